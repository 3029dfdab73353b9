"""One safetensors file: its header, checked against the file, and a writer that reads back.

A file is the length of the header (8 bytes, little-endian), the header (JSON: dtype, shape and
data_offsets of every tensor) and the values, without gaps.
"""

import json
import math
import os
import reprlib
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from convert.files import strict_json
from convert.files.dtypes import NUMPY
from convert.files.tensor_info import TensorInfo
from jaxseek.errors import UserError

_LENGTH_BYTES = 8
_HEADER_LIMIT = 100_000_000  # that of the safetensors package
_METADATA = "__metadata__"
_FIELDS = ("data_offsets", "dtype", "shape")
_MOST_DIMS = 64  # that of numpy
_MOST_BYTES = 2**63 - 1  # of one array, in numpy
# Written and read back in one go, so that both find the block in the processor's cache: 1 MiB is
# as fast as 8 MiB, and it is all the memory that a thread takes.
_BLOCK = 2**20


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, by name. Nothing but the header is read.

    Raises:
        UserError: the file cannot be read, or header and file do not fit together to the byte. One
            line a problem, each with the file, the tensor, the bytes that are there and those that
            are needed.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            raw = _read_raw_header(path, file.fileno(), size=size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}).") from error
    data_start = _LENGTH_BYTES + len(raw)
    tensors, problems = {}, []
    for name, entry in _parse_header(path, raw).items():
        problem = _metadata_problem(entry) if name == _METADATA else _entry_problem(name, entry)
        if problem:
            problems.append(f"{path}: {problem}.")
        elif name != _METADATA:
            tensors[name] = TensorInfo(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                file=path,
                offset=data_start + entry["data_offsets"][0],
            )
    if not problems:
        problems = _layout_problems(path, tensors, data_start=data_start, size=size)
    if problems:
        raise UserError("\n".join(sorted(problems)))
    return tensors


def _read_raw_header(path: Path, descriptor: int, *, size: int) -> bytes:
    start = os.pread(descriptor, _LENGTH_BYTES, 0)
    if start == b"version " and size < 1024:
        raise UserError(
            f"{path}: a pointer of Git LFS stands in place of the weights. Fetch them with "
            "'git lfs pull'."
        )
    length = int.from_bytes(start, "little")
    there = size - _LENGTH_BYTES
    if there <= 0:
        raise UserError(
            f"{path}: no safetensors file: it has {size} bytes, needed are {_LENGTH_BYTES} for the "
            "length of the header, and the header. Copy or download it again."
        )
    if length > min(there, _HEADER_LIMIT):
        raise UserError(
            f"{path}: no safetensors file, or a damaged one: its header claims {length} bytes, "
            f"{there} bytes are there, and at most {_HEADER_LIMIT} are allowed. "
            "Copy or download it again."
        )
    raw = os.pread(descriptor, length, _LENGTH_BYTES)
    if len(raw) < length:
        raise UserError(f"{path}: became shorter while its header was read.")
    return raw


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        if not raw.startswith(b"{"):
            raise ValueError("it begins with another character than '{'")
        header = strict_json.loads(raw)
    except ValueError as error:
        raise UserError(f"{path}: the header is damaged: {error}.") from error
    return header


def _metadata_problem(metadata: Any) -> str | None:
    if isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()):
        return None
    return f"{_METADATA} must map text to text, got {reprlib.repr(metadata)}"


