"""Checkpoints as folders: which are complete, which go. No JAX here.

A folder is complete once it holds `jaxseek.json`, written last and in one rename. That manifest
lists the arrays with their logical shapes, every file with its size and checksum, and the caller's
metadata.

The checksum is XXH3 of 128 bits, which keeps up with memory where sha256 is slower than a disk. It
finds damage; it is no signature, whoever can change a file on purpose can make it fit.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jaxseek.errors import UserError

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)  # Version 1 names the checksum `sha256`, and it is one.
MANIFEST_FILE = "jaxseek.json"
TEMPORARY_FILE = f"{MANIFEST_FILE}.tmp"
ARRAYS_FOLDER = "state"
HASH_THREADS = 4
HASH_BLOCK = 1 << 20  # Bytes: a block is still in the processor's cache when it is hashed.
ALGORITHMS = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
WRITTEN = "xxh3_128"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of a checkpoint: its logical shape and the name of its dtype."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size in bytes and checksum of one file of a checkpoint, `xxh3_128:` and 32 hex digits.

    Files of format version 1 have `sha256:` and 64.
    """

    size: int
    checksum: str


class Checksum:
    """Checksum of bytes that come in pieces, as `FileRecord` spells it.

    Args:
      algorithm: `xxh3_128`, what is written today, or `sha256` for files of format version 1.
    """

    def __init__(self, algorithm: str = WRITTEN):
        self._algorithm = algorithm
        self._hash = ALGORITHMS[algorithm]()

    def update(self, data: bytes | bytearray | memoryview | np.ndarray) -> None:
        """Adds the bytes of a C-contiguous buffer; other threads run meanwhile."""
        if isinstance(data, np.ndarray):  # bfloat16 and the like offer no buffer of their own.
            assert data.flags.c_contiguous, "its bytes are not in the order of its elements"
            data = data.reshape(-1).view(np.uint8).data
        self._hash.update(data)

    def text(self) -> str:
        """The checksum of all bytes so far, `xxh3_128:HEX`."""
        return f"{self._algorithm}:{self._hash.hexdigest()}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `jaxseek.json` holds: leaves in the order of the state, files by path in the folder."""

    step: int
    leaves: dict[str, Leaf]
    files: dict[str, FileRecord]
    metadata: dict[str, Any]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is not a manifest of a format version that this jaxseek reads.
    """
    content = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    try:
        version = content["format_version"]
        if version not in READABLE_VERSIONS:
            readable = " and ".join(map(str, READABLE_VERSIONS))
            raise ValueError(f"format version {version}, this jaxseek reads {readable}")
        leaves = {
            name: Leaf(shape=tuple(leaf["shape"]), dtype=leaf["dtype"])
            for name, leaf in content["leaves"].items()
        }
        files = {name: _file_record(record) for name, record in content["files"].items()}
        return Manifest(
            step=content["step"], leaves=leaves, files=files, metadata=content["metadata"]
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"unexpected content, {error!r}") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Puts `jaxseek.json` into place in one rename; it is on the disk when this returns."""
    temporary = folder / TEMPORARY_FILE
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"format_version": FORMAT_VERSION, **asdict(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST_FILE)
    for directory in (folder, folder.parent):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def record_files(
    folder: Path, *, known: Mapping[str, FileRecord] | None = None
) -> dict[str, FileRecord]:
    """Size and checksum of every file below a folder that has no manifest yet.

    Args:
      folder: the checkpoint.
      known: records made with `Checksum` while the files were written, by path in the folder:
        these files are not read again.
    """
    records = dict(known or {})
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert records.keys() <= names, f"never written: {sorted(records.keys() - names)}"
    unread = [folder / name for name in sorted(names - records.keys())]
    for path, checksum in zip(unread, _checksums(dict.fromkeys(unread, WRITTEN)), strict=True):
        record = FileRecord(size=path.stat().st_size, checksum=checksum)
        records[path.relative_to(folder).as_posix()] = record
    return {name: records[name] for name in sorted(records)}


def changed_files(folder: Path, *, besides: Container[str | None] = ()) -> list[str]:
    """The listed files, `besides` some, whose checksum is not the recorded one; reads them all."""
    files = {name: f for name, f in read_manifest(folder).files.items() if name not in besides}
    algorithms = {folder / name: file.checksum.split(":")[0] for name, file in files.items()}
    found = _checksums(algorithms)
    return [name for name, now in zip(files, found, strict=True) if now != files[name].checksum]


