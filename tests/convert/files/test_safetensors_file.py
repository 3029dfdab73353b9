"""safetensors files: damage is refused by name, what is written is what others read."""

import errno
import json
import os
import random
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from convert.files import safetensors_file
from convert.files.dtypes import NUMPY
from convert.files.safetensors_file import SafetensorsWriter, read_header
from jaxseek.errors import UserError

Entry = dict[str, object]


def entry(begin: int, end: int, *, dtype: str = "U8", shape: list[int] | None = None) -> Entry:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_raw(path: Path, header: object, data: bytes) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read_header(path)
    message = str(error.value)
    assert all(line.startswith(f"{path}: ") and line.endswith(".") for line in message.split("\n"))
    return message


def values(dtype: str, shape: tuple[int, ...], *, seed: int = 0) -> np.ndarray:
    """Random bits: every pattern of the dtype, NaNs included."""
    numpy_dtype = NUMPY[dtype]
    generator = np.random.default_rng(seed)
    if dtype == "BOOL":
        return generator.integers(0, 2, shape).astype(np.bool_)
    raw = generator.integers(0, 256, (*shape, numpy_dtype.itemsize), dtype=np.uint8)
    return raw.view(numpy_dtype).reshape(shape)


def write_all(path: Path, arrays: dict[str, tuple[str, np.ndarray]]) -> None:
    with SafetensorsWriter(path, {n: (d, a.shape) for n, (d, a) in arrays.items()}) as writer:
        for name, (_, array) in arrays.items():
            writer.write(name, array)


def stored(path: Path, name: str) -> bytes:
    info = read_header(path)[name]
    return path.read_bytes()[info.offset : info.offset + info.nbytes]


# What is written elsewhere


def test_the_header_says_where_the_values_stand(tmp_path: Path):
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5).astype(ml_dtypes.bfloat16),
        "scalar": np.array(7, np.int64),
        "nothing": np.zeros((0, 3), np.float16),
    }
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    tensors = read_header(path)
    assert {n: (i.dtype, i.shape, i.nbytes) for n, i in tensors.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("BF16", (5,), 10),
        "scalar": ("I64", (), 8),
        "nothing": ("F16", (0, 3), 0),
    }
    assert all(stored(path, name) == array.tobytes() for name, array in arrays.items())


def test_metadata_is_no_tensor_and_a_header_may_end_in_spaces(tmp_path: Path):
    raw = json.dumps({"__metadata__": {"format": "pt"}, "a": entry(0, 2)}).encode() + b"   "
    assert list(read_header(write_raw(tmp_path / "a", raw, b"xy"))) == ["a"]


def test_only_the_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_raw(tmp_path / "a", {"a": entry(0, 2**33)}, b"")
    header_end = path.stat().st_size
    os.truncate(path, header_end + 2**33)  # sparse: takes no room
    read = []
    pread = os.pread

    def counting(descriptor: int, size: int, offset: int) -> bytes:
        read.append((offset, size))
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", counting)
    assert read_header(path)["a"].nbytes == 2**33
    assert read == [(0, 8), (8, header_end - 8)]


# Damage


@pytest.mark.parametrize("size", [0, 5, 8])
def test_a_file_without_room_for_a_header_is_refused(tmp_path: Path, size: int):
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes(size))
    assert f"it has {size} bytes, needed are 8 for the length of the header" in refusal(path)


@pytest.mark.parametrize("claimed", [43, 2**31, 2**63 - 1, 2**64 - 1])
def test_a_header_that_claims_more_than_is_there_is_refused(tmp_path: Path, claimed: int):
    path = tmp_path / "a.safetensors"
    path.write_bytes(claimed.to_bytes(8, "little") + b"{" * 42)
    assert f"its header claims {claimed} bytes, 42 bytes are there" in refusal(path)


