"""Folders that appear whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxseek.errors import UserError

_SUFFIX = ".partial"


@contextlib.contextmanager
def new_folder(path: Path, *, needed_bytes: int) -> Iterator[Path]:
    """The folder to write to, `PATH.partial`, which becomes `path` where the block ends well and
    is deleted where it does not.

    Args:
        path: made with its parents; may exist if it is empty.
        needed_bytes: how much will be written at least; compared with the room on the disk.

    Raises:
        UserError: `path` or `PATH.partial` holds something, cannot be made, or has no room.
    """
    path = path.expanduser().absolute()
    partial = path.with_name(path.name + _SUFFIX)
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists already; nothing is ever overwritten. Give a new folder.")
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
        yield partial
        partial.rename(path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{path} could not be written: {where}{error.strerror}.") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
