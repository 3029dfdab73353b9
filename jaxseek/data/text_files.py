"""The user's own text files as documents. Complaints name the file and, within it, the line."""

import glob
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxseek.data.documents import Corpus, Document
from jaxseek.errors import UserError

SUFFIXES = (".jsonl", ".md", ".py", ".txt")

_COMPRESSED_SUFFIXES = (".bz2", ".gz", ".xz", ".zip", ".zst")


def read_documents(source: str | Path, *, text_field: str = "text") -> Corpus:
    """The user's own text: a file, a folder (searched whole, hidden entries left out) or a glob.

    .txt and .md are UTF-8 with or without a byte order mark, .py follows PEP 263, .jsonl holds one
    object a line with the text in `text_field`. Empty files and records are skipped and listed.
    Raises `UserError` naming file and line.
    """
    files = _find_files(str(source))
    documents, skipped = [], []
    for name, path in files:
        for document in _read_file(path, name=name, text_field=text_field):
            if document.text:
                documents.append(document)
            else:
                skipped.append(f"{document.name}: empty")
    if not documents:
        what = f"{files[0][1]} is" if len(files) == 1 else f"all {len(files)} files of {source} are"
        raise UserError(f"{what} empty: data.source needs at least one file with text in it.")
    return Corpus(documents=tuple(documents), skipped=tuple(skipped))


def _find_files(source: str) -> list[tuple[str, Path]]:
    """(name, path) of every file of `source` with a known suffix, sorted by name."""
    path = Path(source).expanduser()
    if path.is_file():
        _check_suffix(path)
        return [(path.name, path)]
    if path.is_dir():
        root, found = path, [file for file in path.rglob("*") if file.is_file()]
    elif glob.has_magic(source):
        root = _folder_before_wildcards(path)
        matches = map(Path, glob.glob(str(path), recursive=True))
        found = [file for file in matches if file.is_file()]
        if not found:
            raise UserError(
                f"data.source {source!r} matches no file: check the pattern and the folder {root}."
            )
    else:
        raise UserError(f"data.source {source!r} does not exist: give a file, a folder, or a glob.")
    names = sorted((file.relative_to(root).as_posix(), file) for file in found)
    visible = [(name, file) for name, file in names if not f"/{name}".count("/.")]
    usable = [(name, file) for name, file in visible if file.suffix in SUFFIXES]
    if not usable:
        counts = Counter(file.suffix or "no suffix" for _, file in visible).most_common(5)
        seen = ", ".join(f"{count} x {suffix}" for suffix, count in counts) or "nothing"
        raise UserError(f"data.source {source!r} has no {', '.join(SUFFIXES)} file; found: {seen}.")
    return usable


def _folder_before_wildcards(pattern: Path) -> Path:
    parts = pattern.parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return Path(*parts[:fixed])


def _check_suffix(path: Path) -> None:
    if path.suffix in SUFFIXES:
        return
    hint = " Decompress it first." if path.suffix in _COMPRESSED_SUFFIXES else ""
    kind = path.suffix or "suffixless"
    raise UserError(f"{path}: cannot read a {kind} file; known: {', '.join(SUFFIXES)}.{hint}")


def _read_file(path: Path, *, name: str, text_field: str) -> Iterator[Document]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}.") from error
    if path.suffix == ".jsonl":
        yield from _read_json_lines(data, path=path, name=name, text_field=text_field)
        return
    decode = decode_python if path.suffix == ".py" else _decode_utf8
    try:
        text = decode(data)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, data, error) from error
    except SyntaxError as error:
        where = f"{path}:1"  # an encoding is declared in the first two lines
        raise UserError(f"{where}: {error}. Convert the file to UTF-8.") from error
    yield Document(name, text)


def _read_json_lines(data: bytes, *, path: Path, name: str, text_field: str) -> Iterator[Document]:
    try:
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, data, error) from error
    # Not splitlines(): U+2028 and its like may stand unescaped inside a JSON string.
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            text = _text_of_record(line, where=f"{path}:{number}", text_field=text_field)
            yield Document(f"{name}:{number}", text)
    if not content.strip():
        yield Document(name, "")


def _text_of_record(line: str, *, where: str, text_field: str) -> str:
    try:
        record = json.loads(line, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not one whole JSON object ({error.msg} at column {error.colno})."
        ) from error
    except _DuplicateKeyError as error:
        raise UserError(f"{where}: field {error.args[0]!r} stands twice in one object.") from error
    if not isinstance(record, dict):
        kind = _json_type(record)
        raise UserError(f"{where}: {kind} where an object with field {text_field!r} is needed.")
    if text_field not in record:
        found = ", ".join(map(repr, record)) or "none"
        raise UserError(f"{where}: no field {text_field!r}; fields found: {found}.")
    text = record[text_field]
    if not isinstance(text, str):
        raise UserError(f"{where}: field {text_field!r} is {_json_type(text)}; text is needed.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: half a surrogate pair at character {error.start + 1}: not valid text."
        ) from error
    return text


class _DuplicateKeyError(ValueError):
    """The name of a field that one JSON object holds twice."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise _DuplicateKeyError(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return record


def _json_type(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def decode_python(data: bytes) -> str:
    """Python source as `tokenize.open` reads it: PEP 263 encoding, newlines as "\\n".

    Raises SyntaxError for an unknown or missing declaration and UnicodeDecodeError for bad bytes.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return _universal_newlines(data.decode(encoding))


def _decode_utf8(data: bytes) -> str:
    return _universal_newlines(data.decode("utf-8-sig"))


def _universal_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _not_utf8(path: Path, data: bytes, error: UnicodeDecodeError) -> UserError:
    line = data.count(b"\n", 0, error.start) + 1
    byte = f"byte 0x{error.object[error.start]:02x}, {error.reason}"
    return UserError(
        f"{path}:{line}: not valid {error.encoding.upper()} ({byte}). Convert the file to UTF-8."
    )
