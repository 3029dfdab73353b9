"""The reader of torch.save's files against files written by hand: their layout, damage, attacks.

tests/parity/test_torch_file.py reads what torch writes.
"""

import contextlib
import pickle
import random
import struct
import tracemalloc
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from convert.files.dtypes import NUMPY
from convert.files.tensor_info import TensorInfo
from convert.files.torch_file import read_torch_file
from jaxseek.errors import UserError
from tests.convert.files.torch_archives import (
    ORDERED_DICT,
    Attributes,
    Call,
    Name,
    Raw,
    Stored,
    pickled,
    storage,
    tensor,
    write_archive,
)

SIX = np.arange(6, dtype=np.float32).tobytes()
ONE_TENSOR = tensor(storage("0", 6), (2, 3), (3, 1))


def values(info: TensorInfo) -> np.ndarray:
    dtype = NUMPY[info.dtype]
    strides = info.strides and [step * dtype.itemsize for step in info.strides]
    return np.ndarray(info.shape, dtype, info.file.read_bytes(), info.offset, strides)


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read_torch_file(path)
    assert str(path) in str(error.value)
    return str(error.value)


def refusal_of(tmp_path: Path, state, **storages: bytes) -> str:
    data = {key.removeprefix("_"): data for key, data in storages.items()} or {"0": SIX}
    return refusal(write_archive(tmp_path / "a.bin", state, data))


# What is read


@pytest.mark.parametrize("root", [dict, lambda state: Attributes(ORDERED_DICT, state)])
def test_tensors_lie_where_the_file_says(tmp_path, root):
    ordered = Name("collections", "OrderedDict")
    path = write_archive(
        tmp_path / "a.bin",
        {
            "whole": ONE_TENSOR,
            "transposed": tensor(storage("0", 6), (3, 2), (1, 3)),
            "row": tensor(storage("0", 6), (3,), (1,), offset=3),
            "column": tensor(storage("0", 6), (2, 1), (3, 1), offset=2),
            "expanded": tensor(storage("0", 6), (2, 2), (0, 1), offset=4),
            "scalar": tensor(storage("1", 1, kind="LongStorage"), (), ()),
            "empty": tensor(storage("2", 0, kind="HalfStorage"), (0, 7), (7, 1)),
            "half": tensor(storage("3", 2, kind="BFloat16Storage"), (2,), (1,)),
            "parameter": Call(
                Name("torch._utils", "_rebuild_parameter"), (ONE_TENSOR, True, Call(ordered, ()))
            ),
        },
        {
            "0": SIX,
            "1": np.int64(-9).tobytes(),
            "2": b"",
            "3": np.array([1.5, -2], ml_dtypes.bfloat16).tobytes(),
        },
    )
    infos = read_torch_file(path)
    six = np.frombuffer(SIX, np.float32).reshape(2, 3)
    expected = {
        "whole": six,
        "transposed": six.T,
        "row": six[1],
        "column": six[:, 2:],
        "expanded": np.stack([six[1, 1:], six[1, 1:]]),
        "scalar": np.int64(-9),
        "empty": np.empty((0, 7), np.float16),
        "half": np.array([1.5, -2], ml_dtypes.bfloat16),
        "parameter": six,
    }
    assert list(infos) == list(expected)
    for name, value in expected.items():
        assert infos[name].name == name
        np.testing.assert_array_equal(values(infos[name]), value, err_msg=name)
    # Only a tensor that is not in C order has strides, with 0 for a dim of one value.
    strided = {name: info.strides for name, info in infos.items() if info.strides is not None}
    assert strided == {"transposed": (1, 3), "column": (3, 0), "expanded": (0, 1)}


