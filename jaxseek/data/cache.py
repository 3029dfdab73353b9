"""The cache of prepared data: keys made from contents, and files that are written whole or not."""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxseek.data.documents import Document
from jaxseek.errors import UserError


def digest(parts: Iterable[str]) -> str:
    """SHA-256 of several strings, 64 hex digits; ("ab", "c") and ("a", "bc") differ."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape")  # as Python decodes odd file names
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()


def documents_digest(documents: Iterable[Document]) -> str:
    """SHA-256 of the names and texts of `documents`, in their order."""
    return digest(part for document in documents for part in document)


@contextlib.contextmanager
def atomic_write(path: Path, *, what: str = "the data cache") -> Iterator[Path]:
    """Yields a temporary path; it becomes `path` when the block ends well, else it is removed.

    A reader sees the old file, the new file or no file, never half of one; of two processes that
    write at once the last one wins. Raises `UserError`, which names `what`, where the folder cannot
    be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"cannot write {what} {path}: {error.strerror or error}. "
            "Set JAXSEEK_CACHE to a folder that can be written."
        ) from error
    finally:
        # Renamed already, or its folder could not be made.
        with contextlib.suppress(OSError):
            temporary.unlink()
