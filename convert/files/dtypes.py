"""dtypes of tensor files by their safetensors names, and casts between them."""

import itertools
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from jaxseek.errors import UserError

NUMPY: Mapping[str, np.dtype] = MappingProxyType(
    {
        name: np.dtype(scalar)
        for name, scalar in {
            "F64": np.float64,
            "F32": np.float32,
            "F16": np.float16,
            "BF16": ml_dtypes.bfloat16,
            "F8_E4M3": ml_dtypes.float8_e4m3fn,
            "F8_E5M2": ml_dtypes.float8_e5m2,
            "F8_E8M0": ml_dtypes.float8_e8m0fnu,
            "I64": np.int64,
            "I32": np.int32,
            "I16": np.int16,
            "I8": np.int8,
            "U64": np.uint64,
            "U32": np.uint32,
            "U16": np.uint16,
            "U8": np.uint8,
            "BOOL": np.bool_,
        }.items()
    }
)

# What a parameter may be stored as, the narrowest first; neither of the first two holds the other.
FLOATS = ("F16", "BF16", "F32", "F64")

# The bits that are all set in infinities and NaN, and in nothing else.
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000}

# A tile of a transposed copy: this many values of the fastest dim of the source by as many of the
# fastest dim of the target. 128 was the fastest of 64 to 1024, or within 15 % of it.
_TILE = 128


def name_of(dtype: np.dtype | type) -> str:
    """The safetensors name of a numpy dtype; raises `UserError` for one that has none."""
    for name, known in NUMPY.items():
        if known == dtype:
            return name
    raise UserError(f"dtype {np.dtype(dtype)} cannot be stored; known are {', '.join(NUMPY)}")


def widest(names: Iterable[str]) -> str:
    """The narrowest of `FLOATS` that holds every value of all `names`, which are of `FLOATS` too.

    F16 and BF16 together need F32.
    """
    distinct = set(names)
    assert distinct and distinct <= set(FLOATS), distinct
    return "F32" if distinct == {"F16", "BF16"} else max(distinct, key=FLOATS.index)


def cast(array: np.ndarray, dtype: str, *, out: np.ndarray | None = None) -> np.ndarray:
    """`array` as `dtype`, bit-equal to `array.astype`: rounded to nearest even.

    A NaN becomes whatever `astype` makes of it (float32 to bfloat16 drops its payload); overflow
    gives inf without a warning. Sources whose fastest dim is not the
    fastest of `out`, such as a transposed matrix, are copied tile by tile. Beside the result, no
    more than a tile is allocated, never a copy of the array.

    Args:
        array: any shape and strides.
        dtype: a name of `NUMPY`.
        out: filled and returned, of the array's shape and of `dtype`, not overlapping the array.
            `None` allocates one in C order, or returns `array` itself where it has the dtype.
    """
    target = NUMPY[dtype]
    if out is None:
        if array.dtype == target:
            return array
        out = np.empty(array.shape, target)
    assert out.shape == array.shape and out.dtype == target, (out.shape, out.dtype)
    if array.dtype == target:
        # numpy copies ml_dtypes' own types value by value, plain integers in bulk.
        bits = np.dtype(f"u{target.itemsize}")
        _copy(out.view(bits), array.view(bits))
    else:
        # A signalling NaN, as uninitialised memory has, becomes a quiet one: no news to anyone.
        with np.errstate(invalid="ignore", over="ignore"):
            _copy(out, array)
    return out


def cast_in_range(array: np.ndarray, dtype: str, *, name: str) -> np.ndarray:
    """`cast` of the tensor `name`, or of a part of it, to one of `FLOATS`.

    Raises:
        UserError: a finite value would become infinite.
    """
    result = cast(array, dtype)
    if ml_dtypes.finfo(array.dtype).max > ml_dtypes.finfo(result.dtype).max:
        beyond = count_not_finite(result)
        if beyond and (beyond := beyond - count_not_finite(array)):
            raise UserError(
                f"{name}: {beyond:,} values are beyond the range of {dtype}; give another --dtype."
            )
    return result


def count_not_finite(values: np.ndarray) -> int:
    """How many infinities and NaN there are among values of one of `FLOATS`; of any strides."""
    mask = np.dtype(f"u{values.itemsize}").type(_EXPONENT[name_of(values.dtype)])
    return int(np.count_nonzero((values.view(mask.dtype) & mask) == mask))


def _copy(out: np.ndarray, array: np.ndarray) -> None:
    """`out[...] = array` for different strides and dtypes."""
    out, array = _coalesced(out, array)
    if array.size == 0 or _fastest(array) == _fastest(out):
        np.copyto(out, array, casting="unsafe")
        return
    dim = _fastest(array)
    out, array = np.moveaxis(out, dim, -1), np.moveaxis(array, dim, -1)
    # A tile is read and cast along the rows of the source, then written along those of `out`: the
    # lines of both stay in the cache. Written straight from the source, strides of a power of two
    # are three times slower; with tiles that do not follow each other along the rows of the
    # source, float32 to bfloat16 is twice as slow.
    tile = _tile_shape(out)
    buffer = np.empty(math.prod(tile), out.dtype)
    starts = [range(0, size, step) for size, step in zip(out.shape, tile, strict=True)]
    for corner in itertools.product(*starts):
        region = tuple(slice(i, i + step) for i, step in zip(corner, tile, strict=True))
        source = array[region]
        rows = buffer[: source.size].reshape(source.shape)
        np.copyto(rows, source, casting="unsafe")
        out[region] = rows


def _fastest(array: np.ndarray) -> int:
    """The dim along which neighbours are closest in memory; -1 without one."""
    dims = [dim for dim, size in enumerate(array.shape) if size > 1]
    return min(dims, key=lambda dim: abs(array.strides[dim]), default=-1)


def _tile_shape(out: np.ndarray) -> list[int]:
    """`_TILE` values of the last dim, by as many of those of the others that are fastest."""
    *others, last = out.shape
    tile = [1] * len(others)
    room = _TILE
    for dim in sorted(range(len(others)), key=lambda dim: abs(out.strides[dim])):
        tile[dim] = max(1, min(room, out.shape[dim]))
        room //= tile[dim]
    return [*tile, min(_TILE, last)]


def _coalesced(out: np.ndarray, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both with every two neighbouring dims merged that lie as one in both."""
    shape: list[int] = []
    strides: list[tuple[int, int]] = []
    for size, *step in zip(out.shape, out.strides, array.strides, strict=True):
        if size == 1:
            continue
        if strides and strides[-1] == (step[0] * size, step[1] * size):
            shape[-1] *= size
            strides[-1] = (step[0], step[1])
        else:
            shape.append(size)
            strides.append((step[0], step[1]))
    return (
        as_strided(out, shape, [ours for ours, _ in strides]),
        as_strided(array, shape, [theirs for _, theirs in strides]),
    )