def test_a_header_above_the_limit_is_refused_though_it_is_all_there(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    path.write_bytes((2**31).to_bytes(8, "little"))
    os.truncate(path, 2**32)
    assert "at most 100000000 are allowed" in refusal(path)


def test_a_pointer_of_git_lfs_is_recognised(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"version https://git-lfs.example/spec/v1\noid sha256:0\nsize 4976698672\n")
    assert "git lfs pull" in refusal(path)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"", "it begins with another character than '{'"),
        (b"[]", "it begins with another character than '{'"),
        (b" {}", "it begins with another character than '{'"),
        (b'{"a": \xff}', "byte 6 is not UTF-8 text"),
        (b'{"a": 1,}', "not valid JSON, line 1, column 9"),
        (b'{"a": 1} x', "not valid JSON, line 1, column 10: Extra data"),
        (b'{"a":' * 100_000, "it is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b'{"a": {}, "a": {}}', "the key 'a' stands there 2 times"),
        (b'{"a": {"dtype": "F32", "dtype": "U8"}}', "the key 'dtype' stands there 2 times"),
    ],
)
def test_a_header_that_is_no_json_object_is_refused(tmp_path: Path, raw: bytes, complaint: str):
    message = refusal(write_raw(tmp_path / "a", raw, b"12"))
    assert "the header is damaged" in message and complaint in message


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (None, "needed are data_offsets, dtype, shape, got None"),
        ({"dtype": "U8", "shape": [4]}, "needed are data_offsets, dtype, shape, got ['dtype', "),
        (entry(0, 4) | {"strides": [1]}, "got ['data_offsets', 'dtype', 'shape', 'strides']"),
        (entry(0, 4, dtype="F8_E4M3FNUZ"), "dtype 'F8_E4M3FNUZ' is unknown; known are F64, F32"),
        (entry(0, 4) | {"dtype": ["U8"]}, "dtype ['U8'] is unknown"),
        (entry(0, 4) | {"shape": 4}, "shape must be a list of whole numbers from 0, got 4"),
        (entry(0, 4, shape=[-4]), "shape must be a list of whole numbers from 0, got [-4]"),
        (entry(0, 4) | {"shape": [4.0]}, "shape must be a list of whole numbers from 0"),
        (entry(0, 4) | {"shape": [True]}, "shape must be a list of whole numbers from 0"),
        (entry(0, 4, shape=[1] * 65), "65 dims, at most 64 are possible"),
        (entry(0, 4, shape=[2**62, 2**62]), "is beyond the 9223372036854775807 bytes of an array"),
        (entry(0, 0, shape=[0, 2**62, 2**62]), "is beyond the 9223372036854775807 bytes"),
        (entry(0, 4) | {"data_offsets": [0]}, "data_offsets must be [begin, end], got [0]"),
        (entry(0, 4) | {"data_offsets": [4, 0]}, "data_offsets must be [begin, end], got [4, 0]"),
        (entry(0, 4) | {"data_offsets": [-4, 0]}, "data_offsets must be [begin, end]"),
        (entry(0, 4) | {"data_offsets": "04"}, "data_offsets must be [begin, end], got '04'"),
        (entry(0, 4, dtype="F32", shape=[3]), "hold 4 bytes, F32 of shape [3] needs 12"),
        (entry(0, 4, shape=[]), "hold 4 bytes, U8 of shape [] needs 1"),
    ],
)
def test_an_entry_that_is_wrong_is_refused_by_the_tensors_name(
    tmp_path: Path, wrong: object, complaint: str
):
    path = write_raw(tmp_path / "a", {"wrong.weight": wrong, "right": entry(4, 6)}, bytes(6))
    message = refusal(path)
    assert message.startswith(f"{path}: tensor 'wrong.weight': ") and complaint in message
    assert len(message) < 400


def test_a_name_that_is_no_text_is_refused(tmp_path: Path):
    path = write_raw(tmp_path / "a", b'{"\\ud800": {}}', b"")
    assert refusal(path).endswith(r"tensor '\ud800': the name is no valid text.")


@pytest.mark.parametrize("metadata", [{"format": 1}, ["pt"], None])
def test_metadata_is_text_to_text(tmp_path: Path, metadata: object):
    path = write_raw(tmp_path / "a", {"__metadata__": metadata}, b"")
    assert "__metadata__ must map text to text" in refusal(path)


def test_overlaps_and_gaps_are_refused(tmp_path: Path):
    header = {"a": entry(0, 4), "b": entry(2, 6), "c": entry(9, 10)}
    path = write_raw(tmp_path / "a", header, bytes(10))
    start = path.stat().st_size - 10
    assert refusal(path).split("\n") == [
        f"{path}: tensor 'b': begins at byte {start + 2}, within tensor 'a', which ends at byte "
        f"{start + 4}.",
        f"{path}: tensor 'c': begins at byte {start + 9}; the 3 bytes from tensor 'b' to there "
        "belong to no tensor.",
    ]


