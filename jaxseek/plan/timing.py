"""How long a step takes: a model, not a measurement.

    step = max(compute, overlapped communication) + exposed communication + optimizer

Compute runs at a stated fraction of the chip's peak, communication at a stated bandwidth, the
optimizer at a stated fraction of the memory's. A collective overlaps only where the compiled
schedule computes between its start and its end.
"""

import dataclasses
from typing import Literal

from jaxseek.devices import Fleet
from jaxseek.layout import flatten_paths
from jaxseek.mesh import TENSOR_AXIS
from jaxseek.model import DENSE_STACK, MOE_STACK
from jaxseek.plan.measurement import Measurement
from jaxseek.plan.theory import local_heads, local_size
from jaxseek.train.state import Program

Bound = Literal["compute", "memory", "PCIe", "NVLink", "nothing"]
COMPUTE_FRACTION = 0.5
_MEMORY_FRACTION = 0.8
# Of the rate of measured products: attention, norms and the optimizer's neighbours run below it.
# Products that reach 71 % of the peak and a step at half of it agree.
_STEP_FRACTION = 0.7
# Of the link's peak, as a ring of NCCL sees it. GeForce cards pass everything through the host's
# memory, which two or more of them share.
_NVLINK_FRACTION, _PEER_FRACTION, _HOST_FRACTION = 0.75, 0.7, 0.4
# XLA multiplies float32 with the tensor cores too, as TF32, at half the rate of bf16.
_FLOAT32_SLOWER = 2
# Blockwise attention: two products forward; five backward, which computes the scores anew. The
# model's own count is two and four.
_ATTENTION_FORWARD, _ATTENTION_BACKWARD = 2, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What the model assumes of the machine.

    Attributes:
        flops: bf16 operations of one GPU a second.
        memory: bytes a second from and to one GPU's memory.
        wire: bytes a second that one GPU sends while a ring runs.
        link: what the ring runs over.
        compute_fraction: `flops` as a fraction of the peak.
        compute_words: where `flops` comes from.
        link_words: where `wire` comes from.
        memory_words: where `memory` comes from.
    """

    flops: float
    memory: float
    wire: float
    link: Literal["PCIe", "NVLink"]
    compute_fraction: float
    compute_words: str
    link_words: str
    memory_words: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step, and of its parts."""

    compute: float
    overlapped: float
    exposed: float
    optimizer: float
    link: Literal["PCIe", "NVLink"]

    @property
    def seconds(self) -> float:
        """The whole step."""
        return max(self.compute, self.overlapped) + self.exposed + self.optimizer

    @property
    def bound_by(self) -> Bound:
        """What to make faster first."""
        parts: dict[Bound, float] = {
            "compute": self.compute,
            "memory": self.optimizer,
            self.link: self.overlapped + self.exposed,
        }
        return max(parts, key=lambda part: parts[part])


def machine_rates(
    fleet: Fleet,
    *,
    compute_fraction: float | None,
    wire_gb_s: float | None,
    measured: Measurement | None = None,
) -> Rates:
    """Rates of `fleet`: what the user gives, or else what was measured, or else what is assumed.

    Args:
        compute_fraction: of the peak, that products reach.
        wire_gb_s: 10^9 bytes a second that one GPU sends in a ring.
        measured: on these very GPUs.
    """
    device = fleet.device
    peak = device.bf16_tflops * 1e12
    on_date = "" if measured is None else f"measured on this machine on {measured.date}"
    wire, link_words = _assumed_wire(fleet)
    if wire_gb_s is not None:
        wire, link_words = wire_gb_s * 1e9, "as given"
    elif measured is not None and measured.wire is not None:
        wire, link_words = measured.wire, on_date
    memory, memory_words = device.memory_gb_s * 1e9 * _MEMORY_FRACTION, "assumed"
    if measured is not None:
        memory, memory_words = measured.memory, on_date
    fraction, compute_words = COMPUTE_FRACTION, "assumed"
    if compute_fraction is not None:
        fraction, compute_words = compute_fraction, "as given"
    elif measured is not None:
        fraction = _STEP_FRACTION * measured.matmul_flops / peak
        compute_words = (
            f"{_STEP_FRACTION:.0%} of the {measured.matmul_flops / 1e12:.1f} TFLOP/s {on_date}"
        )
    return Rates(
        flops=peak * fraction,
        memory=memory,
        wire=wire,
        link="NVLink" if fleet.over_nvlink else "PCIe",
        compute_fraction=fraction,
        compute_words=compute_words,
        link_words=link_words,
        memory_words=memory_words,
    )