def _entry_problem(name: str, entry: Any) -> str | None:
    """What is wrong with the entry of one tensor, taken for itself."""
    where = f"tensor {name!r}"
    try:
        name.encode()
    except UnicodeEncodeError:
        return f"{where}: the name is no valid text"
    if not isinstance(entry, dict):
        return f"{where}: needed are {', '.join(_FIELDS)}, got {reprlib.repr(entry)}"
    if sorted(entry) != list(_FIELDS):
        return f"{where}: needed are {', '.join(_FIELDS)}, got {reprlib.repr(sorted(entry))}"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NUMPY:
        return f"{where}: dtype {reprlib.repr(dtype)} is unknown; known are {', '.join(NUMPY)}"
    if not _is_counts(shape):
        return f"{where}: shape must be a list of whole numbers from 0, got {reprlib.repr(shape)}"
    if len(shape) > _MOST_DIMS:
        return f"{where}: {len(shape)} dims, at most {_MOST_DIMS} are possible"
    itemsize = NUMPY[dtype].itemsize
    # numpy counts so too: dims beside one of size 0 may not be beyond all bounds either.
    if math.prod(dim for dim in shape if dim) * itemsize > _MOST_BYTES:
        return f"{where}: shape {reprlib.repr(shape)} is beyond the {_MOST_BYTES} bytes of an array"
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"{where}: data_offsets must be [begin, end], got {reprlib.repr(offsets)}"
    there, needed = offsets[1] - offsets[0], math.prod(shape) * itemsize
    if there != needed:
        return (
            f"{where}: its data_offsets hold {there} bytes, {dtype} of shape {shape} needs {needed}"
        )
    return None


def _is_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _layout_problems(
    path: Path, tensors: Mapping[str, TensorInfo], *, data_start: int, size: int
) -> list[str]:
    """Overlaps, gaps, and values beyond the end of the file or left over there."""
    problems = []
    position, before = data_start, "the header"
    in_order = sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes))
    for info in in_order:
        where = f"{path}: tensor {info.name!r}: begins at byte {info.offset}"
        if info.offset < position:
            problems.append(f"{where}, within {before}, which ends at byte {position}.")
        elif info.offset > position:
            gap = info.offset - position
            problems.append(f"{where}; the {gap} bytes from {before} to there belong to no tensor.")
        if info.offset + info.nbytes >= position:
            position, before = info.offset + info.nbytes, f"tensor {info.name!r}"
    incomplete = [info for info in in_order if info.offset + info.nbytes > size]
    if incomplete:
        first = incomplete[0]
        there = max(0, size - first.offset)
        problems.append(
            f"{path}: cut short: it has {size} bytes, its header needs {position}. Incomplete "
            f"tensors: {len(incomplete)}, first {first.name!r} with {there} of {first.nbytes} "
            "bytes. Copy or download it again."
        )
    elif size > position:
        problems.append(
            f"{path}: too long: it has {size} bytes, its header needs {position}, "
            f"{size - position} are left over. Copy or download it again."
        )
    return problems


class _Span(NamedTuple):
    start: int
    stop: int


class _Thread(threading.local):
    """What each thread that writes has for itself."""

    def __init__(self) -> None:
        self.buffer = bytearray(_BLOCK)
        self.outgoing = bytearray(_BLOCK)


