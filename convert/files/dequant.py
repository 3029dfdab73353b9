"""FP8 weights with one scale per block of rows and columns, as DeepSeek V3 stores them.

Despite its name, `weight_scale_inv` is what the stored value is multiplied with.
Letters: R rows, C columns of the whole matrix; r, c of the region that is read.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from convert.files.dtypes import NUMPY, cast, name_of
from jaxseek.errors import UserError

# Codes to values by table lookup: ten times as fast as the cast of ml_dtypes.
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

# Values that are worked on at a time. numpy widens the codes of a lookup to 64 bits, so that the
# temporaries come to 3 MiB.
_BAND = 1 << 18

_SCALE_DTYPES = ("F32", "F8_E8M0")


def block_of(quantization_config: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Rows and columns of a block by a config's `quantization_config`, `None` without blocks.

    How activations are quantised is of no concern here, and whether scales are powers of two
    (`scale_fmt`) shows in the scales themselves.

    Raises:
        UserError: for anything other than FP8 (e4m3), or a `weight_block_size` that is not two
            positive integers.
    """
    if quantization_config is None:
        return None
    if not isinstance(quantization_config, Mapping):
        raise UserError(f"quantization_config is {quantization_config!r}; it must be an object")
    for key, known in (
        ("quant_method", ("fp8",)),
        ("fmt", (None, "e4m3")),
        ("scale_fmt", (None, "ue8m0")),
    ):
        value = quantization_config.get(key)
        if value not in known:
            raise UserError(
                f"quantization_config has {key} = {value!r}; only {key} = {known[-1]!r} can be "
                "read. Take the checkpoint in FP8 as released, or in bfloat16."
            )
    block = quantization_config.get("weight_block_size")
    if block is None:
        return None
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise UserError(
            f"quantization_config has weight_block_size = {block!r}; it must be two positive "
            "integers, such as [128, 128]"
        )
    return block[0], block[1]


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scale of an [R, C] matrix: blocks by ceil division, the last ones partial."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])


def dequantise(
    weight: np.ndarray,
    scale: np.ndarray,
    *,
    block: tuple[int, int],
    origin: tuple[int, int] = (0, 0),
    dtype: str,
) -> np.ndarray:
    """Values of a region of a matrix: weight times the scale of its block.

    The product is taken in float32 and rounded once to `dtype`. Code 0x7f is NaN and stays it.

    Args:
        weight: float8_e4m3fn [r, c], any strides; the region that begins at `origin`.
        scale: of the whole matrix, float32 or float8_e8m0fnu, of shape `scale_shape([R, C])`.
        block: rows and columns that share a scale, from the config: edge blocks are partial, so
            that no ratio of shapes tells it.
        origin: row and column of the region in the whole matrix.
        dtype: `BF16` or `F32`.

    Returns:
        [r, c] in C order.

    Raises:
        UserError: for a scale that ends before the region does, or other dtypes. The message
            lacks the tensor's name, which is not known here.
    """
    _check_region(weight, scale, block=block, origin=origin)
    factors = scale.astype(np.float32)
    rows, columns = weight.shape
    out = np.empty(weight.shape, NUMPY[dtype])
    if out.size == 0:
        return out
    codes = weight.view(np.uint8)
    column_block = np.arange(origin[1], origin[1] + columns) // block[1]
    height = max(1, _BAND // columns)
    buffer = np.empty((min(height, rows), columns), np.float32)
    start = 0
    while start < rows:
        # A band of rows within one block, so that the factors are one row.
        block_row = (origin[0] + start) // block[0]
        end = min(start + height, rows, (block_row + 1) * block[0] - origin[0])
        band = out[start:end] if dtype == "F32" else buffer[: end - start]
        # "wrap" spares the bounds check, and no byte is out of bounds.
        np.take(_VALUES, codes[start:end], out=band, mode="wrap")
        np.multiply(band, factors[block_row, column_block], out=band)
        if dtype != "F32":
            cast(band, dtype, out=out[start:end])
        start = end
    return out


def _check_region(
    weight: np.ndarray, scale: np.ndarray, *, block: tuple[int, int], origin: tuple[int, int]
) -> None:
    if weight.ndim != 2 or scale.ndim != 2:
        raise UserError(
            "only matrices have scales by block, the weight is "
            f"{list(weight.shape)} and the scale {list(scale.shape)}"
        )
    if weight.dtype != ml_dtypes.float8_e4m3fn:
        raise UserError(f"the weight is {name_of(weight.dtype)}; only F8_E4M3 has a scale")
    if name_of(scale.dtype) not in _SCALE_DTYPES:
        raise UserError(
            f"the scale is {name_of(scale.dtype)}; known are {' and '.join(_SCALE_DTYPES)}"
        )
    end = (origin[0] + weight.shape[0], origin[1] + weight.shape[1])
    needed = scale_shape(end, block)
    if min(origin) < 0 or scale.shape[0] < needed[0] or scale.shape[1] < needed[1]:
        raise UserError(
            f"the scale is {list(scale.shape)}, but rows to {end[0]} and columns to {end[1]} in "
            f"blocks of {block[0]} x {block[1]} need at least {list(needed)}"
        )
