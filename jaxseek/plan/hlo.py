"""The text of a compiled program (XLA's scheduled HLO): computations, instructions, and how often
each computation runs.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLEES = re.compile(
    r"(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLEE_LISTS = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_AWAITED = ("async-update", "async-done")
_BITS = {"pred": 8, "token": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One array of an instruction's result: HLO's dtype name and its dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in memory."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            bits = int(re.sub(r"^[a-z]+", "", self.dtype).partition("e")[0])
        return math.ceil(math.prod(self.dims) * bits / 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction; `attributes` is all that stands behind its operands.

    Attributes:
        operands: names of instructions of the same computation.
        shapes: the arrays of the result, tuples laid flat.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def callees(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        single = [name for _, name in _CALLEES.findall(self.attributes)]
        lists = [_OPERAND.findall(names) for names in _CALLEE_LISTS.findall(self.attributes)]
        return tuple(single + [name for names in lists for name in names])

    @property
    def trip_count(self) -> int | None:
        """Of a `while`; `None` where the compiler does not know it."""
        match = _TRIP_COUNT.search(self.attributes)
        return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """The computations of a program by name, each a list of instructions in the order in which they
    are scheduled.
    """

    entry: str
    computations: dict[str, tuple[Instruction, ...]]

    def runs(self) -> Iterator[tuple[str, int | None]]:
        """(computation, how often one execution of the program runs it) for every way in which the
        entry reaches it.

        `None` stands for a loop whose trip count is unknown. Every branch of a conditional counts
        as taken.
        """
        pending: list[tuple[str, int | None]] = [(self.entry, 1)]
        while pending:
            name, count = pending.pop()
            yield name, count
            for instruction in self.computations[name]:
                times = instruction.trip_count if instruction.opcode == "while" else 1
                if instruction.opcode in _AWAITED:
                    continue  # its start has run them; some compilers name them here again
                total = None if times is None or count is None else count * times
                pending += [(callee, total) for callee in instruction.callees]


def parse_hlo(text: str) -> Module:
    """The module that `compiled.as_text()` prints.

    Raises:
        ValueError: when there is no entry computation in `text`.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, body = None, "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, body = header[2], []
            entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = tuple(body)
        elif match := _NAME.match(line):
            body.append(_instruction(match[1], match[2]))
    if entry is None:
        raise ValueError("there is no ENTRY computation in this text; it is no compiled HLO module")
    return Module(entry=entry, computations=computations)


def _instruction(name: str, text: str) -> Instruction:
    """`TYPE OPCODE(OPERANDS), ATTRIBUTES` in parts."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opening = text.index("(", end)
    closing = _closing(text, opening)
    return Instruction(
        name=name,
        opcode=text[end:opening].strip(),
        shapes=_shapes(text[:end]),
        operands=tuple(_OPERAND.findall(text[opening:closing])),
        attributes=text[closing + 1 :],
    )


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(dtype=dtype, dims=tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in _SHAPE.findall(text)
    )


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"unbalanced parentheses: {text[:80]}")
