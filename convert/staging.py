"""Folders that appear whole or not at all."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from convert import interruption
from jaxseek.errors import UserError

_SUFFIX = ".partial"
_DELETIONS, _PAUSE = 20, 0.05  # tries at most, and seconds after each


@contextlib.contextmanager
def new_folder(path: Path, *, needed_bytes: int) -> Iterator[Path]:
    """The folder to write to, `PATH.partial`, which becomes `path` where the block ends well and
    is deleted where it does not.

    Args:
        path: made with its parents; may exist if it is empty. Links are followed.
        needed_bytes: how much will be written at least; compared with the room on the disk.

    Raises:
        UserError: `path` or `PATH.partial` holds something, cannot be made, or has no room.
    """
    path = Path(os.path.realpath(path.expanduser()))
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists already; nothing is ever overwritten. Give a new folder.")
    if path.is_mount():
        raise UserError(
            f"{path} is where a disk is mounted, and can be no new folder; give one in it, such as "
            f"{path / 'model'}."
        )
    partial = path.with_name(path.name + _SUFFIX)
    if os.path.lexists(partial):
        raise UserError(
            f"{partial} is there, from a conversion that was interrupted or still runs. Delete it "
            "if none runs, or give another folder."
        )
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{partial} cannot be made: {error.strerror}.") from error
    try:
        free = shutil.disk_usage(partial).free
        if free < needed_bytes:
            raise UserError(
                f"{path} needs {needed_bytes:,} bytes, and its disk has {free:,} free. Make room "
                "or give a folder on another disk."
            )
        interruption.check()
        yield partial
        interruption.check()
        partial.rename(path)
    except OSError as error:
        _delete(partial)
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{path} could not be written: {where}{error.strerror}.") from error
    except BaseException:
        _delete(partial)
        raise


def _delete(folder: Path) -> None:
    """Delete a folder in which threads of TensorStore may still be finishing what they began."""
    for _ in range(_DELETIONS):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_PAUSE)
        if not folder.exists():
            return


def copy_files(files: Iterable[Path], folder: Path) -> None:
    """Copies of `files` in a folder that is there."""
    for file in files:
        shutil.copyfile(file, folder / file.name)


def unfinished(path: Path) -> str | None:
    """What to say of a folder that `new_folder` was, or is, writing, or of one within it; `None` of
    any other.
    """
    for folder in (path, *path.parents):
        if folder.name.endswith(_SUFFIX):
            return (
                f"{folder} is not finished: a conversion that was interrupted has left it, or one "
                "that still runs writes it. Delete it if none runs, and convert again."
            )
    return None
