"""GPUs by name, from `configs/devices.yaml`, and what `3xrtx4090` stands for."""

import dataclasses
import functools
import re

from jaxseek.errors import UserError
from jaxseek.paths import configs_dir
from jaxseek.schema import Settings, build, check_keys, nearest_names
from jaxseek.yaml_file import read_yaml

GIB = 2**30
# Of one direction, 10^9 bytes a second and lane, after line coding (PCI-SIG).
_PCIE_LANE_GB_S = {3: 0.985, 4: 1.969, 5: 3.938}
# What a process holds outside of XLA's pool: the CUDA context with its kernels, cuBLAS and cuDNN;
# and, where there is more than one GPU, the buffers of NCCL's channels, of which a ring over PCIe
# has few. Over NVLink people measured 0.7 GiB for each communicator (NCCL issue 964), of which a
# mesh of two axes has three. Assumed, and measured on none of the machines that jaxseek is tested
# on.
CONTEXT_GIB = 0.6
_NCCL_PCIE_GIB, _NCCL_NVLINK_GIB = 0.4, 2.1
# A typing mistake of a larger number would keep the plan busy for hours.
_MOST_GPUS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of GPU.

    Attributes:
        name: what nvidia-smi and JAX call it.
        bf16_tflops: dense peak with float32 accumulation, 10^12 operations a second.
        memory_mib: the total that nvidia-smi shows.
        cuda_memory_mib: the total that CUDA gives to programs; the driver keeps the rest.
        memory_gb_s: peak of the memory bus, 10^9 bytes a second.
        compute_capability: CUDA's.
        pcie_generation: of the slot.
        pcie_lanes: of the slot.
        peer_access: whether GPUs reach each other over PCIe without the host's memory.
        multiprocessors: number of them.
        clock_ghz: the highest that CUDA reports.
        l2_mib: level 2 cache.
        shared_kib: shared memory of a multiprocessor; one block may have 1 KiB less.
        threads: of a multiprocessor.
        source: where the figures stand.
        nvlink_gb_s: of one GPU, one direction; left out without NVLink.
        nvlink_gpus: how many GPUs NVLink joins.
    """

    name: str
    bf16_tflops: float
    memory_mib: int
    cuda_memory_mib: int
    memory_gb_s: float
    compute_capability: float
    pcie_generation: int
    pcie_lanes: int
    peer_access: bool
    multiprocessors: int
    clock_ghz: float
    l2_mib: int
    shared_kib: int
    threads: int
    source: str
    nvlink_gb_s: float | None = None
    nvlink_gpus: int = 0

    def __post_init__(self):
        if self.pcie_generation not in _PCIE_LANE_GB_S:
            known = ", ".join(map(str, _PCIE_LANE_GB_S))
            raise UserError(
                f"pcie_generation {self.pcie_generation} is not known; known are {known}."
            )
        for name, value in vars(self).items():
            if type(value) in (int, float) and value <= 0 and name != "nvlink_gpus":
                raise UserError(f"{name} must be positive, got {value}.")
        if self.cuda_memory_mib > self.memory_mib:
            raise UserError(
                f"cuda_memory_mib {self.cuda_memory_mib} is more than memory_mib {self.memory_mib}."
            )

    @property
    def memory_gib(self) -> float:
        """Total memory in GiB."""
        return self.memory_mib / 1024

    @property
    def pcie_gb_s(self) -> float:
        """Peak of the slot in one direction, 10^9 bytes a second."""
        return _PCIE_LANE_GB_S[self.pcie_generation] * self.pcie_lanes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """So many GPUs of one kind in one machine, as `3xrtx4090` names them."""

    count: int
    key: str
    device: Device

    @classmethod
    def parse(cls, text: str) -> "Fleet":
        """`"3xrtx4090"` is three RTX 4090; the number may be left out.

        Raises:
            UserError: when `text` has another form or names no known GPU; the known are listed.
                And for more GPUs than any machine has.
        """
        match = re.fullmatch(r"(?:([1-9]\d*)x)?([a-z][\w-]*)", text.strip().lower())
        if not match:
            raise UserError(
                f"gpus: {text!r} is not of the form NxGPU, for example 3xrtx4090; known GPUs are "
                f"{', '.join(devices())}."
            )
        count = int(match[1] or 1)
        if count > _MOST_GPUS:
            raise UserError(f"gpus: {text} are more than the {_MOST_GPUS} that are planned for.")
        return cls(count=count, key=match[2], device=find_device(match[2]))

    @property
    def over_nvlink(self) -> bool:
        """Whether NVLink joins all of these GPUs."""
        return self.device.nvlink_gb_s is not None and self.count <= self.device.nvlink_gpus

    @property
    def nccl_gib(self) -> float:
        """Memory of one GPU in GiB that NCCL's buffers are taken to need."""
        if self.count == 1:
            return 0.0
        return _NCCL_NVLINK_GIB if self.over_nvlink else _NCCL_PCIE_GIB

    @property
    def usable_gib(self) -> float:
        """Memory of one GPU in GiB that a training program can use."""
        return self.device.cuda_memory_mib / 1024 - CONTEXT_GIB - self.nccl_gib

    def __str__(self) -> str:
        return f"{self.count}x{self.key}"


@functools.cache
def devices() -> dict[str, Device]:
    """All known GPUs by their short name, in the order of the table.

    Raises:
        UserError: when the table is damaged.
    """
    settings = read_yaml(configs_dir() / "devices.yaml")
    tables: dict[str, Settings] = {}
    for key, setting in settings.items():
        name, _, field = key.partition(".")
        tables.setdefault(name, {})[field] = setting
    for table in tables.values():
        check_keys(table, Device)  # a misspelt nvlink_gb_s would be no NVLink, without a word
    return {name: build(Device, settings, prefix=f"{name}.") for name in tables}


def find_device(key: str) -> Device:
    """The GPU of a short name such as `rtx4090`.

    Raises:
        UserError: when it is not known; the message lists those that are.
    """
    known = devices()
    if key not in known:
        near = nearest_names(key, known)
        hint = f"the nearest is {' or '.join(near)}; " if near else ""
        raise UserError(f"gpus: {key!r} is not known; {hint}known are {', '.join(known)}.")
    return known[key]


def key_of_kind(device_kind: str) -> str | None:
    """The short name of the GPU that nvidia-smi and JAX call `device_kind`, or `None`.

    Nothing but the whole name will do: an RTX 4090 Laptop GPU or an H100 PCIe is another chip.
    Behind the name of a described GPU stands another in brackets (`jaxseek.plan.compilation`).
    """
    name = device_kind.partition(" [")[0]
    return next((key for key, known in devices().items() if known.name == name), None)


def device_of_kind(device_kind: str) -> Device | None:
    """The GPU that JAX calls `device_kind`, or `None` where it is not known (always on CPU)."""
    key = key_of_kind(device_kind)
    return None if key is None else devices()[key]
