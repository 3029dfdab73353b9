"""What a plan says about one choice: its figures, from a compiled step or from the model."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax

from jaxseek.devices import GIB
from jaxseek.flops import model_flops_per_token
from jaxseek.plan.choices import Choice, Request
from jaxseek.plan.collectives import Collective, find_collectives, wire_bytes
from jaxseek.plan.compilation import CompiledStep, Target
from jaxseek.plan.hlo import parse_hlo
from jaxseek.plan.memory import temporaries_bytes
from jaxseek.plan.theory import WireBytes, minimum_wire_bytes, state_bytes
from jaxseek.plan.timing import Rates, device_flops, step_time
from jaxseek.train.state import Program

Source = Literal["compiled", "modelled"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoicePlan:
    """One choice with its figures; field by field what `--json` prints.

    Attributes:
        micro_batch_tokens: of one micro-batch on one data device.
        accumulation: micro-batches of a step.
        fits: whether GPUs, and the host where its memory is given, have room.
        host_gib: memory of the host: what is kept there, and the copy of the state that a
            checkpoint is written from.
        wire_bytes: what one GPU sends in a step, by axis and kind.
        flops_per_step: executed by all GPUs together.
        model_flops_per_step: of the model, no recomputation.
        source: "compiled" for the program of those GPUs; "modelled" for everything else.
    """

    mesh: str
    zero: int
    state: str
    remat: str
    offload: str
    micro_batch_tokens: int
    accumulation: int
    fits: bool
    state_gib: float
    temporaries_gib: float
    total_gib: float
    headroom_gib: float
    host_gib: float
    wire_bytes: WireBytes
    wire_bytes_minimum: int
    flops_per_step: float
    model_flops_per_step: float
    step_seconds: float
    tokens_per_second: float
    bound_by: str
    source: Source

    @property
    def choice(self) -> Choice:
        """The choice itself."""
        names = [field.name for field in dataclasses.fields(Choice)]
        return Choice(**{name: getattr(self, name) for name in names})


def choice_plan(
    request: Request,
    choice: Choice,
    program: Program,
    *,
    rates: Rates,
    target: Target,
    step: CompiledStep | None = None,
    collectives: Sequence[Collective] = (),
    correction: float = 1.0,
) -> ChoicePlan:
    """The figures of one choice.

    Args:
        program: of the run that `choice` stands for, with its micro-batch.
        step: its compiled step; `None` has everything modelled.
        collectives: those of `step`.
        correction: what modelled temporaries are multiplied by, from another micro-batch's step.
    """
    run = program.run
    minimum = minimum_wire_bytes(program)
    if step is None:
        state, held = state_bytes(program), round(temporaries_bytes(program) * correction)
        sent, overlapped = minimum, 0
    else:
        state, held = step.state_bytes, step.total_bytes - step.state_bytes
        sent = wire_bytes(collectives)
        overlapped = sum(c.wire_bytes for c in collectives if c.overlapped)
    time = step_time(
        program,
        rates=rates,
        state_bytes=state,
        overlapped_bytes=overlapped,
        exposed_bytes=total(sent) - overlapped,
    )
    host = host_bytes(program) / GIB
    headroom = request.fleet.usable_gib - (state + held) / GIB
    per_token = model_flops_per_token(run.model, program.specs, seq_len=run.seq_len)
    return ChoicePlan(
        **dataclasses.asdict(choice),
        micro_batch_tokens=run.sequences_per_micro_batch * run.seq_len,
        accumulation=run.accumulation,
        fits=headroom >= 0 and (request.ram_gib is None or host <= request.ram_gib),
        state_gib=state / GIB,
        temporaries_gib=held / GIB,
        total_gib=(state + held) / GIB,
        headroom_gib=headroom,
        host_gib=host,
        wire_bytes=sent,
        wire_bytes_minimum=total(minimum),
        flops_per_step=device_flops(program) * run.mesh_shape.devices,
        model_flops_per_step=per_token * run.tokens_per_step,
        step_seconds=time.seconds,
        tokens_per_second=run.tokens_per_step / time.seconds,
        bound_by=time.bound_by,
        source="compiled" if step is not None and target == "cuda" else "modelled",
    )


def step_collectives(program: Program, step: CompiledStep, *, target: Target) -> list[Collective]:
    """The collectives of a compiled step, in the dtypes that the GPUs send.

    On CPU 16-bit values are summed and gathered as float32 (`Parallel.wire_dtype`); there floats
    are counted with the compute dtype's size.
    """
    found = find_collectives(parse_hlo(step.text), mesh=dict(program.mesh.shape))
    item = program.compute_dtype.itemsize
    if target == "cuda" or item == 4:
        return found
    return [
        dataclasses.replace(c, operand_bytes=c.operand_bytes * item // 4)
        if c.dtypes == ("f32",)
        else c
        for c in found
    ]


def host_bytes(program: Program) -> int:
    """Bytes of the host's memory that a run on it needs beside the process itself: a checkpoint is
    written in the background from a copy of the whole state, each array once.
    """
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(program.abstract_state))


def total(sent: WireBytes) -> int:
    """All bytes of a bill."""
    return sum(sum(kinds.values()) for kinds in sent.values())