def step_of(folder: Path) -> int | None:
    """The step that a folder's name stands for; `None` where it is not what `str(step)` gives."""
    name = folder.name
    return int(name) if name.isdecimal() and str(int(name)) == name else None


def incompleteness(folder: Path) -> str | None:
    """Why a folder is no complete checkpoint, or `None`; looks at sizes, not at content."""
    if step_of(folder) is None:
        return "its name is not a step number"
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return f"it has no {MANIFEST_FILE}"
    except (OSError, ValueError) as error:
        return f"its {MANIFEST_FILE} cannot be read ({error})"
    if manifest.step != step_of(folder):
        return f"its {MANIFEST_FILE} is that of step {manifest.step}"
    for name, record in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != record.size:
            return f"{name} has {size} bytes, {record.size} were written"
    return None


def clear_the_way(folder: Path) -> None:
    """Deletes what an interrupted save of the same step left; moves anything else aside."""
    if not folder.exists():
        return
    if _is_interrupted_save(folder):
        shutil.rmtree(folder)
        return
    aside = folder.with_name(f"{folder.name}.damaged")
    logger.warning("Moved %s, not a complete checkpoint, to %s", folder, aside)
    folder.rename(aside)


def delete_old(directory: Path, *, newest: int, keep: int) -> None:
    """Keeps `newest`, complete on the disk by now, and the `keep - 1` complete steps before it.

    Later steps stay, and so does what is neither complete nor the rest of an interrupted save.
    """
    problem = incompleteness(directory / str(newest))
    assert problem is None, problem
    earlier = {
        step: path
        for path in directory.iterdir()
        if path.is_dir() and (step := step_of(path)) is not None and step < newest
    }
    complete = [step for step in sorted(earlier) if incompleteness(earlier[step]) is None]
    outdated = [earlier[step] for step in complete[: max(0, len(complete) - (keep - 1))]]
    for folder in outdated + [path for path in earlier.values() if _is_interrupted_save(path)]:
        try:
            # The manifest goes first, so that half a checkpoint never counts.
            (folder / MANIFEST_FILE).unlink(missing_ok=True)
            shutil.rmtree(folder)
        except OSError as error:
            logger.warning("Old checkpoint %s could not be deleted: %s", folder, error)


def check_writable(directory: Path) -> None:
    """Finds out, without writing, whether the folder exists or can be made, and takes files.

    Raises:
      UserError: it cannot, and why.
    """
    existing = _nearest_existing(directory)
    if not existing.is_dir():
        raise UserError(f"Checkpoints cannot be written to {directory}: {existing} is a file.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"Checkpoints cannot be written to {directory}: {existing} is not writable. "
            "Choose another folder."
        )


def free_bytes(directory: Path) -> int:
    """What may still be written to a folder that exists or can be made."""
    return shutil.disk_usage(_nearest_existing(directory)).free


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


def _is_interrupted_save(folder: Path) -> bool:
    """Whether a folder holds nothing but what a save that never finished leaves behind."""
    ours = (TEMPORARY_FILE, ARRAYS_FOLDER)
    return all(path.name.startswith(ours) for path in folder.iterdir())


def _file_record(record: dict[str, Any]) -> FileRecord:
    """A record of either format version.

    Raises:
      ValueError: its checksum is none that this jaxseek knows.
    """
    checksum = f"sha256:{record['sha256']}" if "sha256" in record else record["checksum"]
    if checksum.split(":")[0] not in ALGORITHMS:
        raise ValueError(f"unknown checksum {checksum!r}")
    return FileRecord(size=record["size"], checksum=checksum)


def _checksums(algorithms: dict[Path, str]) -> list[str]:
    """Checksum of each file by the algorithm named for it."""
    with ThreadPoolExecutor(max_workers=HASH_THREADS) as pool:  # Hashing lets go of the GIL.
        return list(pool.map(checksum_of, algorithms, algorithms.values()))


def checksum_of(path: Path, algorithm: str) -> str:
    """The checksum of a file's content, by `algorithm`, as `FileRecord` spells it."""
    checksum, block = Checksum(algorithm), bytearray(HASH_BLOCK)
    view = memoryview(block)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            checksum.update(view[:count])
    return checksum.text()
