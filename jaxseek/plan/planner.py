"""Plans: every legal choice with what it needs and costs, best first."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from jaxseek.devices import GIB
from jaxseek.flops import model_flops_per_token
from jaxseek.mesh import MeshShape
from jaxseek.plan.choices import Choice, Request, find_choices
from jaxseek.plan.collectives import Collective, find_collectives, wire_bytes
from jaxseek.plan.compilation import CompiledStep, Target, compile_step, planning_program
from jaxseek.plan.hlo import parse_hlo
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
        temporaries_gib, total_gib, headroom_gib: `None` where nothing was compiled, because the
            state alone does not fit.
        host_gib: of the state that lies in the host's memory.
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
    temporaries_gib: float | None
    total_gib: float | None
    headroom_gib: float | None
    host_gib: float
    wire_bytes: WireBytes
    wire_bytes_minimum: int
    flops_per_step: float
    model_flops_per_step: float
    step_seconds: float
    tokens_per_second: float
    bound_by: str
    source: Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All choices, best first, and what their figures rest on."""

    model: str
    gpus: str
    choices: tuple[ChoicePlan, ...]
    usable_gib: float
    rates: Rates
    target: Target

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        choices = [dataclasses.asdict(choice) for choice in self.choices]
        return {"model": self.model, "gpus": self.gpus, "choices": choices}


def make_plan(
    request: Request, *, rates: Rates, target: Target, report: Callable[[str], None]
) -> Plan:
    """Plan every choice that `request` leaves open.

    A choice whose state alone is too large is not compiled; where that is true of all of them, the
    one that needs least is. Whatever `request.only` picks is compiled.

    Args:
        report: told what is going on, a line at a time.
    """
    programs = {
        choice: planning_program(request.run(choice), fleet=request.fleet, target=target)
        for choice in find_choices(request)
    }
    states = {choice: state_bytes(program) for choice, program in programs.items()}
    usable = request.fleet.usable_gib * GIB
    chosen = {choice for choice, size in states.items() if size <= usable or request.only}
    if not chosen:
        chosen = {min(states, key=lambda choice: _size_rank(choice, states[choice]))}
    plans = []
    for choice, program in programs.items():
        step = None
        if choice in chosen:
            step = compile_step(program, target=target)
            report(
                f"mesh {choice.mesh}, ZeRO {choice.zero}, remat {choice.remat}: "
                f"compiled in {step.seconds:.1f} s"
            )
        plans.append(
            _choice_plan(program, step, request=request, choice=choice, rates=rates, target=target)
        )
    return Plan(
        model=request.name,
        gpus=str(request.fleet),
        choices=tuple(sorted(plans, key=_rank)),
        usable_gib=request.fleet.usable_gib,
        rates=rates,
        target=target,
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


def _choice_plan(
    program: Program,
    step: CompiledStep | None,
    *,
    request: Request,
    choice: Choice,
    rates: Rates,
    target: Target,
) -> ChoicePlan:
    """The figures of one choice, from its compiled step if there is one."""
    shape, run = MeshShape.parse(choice.mesh), program.run
    minimum = minimum_wire_bytes(program)
    least = _total(minimum)
    state = state_bytes(program)
    sent, overlapped = minimum, 0
    memory: dict[str, float | None] = dict.fromkeys(("temporaries", "total", "headroom"))
    usable = request.fleet.usable_gib
    if step is not None:
        collectives = step_collectives(program, step, target=target)
        sent = wire_bytes(collectives)
        overlapped = sum(c.wire_bytes for c in collectives if c.overlapped)
        total = step.total_bytes / GIB
        held = step.temporaries_bytes + step.unaliased_bytes
        memory = {"temporaries": held / GIB, "total": total, "headroom": usable - total}
        state = step.state_bytes
    time = step_time(
        program,
        rates=rates,
        state_bytes=state,
        overlapped_bytes=overlapped,
        exposed_bytes=_total(sent) - overlapped,
    )
    tokens = run.tokens_per_step
    per_token = model_flops_per_token(run.model, program.specs, seq_len=run.seq_len)
    return ChoicePlan(
        **dataclasses.asdict(choice),
        micro_batch_tokens=request.resolved_micro_batch,
        accumulation=run.accumulation,
        fits=memory["total"] is not None and memory["total"] <= usable,
        state_gib=state / GIB,
        temporaries_gib=memory["temporaries"],
        total_gib=memory["total"],
        headroom_gib=memory["headroom"],
        host_gib=0.0,
        wire_bytes=sent,
        wire_bytes_minimum=least,
        flops_per_step=device_flops(program) * shape.devices,
        model_flops_per_step=per_token * tokens,
        step_seconds=time.seconds,
        tokens_per_second=tokens / time.seconds,
        bound_by=time.bound_by,
        source="compiled" if step is not None and target == "cuda" else "modelled",
    )


def _size_rank(choice: Choice, state: int) -> tuple[int, ...]:
    """The smallest state first; of equal ones that with the fewest temporaries."""
    remats = ("full", "selective", "none")
    return (state, -choice.zero, remats.index(choice.remat))


def _rank(plan: ChoicePlan) -> tuple[float, ...]:
    """What fits comes first, the fastest of it before the others; of the rest the smallest."""
    if plan.fits:
        return (0, -plan.tokens_per_second)
    return (1, math.inf if plan.total_gib is None else plan.total_gib, plan.state_gib)


def _total(sent: WireBytes) -> int:
    return sum(sum(kinds.values()) for kinds in sent.values())
