"""Plans: every legal choice with what it needs and costs, best first.

All choices are modelled; then the best are compiled, one after the other, each with the largest
micro-batch that fits, until enough of them have been and the best of all is one of them.
"""

import bisect
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxseek.devices import GIB
from jaxseek.plan.choices import Choice, Request, find_choices
from jaxseek.plan.collectives import Collective
from jaxseek.plan.compilation import Target, compile_step, planning_program
from jaxseek.plan.figures import ChoicePlan, choice_plan, step_collectives
from jaxseek.plan.memory import temporaries_bytes
from jaxseek.plan.theory import state_bytes
from jaxseek.plan.timing import Rates
from jaxseek.train.state import Program

# Programs compiled for one choice in search of its largest micro-batch.
_TRIES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All choices, best first, and what their figures rest on.

    Attributes:
        collectives: of the choices that were compiled.
        largest: choices whose next larger micro-batch does not fit: it was compiled, or the formula
            says so that the compiled one has corrected.
    """

    request: Request
    choices: tuple[ChoicePlan, ...]
    collectives: Mapping[Choice, tuple[Collective, ...]]
    largest: frozenset[Choice]
    rates: Rates
    target: Target

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        choices = [dataclasses.asdict(choice) for choice in self.choices]
        return {"model": self.request.name, "gpus": str(self.request.fleet), "choices": choices}


def make_plan(
    request: Request,
    *,
    rates: Rates,
    target: Target,
    report: Callable[[str], None],
    most_compiled: int,
) -> Plan:
    """Plan every choice that `request` leaves open.

    Args:
        report: told what is going on, a line at a time.
        most_compiled: how many choices are compiled, the most promising first; up to twice as
            many where the first of all is not among them.
    """
    options = [
        _Option(request, choice, rates=rates, target=target) for choice in find_choices(request)
    ]
    waiting = list(options)
    while waiting:
        best = min(options, key=lambda option: _rank(option.plan))
        compiled = len(options) - len(waiting)
        # Where the nearest miss is known exactly, the others miss by more.
        enough = compiled >= most_compiled or not best.plan.fits
        if (best.settled and enough) or compiled >= 2 * most_compiled:
            break
        settled = min(waiting, key=lambda option: _rank(option.plan))
        waiting.remove(settled)
        settled.settle(report)
        for option in waiting:
            if option.is_like(settled):
                option.assume(settled)
    return Plan(
        request=request,
        choices=tuple(sorted((option.plan for option in options), key=_rank)),
        collectives={option.choice: option.collectives for option in options if option.settled},
        largest=frozenset(option.choice for option in options if option.at_largest),
        rates=rates,
        target=target,
    )


class _Option:
    """A choice under consideration, with the best micro-batch that is known for it.

    Attributes:
        plan: its figures with that micro-batch.
        collectives: of the compiled program.
        settled: whether the figures are the compiled program's.
        at_largest: whether a larger micro-batch is known not to fit.
    """

    def __init__(self, request: Request, choice: Choice, *, rates: Rates, target: Target):
        self.choice = choice
        self._request, self._rates = request, rates
        self._target: Target = target
        self._sizes = request.micro_batches(choice)
        run = request.run_of(choice, micro_batch=self._sizes[0])
        self._base = planning_program(run, fleet=request.fleet, target=target)
        self._correction = 1.0
        self.collectives: tuple[Collective, ...] = ()
        self.settled = self.at_largest = False
        self.plan = self._figures(self._largest(self._sizes))

    def settle(self, report: Callable[[str], None]) -> None:
        """Compile; where the micro-batch turns out too large or too small, another one.

        Where the formula is so wrong that none of them fits, the last is the smallest of all.
        """
        sizes = self._sizes
        size = self._largest(sizes)
        for tries in reversed(range(_TRIES)):
            plan, collectives = self._compiled(size, report)
            has_room = plan.headroom_gib >= 0
            if has_room or not self.settled or self.plan.headroom_gib < 0:
                self.plan, self.collectives, self.settled = plan, collectives, True
            sizes = [n for n in sizes if (n > size if has_room else n < size)]
            if not sizes or (has_room and self._needed(sizes[0]) > self._usable):
                self.at_largest = self.plan.headroom_gib >= 0
                break
            hopeless = tries == 1 and self.plan.headroom_gib < 0
            size = sizes[0] if hopeless else self._largest(sizes)

    def _compiled(
        self, size: int, report: Callable[[str], None]
    ) -> tuple[ChoicePlan, tuple[Collective, ...]]:
        """The figures of a micro-batch from its program, by which the formula is corrected."""
        program = self._program(size)
        step = compile_step(program, target=self._target, usable_bytes=self._usable)
        collectives = tuple(step_collectives(program, step, target=self._target))
        plan = self._figures(size, step=step, collectives=collectives)
        report(
            f"{self.choice}, {plan.micro_batch_tokens} tokens per GPU: "
            f"{plan.total_gib:.1f} GiB, compiled in {step.seconds:.1f} s"
        )
        self._correction = step.temporaries_bytes / max(1, temporaries_bytes(program))
        return plan, collectives

    def is_like(self, other: "_Option") -> bool:
        """Whether the formula is likely to err on both by the same factor."""
        mine, others = self.choice, other.choice
        return self is not other and (mine.mesh, mine.zero) == (others.mesh, others.zero)

    def assume(self, other: "_Option") -> None:
        """Correct the formula as for `other`, which has been compiled."""
        self._correction = other._correction
        self.plan = self._figures(self._largest(self._sizes))

    @property
    def _usable(self) -> float:
        return self._request.fleet.usable_gib * GIB

    def _program(self, micro_batch: int) -> Program:
        run = self._request.run_of(self.choice, micro_batch=micro_batch)
        return dataclasses.replace(self._base, run=run)

    def _figures(self, micro_batch: int, **compiled: Any) -> ChoicePlan:
        return choice_plan(
            self._request,
            self.choice,
            self._program(micro_batch),
            rates=self._rates,
            target=self._target,
            correction=self._correction,
            **compiled,
        )

    def _needed(self, micro_batch: int) -> float:
        program = self._program(micro_batch)
        return state_bytes(program) + temporaries_bytes(program) * self._correction

    def _largest(self, sizes: list[int]) -> int:
        """The largest of `sizes` (rising) that is thought to fit, or the first."""
        fitting = bisect.bisect_right(sizes, self._usable, key=self._needed)
        return sizes[max(0, fitting - 1)]


def _rank(plan: ChoicePlan) -> tuple[float, ...]:
    """What fits comes first, the fastest of it before the others; of the rest the smallest."""
    if plan.fits:
        return (0, -plan.tokens_per_second)
    return (1, plan.total_gib, plan.state_gib)