def test_a_gap_behind_the_header_is_refused(tmp_path: Path):
    path = write_raw(tmp_path / "a", {"a": entry(2, 4)}, bytes(4))
    assert "the 2 bytes from the header to there belong to no tensor" in refusal(path)


def test_a_file_that_was_cut_short_is_refused_with_the_first_incomplete_tensor(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({n: np.zeros(30, np.float32) for n in "abc"}, path)
    size = path.stat().st_size
    os.truncate(path, size - 130)
    message = refusal(path)
    assert f"cut short: it has {size - 130} bytes, its header needs {size}" in message
    assert "Incomplete tensors: 2, first 'b' with 110 of 120 bytes" in message


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path):
    path = write_raw(tmp_path / "a", {"a": entry(0, 4)}, bytes(6))
    size = path.stat().st_size
    assert f"it has {size} bytes, its header needs {size - 2}, 2 are left over" in refusal(path)


def test_all_problems_of_a_file_are_told_at_once_and_sorted(tmp_path: Path):
    header = {"b": entry(0, 4, dtype="F9"), "a": entry(0, 5, dtype="F32", shape=[1])}
    lines = refusal(write_raw(tmp_path / "a", header, bytes(4))).split("\n")
    assert ["tensor 'a'" in lines[0], "tensor 'b'" in lines[1]] == [True, True]


def test_what_cannot_be_opened_is_refused(tmp_path: Path):
    assert "cannot be read (No such file or directory)" in refusal(tmp_path / "absent")
    assert "cannot be read (Is a directory)" in refusal(tmp_path)


def test_random_damage_of_the_header_is_refused_or_parsed(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    arrays = {f"layers.{i}.w": np.zeros((i, 2), np.float16) for i in range(4)}
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    intact = path.read_bytes()
    header_end = 8 + int.from_bytes(intact[:8], "little")
    generator = random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(intact)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(header_end)] ^= 1 << generator.randrange(8)
        if generator.random() < 0.2:
            del damaged[generator.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        try:
            tensors = read_header(path)
        except UserError:
            refused += 1
        else:
            assert sum(info.nbytes for info in tensors.values()) == len(intact) - header_end
    assert refused > 300


# Writing


def test_what_is_written_is_what_the_safetensors_package_reads(tmp_path: Path):
    arrays = {
        "flags": ("BOOL", values("BOOL", (3, 3))),
        "fp8": ("F8_E4M3", values("F8_E4M3", (5, 7))),
        "bf16": ("BF16", values("BF16", (3, 5))),
        "f16": ("F16", values("F16", (7,))),
        "f32": ("F32", values("F32", (2, 3, 5))),
        "ids": ("I64", values("I64", (3,))),
        "scalar": ("F32", values("F32", ())),
        "nothing": ("BF16", values("BF16", (0, 4))),
        "日本": ("U8", values("U8", (1,))),
    }
    path = tmp_path / "model.safetensors"
    write_all(path, arrays)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(arrays)
        for name, (dtype, array) in arrays.items():
            part = file.get_slice(name)
            assert (part.get_dtype(), tuple(part.get_shape())) == (dtype, array.shape)
            if dtype != "F8_E4M3":  # its numpy reader cannot
                assert file.get_tensor(name).tobytes() == array.tobytes()
    assert all(stored(path, name) == array.tobytes() for name, (_, array) in arrays.items())


def test_every_tensor_is_aligned_and_the_order_is_kept_within_a_size(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    dtypes = {"a": "U8", "b": "BF16", "c": "F64", "d": "U8", "e": "F16", "f": "F32"}
    write_all(path, {name: (dtype, values(dtype, (3,))) for name, dtype in dtypes.items()})
    tensors = read_header(path)
    assert all(info.offset % NUMPY[info.dtype].itemsize == 0 for info in tensors.values())
    assert sorted(tensors, key=lambda name: tensors[name].offset) == list("cfbead")


def test_blocks_may_come_in_any_order_from_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(safetensors_file, "_BLOCK", 64)
    arrays = {f"t{i}": values("BF16", (101, 3), seed=i) for i in range(4)}
    path = tmp_path / "model.safetensors"
    parts = [(name, start) for start in range(0, 303, 50) for name in arrays]
    random.Random(0).shuffle(parts)
    with SafetensorsWriter(path, {name: ("BF16", a.shape) for name, a in arrays.items()}) as writer:

        def write(mine: list[tuple[str, int]]) -> None:
            for name, start in mine:
                writer.write(name, arrays[name].reshape(-1)[start : start + 50], start=start)

        threads = [threading.Thread(target=write, args=(parts[i::3],)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(stored(path, name) == array.tobytes() for name, array in arrays.items())


def test_short_writes_and_short_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:5]], at))
    array = values("F32", (20,))
    write_all(tmp_path / "a", {"a": ("F32", array)})
    assert stored(tmp_path / "a", "a") == array.tobytes()


