"""Files as `torch.save` writes them, by hand: without torch, and with what torch never writes."""

import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple


class Name(NamedTuple):
    """A global of the pickle."""

    module: str
    name: str


class Call(NamedTuple):
    """A function and its arguments, called when the pickle is read."""

    function: Any
    arguments: Any


class Stored(NamedTuple):
    """A persistent id."""

    id: Any


class Attributes(NamedTuple):
    """A value and the attributes that it is given."""

    value: Any
    state: Any


class Raw(NamedTuple):
    """Instructions as they are."""

    code: bytes


ORDERED_DICT = Call(Name("collections", "OrderedDict"), ())


def pickled(value: Any) -> bytes:
    """The pickle, protocol 2, of plain values and of the above."""
    return b"\x80\x02" + _code(value) + b"."


def _code(value: Any) -> bytes:
    match value:
        case Raw(code):
            return code
        case Name(module, name):
            return f"c{module}\n{name}\n".encode()
        case Call(function, arguments):
            return _code(function) + _code(arguments) + b"R"
        case Stored(id_):
            return _code(id_) + b"Q"
        case Attributes(inner, state):
            return _code(inner) + _code(state) + b"b"
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            code = value.to_bytes(9, "little", signed=True)
            return b"\x8a\x09" + code
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case tuple():
            return b"(" + b"".join(map(_code, value)) + b"t"
        case list():
            return b"](" + b"".join(map(_code, value)) + b"e"
        case dict():
            items = b"".join(_code(key) + _code(item) for key, item in value.items())
            return b"}(" + items + b"u"
    raise AssertionError(value)


def storage(key: str, size: int, *, kind: str = "FloatStorage") -> Stored:
    return Stored(("storage", Name("torch", kind), key, "cpu", size))


def tensor(stored: Any, shape: tuple, strides: tuple, *, offset: int = 0) -> Call:
    arguments = (stored, offset, shape, strides, False, ORDERED_DICT)
    return Call(Name("torch._utils", "_rebuild_tensor_v2"), arguments)


def write_archive(
    path: Path, state: Any, storages: dict[str, bytes], *, byteorder: bytes = b"little", **more
) -> Path:
    """A file of torch.save that holds `state`, a value of `pickled` or the pickle itself.

    Args:
        more: entries to add or replace by name.
    """
    pickle = state if isinstance(state, bytes) else pickled(state)
    entries = {"data.pkl": pickle, "byteorder": byteorder, "version": b"3\n"}
    entries |= {f"data/{key}": data for key, data in storages.items()} | more
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(f"archive/{name}", data)
    return path
