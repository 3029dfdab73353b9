"""Checkpoints as folders: which are complete, which go. No JAX here.

A folder is complete once it holds `jaxseek.json`, written last and in one rename. That manifest
lists the arrays with their logical shapes, every file with its size and sha256, and the caller's
metadata.
"""

import hashlib
import json
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxseek.errors import UserError

FORMAT_VERSION = 1
MANIFEST_FILE = "jaxseek.json"
TEMPORARY_FILE = f"{MANIFEST_FILE}.tmp"
ARRAYS_FOLDER = "state"
HASH_THREADS = 4

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
    """Size in bytes and sha256 (hex) of one file of a checkpoint."""

    size: int
    sha256: str


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
      ValueError: it is not a manifest of this format version.
    """
    content = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    try:
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version}, this jaxseek reads {FORMAT_VERSION}")
        leaves = {
            name: Leaf(shape=tuple(leaf["shape"]), dtype=leaf["dtype"])
            for name, leaf in content["leaves"].items()
        }
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
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


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Size and checksum of every file below a folder that has no manifest yet, read back."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): FileRecord(size=path.stat().st_size, sha256=sha256)
        for path, sha256 in zip(paths, _checksums(paths), strict=True)
    }


def changed_files(folder: Path) -> list[str]:
    """The listed files whose sha256 is not the recorded one; reads everything."""
    files = read_manifest(folder).files
    found = _checksums([folder / name for name in files])
    return [name for name, now in zip(files, found, strict=True) if now != files[name].sha256]


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
    existing = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    if not existing.is_dir():
        raise UserError(f"Checkpoints cannot be written to {directory}: {existing} is a file.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"Checkpoints cannot be written to {directory}: {existing} is not writable. "
            "Choose another folder."
        )


def _is_interrupted_save(folder: Path) -> bool:
    """Whether a folder holds nothing but what a save that never finished leaves behind."""
    ours = (TEMPORARY_FILE, ARRAYS_FOLDER)
    return all(path.name.startswith(ours) for path in folder.iterdir())


def _checksums(paths: list[Path]) -> list[str]:
    with ThreadPoolExecutor(max_workers=HASH_THREADS) as pool:  # hashlib lets go of the GIL.
        return list(pool.map(_sha256, paths))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
