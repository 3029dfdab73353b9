"""Files of `torch.save`: where their tensors lie. Neither torch nor a pickle is run.

Since version 1.6 of torch such a file is a zip archive without compression:

    ARCHIVE/data.pkl    pickle of the state dict; tensors refer to storages by key
    ARCHIVE/data/KEY    bytes of a storage
    ARCHIVE/byteorder   `little`, in files of torch 2.1 and later
"""

import io
import math
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

from convert.files import torch_pickle
from convert.files.dtypes import NUMPY
from convert.files.tensor_info import TensorInfo
from convert.files.torch_pickle import Storage, Tensor
from jaxseek.errors import UserError

# Bytes of a pickle or of the zip directory: each has some 200 per tensor, so that the largest
# checkpoints stay far below. A file made to fill the memory does not get beyond 2 GB.
_LIMIT = 16 << 20

# Of numpy's arrays.
_MAX_BYTES = 2**63 - 1

_ENCRYPTED = 1 << 0
_LOCAL_HEADER = struct.Struct("<4s22xHH")

# Names under which training programs keep the state dict beside what else they save.
_WRAPPERS = ("state_dict", "model")

_AS_SAFETENSORS = (
    "Where you trust it, load it with a current torch and save its state dict as safetensors."
)


def read_torch_file(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a state dict, by name; reads its pickle and the zip directory only.

    A state dict is a dict of tensors and parameters. Where it is the entry `state_dict` or `model`
    of a dict, its names are taken without that prefix and the other entries (optimizer, step) are
    left out. Tied tensors appear under each of their names, views with their strides.

    Raises:
        UserError: for files cut short, of another format (TorchScript, torch before 1.6,
            compressed, encrypted or big-endian) or other content, tensors that reach beyond
            their storage, and pickles that ask for anything a state dict does not need. Nothing a
            pickle asks for is executed.
    """
    try:
        with _BoundedFile(path) as file, _open_zip(file, path) as archive:
            root = _root(archive, path)
            source = f"{path}: data.pkl"
            state = torch_pickle.describe(_read(archive, f"{root}/data.pkl", path), source=source)
            storages = _Storages(file=file, archive=archive, root=root, path=path)
            return {
                name: storages.locate(name, tensor)
                for name, tensor in _state_dict(state, path).items()
            }
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


class _BoundedFile(io.FileIO):
    """Refuses to read more at once than a zip directory takes: `zipfile` trusts its lengths."""

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = -1 if size is None else size
        if wanted < 0:
            wanted = os.fstat(self.fileno()).st_size - self.tell()
        if wanted > _LIMIT:
            raise zipfile.BadZipFile(f"a directory of {wanted} bytes")
        return super().read(max(wanted, 0))


def _open_zip(file: _BoundedFile, path: Path) -> zipfile.ZipFile:
    size = os.fstat(file.fileno()).st_size
    start = file.read(64)
    if not start.startswith(b"PK\x03\x04"):
        raise UserError(_not_a_zip(path, size, start))
    try:
        return zipfile.ZipFile(file)
    # Damaged directories also raise struct.error, UnicodeDecodeError or NotImplementedError.
    except Exception as error:
        raise UserError(
            f"{path} ({size} bytes) begins like a file of torch.save, but its zip directory is "
            f"missing or damaged ({error}). It was probably cut short: download it again."
        ) from error


def _not_a_zip(path: Path, size: int, start: bytes) -> str:
    message = f"{path} ({size} bytes) is no file of torch.save since torch 1.6"
    if start.startswith(b"version https://git-lfs"):
        return f"{message} but a pointer of git-lfs: fetch the file itself, with `git lfs pull`."
    if start.startswith(b"\x80"):
        return (
            f"{message} but a bare pickle, as older ones write, and pickles are not run here. "
            f"{_AS_SAFETENSORS}"
        )
    return f"{message}: it is no zip archive. Download it again, or give another file."


def _root(archive: zipfile.ZipFile, path: Path) -> str:
    """Name of the folder that holds all entries, after checks of what is in it."""
    names = archive.namelist()
    if len(set(names)) != len(names):
        raise UserError(f"{path} has two zip entries of one name. {_AS_SAFETENSORS}")
    roots = [name.split("/")[0] for name in names if name.endswith("/data.pkl")]
    if len(roots) != 1 or f"{roots[0]}/data.pkl" not in names:
        raise UserError(
            f"{path} is a zip archive, but holds no data.pkl as files of torch.save do. "
            "Give the file of a state dict."
        )
    (root,) = roots
    if f"{root}/constants.pkl" in names or any(name.startswith(f"{root}/code/") for name in names):
        raise UserError(
            f"{path} is a TorchScript program, not a state dict. Load it with torch.jit.load "
            "where you trust it, and save its state dict as safetensors."
        )
    # Older files have no such entry, and were written on little-endian machines.
    if f"{root}/byteorder" in names:
        order = _read(archive, f"{root}/byteorder", path)
        if order != b"little":
            raise UserError(
                f"{path} has byte order {ascii(order[:20])[2:-1]}; only little can be read. "
                f"{_AS_SAFETENSORS}"
            )
    return root


def _entry(archive: zipfile.ZipFile, name: str, path: Path) -> zipfile.ZipInfo:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise UserError(
            f"{path}: {name} is compressed, which torch.save never does. Unpack and zip it again "
            "without compression (zip -0), or download the original."
        )
    if info.flag_bits & _ENCRYPTED:
        raise UserError(f"{path}: {name} is encrypted. Decrypt the file first.")
    return info


def _read(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    info = _entry(archive, name, path)
    if info.file_size > _LIMIT:
        raise UserError(
            f"{path}: {name} has {info.file_size} bytes, more than the {_LIMIT} of the "
            f"largest state dicts. {_AS_SAFETENSORS}"
        )
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"{path}: {name} is damaged ({error}). Download the file again.") from error


def _state_dict(state: Any, path: Path) -> dict[str, Tensor]:
    """The dict of tensors within what the pickle describes."""
    advice = f"A state dict of tensors is needed, by itself or as {' or '.join(_WRAPPERS)}."
    if type(state) is not dict:
        raise UserError(f"{path} holds a {type(state).__name__.lower()}. {advice}")
    wrapped = [key for key in _WRAPPERS if type(state.get(key)) is dict]
    if len(wrapped) > 1:
        raise UserError(f"{path} holds both {' and '.join(wrapped)}. Save one of them by itself.")
    if wrapped:
        beside = [key for key, value in state.items() if type(value) is Tensor]
        if beside:
            raise UserError(
                f"{path} holds tensors both in {wrapped[0]} and beside it ({beside[0]}). "
                "Save one state dict by itself."
            )
        state = state[wrapped[0]]
    for name, value in state.items():
        if type(name) is not str or type(value) is not Tensor:
            kind = type(value).__name__.lower()
            raise UserError(f"{path} holds a {kind} as {name!r}, where tensors belong. {advice}")
    return state


class _Storages:
    """The storages of an archive, and where tensors lie in them."""

    def __init__(self, *, file: _BoundedFile, archive: zipfile.ZipFile, root: str, path: Path):
        self._file = file
        self._archive = archive
        self._root = root
        self._path = path
        self._offsets: dict[str, int] = {}

    def locate(self, name: str, tensor: Tensor) -> TensorInfo:
        """Where a tensor lies; `UserError` unless all of it lies within its storage."""
        itemsize = NUMPY[tensor.dtype].itemsize
        storage = tensor.storage
        start, room = self._bytes_of(name, storage)
        steps = zip(tensor.shape, tensor.strides, strict=True)
        values = 0 if 0 in tensor.shape else 1 + sum((size - 1) * step for size, step in steps)
        end = (tensor.offset + values) * itemsize
        size = math.prod(tensor.shape)
        if size * itemsize > _MAX_BYTES or end > room:
            raise UserError(
                f"{self._path}: tensor {name} of {size} values of {tensor.dtype} reaches to byte "
                f"{end} of its storage data/{storage.key}, which has {room}. The file is damaged: "
                "download it again."
            )
        return TensorInfo(
            name=name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            file=self._path,
            offset=start + tensor.offset * itemsize,
            strides=_strides(tensor),
        )

    def _bytes_of(self, name: str, storage: Storage) -> tuple[int, int]:
        """Position in the file and length in bytes of a storage."""
        entry = f"{self._root}/data/{storage.key}"
        if entry not in self._archive.NameToInfo:
            raise UserError(
                f"{self._path} has no entry {ascii(entry)[1:-1]}, where tensor {name} lies. The "
                "file is damaged: download it again."
            )
        info = _entry(self._archive, entry, self._path)
        needed = storage.size * (NUMPY[storage.dtype].itemsize if storage.dtype else 1)
        if info.file_size < needed:
            raise UserError(
                f"{self._path}: data/{storage.key} has {info.file_size} bytes; tensor {name} "
                f"says it has {needed}. The file is damaged: download it again."
            )
        if entry not in self._offsets:
            self._offsets[entry] = self._offset(info)
        return self._offsets[entry], needed

    def _offset(self, info: zipfile.ZipInfo) -> int:
        # The lengths in the entry's own header differ from those in the directory: torch pads
        # there, so that storages are aligned.
        self._file.seek(info.header_offset)
        header = self._file.read(_LOCAL_HEADER.size)
        size = os.fstat(self._file.fileno()).st_size
        if len(header) == _LOCAL_HEADER.size:
            signature, name, extra = _LOCAL_HEADER.unpack(header)
            start = info.header_offset + _LOCAL_HEADER.size + name + extra
            if signature == b"PK\x03\x04" and start + info.file_size <= size:
                return start
        raise UserError(
            f"{self._path} ({size} bytes): its zip directory has {ascii(info.filename)[1:-1]} of "
            f"{info.file_size} bytes at byte {info.header_offset}, where it is not. The file is "
            "damaged: download it again."
        )


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Strides in values, 0 for dims of one value; `None` for tensors in C order."""
    step = 1
    ordered = True
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        ordered &= size == 1 or stride == step
        step *= size
    if ordered or 0 in tensor.shape:
        return None
    steps = zip(tensor.shape, tensor.strides, strict=True)
    return tuple(stride if size > 1 else 0 for size, stride in steps)
