"""The bill of one choice: every collective of its compiled step, what it is for, what it sends."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from jaxseek.plan.collectives import Collective
from jaxseek.plan.planner import Plan

_COLUMNS = ("axis", "collective", "dtype", "runs", "MB each", "GB a step", "overlaps", "for")
# Names of the compiler's making, between those that the model's source gives (jax.named_scope).
_MACHINERY = re.compile(r"jit\(.*?\)|shard_map|while|body|closed_call|checkpoint|cond|branch_\d+.*")
_SCOPE = re.compile(r"(?:transpose\()?jvp\((.*?)\)+")
_PARAMETER_PARTS = 3  # "dense_layers.mlp.gate_proj" and more name a parameter of a stack


class Line(NamedTuple):
    """Collectives of one purpose.

    Attributes:
        runs: how often one of them runs in a step, together.
        bytes: what one GPU sends in a step.
        overlapped: of `bytes`, those that travel while products run.
    """

    axis: str
    kind: str
    dtype: str
    purpose: str
    runs: int
    bytes: int
    overlapped: int


def bill(collectives: Iterable[Collective]) -> list[Line]:
    """The collectives summed by purpose, the costliest first."""
    lines: dict[tuple[str, ...], Line] = {}
    for collective in collectives:
        key = (
            collective.axis,
            collective.kind,
            "+".join(collective.dtypes),
            purpose(collective.origin, kind=collective.kind),
        )
        sent = collective.wire_bytes
        old = lines.get(key, Line(*key, runs=0, bytes=0, overlapped=0))
        lines[key] = old._replace(
            runs=old.runs + collective.count,
            bytes=old.bytes + sent,
            overlapped=old.overlapped + sent * collective.overlapped,
        )
    return sorted(lines.values(), key=lambda line: -line.bytes)


def purpose(origin: str, *, kind: str) -> str:
    """What a collective is for, in words, of its place in the source's trace (HLO's `op_name`).

    XLA combines small collectives; their places stand in parentheses, separated by colons.
    """
    before, places = "", [origin]
    if origin.endswith(")"):
        opening = _opening(origin)
        before, places = origin[:opening], _split(origin[opening + 1 : -1])
    phrases = dict.fromkeys(_phrase(before + place, kind=kind) for place in places)
    return " and ".join(phrases)


def print_bill(plan: Plan, *, console: Console) -> None:
    """The bill of the plan's first compiled choice as a table, with the sum and the least that it
    could be.
    """
    choice = next(figures for figures in plan.choices if figures.choice in plan.collectives)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        left = column in ("axis", "collective", "dtype", "for")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "for")
    lines = bill(plan.collectives[choice.choice])
    for line in lines:
        table.add_row(
            line.axis,
            line.kind,
            line.dtype,
            f"{line.runs:,}",
            f"{line.bytes / line.runs / 1e6:.3g}",
            f"{line.bytes / 1e9:.3f}",
            f"{line.overlapped / line.bytes:.0%}" if line.bytes else "-",
            line.purpose,
        )
    console.print(table)
    sent, least = sum(line.bytes for line in lines), choice.wire_bytes_minimum
    ratio = f", {sent / least:.4f} times the least possible" if least else ""
    console.print(
        f"{choice.choice}, {choice.micro_batch_tokens} tokens per GPU, accumulation "
        f"{choice.accumulation}: one GPU sends {sent / 1e9:.3f} GB in a step{ratio}.",
        highlight=False,
        soft_wrap=True,
    )


def _phrase(place: str, *, kind: str) -> str:
    """One place of the source's trace in words; XLA leaves sums that it joins without one."""
    if "/" not in place:
        return "several, joined by the compiler"
    recomputed, backward = "rematted_computation" in place, "transpose(" in place
    names = [_SCOPE.sub(r"\1", part) for part in place.split("/")]
    names = [name for name in names if name and not _MACHINERY.fullmatch(name)]
    scopes = [name for name in names[:-1] if name != "rematted_computation"]
    if not scopes:
        return "sums of scalars"
    *_, last = scopes
    what = "/".join(scopes)
    if "." in last:  # gather names the collective after the parameter
        parts = last.split(".")
        owner = parts[0] if len(parts) >= _PARAMETER_PARTS else ".".join(parts[:-1])
        what = f"{'gradients' if kind != 'all-gather' else 'weights'} of {owner}"
        if kind == "all-gather":
            return (
                f"{what}, {'again for the backward pass' if recomputed or backward else 'forward'}"
            )
        return what
    direction = "recomputed" if recomputed else "backward" if backward else "forward"
    return f"activations of {what}, {direction}"


def _opening(text: str) -> int:
    """Index of the parenthesis that the last letter of `text` closes."""
    depth = 0
    for index in range(len(text) - 1, -1, -1):
        depth += (text[index] == ")") - (text[index] == "(")
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses: {text[:80]}")


def _split(text: str) -> list[str]:
    """`text` at the colons that stand in no parentheses."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == ":" and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]
