"""A checkpoint of jaxseek as the tensors of a Hugging Face folder, read one at a time.

Checkpoints know logical shapes only, so what comes out does not depend on the mesh of the run, nor
on whether there is optimizer state beside the parameters.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert.checkpoint_folder import find_step, model_of, owner_of
from convert.files import dtypes
from convert.files.page_cache import forget_pages
from convert.files.safetensors_file import read_header
from convert.files.tensor_info import TensorInfo
from convert.import_plan import CORRECTION_BIAS, DtypeChoice, chosen_dtype
from convert.names import HFTensor, checkpoint_leaf, hf_tensors
from convert.to_jax import MTP_FILE
from jaxseek.checkpoint_arrays import chunk_file, open_array, read_slice
from jaxseek.checkpoint_files import (
    ARRAYS_FOLDER,
    Checksum,
    Manifest,
    changed_files,
    checksum_of,
    read_manifest,
)
from jaxseek.config import ModelConfig
from jaxseek.errors import UserError
from jaxseek.paths import HF_FILES, TOKENIZER

# A tensor of more bytes is read in several blocks, each of about this many.
_BLOCK_BYTES = 64 << 20
_STREAM_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSource:
    """One complete step of a run or of a converted model.

    Attributes:
        folder: of the step.
        owner: the run folder or converted model that it is in; `None` for a step copied elsewhere.
        config: of the model.
        source: what is known of the Hugging Face folder that the model came from: its `config`
            and, under `dtypes`, that of each tensor; `None` for a model trained from nothing.
        tensors: of the parameters, by Hugging Face name.
        dtypes: what each tensor is exported as.
    """

    folder: Path
    owner: Path | None
    manifest: Manifest
    config: ModelConfig
    source: Mapping[str, Any] | None
    tensors: Mapping[str, HFTensor]
    dtypes: Mapping[str, str]

    @functools.cached_property
    def mtp(self) -> dict[str, TensorInfo]:
        """The tensors of MTP layers that are kept for an export, by name."""
        return read_header(self.folder / MTP_FILE) if MTP_FILE in self.manifest.files else {}

    @property
    def carried_files(self) -> list[Path]:
        """Tokenizer and whatever else travels along."""
        found: dict[str, Path] = {}
        for name in (TOKENIZER, HF_FILES):  # of two files of one name the original wins
            folder = self.owner and self.owner / name
            if folder and folder.is_dir():
                found |= {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
        return list(found.values())

    def verify(self) -> None:
        """Compare files with their checksums: all but those that `blocks` compares as it reads.

        Raises:
            UserError: naming those that have changed.
        """
        chunks = {self._chunk(tensor) for tensor in self.tensors.values()}
        if changed := changed_files(self.folder, besides=chunks):
            raise self._damaged(changed)

    def values(self, name: str, *, dtype: str) -> np.ndarray:
        """All values of a tensor, flat; for small ones."""
        return np.concatenate([b.flatten() for _, b in self.blocks(name, dtype=dtype)])

    def blocks(
        self, name: str, *, dtype: str | None = None, check: bool = True
    ) -> Iterator[tuple[int, np.ndarray]]:
        """A tensor's values in its exported dtype, or in `dtype`, C-contiguous, in one block or
        several: how many values come before the block, and the block, which the next may overwrite.
        Blocks of memory-mapped files are read-only.

        Args:
            check: compare a tensor's own file with its checksum, at the latest at its end.

        Raises:
            UserError: an array that cannot be read, a file that has changed, or a value beyond the
                range of the dtype.
        """
        tensor = self.tensors[name]
        (path,) = tensor.paths
        array = self._array(path)
        read = functools.partial(read_slice, array, index=tensor.index, order=tensor.order)
        chunk, target = self._chunk(tensor), dtype or self.dtypes[name]
        if check and chunk:
            if array.dtype.numpy_dtype == dtypes.NUMPY[target]:
                yield from self._stream(chunk, dtypes.NUMPY[target])
                return
            self._check_chunk(chunk)
        shape = [tensor.part_shape[dim] for dim in tensor.order]
        for start, part in _row_blocks(shape, itemsize=array.dtype.numpy_dtype.itemsize):
            try:
                values = read(rows=part)
            except (OSError, ValueError) as error:
                raise UserError(f"{self.folder}: {path} cannot be read: {error}.") from error
            yield start, dtypes.cast_in_range(values, target, name=name)

    def mtp_blocks(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """As `blocks`, of one of `mtp`."""
        info = self.mtp[name]
        dtype = dtypes.NUMPY[info.dtype]
        for start, rows in _row_blocks(info.shape, itemsize=dtype.itemsize):
            size = (rows.stop - rows.start) * math.prod(info.shape[1:])
            offset = info.offset + start * dtype.itemsize
            yield start, np.fromfile(info.file, dtype, size, offset=offset)

    def stored_bytes(self, tensor: HFTensor) -> int:
        """Bytes of a tensor in the checkpoint."""
        leaf = self.manifest.leaves[checkpoint_leaf(tensor.paths[0])]
        return math.prod(tensor.shape) * np.dtype(leaf.dtype).itemsize

    def release(self, name: str) -> None:
        """Give the page cache of a tensor's file back to the system, where it has one of its own.
        No array of it may be left.
        """
        if chunk := self._chunk(self.tensors[name]):
            forget_pages(self.folder / chunk)

    def _chunk(self, tensor: HFTensor) -> str | None:
        """The file that holds a tensor and nothing else, as a converted model has them."""
        index = tensor.index + (0,) * len(tensor.part_shape)
        leaf = checkpoint_leaf(tensor.paths[0])
        file = chunk_file(Path(ARRAYS_FOLDER), leaf, index).as_posix()
        record = self.manifest.files.get(file)
        return file if record and record.size == self.stored_bytes(tensor) else None

    def _stream(self, file: str, dtype: np.dtype) -> Iterator[tuple[int, np.ndarray]]:
        """A tensor's own file in small blocks, each while it is in the processor's cache. Reading
        is twice as fast as mapping where the bytes are only written elsewhere.
        """
        recorded, done = self.manifest.files[file].checksum, 0
        checksum, buffer = Checksum(recorded.partition(":")[0]), bytearray(_STREAM_BYTES)
        with (self.folder / file).open("rb", buffering=0) as opened:
            while count := opened.readinto(buffer):
                block = memoryview(buffer)[:count]
                checksum.update(block)
                if count % dtype.itemsize:
                    break  # a file that has become shorter; its checksum tells
                yield done // dtype.itemsize, np.frombuffer(block, dtype)
                done += count
        if checksum.text() != recorded:
            raise self._damaged([file])

    def _check_chunk(self, file: str) -> None:
        """Compare a file with its checksum; what it reads stays in the page cache."""
        recorded = self.manifest.files[file].checksum
        if checksum_of(self.folder / file, recorded.partition(":")[0]) != recorded:
            raise self._damaged([file])

    def _damaged(self, files: Sequence[str]) -> UserError:
        return UserError(
            f"{self.folder} is damaged; these files have changed since they were written: "
            f"{', '.join(files[:20])}{' ...' if len(files) > 20 else ''}. Restore them from a "
            "copy, or convert again."
        )

    @functools.cached_property
    def _opened(self) -> dict[str, Any]:
        return {}

    def _array(self, path: str) -> Any:
        if path not in self._opened:
            self._opened[path] = open_array(self.folder / ARRAYS_FOLDER, checkpoint_leaf(path))
        return self._opened[path]


def open_checkpoint(
    path: Path, *, dtype: DtypeChoice = "keep", step: int | None = None
) -> CheckpointSource:
    """The newest complete step of a run folder, of a converted model, of their `checkpoints/`, or
    the step whose folder `path` is.

    Args:
        dtype: what tensors are exported as; `keep` is what they were in the folder that the model
            came from, and what the checkpoint holds for a model trained from nothing.
        step: this one instead of the newest.

    Raises:
        UserError: there is no such checkpoint, or it is not complete.
    """
    folder = find_step(path, step=step)
    manifest = read_manifest(folder)
    config = model_of(folder, manifest)
    source = manifest.metadata.get("source")
    tensors = hf_tensors(config)
    opened = CheckpointSource(
        folder=folder,
        owner=owner_of(folder),
        manifest=manifest,
        config=config,
        source=source,
        tensors=tensors,
        dtypes={
            name: chosen_dtype(name, _base_dtype(name, tensor, manifest, source), dtype)
            for name, tensor in tensors.items()
        },
    )
    return dataclasses.replace(opened, dtypes={**opened.dtypes, **_wider_biases(opened)})


def _wider_biases(source: CheckpointSource) -> dict[str, str]:
    """float32 for the correction biases that training has moved off the values which the dtype of
    the folder they came from can hold: rounded, they would choose other experts.
    """
    exact = {}
    for name in source.tensors:
        if name.endswith(CORRECTION_BIAS):
            narrow = source.values(name, dtype=source.dtypes[name])
            if not np.array_equal(dtypes.cast(narrow, "F32"), source.values(name, dtype="F32")):
                exact[name] = "F32"
    return exact


def _base_dtype(
    name: str, tensor: HFTensor, manifest: Manifest, source: Mapping[str, Any] | None
) -> str:
    if source:
        known = source["dtypes"]
        return known["exceptions"].get(name, known["default"])
    leaf = manifest.leaves[checkpoint_leaf(tensor.paths[0])]
    return dtypes.name_of(np.dtype(leaf.dtype))


def _row_blocks(shape: Sequence[int], *, itemsize: int) -> Iterator[tuple[int, slice]]:
    """Blocks of rows of the first dim, of about `_BLOCK_BYTES`: the values before each, and it."""
    rows_in_all = shape[0] if shape else 1
    row = math.prod(shape) // rows_in_all
    step = max(1, _BLOCK_BYTES // max(1, row * itemsize))
    for start in range(0, rows_in_all, step):
        yield start * row, slice(start, min(start + step, rows_in_all))
