"""The system's page cache of files that are read once."""

import os
from pathlib import Path

_CAN_FORGET = hasattr(os, "posix_fadvise")  # macOS cannot


def forget_pages(path: Path, *, start: int = 0, size: int = 0) -> None:
    """Give the page cache of a file, or of `size` bytes from `start`, back to the system: what is
    read once may be larger than memory. Pages that are mapped stay.
    """
    if _CAN_FORGET:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)
