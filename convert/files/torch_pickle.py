"""What the pickle of a torch file describes, without unpickling it.

Python's unpickler calls what a pickle names. Here an interpreter of the few instructions that a
state dict consists of builds plain dicts, lists, tuples, numbers and strings, and the two classes
below. It knows a handful of names, looks none of them up and calls nothing. No instruction copies,
so that memory stays in proportion to the pickle's length.
"""

import dataclasses
import pickletools
from collections.abc import Callable
from typing import Any

from jaxseek.errors import UserError

# Class of a storage, or torch's name of a dtype, to the name in safetensors.
_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}

# Bounds of torch's and numpy's arrays.
_MAX_DIMS = 64
_MAX_INTEGER = 2**63 - 1

# Stands on the stack where the arguments of an instruction begin.
_MARK = object()

_SAVE_AGAIN = (
    "If you trust it, load it with torch and save its state dict alone, as safetensors; "
    "otherwise delete it."
)
_IGNORED = {"PROTO", "FRAME", "STOP"}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "MARK": lambda: _MARK,
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Storage:
    """Bytes that tensors lie in: entry `data/KEY` of the archive.

    Attributes:
        dtype: of the values; `None` where each tensor has its own.
        size: number of values, of bytes where there is no dtype.
    """

    key: str
    dtype: str | None
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tensor:
    """A view of a storage; offset and strides in values. Only the types are checked so far."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Global:
    """A name of the pickle, never looked up. `call` says what a call of it describes."""

    name: str
    dtype: str | None = None
    call: Callable[..., Any] | None = None


class _MalformedError(Exception):
    """What is wrong with a pickle; becomes a `UserError` that says where."""


def describe(pickle: bytes, *, source: str) -> Any:
    """The object that a state dict's pickle describes, tensors as `Tensor`.

    An `OrderedDict` becomes a dict, a `Parameter` its tensor; attributes are left out.

    Args:
        pickle: as `torch.save` writes it, protocol 2 to 5.
        source: where it comes from, for messages.

    Raises:
        UserError: for names and instructions that no state dict needs, and malformed pickles.
    """
    interpreter = _Interpreter(source)
    try:
        for opcode, argument, _ in pickletools.genops(pickle):
            interpreter.run(opcode.name, argument)
        return interpreter.result()
    except UserError:
        raise
    # Bytes that are no pickle make pickletools raise ValueError mostly, and here, where a stack
    # lacks what an instruction takes, IndexError and TypeError.
    except Exception as error:
        raise UserError(
            f"{source} is no pickle of a state dict ({error}); nothing was executed. The file is "
            "damaged or was not written by torch.save: download or save it again."
        ) from error


class _Interpreter:
    """Stack and memo of a pickle, and what its instructions do to them."""

    def __init__(self, source: str):
        self._source = source
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        """What is left at the end."""
        (value,) = self._stack
        return value

    def run(self, name: str, argument: Any) -> None:
        """One instruction by its name in `pickletools`."""
        if name in _IGNORED:
            return
        if name in _LITERALS:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _INSTRUCTIONS:
            _INSTRUCTIONS[name](self, argument)
        else:
            raise UserError(
                f"{self._source} has the pickle instruction {name}, which no state dict needs; "
                f"nothing was executed. {_SAVE_AGAIN}"
            )

    def _since_mark(self) -> list[Any]:
        stack = self._stack
        start = len(stack) - 1
        while stack[start] is not _MARK:
            start -= 1
            if start < 0:
                raise _MalformedError("a mark is missing")
        values = stack[start + 1 :]
        del stack[start:]
        return values

    def _memoize(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def _recall(self, index: int) -> None:
        if index not in self._memo:
            raise _MalformedError(f"nothing is memoised as {index}")
        self._stack.append(self._memo[index])

    def _tuple(self, count: int | None) -> None:
        if count is None:
            values = self._since_mark()
        else:
            values = [self._stack.pop() for _ in range(count)][::-1]
        self._stack.append(tuple(values))

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise _MalformedError(f"items are added to a {_kind(target)}")
        target.extend(values)

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise _MalformedError(f"{len(items)} keys and values are added to a {_kind(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int):
                raise _MalformedError(f"a {_kind(key)} is a key")
            target[key] = value

    def _append(self) -> None:
        value = self._stack.pop()
        self._extend([value])

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _global(self, name: str) -> None:
        known = _GLOBALS.get(name)
        if known is None:
            raise UserError(
                f"{self._source} asks to run {ascii(name[:100])[1:-1]}, which no state dict needs; "
                f"nothing was executed. {_SAVE_AGAIN}"
            )
        self._stack.append(known)

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise _MalformedError("a name is not a string")
        self._global(f"{module}.{name}")

    def _persistent_id(self) -> None:
        self._stack.append(_storage(self._stack.pop()))

    def _reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(function) is not _Global or function.call is None or type(arguments) is not tuple:
            raise _MalformedError(f"a {_kind(function)} is called with a {_kind(arguments)}")
        try:
            self._stack.append(function.call(*arguments))
        except TypeError as error:
            raise _MalformedError(
                f"{function.name} is called with {len(arguments)} arguments"
            ) from error

    def _build(self) -> None:
        # Attributes of a state dict: `_metadata` with the versions of its modules.
        self._stack.pop()
        if type(self._stack[-1]) is not dict:
            raise _MalformedError(f"a {_kind(self._stack[-1])} is given attributes")


_INSTRUCTIONS: dict[str, Callable[[_Interpreter, Any], None]] = {
    "TUPLE": lambda run, _: run._tuple(None),
    "TUPLE1": lambda run, _: run._tuple(1),
    "TUPLE2": lambda run, _: run._tuple(2),
    "TUPLE3": lambda run, _: run._tuple(3),
    "APPEND": lambda run, _: run._append(),
    "APPENDS": lambda run, _: run._extend(run._since_mark()),
    "SETITEM": lambda run, _: run._set_item(),
    "SETITEMS": lambda run, _: run._update(run._since_mark()),
    "BINPUT": lambda run, index: run._memoize(index),
    "LONG_BINPUT": lambda run, index: run._memoize(index),
    "MEMOIZE": lambda run, _: run._memoize(None),
    "BINGET": lambda run, index: run._recall(index),
    "LONG_BINGET": lambda run, index: run._recall(index),
    # pickletools joins module and name by a space.
    "GLOBAL": lambda run, name: run._global(name.replace(" ", ".")),
    "STACK_GLOBAL": lambda run, _: run._stack_global(),
    "BINPERSID": lambda run, _: run._persistent_id(),
    "REDUCE": lambda run, _: run._reduce(),
    "BUILD": lambda run, _: run._build(),
}


def _kind(value: Any) -> str:
    return value.name if type(value) is _Global else type(value).__name__.strip("_").lower()


def _storage(persistent_id: Any) -> Storage:
    match persistent_id:
        case ("storage", _Global(dtype=dtype, call=None), str(key), str(), int(size)):
            if 0 <= size <= _MAX_INTEGER:
                return Storage(key=key, dtype=dtype, size=size)
    raise _MalformedError("a persistent id is not of the form (storage, type, key, device, size)")


def _empty_dict() -> dict:
    return {}


def _size(values: Any) -> tuple:
    return _integers(values)


def _tensor(storage, offset, size, stride, requires_grad, hooks, metadata=None) -> Tensor:
    """`torch._utils._rebuild_tensor_v2`; gradients, hooks and metadata do not matter."""
    del requires_grad, hooks, metadata
    if type(storage) is not Storage or storage.dtype is None:
        raise _MalformedError("a tensor has no storage with a dtype")
    return _view(storage, storage.dtype, offset, size, stride)


def _tensor_of_dtype(
    storage, offset, size, stride, requires_grad, hooks, dtype, metadata=None
) -> Tensor:
    """`torch._utils._rebuild_tensor_v3`: for dtypes that have no class of storage."""
    del requires_grad, hooks, metadata
    if type(storage) is not Storage or type(dtype) is not _Global or dtype.dtype is None:
        raise _MalformedError("a tensor has no storage or no dtype")
    return _view(storage, dtype.dtype, offset, size, stride)


def _view(storage: Storage, dtype: str, offset: Any, shape: Any, strides: Any) -> Tensor:
    (offset,) = _integers((offset,))
    shape, strides = _integers(shape), _integers(strides)
    if len(shape) != len(strides):
        raise _MalformedError("a tensor has shape and strides of different lengths")
    return Tensor(storage=storage, dtype=dtype, offset=offset, shape=shape, strides=strides)


def _integers(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > _MAX_DIMS:
        raise _MalformedError(f"a shape or strides are not a tuple of at most {_MAX_DIMS}")
    if not all(type(value) is int and 0 <= value <= _MAX_INTEGER for value in values):
        raise _MalformedError("an offset, a shape or strides are not integers from 0 to 2**63 - 1")
    return values


def _parameter(data, requires_grad, hooks) -> Tensor:
    """`torch._utils._rebuild_parameter`."""
    del requires_grad, hooks
    if type(data) is not Tensor:
        raise _MalformedError("a parameter is not made of a tensor")
    return data


_GLOBALS = {
    known.name: known
    for known in (
        _Global(name="collections.OrderedDict", call=_empty_dict),
        _Global(name="torch._utils._rebuild_tensor_v2", call=_tensor),
        _Global(name="torch._utils._rebuild_tensor_v3", call=_tensor_of_dtype),
        _Global(name="torch._utils._rebuild_parameter", call=_parameter),
        _Global(name="torch.Size", call=_size),
        _Global(name="torch.storage.UntypedStorage"),
        *(_Global(name=f"torch.{name}", dtype=dtype) for name, dtype in _STORAGES.items()),
        *(_Global(name=f"torch.{name}", dtype=dtype) for name, dtype in _DTYPES.items()),
    )
}