class SafetensorsWriter:
    """A safetensors file whose tensors come in any order, in blocks, and from several threads.

    Every block is read back and compared. As a context manager it closes the file, and checks that
    it is complete unless an exception is on its way.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]):
        """Creates the file and writes its header.

        Args:
            path: a file that does not exist.
            tensors: dtype, by its safetensors name, and shape of every tensor. In the file those of
                wide dtypes come first, otherwise the order given: so all are aligned.

        Raises:
            UserError: the file cannot be written.
        """
        header, self._tensors = _lay_out(path, tensors)
        self._path = path
        self._size = len(header) + sum(info.nbytes for info in self._tensors.values())
        self._written: dict[str, list[_Span]] = {name: [] for name in tensors}
        self._lock = threading.Lock()
        self._thread = _Thread()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise self._cannot_write("the header", error) from error
        try:
            self._write_block(memoryview(header), offset=0, what="the header")
        except UserError:
            os.close(self._descriptor)
            raise

    def write(self, name: str, array: np.ndarray, *, start: int = 0) -> None:
        """Writes a tensor, or the part of its flat values that begins at element `start`.

        Args:
            array: any shape, C-contiguous, of the dtype that was declared.

        Raises:
            UserError: the disk is full or fails, or holds other bytes than were written.
        """
        info = self._tensors[name]
        span = _Span(start, start + array.size)
        assert array.flags.c_contiguous, f"{name}: not C-contiguous, strides {array.strides}"
        assert array.dtype == NUMPY[info.dtype], f"{name}: {array.dtype}, declared {info.dtype}"
        assert start >= 0 and span.stop <= info.size, f"{name}: {span} of {info.size} values"
        data = array.reshape(-1).view(np.uint8).data
        offset = info.offset + start * array.itemsize
        for begin in range(0, len(data), _BLOCK):
            block = data[begin : begin + _BLOCK]
            self._write_block(block, offset=offset + begin, what=f"tensor {name!r}")
        with self._lock:
            self._written[name].append(span)

    def close(self) -> None:
        """Closes the file. Every value of every tensor must have been written, once.

        Raises:
            UserError: the file that is there now is not the one that was written.
        """
        self._close_descriptor()
        for name, spans in self._written.items():
            position = 0
            for span in sorted(spans):
                assert span.start == position, f"{name}: {span} written after value {position}"
                position = span.stop
            size = self._tensors[name].size
            assert position == size, f"{name}: {position} of {size} values written"
        if read_header(self._path) != self._tensors:
            raise UserError(f"{self._path}: the header is not the one that was written.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            os.close(self._descriptor)

    def _close_descriptor(self) -> None:
        try:
            os.close(self._descriptor)
        except OSError as error:  # network file systems find out here that their disk is full
            raise self._cannot_write("the end", error) from error

    def _write_block(self, block: memoryview, *, offset: int, what: str) -> None:
        """Writes at most `_BLOCK` bytes, and compares them with what the file holds then."""
        if len(block) == _BLOCK:
            # Linux writes the pages of another file's map at half the speed of other memory.
            self._thread.outgoing[:] = block
            block = memoryview(self._thread.outgoing)
        try:
            _write_all(self._descriptor, block, offset)
            found = self._read_back(len(block), offset)
        except OSError as error:
            raise self._cannot_write(what, error) from error
        # A bytearray compares by memcmp, a memoryview value by value.
        if found != block:
            raise UserError(
                f"{self._path}: {what}: among the {len(block)} bytes from byte {offset} the file "
                "holds others than were written. Do not trust this disk; write to another one."
            )

    def _read_back(self, size: int, offset: int) -> bytearray:
        """`size` bytes of the file, fewer where it ends; whole blocks reuse the thread's buffer."""
        buffer = self._thread.buffer if size == _BLOCK else bytearray(size)
        done = 0
        while done < size:
            with memoryview(buffer) as view:
                count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if not count:
                return buffer[:done]
            done += count
        return buffer

    def _cannot_write(self, what: str, error: OSError) -> UserError:
        return UserError(
            f"{self._path}: {what} cannot be written ({error.strerror or error}). The whole file "
            f"needs {self._size} bytes: give a place with enough room and the right to write."
        )


def _lay_out(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[bytes, dict[str, TensorInfo]]:
    """The header, with the length in front of it, and where each tensor goes."""
    assert _METADATA not in tensors
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    position = 0
    for name in sorted(tensors, key=lambda name: -NUMPY[tensors[name][0]].itemsize):
        dtype, shape = tensors[name]
        end = position + math.prod(shape) * NUMPY[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    raw = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    assert len(raw) <= _HEADER_LIMIT, f"{path}: a header of {len(raw)} bytes"
    header = len(raw).to_bytes(_LENGTH_BYTES, "little") + raw
    del entries[_METADATA]
    return header, {
        name: TensorInfo(
            name=name,
            dtype=entry["dtype"],
            shape=entry["shape"],
            file=path,
            offset=len(header) + entry["data_offsets"][0],
        )
        for name, entry in entries.items()
    }


def _write_all(descriptor: int, block: memoryview, offset: int) -> None:
    done = 0
    while done < len(block):
        done += os.pwrite(descriptor, block[done:], offset + done)