def test_a_state_dict_may_have_attributes(tmp_path):
    metadata = Attributes({"a": ONE_TENSOR}, {"_metadata": {"": {"version": 1}}})
    path = write_archive(tmp_path / "a.bin", metadata, {"0": SIX})
    assert list(read_torch_file(path)) == ["a"]


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_a_state_dict_may_lie_beside_other_things(tmp_path, key):
    state = {key: {"a": ONE_TENSOR}, "step": 7, "optimizer": {"state": {0: [ONE_TENSOR]}}}
    path = write_archive(tmp_path / "a.bin", state, {"0": SIX})
    assert list(read_torch_file(path)) == ["a"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_later_protocols_are_read(tmp_path, protocol):
    # Frames, memo and names from the stack, as pickle itself writes them; no tensors.
    path = write_archive(tmp_path / "a.bin", pickle.dumps({"model": {}}, protocol), {})
    assert read_torch_file(path) == {}


# Other content


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([ONE_TENSOR], "holds a list. A state dict of tensors is needed"),
        (ONE_TENSOR, "holds a tensor. A state dict"),
        ({"a": ONE_TENSOR, "version": 3}, "holds a int as 'version', where tensors belong"),
        ({"a": {"b": ONE_TENSOR}}, "holds a dict as 'a', where tensors belong"),
        ({"model": {"a": ONE_TENSOR, "b": None}}, "holds a nonetype as 'b'"),
        ({5: ONE_TENSOR}, "holds a tensor as 5"),
        ({"model": {}, "state_dict": {}}, "both state_dict and model"),
        ({"model": {}, "a": ONE_TENSOR}, r"in model and beside it \(a\)"),
    ],
)
def test_anything_but_a_state_dict_is_refused(tmp_path, state, message):
    with pytest.raises(UserError, match=message):
        read_torch_file(write_archive(tmp_path / "a.bin", state, {"0": SIX}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (tensor(storage("0", 6), (7,), (1,)), "reaches to byte 28 .* data/0, which has 24"),
        (tensor(storage("0", 6), (2, 3), (4, 1)), "reaches to byte 28"),
        (tensor(storage("0", 6), (2, 3), (3, 1), offset=1), "reaches to byte 28"),
        (tensor(storage("0", 6), (0,), (1,), offset=7), "reaches to byte 28"),
        (tensor(storage("0", 7), (2, 3), (3, 1)), "data/0 has 24 bytes; tensor a says it has 28"),
        (tensor(storage("0", 10**12), (10**12,), (1,)), "says it has 4000000000000"),
        (tensor(storage("0", 6), (2**62, 2), (0, 0)), "of 9223372036854775808 values"),
        (tensor(storage("9", 6), (6,), (1,)), "has no entry archive/data/9, where tensor a lies"),
        (tensor(storage("0", -6), (6,), (1,)), "persistent id is not of the form"),
        (tensor(storage("0", 6), (6,), (-1,)), "are not integers from 0"),
        (tensor(storage("0", 6), (-6,), (1,)), "are not integers from 0"),
        (tensor(storage("0", 6), (2**63,), (0,)), "are not integers from 0"),
        (tensor(storage("0", 6), (6,), (1,), offset=-1), "are not integers from 0"),
        (tensor(storage("0", 6), (True,), (1,)), "are not integers from 0"),
        (tensor(storage("0", 6), (1,) * 65, (1,) * 65), "a tuple of at most 64"),
        (tensor(storage("0", 6), (2, 3), (1,)), "different lengths"),
        (tensor(storage("0", 6), [2, 3], [3, 1]), "a tuple of at most 64"),
        (tensor("0", (6,), (1,)), "no storage with a dtype"),
        (tensor(storage("0", 6, kind="float32x"), (6,), (1,)), "asks to run torch.float32x"),
        (tensor(storage("0", 6, kind="Size"), (6,), (1,)), "persistent id is not of the form"),
        (tensor(Stored("0"), (6,), (1,)), "persistent id is not of the form"),
        (tensor(Stored(("module", "os", "x", "cpu", 6)), (6,), (1,)), "not of the form"),
    ],
)
def test_tensors_that_do_not_fit_their_storage_are_refused(tmp_path, wrong, message):
    with pytest.raises(UserError, match=message):
        read_torch_file(write_archive(tmp_path / "a.bin", {"a": wrong}, {"0": SIX}))


# Attacks: nothing may be run


def attacks(canary: Path) -> dict[str, bytes]:
    """Pickles that reach for code; many of them make the file `canary` where Python reads them."""
    command = f"touch {canary}"
    system, exec_ = Name("posix", "system"), Name("builtins", "exec")
    code = f"open({str(canary)!r}, 'w').close()"
    getattr_ = Name("builtins", "getattr")
    return {
        "os.system": pickled(Call(Name("os", "system"), (command,))),
        "posix.system": pickled(Call(system, (command,))),
        "exec": pickled({"a": Call(exec_, (code,))}),
        "eval by stack": b"\x80\x04" + pickled("builtins")[2:-1] + pickled("eval")[2:-1] + b"\x93.",
        "subprocess": pickled(Call(Name("subprocess", "Popen"), (("touch", str(canary)),))),
        "nested in a tensor": pickled({"a": tensor(Call(system, (command,)), (6,), (1,))}),
        "in a key": pickled(
            {"model": Raw(b"}(" + pickled(Call(system, (command,)))[2:-1] + b"Nu")}
        ),
        "in a persistent id": pickled(Stored(("storage", Call(system, (command,)), "0", "cpu", 6))),
        "in attributes": pickled(Attributes(ORDERED_DICT, {"x": Call(system, (command,))})),
        "torch's own": pickled(Call(Name("torch.storage", "_load_from_bytes"), (b"".hex(),))),
        "attribute of a known name": pickled(Name("torch.Size", "__init__.__globals__")),
        "dotted": pickled(Name("collections", "OrderedDict.__reduce__")),
        "getattr": pickled(Call(getattr_, (Name("collections", "OrderedDict"), "clear"))),
        "instance": pickled(Raw(b"(" + pickled(command)[2:-1] + b"iposix\nsystem\n")),
        "object": pickled(Raw(b"(cposix\nsystem\n" + pickled(command)[2:-1] + b"o")),
        "new": pickled(Raw(b"ccollections\nOrderedDict\n)\x81")),
        "extension": pickled(Raw(b"\x82\x01")),
        "extension of 4 bytes": pickled(Raw(b"\x84\x01\x00\x00\x00")),
        "persistent id as text": pickled(Raw(b"Pos.system\n")),
    }


