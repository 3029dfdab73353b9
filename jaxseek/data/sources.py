"""Where the text of a run comes from: the standard library's sources, or files of the user."""

import sysconfig
from pathlib import Path

from jaxseek.data.documents import Corpus, Document
from jaxseek.data.text_files import decode_python, read_documents
from jaxseek.errors import UserError

STDLIB = "stdlib"

# Tests repeat themselves and hold broken code on purpose, lib2to3 left the library, and pydoc_data
# is one generated file of prose, 6 % of all text.
_STDLIB_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "lib2to3", "pydoc_data"}) | {
    "site-packages",
    "dist-packages",
    "__pycache__",
}
# How this one interpreter was built: data and tokenizer would differ between machines.
_STDLIB_SKIPPED_PREFIX = "_sysconfigdata"


def load_corpus(source: str, *, text_field: str = "text") -> Corpus:
    """The documents of `source`: "stdlib", or a file, folder or glob as in `read_documents`."""
    return stdlib_documents() if source == STDLIB else read_documents(source, text_field=text_field)


def stdlib_documents(*, root: Path | None = None) -> Corpus:
    """The standard library's own .py files without tests, decoded as Python does (PEP 263).

    `root` defaults to the running interpreter's standard library. Files that do not decode are
    skipped and listed.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    documents, skipped = [], []
    for name, path in sorted(
        (path.relative_to(root).as_posix(), path) for path in root.rglob("*.py")
    ):
        if not _STDLIB_SKIPPED_FOLDERS.isdisjoint(name.split("/")[:-1]):
            continue
        if path.name.startswith(_STDLIB_SKIPPED_PREFIX):
            continue
        try:
            text = decode_python(path.read_bytes())
        except (SyntaxError, UnicodeDecodeError, OSError) as error:
            skipped.append(f"{name}: {error}")
            continue
        if text:
            documents.append(Document(name, text))
    if not documents:
        raise UserError(
            f"the Python standard library at {root} holds no source files: this Python was "
            "installed without them. Give your own text with data.source (a file, folder or glob)."
        )
    return Corpus(documents=tuple(documents), skipped=tuple(skipped))
