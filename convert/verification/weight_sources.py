"""The tensors of a model, be they in a Hugging Face folder or in a checkpoint of jaxseek.

They go by their Hugging Face names, a matrix per expert: of a folder with all experts of a layer in
one tensor they are pieces.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from convert.checkpoint_source import CheckpointSource
from convert.files import dtypes
from convert.import_plan import ImportPlan
from convert.names import hf_tensors
from jaxseek.config import ModelConfig

_BLOCK_BYTES = 4 << 20


class WeightSource(Protocol):
    """Tensors of a model, wherever they are.

    Attributes:
        path: where they are.
        config: of the model.
        shapes, dtypes: by name.
        mtp: which of the names are of MTP layers.
    """

    path: Path
    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    mtp: frozenset[str]

    def blocks(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """A tensor's values: how many come before the block, and the block. Blocks consist of whole
        rows of the tensor's first dim.
        """
        ...

    def release(self, name: str) -> None:
        """Let go of the memory that reading a tensor has mapped."""
        ...


class FolderWeights:
    """Those of a Hugging Face folder, FP8 dequantised."""

    def __init__(self, plan: ImportPlan):
        """`plan` must be made with `keep`."""
        self.path = plan.folder.path
        self.config = plan.config
        self.plan = plan
        self.mtp = frozenset(plan.kept)
        # Which part of which tensor of the folder a name stands for; whole tensors are not here.
        self._pieces: dict[str, tuple[str, int, int]] = {}
        wanted = hf_tensors(plan.config)
        self.shapes = {name: plan.folder.tensors[name].shape for name in plan.kept}
        self.shapes |= {name: tensor.shape for name, tensor in wanted.items()}
        holders = {
            (path, tensor.layer): (name, number)
            for name, tensor in plan.tensors.items()
            if tensor.expert is None
            for number, path in enumerate(tensor.paths)
        }
        for name, tensor in wanted.items():
            if name not in plan.tensors:
                assert tensor.expert is not None, name
                holder, number = holders[tensor.paths[0], tensor.layer]
                self._pieces[name] = (holder, number, tensor.expert)
        self.dtypes = {name: plan.dtypes[self._holder(name)] for name in self.shapes}

    @property
    def unrounded(self) -> "FolderWeights":
        """The same with FP8 as float32, which holds the products of value and scale better."""
        exact = dict.fromkeys(self.plan.scales, "F32")
        return FolderWeights(dataclasses.replace(self.plan, dtypes={**self.plan.dtypes, **exact}))

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Some rows of a tensor's first dim."""
        if name in self._pieces:
            holder, number, expert = self._pieces[name]
            whole = self.plan.read(holder, dtype=self.dtypes[name])
            return self.plan.tensors[holder].file_parts(whole)[number][expert][start:stop]
        region = (slice(start, stop), *(slice(0, n) for n in self.shapes[name][1:]))
        return self.plan.read(name, dtype=self.dtypes[name], region=region)

    def blocks(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        row = row_size(self.shapes[name])
        for start, stop in row_spans(self.shapes[name], dtype=self.dtypes[name]):
            yield start * row, self.rows(name, start, stop)

    def release(self, name: str) -> None:
        self.plan.release(self._holder(name))

    def _holder(self, name: str) -> str:
        return self._pieces[name][0] if name in self._pieces else name


class CheckpointWeights:
    """Those of a checkpoint of jaxseek, in the dtypes of an export."""

    def __init__(self, source: CheckpointSource):
        self.path = source.folder
        self.config = source.config
        self.source = source
        self.mtp = frozenset(source.mtp)
        self.shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
        self.shapes |= {name: info.shape for name, info in source.mtp.items()}
        self.dtypes = {**source.dtypes} | {n: info.dtype for n, info in source.mtp.items()}

    def blocks(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        if name in self.mtp:
            return self.source.mtp_blocks(name)
        # Checksums are read where values differ, to tell damage from training.
        return self.source.blocks(name, check=False)

    def release(self, name: str) -> None:
        """Nothing is mapped longer than its block lives."""


def nbytes(weights: WeightSource, name: str) -> int:
    """Bytes of a tensor's values."""
    return math.prod(weights.shapes[name]) * dtypes.NUMPY[weights.dtypes[name]].itemsize


def row_size(shape: Sequence[int]) -> int:
    """Values in a row of the first dim."""
    return max(1, math.prod(shape[1:]))


def row_spans(shape: Sequence[int], *, dtype: str) -> Iterator[tuple[int, int]]:
    """First row, and the row after the last, of blocks of a few MB of a tensor."""
    row = row_size(shape) * dtypes.NUMPY[dtype].itemsize
    step = max(1, _BLOCK_BYTES // row)
    rows = shape[0] if shape else 1
    return ((start, min(start + step, rows)) for start in range(0, rows, step))
