"""Two sets of weights, tensor by tensor and bit for bit, in blocks of a few MB."""

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from convert.files import dtypes
from convert.pipeline import Job, run_all
from convert.progress import Progress
from convert.verification.weight_sources import (
    FolderWeights,
    WeightSource,
    nbytes,
    row_size,
    row_spans,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor of which values differ.

    Attributes:
        size: how many values it has.
        differing: how many are not the same bit for bit.
        largest: of their absolute differences; NaN where one of a pair is no number.
    """

    name: str
    size: int
    differing: int
    largest: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What reading all tensors of a folder has shown, and comparing them with others if there are.

    Attributes:
        compared: names of the tensors read (and compared).
        differences: in the order of `compared`.
        rounded: those the other holds in a dtype that cannot hold all values of the folder's.
        missing, extra: names, or names with two shapes, of what only the folder or only the other
            has.
        mtp_left_out: how many tensors of MTP layers the other has nothing to compare with.
        not_finite: how many infinities and NaN a tensor of the folder holds, if any.
    """

    compared: tuple[str, ...]
    differences: tuple[Difference, ...]
    rounded: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    mtp_left_out: int
    not_finite: Mapping[str, int]

    @property
    def equal(self) -> bool:
        """Whether nothing differs or is missing; what a narrower dtype rounds is no difference."""
        return not (self.differences or self.missing or self.extra)


def compare(folder: FolderWeights, other: WeightSource | None, *, progress: Progress) -> Comparison:
    """Read every tensor of `folder` once, and compare it with that of the same name in `other`.

    Where dtypes differ, values must equal the folder's after a cast to the other's. FP8 may be
    dequantised straight to float32 or be rounded to bfloat16 first, as a conversion with and
    without `--dtype float32` does.
    """
    found: dict[str, _Finding] = {}
    names, missing, extra, left_out = _names(folder, other)
    unrounded = folder.unrounded if other and folder.plan.scales else folder

    def look(name: str) -> None:
        readings = [folder]
        if other and unrounded.dtypes[name] == other.dtypes[name] != folder.dtypes[name]:
            readings.append(unrounded)
        findings = (_look(reading, other, name) for reading in readings)
        found[name] = min(findings, key=lambda finding: finding.differing)

    run_all(
        (Job(run=functools.partial(look, name), nbytes=nbytes(folder, name)) for name in names),
        done=progress.advance,
    )
    return Comparison(
        compared=tuple(names),
        differences=tuple(
            Difference(
                name=name,
                size=math.prod(folder.shapes[name]),
                differing=found[name].differing,
                largest=found[name].largest,
            )
            for name in names
            if found[name].differing
        ),
        rounded=tuple(name for name in names if other and _rounds(folder, other, name)),
        missing=tuple(missing),
        extra=tuple(extra),
        mtp_left_out=left_out,
        not_finite={name: f.not_finite for name, f in found.items() if f.not_finite},
    )


def total_bytes(folder: FolderWeights, other: WeightSource | None) -> int:
    """Bytes that `compare` reads of `folder`."""
    return sum(nbytes(folder, name) for name in _names(folder, other)[0])


@dataclasses.dataclass(kw_only=True)
class _Finding:
    """About one tensor."""

    differing: int = 0
    largest: float = 0.0
    not_finite: int = 0


def _look(folder: FolderWeights, other: WeightSource | None, name: str) -> _Finding:
    finding = _Finding()
    row = row_size(folder.shapes[name])
    # The other's blocks decide; a block of a checkpoint may be larger than is good here.
    for begin, block in (other or folder).blocks(name):
        flat = np.ascontiguousarray(block).reshape(-1)
        for start, stop in row_spans((flat.size // row, row), dtype=folder.dtypes[name]):
            first = begin // row + start
            values = folder.rows(name, first, first + stop - start) if other else block[start:stop]
            values = np.ascontiguousarray(values).reshape(-1)
            finding.not_finite += dtypes.count_not_finite(values)
            if other:
                expected = dtypes.cast(values, other.dtypes[name])
                _note_differences(expected, flat[start * row : stop * row], finding)
            folder.release(name)
        if other:
            other.release(name)
    return finding


def _note_differences(expected: np.ndarray, found: np.ndarray, finding: _Finding) -> None:
    assert expected.dtype == found.dtype, (expected.dtype, found.dtype)
    bits = np.dtype(f"u{expected.itemsize}")
    unequal = expected.view(bits) != found.view(bits)
    if not unequal.any():
        return
    wide = np.float64 if expected.itemsize == 8 else np.float32
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(expected[unequal].astype(wide) - found[unequal].astype(wide))
    finding.differing += int(np.count_nonzero(unequal))
    finding.largest = float(np.maximum(finding.largest, distance.max()))  # NaN stays NaN


def _names(
    folder: FolderWeights, other: WeightSource | None
) -> tuple[list[str], list[str], list[str], int]:
    """What is compared; what the other lacks, and what only it has; how many MTP tensors are left
    out for one of the two holds none.
    """
    if other is None:
        return [*folder.shapes], [], [], 0
    one_sided = bool(folder.mtp) != bool(other.mtp)
    left_out = folder.mtp | other.mtp if one_sided else frozenset()
    ours = {name: shape for name, shape in folder.shapes.items() if name not in left_out}
    theirs = {name: shape for name, shape in other.shapes.items() if name not in left_out}
    missing = [name for name in ours if name not in theirs]
    extra = [name for name in theirs if name not in ours]
    both = [name for name in ours if name in theirs]
    missing += [
        f"{name}, in the shape {ours[name]}: there it is {theirs[name]}"
        for name in both
        if ours[name] != theirs[name]
    ]
    return [n for n in both if ours[n] == theirs[n]], missing, extra, len(left_out)


def _rounds(folder: FolderWeights, other: WeightSource, name: str) -> bool:
    return dtypes.widest([folder.dtypes[name], other.dtypes[name]]) != other.dtypes[name]
