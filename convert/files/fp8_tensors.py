"""Which tensors of a folder are FP8, and whether each has the block scales that it needs."""

from collections.abc import Mapping
from typing import Any

from convert.files.dequant import block_of, scale_shape
from convert.files.tensor_info import TensorInfo

FP8 = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"  # a multiplier all the same
RELEASED_BLOCK = (128, 128)  # of every DeepSeek release with such scales
_SCALE_DTYPES = ("F32", "F8_E8M0")  # what `dequantise` takes


def find_scales(infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    """FP8 tensors and the names of their scales, where those are there; in any file."""
    return {
        name: name + SCALE_SUFFIX
        for name, info in infos.items()
        if info.dtype == FP8 and name + SCALE_SUFFIX in infos
    }


def check_scales(
    infos: Mapping[str, TensorInfo], scales: Mapping[str, str], quantization_config: Any
) -> tuple[tuple[int, int] | None, list[str]]:
    """The block size, `None` without scales, and a line for each FP8 tensor or scale that is of no
    use.

    Raises:
        UserError: the quantisation that config.json names is another one.
    """
    found = [
        f"{name}: FP8, and {name + SCALE_SUFFIX} is missing, without which its values mean nothing"
        for name, info in infos.items()
        if info.dtype == FP8 and name not in scales
    ]
    found += [
        f"{name}: a scale without an FP8 tensor {name.removesuffix(SCALE_SUFFIX)}"
        for name in infos
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) not in scales
    ]
    if not scales:
        return None, found
    block = block_of(quantization_config) or RELEASED_BLOCK
    for name, scale in scales.items():
        weight, info = infos[name], infos[scale]
        if len(weight.shape) != 2:
            found.append(f"{name}: FP8 with shape {weight.shape}; only matrices have block scales")
        elif info.shape != (needed := scale_shape(weight.shape, block)):
            found.append(
                f"{scale}: shape {info.shape}; {name} of shape {weight.shape} in blocks of "
                f"{block[0]} x {block[1]} needs {needed}"
            )
        if info.dtype not in _SCALE_DTYPES:
            found.append(f"{scale}: dtype {info.dtype}; scales are {' or '.join(_SCALE_DTYPES)}")
    return block, found