@pytest.mark.parametrize(
    ("array", "start"),
    [
        (np.zeros((3, 2), np.float32).T, 0),
        (np.zeros((2, 6), np.float32)[:, ::2], 0),
        (np.zeros((2, 3), np.float64), 0),
        (np.zeros((2, 3), ">f4"), 0),
        (np.zeros(3, np.float32), 4),
        (np.zeros(3, np.float32), -1),
    ],
)
def test_arrays_that_do_not_fit_are_a_programmers_mistake(
    tmp_path: Path, array: np.ndarray, start: int
):
    with (
        pytest.raises(AssertionError),
        SafetensorsWriter(tmp_path / "a", {"a": ("F32", (2, 3))}) as w,
    ):
        w.write("a", array, start=start)


@pytest.mark.parametrize("spans", [[], [(0, 3)], [(0, 3), (4, 2)], [(0, 4), (3, 3)], [(0, 6)] * 2])
def test_a_file_is_closed_only_when_every_value_was_written_once(
    tmp_path: Path, spans: list[tuple[int, int]]
):
    writer = SafetensorsWriter(tmp_path / "a", {"a": ("U8", (6,))})
    for start, size in spans:
        writer.write("a", np.zeros(size, np.uint8), start=start)
    with pytest.raises(AssertionError, match="written"):
        writer.close()


def test_bytes_that_change_on_the_disk_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.safetensors"
    writer = SafetensorsWriter(path, {"a.weight": ("F32", (5,))})
    preadv = os.preadv

    def flipped(descriptor: int, into: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, into, offset)
        into[0][3] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", flipped)
    with pytest.raises(UserError, match=r"a\.safetensors: tensor 'a\.weight': among the 20 bytes"):
        writer.write("a.weight", np.ones(5, np.float32))
    os.close(writer._descriptor)


def test_a_file_that_lost_its_end_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(safetensors_file, "_BLOCK", 16)
    array = np.ones(4, np.float32)
    with SafetensorsWriter(tmp_path / "a", {"a": ("F32", (4,))}) as writer:
        writer.write("a", array)  # the buffer that reads back holds the right bytes now
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(UserError, match="holds others than were written"):
            writer._write_block(
                memoryview(array.view(np.uint8)), offset=writer._tensors["a"].offset, what="a"
            )


def test_a_header_that_changes_before_the_file_is_closed_is_noticed(tmp_path: Path):
    path = tmp_path / "a"
    writer = SafetensorsWriter(path, {"a": ("U8", (2,)), "b": ("U8", (2,))})
    for name in "ab":
        writer.write(name, np.zeros(2, np.uint8))
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"c"'))
    with pytest.raises(UserError, match="the header is not the one that was written"):
        writer.close()


def test_a_full_disk_is_told_with_the_file_and_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.safetensors"
    writer = SafetensorsWriter(path, {"a.weight": ("F32", (1000,))})
    header = path.stat().st_size
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError) as error:
        writer.write("a.weight", np.zeros(1000, np.float32))
    os.close(writer._descriptor)
    assert str(error.value).startswith(
        f"{path}: tensor 'a.weight' cannot be written (No space left on device). "
        f"The whole file needs {header + 4000} bytes"
    )
    with pytest.raises(UserError, match="b: the header cannot be written"):
        SafetensorsWriter(tmp_path / "b", {})


def test_nothing_is_overwritten_and_a_missing_folder_is_told(tmp_path: Path):
    (tmp_path / "a").write_text("precious")
    with pytest.raises(UserError, match=r"a: the header cannot be written \(File exists\)"):
        SafetensorsWriter(tmp_path / "a", {})
    with pytest.raises(UserError, match="No such file or directory"):
        SafetensorsWriter(tmp_path / "absent" / "a", {})
    assert (tmp_path / "a").read_text() == "precious"


def test_a_file_without_tensors_is_valid(tmp_path: Path):
    write_all(tmp_path / "a", {})
    assert read_header(tmp_path / "a") == {}
    assert safetensors.numpy.load_file(tmp_path / "a") == {}
