"""Which devices take part in a collective together, and which mesh axes that is."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

_GROUPS = re.compile(
    r"replica_groups=(\{\{[\d,{}]*\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)
# Newer compilers name the axes of a mesh of their own: its sizes count, its names do not.
_MESH_GROUPS = re.compile(r"replica_groups=@?\w*[<\[]([^>\]]*)[>\]] ?\{([^}]*)\}")
_MESH_AXIS = re.compile(r"([\w.]+)['\"]?=(\d+)")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")


def axis_groups(mesh: Mapping[str, int]) -> dict[frozenset[tuple[int, ...]], str]:
    """The groups of devices that differ along some axes only, and those axes' names."""
    names, sizes = list(mesh), list(mesh.values())
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    found = {}
    large = [i for i, size in enumerate(sizes) if size > 1]
    for length in range(1, len(large) + 1):
        for chosen in itertools.combinations(large, length):
            rest = [i for i in range(len(sizes)) if i not in chosen]
            rows = ids.transpose(*rest, *chosen).reshape(-1, *(sizes[i] for i in chosen))
            groups = frozenset(tuple(sorted(row.ravel().tolist())) for row in rows)
            found[groups] = "+".join(names[i] for i in chosen)
    return found


def replica_groups(attributes: str, *, devices: int) -> list[tuple[int, ...]]:
    """The sets of devices, each in rising order, that take part together in a collective with these
    attributes.

    Raises:
        ValueError: when they are written in a way that is not known.
    """
    if pairs := _PAIRS.search(attributes):
        return _connected(re.findall(r"(\d+),(\d+)", pairs[1]))
    if "replica_groups=" not in attributes:
        return [tuple(range(devices))]
    if named := _MESH_GROUPS.search(attributes):
        return _named_groups(dict(_MESH_AXIS.findall(named[1])), named[2])
    match = _GROUPS.search(attributes)
    if match is None:
        raise ValueError(f"unknown replica groups: {attributes}")
    if match[1] == "{}":
        return [tuple(range(devices))]
    if iota := _IOTA.fullmatch(match[1]):
        shape, dims, order = (
            [int(n) for n in (part or "").split(",") if n] for part in iota.groups()
        )
        ids = np.arange(math.prod(dims)).reshape(dims)
        rows = (ids.transpose(order) if order else ids).reshape(shape)
        return [tuple(sorted(row.ravel().tolist())) for row in rows]
    rows = re.findall(r"\{([\d,]+)\}", match[1])
    return [tuple(sorted(int(n) for n in row.split(","))) for row in rows]


def _named_groups(mesh: Mapping[str, str], axes: str) -> list[tuple[int, ...]]:
    """The groups that differ along the named `axes` of a mesh of the compiler's."""
    names, sizes = list(mesh), [int(size) for size in mesh.values()]
    wanted = [name.strip(" '\"") for name in axes.split(",")]
    if not set(wanted) <= set(names):
        raise ValueError(f"replica groups over {axes}, which are no axes of {dict(mesh)}")
    chosen = [names.index(name) for name in wanted]
    rest = [i for i in range(len(names)) if i not in chosen]
    ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(*rest, *chosen)
    rows = ids.reshape(-1, math.prod(sizes[i] for i in chosen))
    return [tuple(sorted(row.tolist())) for row in rows]


def _connected(pairs: Iterable[tuple[str, str]]) -> list[tuple[int, ...]]:
    """The sets of devices that a permutation moves values among."""
    groups: list[set[int]] = []
    for pair in pairs:
        joined = {int(n) for n in pair}
        for group in [g for g in groups if g & joined]:
            joined |= group
            groups.remove(group)
        groups.append(joined)
    return [tuple(sorted(group)) for group in groups]