def _assumed_wire(fleet: Fleet) -> tuple[float, str]:
    """Bytes a second that one GPU sends in a ring, and where that comes from."""
    device = fleet.device
    if fleet.over_nvlink and device.nvlink_gb_s is not None:
        peak, fraction, kind = device.nvlink_gb_s, _NVLINK_FRACTION, "NVLink"
    else:
        peak = device.pcie_gb_s
        fraction = _PEER_FRACTION if device.peer_access else _HOST_FRACTION
        kind = f"PCIe {device.pcie_generation}.0 x{device.pcie_lanes}"
        kind += "" if device.peer_access else " through host memory"
    return peak * fraction * 1e9, f"{fraction:.0%} of {kind}'s {peak:.1f} GB/s"


def step_time(
    program: Program,
    *,
    rates: Rates,
    state_bytes: int,
    overlapped_bytes: int,
    exposed_bytes: int,
) -> StepTime:
    """Predict a step of `program` on one of its GPUs, which sends so many bytes.

    Args:
        state_bytes: parameters and two moments; the optimizer reads and writes them and reads a
            gradient.
    """
    gradient_bytes = state_bytes / 3
    flops = rates.flops if program.compute_dtype.itemsize == 2 else rates.flops / _FLOAT32_SLOWER
    return StepTime(
        compute=device_flops(program) / flops,
        overlapped=overlapped_bytes / rates.wire,
        exposed=exposed_bytes / rates.wire,
        optimizer=(2 * state_bytes + gradient_bytes) / rates.memory,
        link=rates.link,
    )


def device_flops(program: Program) -> float:
    """FLOPs that the most loaded GPU executes in a step: recomputation, and weights that every
    tensor rank multiplies whole, included.
    """
    run, config = program.run, program.run.model
    ranks = program.mesh.shape[TENSOR_AXIS]
    active = (config.num_experts_per_tok or 0) / (config.n_routed_experts or 1)
    layouts = flatten_paths(program.layout)
    per_token = 0.0
    for path, spec in flatten_paths(program.specs).items():
        tied = spec.role == "embedding" and config.tie_word_embeddings
        if not (spec.role in ("matrix", "router") or tied):
            continue
        share = active if "experts" in spec.dims and ".experts." in path else 1.0
        forwards = 1 + _recomputed(path, program)
        per_token += 2 * (forwards + 2) * share * local_size(layouts[path], tensor=ranks)
    passes = _ATTENTION_BACKWARD + _ATTENTION_FORWARD * (2 if run.remat == "full" else 1)
    heads = config.num_hidden_layers * local_heads(config, tensor=ranks)
    widths = (config.attention_head_dim + config.value_head_dim) / 2
    # Each product costs 2 * T * width; the causal half of it is computed.
    per_token += passes * run.seq_len * heads * widths
    tokens = run.sequences_per_micro_batch * run.accumulation * run.seq_len
    return per_token * tokens


def _recomputed(path: str, program: Program) -> int:
    """How often the backward pass repeats the product with this parameter.

    Only "full" computes what attention's output is projected to anew, and under tensor parallelism
    not even that; no gradient needs what a layer's last product gives.
    """
    in_layer = path.partition(".")[0] in (DENSE_STACK, MOE_STACK)
    if program.run.remat == "none" or not in_layer or ".down_proj." in path:
        return 0
    if ".o_proj." in path:
        return int(program.run.remat == "full" and program.mesh.shape[TENSOR_AXIS] == 1)
    return 1