@pytest.mark.parametrize("name", attacks(Path("x")))
def test_a_pickle_that_asks_for_more_is_not_run(tmp_path, name):
    canary = tmp_path / "canary"
    path = write_archive(tmp_path / "a.bin", attacks(canary)[name], {"0": SIX})
    message = refusal(path)
    assert "nothing was executed" in message
    assert not canary.exists()


def test_the_attacks_are_real(tmp_path):
    for name in ("os.system", "exec", "instance"):
        canary = tmp_path / name
        pickle.loads(attacks(canary)[name])
        assert canary.exists(), name


def test_the_message_names_what_was_asked_for(tmp_path):
    message = refusal_of(tmp_path, Call(Name("os", "system"), ("true",)))
    assert message == (
        f"{tmp_path}/a.bin: data.pkl asks to run os.system, which no state dict needs; nothing was "
        "executed. If you trust it, load it with torch and save its state dict alone, as "
        "safetensors; otherwise delete it."
    )
    assert "\x1b" not in refusal_of(tmp_path, Name("os", "\x1b[2J" + "x" * 10_000))


@pytest.mark.parametrize(
    "state",
    [
        Call(Name("collections", "OrderedDict"), ([("a", 1)],)),
        Call(Name("torch", "Size"), ()),
        Call(Name("torch", "Size"), ("ab",)),
        Call(Name("torch", "FloatStorage"), (10**12,)),
        Call(Name("torch.storage", "UntypedStorage"), (10**12,)),
        Call(Name("torch._utils", "_rebuild_parameter"), ({}, False, ORDERED_DICT)),
        Call(Name("torch._utils", "_rebuild_tensor_v2"), (storage("0", 6),)),
        Call(
            Name("torch._utils", "_rebuild_tensor_v3"),
            (storage("0", 6), 0, (6,), (1,), False, None, Name("torch", "Size")),
        ),
        Call("OrderedDict", ()),
        Call(Name("collections", "OrderedDict"), []),
        Attributes(Name("collections", "OrderedDict"), {"__reduce__": 1}),
        Attributes(storage("0", 6), {"key": "1"}),
        Attributes(ONE_TENSOR, {"offset": 100}),
        Raw(b"}](NNe" + b"s"),
        Raw(b"}()Nu"),
        Raw(b"}(NNu"),
        Raw(b"}(NNNu"),
        Raw(b"}NNa"),
        Raw(b"u"),
        Raw(b"t"),
        Raw(b"Nt"),
        Raw(b"0"),
        Raw(b"h\x05"),
        Raw(b"q\x00"),
        Raw(b"R"),
        Raw(b"NN"),
        Raw(b""),
        Raw(b"(("),
        Raw(b"\xff"),
        Raw(b"X\xff\xff\xff\xffab"),
        Raw(b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fab"),
        Raw(b"\x96\xff\xff\xff\xff\xff\xff\x00\x00ab"),
        Raw(b"X\x01\x00\x00\x00\xff"),
        b"",
        b"\x80",
        b"\x80\x02}",
        b"no pickle",
    ],
)
def test_malformed_pickles_are_refused(tmp_path, state):
    path = write_archive(tmp_path / "a.bin", state, {"0": SIX})
    message = refusal(path)
    assert "a.bin: data.pkl" in message or "holds a" in message


@pytest.mark.parametrize(
    "code",
    [
        # In Python's unpickler this index alone makes a memo of 8 GB.
        b"\x80\x02}r\xff\xff\xff\x3f.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
        b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
        b"\x80\x02}(X\x01\x00\x00\x00a" + b")" + b"\x85" * 100_000 + b"u.",
        b"\x80\x02}" + b"\x85" * 100_000 + b".",
        b"\x80\x02}q\x00(X\x05\x00\x00\x00modelh\x00u.",
        b"\x80\x02}q\x00(X\x01\x00\x00\x00ah\x00u.",
        b"\x80\x02}q\x00(h\x00Nu.",
        # A shape of integers with 2000 bits.
        b"\x80\x02ctorch\nSize\n((\x8a\xff" + b"\x7f" * 255 + b"q\x00" + b"h\x00" * 100_000 + b"tt"
        b"R.",
    ],
)
def test_depth_cycles_and_big_numbers_cost_little(tmp_path, code):
    path = write_archive(tmp_path / "a.bin", code, {})
    tracemalloc.start()
    with contextlib.suppress(UserError):
        read_torch_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


# Other files


def test_damaged_or_foreign_files_are_told_apart(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    whole = write_archive(path, {"a": ONE_TENSOR}, {"0": SIX}).read_bytes()

    def message(data: bytes) -> str:
        path.write_bytes(data)
        return refusal(path)

    for cut in (1, 22, 100, len(whole) - 40):
        assert f"({len(whole) - cut} bytes)" in message(whole[:-cut])
        assert "cut short: download it again" in message(whole[:-cut])
    assert "is no file of torch.save" in message(b"")
    assert "(20 bytes)" in message(b"x" * 20)
    assert "pointer of git-lfs" in message(b"version https://git-lfs.github.com/spec/v1\noid ...")
    assert "a bare pickle, as older ones write" in message(
        b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
    )
    path.unlink()
    assert "cannot be read: No such file" in refusal(path)
    assert "cannot be read: Is a directory" in refusal(tmp_path)


def test_every_cut_is_refused(tmp_path):
    whole = write_archive(tmp_path / "a.bin", {"a": ONE_TENSOR}, {"0": SIX}).read_bytes()
    path = tmp_path / "cut.bin"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        refusal(path)


def test_flipped_bits_are_refused_or_change_values_only(tmp_path):
    whole = write_archive(tmp_path / "a.bin", {"a": ONE_TENSOR}, {"0": SIX}).read_bytes()
    path = tmp_path / "flipped.bin"
    generator = random.Random(0)
    refused = 0
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 3)):
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            for info in read_torch_file(path).values():
                values(info)
        except UserError:
            refused += 1
    assert refused > 300


