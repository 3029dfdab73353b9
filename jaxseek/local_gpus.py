"""The NVIDIA GPUs of this machine, by `nvidia-smi`, before JAX starts and without it."""

import csv
import dataclasses
import math
import os
import re
import subprocess
from collections.abc import Sequence

from jaxseek.devices import CONTEXT_GIB, Device, Fleet, devices, key_of_kind
from jaxseek.errors import UserError

_QUERY = ("uuid", "name", "memory.total", "memory.free", "driver_version")
_PATIENCE_SECONDS = 60  # a sleeping driver without persistence mode takes some
# `XLA_CLIENT_MEM_FRACTION` is the name of today; JAX refuses to start when both are set.
_FRACTION, _OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_INDEX = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalGpu:
    """One GPU of this machine, in nvidia-smi's words.

    Attributes:
        memory_mib: its total; `None` where it shares the host's.
        free_mib: what neither the driver nor a program holds now.
    """

    uuid: str
    name: str
    memory_mib: int | None
    free_mib: int | None
    driver: str


def local_gpus() -> list[LocalGpu]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves visible; none without a working driver.

    Raises:
        UserError: when nvidia-smi does not answer, and where `CUDA_VISIBLE_DEVICES` leaves open
            which GPUs it means.
    """
    return _visible(_installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def local_fleet() -> Fleet | None:
    """The visible GPUs as a fleet with the memory that nvidia-smi shows, `None` without any.

    Raises:
        UserError: when they differ from each other or are not in the device table, and what
            `local_gpus` raises.
    """
    return _fleet_of(local_gpus())


def size_memory_pool() -> float | None:
    """Let XLA's memory pool have what the plan says that a program may use; call before JAX starts.

    By itself JAX gives the pool 75 % of the memory. The share is of CUDA's total, and the pool is
    allocated whole at the first array; a share that is not to be had costs an error line and is
    tried again with 90 % of it, once. So what other programs hold now is taken off. Does nothing
    where the user set a share, without GPUs that the table knows, and where JAX is told to run on
    something else.

    Returns:
        The share, or `None` where it is left to JAX or to the user.
    """
    if os.environ.get(_FRACTION) or os.environ.get(_OLD_FRACTION) or not jax_may_use_gpus():
        return None
    try:
        gpus = local_gpus()
        fleet = _fleet_of(gpus)
    except UserError:  # JAX may still know how to run there
        return None
    if fleet is None:
        return None
    usable = [fleet.usable_gib] + [
        gpu.free_mib / 1024 - CONTEXT_GIB - fleet.nccl_gib
        for gpu in gpus
        if gpu.free_mib is not None
    ]
    # Rounded down: a thousandth is some 20 MiB, and one byte too many costs a tenth.
    share = math.floor(1000 * min(usable) / (fleet.device.cuda_memory_mib / 1024)) / 1000
    if share <= 0:
        return None
    os.environ[_FRACTION] = str(share)
    return share


def jax_may_use_gpus() -> bool:
    """Whether JAX, which has not started yet, is left to take this machine's GPUs."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return not platforms or not {"cuda", "gpu"}.isdisjoint(platforms.lower().split(","))


def _installed_gpus() -> list[LocalGpu]:
    """All GPUs of the machine, in the order of the PCI bus."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
        )
    except OSError:  # not installed
        return []
    except subprocess.TimeoutExpired:
        raise UserError(
            f"nvidia-smi did not answer within {_PATIENCE_SECONDS} seconds; "
            "the driver may be stuck. Give the GPUs with --gpus, for example --gpus 3xrtx4090."
        ) from None
    if done.returncode != 0:  # the program without its driver
        return []
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [_gpu(row) for row in rows if len(row) == len(_QUERY)]


def _gpu(row: Sequence[str]) -> LocalGpu:
    uuid, name, total, free, driver = (cell.strip() for cell in row)
    return LocalGpu(
        uuid=uuid, name=name, memory_mib=_mib(total), free_mib=_mib(free), driver=driver
    )


def _mib(cell: str) -> int | None:
    return int(cell) if cell.isdecimal() else None


def _visible(gpus: list[LocalGpu], chosen: str | None) -> list[LocalGpu]:
    """Those of `gpus` that CUDA shows: by index or by the beginning of the UUID, up to the first
    that is neither.
    """
    if chosen is None:
        return gpus
    visible: list[LocalGpu] = []
    for word in (part.strip() for part in chosen.split(",")):
        if word.startswith("MIG-"):
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={chosen} names a MIG slice, which the device table does not "
                "know. Give a GPU that is near to it with --gpus."
            )
        if _INDEX.fullmatch(word):
            _check_numbering(gpus, chosen)
            found = gpus[int(word) : int(word) + 1]
        else:
            found = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)]
        if len(found) != 1:
            break
        visible += found
    return visible


def _check_numbering(gpus: list[LocalGpu], chosen: str) -> None:
    """CUDA numbers the GPUs from the fastest on, unless it is told to go by the bus."""
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if len({gpu.name for gpu in gpus}) > 1 and not by_bus:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={chosen} on a machine with {_kinds(gpus)}: CUDA does not number "
            "them as nvidia-smi does. Set CUDA_DEVICE_ORDER=PCI_BUS_ID too."
        )


def _fleet_of(gpus: list[LocalGpu]) -> Fleet | None:
    if not gpus:
        return None
    if len({gpu.name for gpu in gpus}) > 1:
        raise UserError(
            f"this machine has {_kinds(gpus)}; one run needs GPUs of one kind. Choose them with "
            "CUDA_VISIBLE_DEVICES, or give --gpus."
        )
    key = key_of_kind(gpus[0].name)
    if key is None:
        raise UserError(
            f"nvidia-smi shows {gpus[0].name!r}, which configs/devices.yaml does not know; known "
            f"are {', '.join(devices())}. Give the one that is nearest with --gpus, for example "
            f"--gpus {len(gpus)}xgeneric-24gb, and its link with --bandwidth; or add it there."
        )
    totals = [gpu.memory_mib for gpu in gpus if gpu.memory_mib is not None]
    device = _with_memory(devices()[key], min(totals)) if totals else devices()[key]
    return Fleet(count=len(gpus), key=key, device=device)


def _with_memory(device: Device, total_mib: int) -> Device:
    """`device` with the memory of this machine's: error correction takes some, and there are cards
    with more than the maker built in.
    """
    kept = device.memory_mib - device.cuda_memory_mib
    return dataclasses.replace(device, memory_mib=total_mib, cuda_memory_mib=total_mib - kept)


def _kinds(gpus: Sequence[LocalGpu]) -> str:
    counts = {gpu.name: sum(other.name == gpu.name for other in gpus) for gpu in gpus}
    return " and ".join(f"{count} x {name}" for name, count in counts.items())
