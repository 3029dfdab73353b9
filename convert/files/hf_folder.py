"""A Hugging Face folder: `config.json` and weights, checked as a whole, then mapped into memory."""

import json
import mmap
import os
import threading
from pathlib import Path
from typing import Any, Self

import numpy as np

from convert.files import strict_json
from convert.files.dtypes import NUMPY
from convert.files.page_cache import forget_pages
from convert.files.tensor_info import TensorInfo
from convert.files.weight_files import find_weights
from convert.staging import unfinished
from jaxseek.checkpoint_files import MANIFEST_FILE
from jaxseek.errors import UserError
from jaxseek.paths import CHECKPOINTS

CONFIG_FILE = "config.json"

_SHOWN_LINES = 100  # of problems: a V3 folder with another index has 90,000
_CARRIED_SUFFIXES = (".jinja", ".json", ".model", ".py", ".txt")
_INDEX_SUFFIX = ".index.json"
# Linux maps the pages around the one that is read along with it, 64 KiB at a time. `release` lets
# go of them too; without it a model of many small tensors would stay resident piece by piece.
_RELEASED = max(mmap.PAGESIZE, 2**16)
_CAN_RELEASE = hasattr(mmap, "MADV_DONTNEED")  # Windows cannot


class HFFolder:
    """A folder whose files have been checked; `open_hf_folder` makes it.

    The weights are mapped into memory, a file at its first use. Every method may be called from
    several threads.

    Attributes:
        path: the folder.
        config: the content of `config.json`.
        tensors: every tensor of the model.
        files: the files that hold them.
        notes: what a person should know, a line each.
    """

    def __init__(
        self,
        *,
        path: Path,
        config: dict[str, Any],
        tensors: dict[str, TensorInfo],
        files: list[Path],
        notes: list[str],
    ):
        self.path = path
        self.config = config
        self.tensors = tensors
        self.files = files
        self.notes = notes
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def view(self, name: str) -> np.ndarray:
        """A tensor as a read-only array on the mapped file, in its shape and dtype.

        It may be unaligned, and not C-contiguous where the file is one of PyTorch's.

        Raises:
            UserError: the file cannot be mapped, or is shorter than when the folder was opened.
        """
        info = self.tensors[name]
        dtype = NUMPY[info.dtype]
        if not info.size:
            empty = np.empty(info.shape, dtype)
            empty.flags.writeable = False
            return empty
        mapped = self._map(info.file)
        if info.offset + _extent(info) > len(mapped):
            raise UserError(f"{info.file}: became shorter after it was checked. Start again.")
        strides = info.strides and tuple(stride * dtype.itemsize for stride in info.strides)
        return np.ndarray(info.shape, dtype, buffer=mapped, offset=info.offset, strides=strides)

    def release(self, name: str) -> None:
        """Takes a tensor's pages out of resident memory; views stay valid and read them anew.

        Does nothing on systems without `madvise`.
        """
        info = self.tensors[name]
        with self._lock:
            mapped = self._maps.get(info.file)
        if not _CAN_RELEASE or mapped is None or not info.size:
            return
        start = info.offset // _RELEASED * _RELEASED
        stop = min(-(-(info.offset + _extent(info)) // _RELEASED) * _RELEASED, len(mapped))
        mapped.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def forget(self, name: str) -> None:
        """`release`, and gives the page cache of the tensor's part of its file back too."""
        self.release(name)
        info = self.tensors[name]
        if info.size:
            forget_pages(info.file, start=info.offset, size=_extent(info))

    def carried_files(self) -> list[Path]:
        """What belongs to a model besides config and weights: tokenizer, templates, code, licence.

        Files of the folder itself only, sorted.
        """
        return sorted(
            path
            for path in self.path.iterdir()
            if path.is_file()
            and not path.name.startswith(".")
            and path.name != CONFIG_FILE
            and not path.name.endswith(_INDEX_SUFFIX)
            and (path.suffix in _CARRIED_SUFFIXES or path.name.startswith("LICENSE"))
        )

    def close(self) -> None:
        """Lets go of the maps; a file is unmapped once no view of it is left."""
        with self._lock:
            self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _map(self, file: Path) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                try:
                    with file.open("rb") as opened:
                        self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
                except (OSError, ValueError) as error:  # ValueError: it is empty now
                    raise UserError(f"{file}: cannot be mapped into memory ({error}).") from error
            return self._maps[file]


def open_hf_folder(path: Path) -> HFFolder:
    """Opens a folder with `config.json` and weights, safetensors or PyTorch's, after checking all.

    Headers are read and nothing else, so this is quick and takes no memory for weights.

    Raises:
        UserError: it is no such folder, or files are missing, damaged or contradict each other; all
            that is wrong with any of them, sorted.
    """
    path = Path(os.path.expanduser(path))
    problems: list[str] = []
    try:
        if not path.is_dir():
            raise UserError(_no_folder(path))
        if not os.path.lexists(path / CONFIG_FILE):
            raise UserError(_no_config(path))
        config = _read_config(path / CONFIG_FILE, problems=problems)
        weights = find_weights(path, problems=problems)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}).") from error
    if problems:
        raise UserError(_summary(path, problems))
    return HFFolder(
        path=path,
        config=config,
        tensors=weights.tensors,
        files=weights.files,
        notes=weights.notes,
    )


def _no_folder(path: Path) -> str:
    what = "is a file" if path.exists() else "does not exist"
    return (
        f"{path} {what}; needed is the folder of a model, with {CONFIG_FILE} and the weights. "
        "Models are not downloaded here."
    )


def _no_config(folder: Path) -> str:
    """What a folder without a config may be instead."""
    if problem := unfinished(folder):
        return problem
    export = "'python -m convert to-hf' makes such a folder of it."
    if (folder / MANIFEST_FILE).exists():
        return f"{folder} is a checkpoint of jaxseek, no folder in Hugging Face's format. {export}"
    if (folder / CHECKPOINTS).is_dir():
        return f"{folder} is a run of jaxseek, no folder in Hugging Face's format. {export}"
    inside = sorted(file.parent for file in folder.glob(f"snapshots/*/{CONFIG_FILE}"))
    if inside:
        return f"{folder} is an entry of Hugging Face's cache; the model is in {inside[-1]}."
    return (
        f"{folder} has no {CONFIG_FILE}, which says what model it is. Give the folder of a model, "
        "with its config and weights."
    )


def _read_config(path: Path, *, problems: list[str]) -> dict[str, Any]:
    try:
        config = strict_json.loads(path.read_bytes())
        if isinstance(config, dict):
            return config
        problems.append(f"{path}: needed is a JSON object, got {json.dumps(config)[:40]}.")
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror or error}).")
    except ValueError as error:
        problems.append(f"{path}: {error}.")
    return {}


def _extent(info: TensorInfo) -> int:
    """Bytes from a tensor's first value to the end of its last; there is at least one."""
    if info.strides is None:
        return info.nbytes
    last = sum((dim - 1) * stride for dim, stride in zip(info.shape, info.strides, strict=True))
    return (last + 1) * NUMPY[info.dtype].itemsize


def _summary(folder: Path, problems: list[str]) -> str:
    lines = [line for problem in sorted(problems) for line in problem.splitlines()]
    if len(lines) == 1:
        return lines[0]
    shown = lines[:_SHOWN_LINES]
    if len(lines) > len(shown):
        shown.append(f"... and {len(lines) - len(shown)} more")
    return f"{folder} cannot be converted; problems: {len(lines)}\n" + "\n".join(shown)