def test_flipped_bits_of_a_pickle_never_escape(tmp_path):
    path = tmp_path / "a.bin"
    whole = pickled({"a": ONE_TENSOR, "b": tensor(storage("0", 6), (3, 2), (1, 3))})
    generator = random.Random(1)
    refused = 0
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 3)):
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        try:
            for info in read_torch_file(write_archive(path, bytes(damaged), {"0": SIX})).values():
                values(info)
        except UserError:
            refused += 1
    assert refused > 300


def test_other_archives_are_refused(tmp_path):
    path = tmp_path / "a.bin"

    def message(**entries) -> str:
        return refusal(write_archive(path, {"a": ONE_TENSOR}, {"0": SIX}, **entries))

    assert "TorchScript program" in message(**{"constants.pkl": b""})
    assert "TorchScript program" in message(**{"code/__torch__.py": b""})
    assert "byte order big; only little" in message(byteorder=b"big")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", b"")
    assert "holds no data.pkl" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"")
        archive.writestr("b/data.pkl", b"")
    assert "holds no data.pkl" in refusal(path)


def test_compressed_and_encrypted_entries_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    state = pickled({"a": ONE_TENSOR})
    for compressed in ("archive/data.pkl", "archive/data/0"):
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in (("archive/data.pkl", state), ("archive/data/0", SIX)):
                method = zipfile.ZIP_DEFLATED if name == compressed else zipfile.ZIP_STORED
                archive.writestr(name, data, compress_type=method)
        assert f"{compressed} is compressed" in refusal(path)
    data = bytearray(write_archive(path, state, {"0": SIX}).read_bytes())
    data[data.rindex(b"archive/data/0") - 46 + 8] |= 1  # the flags in the directory
    path.write_bytes(data)
    assert "archive/data/0 is encrypted" in refusal(path)


def test_two_entries_of_one_name_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    write_archive(path, {"a": ONE_TENSOR}, {"0": SIX, "1": SIX})
    path.write_bytes(path.read_bytes().replace(b"archive/data/1", b"archive/data/0"))
    assert "two zip entries of one name" in refusal(path)


def test_lengths_are_not_believed_before_something_is_read(tmp_path):
    path = tmp_path / "a.bin"
    write_archive(path, {"a": ONE_TENSOR}, {"0": SIX})
    whole = path.read_bytes()
    end = whole.rindex(b"PK\x05\x06")
    with path.open("r+b") as file:  # a sparse file of 3 GB, all of it said to be the directory
        file.seek(3 << 30)
        directory = struct.pack("<II", (3 << 30) - 100, 100)
        file.write(whole[end : end + 12] + directory + whole[end + 20 :])
    tracemalloc.start()
    assert "a directory of 3221225372 bytes" in refusal(path)
    large = write_archive(tmp_path / "b.bin", b"(" * ((16 << 20) + 1), {})
    tracemalloc.reset_peak()
    assert "data.pkl has 16777217 bytes, more than" in refusal(large)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
