"""What a header says about one tensor of a checkpoint's files."""

import dataclasses
import math
from pathlib import Path

from convert.files import dtypes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where the values of a tensor stand.

    Attributes:
        name: as in the file.
        dtype: its safetensors name, such as `BF16`, whatever the container is.
        file, offset: the file, and the position in it of the first byte.
        strides: in elements, by dim; `None` for row-major, which safetensors always is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    strides: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.size * dtypes.NUMPY[self.dtype].itemsize
