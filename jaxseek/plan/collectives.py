"""The collectives of a compiled program: what one GPU sends over which mesh axis, how often, and
whether the schedule computes meanwhile.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping

from jaxseek.plan.hlo import Instruction, Module
from jaxseek.plan.replica_groups import axis_groups, replica_groups

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# What takes long enough to hide a transfer behind: a product or a loop, in a wrapper too.
_HEAVY = {"convolution", "custom-call", "dot", "while"}
_WRAPPERS = {"call", "conditional", "fusion"}
_ORIGIN = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: HLO's name of it.
        axis: mesh axes that it crosses, joined by `+`, or `other` for groups that are no axis.
        group: number of GPUs that take part together.
        dtypes: of what is sent, HLO's names.
        operand_bytes: what one GPU puts in, once.
        count: how often one step runs it.
        overlapped: whether the schedule has a product or a loop between its start and its end.
        origin: where in the source's trace it comes from.
    """

    kind: str
    axis: str
    group: int
    dtypes: tuple[str, ...]
    operand_bytes: int
    count: int
    overlapped: bool
    origin: str

    @property
    def wire_bytes(self) -> int:
        """Bytes that one GPU sends in a step: the ring algorithm's, which no other undercuts."""
        others = self.group - 1
        once = {
            "all-gather": self.operand_bytes * others,
            "all-reduce": 2 * self.operand_bytes * others / self.group,
            "reduce-scatter": self.operand_bytes * others / self.group,
            "all-to-all": self.operand_bytes * others / self.group,
            "ragged-all-to-all": self.operand_bytes * others / self.group,
        }.get(self.kind, self.operand_bytes)
        return round(once * self.count)


def find_collectives(module: Module, *, mesh: Mapping[str, int]) -> list[Collective]:
    """All collectives of a program that cross a mesh.

    Args:
        mesh: size of each axis, in the order in which devices are numbered.

    Raises:
        ValueError: when one stands in a loop whose trip count is unknown, so that no bill is
            possible.
    """
    axes = axis_groups(mesh)
    found = []
    for name, count in module.runs():
        instructions = module.computations[name]
        for position, instruction in enumerate(instructions):
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            groups = replica_groups(instruction.attributes, devices=math.prod(mesh.values()))
            if max(map(len, groups)) == 1:
                continue
            if count is None:
                raise ValueError(f"{instruction.name} runs in a loop of unknown trip count")
            shapes = {other.name: other.shapes for other in instructions[:position]}
            operands = instruction.operands
            if kind == "ragged-all-to-all":  # behind the values stand its result's place and sizes
                operands = operands[:1]
            sent = [shape for operand in operands for shape in shapes[operand]]
            origin = _ORIGIN.search(instruction.attributes)
            found.append(
                Collective(
                    kind=kind,
                    axis=axes.get(frozenset(groups), "other"),
                    group=max(map(len, groups)),
                    dtypes=tuple(dict.fromkeys(shape.dtype for shape in sent)),
                    operand_bytes=sum(shape.bytes for shape in sent),
                    count=count,
                    overlapped=_overlaps(instruction, instructions[position + 1 :], module=module),
                    origin=origin[1] if origin else instruction.name,
                )
            )
    return found


def wire_bytes(collectives: Iterable[Collective]) -> dict[str, dict[str, int]]:
    """`{axis: {kind: bytes that one GPU sends in a step}}`."""
    total: dict[str, dict[str, int]] = {}
    for collective in collectives:
        kinds = total.setdefault(collective.axis, {})
        kinds[collective.kind] = kinds.get(collective.kind, 0) + collective.wire_bytes
    return total


def _overlaps(start: Instruction, following: Iterable[Instruction], *, module: Module) -> bool:
    """Whether much is computed before the collective that `start` began is waited for."""
    if not start.opcode.endswith("-start") or '"is_sync":true' in start.attributes:
        return False
    until_done = itertools.takewhile(lambda other: start.name not in other.operands, following)
    return any(_is_heavy(other, module=module) for other in until_done)


def _is_heavy(instruction: Instruction, *, module: Module) -> bool:
    if instruction.opcode in _WRAPPERS:
        inside = (other for name in instruction.callees for other in module.computations[name])
        return any(_is_heavy(other, module=module) for other in inside)
    return instruction.opcode in _HEAVY
