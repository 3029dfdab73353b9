"""Hugging Face folders: which files count, what is refused, and memory-mapped reads."""

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from convert.files import weight_files
from convert.files.dtypes import NUMPY
from convert.files.hf_folder import HFFolder, open_hf_folder
from convert.files.safetensors_file import SafetensorsWriter
from convert.files.tensor_info import TensorInfo
from jaxseek.errors import UserError

INDEX = "model.safetensors.index.json"


def save(folder: Path, name: str, **tensors: np.ndarray) -> None:
    safetensors.numpy.save_file(tensors, folder / name)


def write_index(folder: Path, weight_map: object, *, name: str = INDEX, **metadata: Any) -> None:
    (folder / name).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        open_hf_folder(folder)
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config and no weights yet."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


ONE = np.ones(3, np.float32)
TWO = np.full((2, 2), 2, np.float16)


# The folder and its config


def test_a_folder_with_one_file_opens(folder: Path):
    save(folder, "model.safetensors", a=ONE, b=TWO)
    with open_hf_folder(folder) as opened:
        assert opened.config == {"model_type": "llama"}
        assert opened.files == [folder / "model.safetensors"]
        assert opened.notes == []
        assert {name: info.shape for name, info in opened.tensors.items()} == {
            "a": (3,),
            "b": (2, 2),
        }
        np.testing.assert_array_equal(opened.view("b"), TWO)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    assert "file is a file; needed is the folder of a model" in refusal(tmp_path / "file")
    assert "absent does not exist; needed is the folder" in refusal(tmp_path / "absent")


def test_the_home_folder_may_be_written_as_a_tilde(folder: Path, monkeypatch: pytest.MonkeyPatch):
    save(folder, "model.safetensors", a=ONE)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert open_hf_folder(Path("~/model")).path == folder


def test_a_folder_without_config_is_told_for_what_it_is(tmp_path: Path):
    kinds = {"checkpoint": tmp_path / "100", "run": tmp_path / "run", "cache": tmp_path / "cache"}
    (kinds["checkpoint"]).mkdir()
    (kinds["checkpoint"] / "jaxseek.json").touch()
    (kinds["run"] / "checkpoints").mkdir(parents=True)
    (kinds["cache"] / "snapshots" / "abc").mkdir(parents=True)
    (kinds["cache"] / "snapshots" / "abc" / "config.json").touch()
    assert "is a checkpoint of jaxseek" in refusal(kinds["checkpoint"])
    assert "is a run of jaxseek" in refusal(kinds["run"])
    assert f"the model is in {kinds['cache'] / 'snapshots' / 'abc'}" in refusal(kinds["cache"])
    assert "has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not valid JSON, line 1, column 1"),
        (b'{"model_type": "llama"', "not valid JSON, line 1"),
        (b'{"a": 1, "a": 2}', "the key 'a' stands there 2 times"),
        (b'{"rope": {"b": 1, "b": 1}}', "the key 'b' stands there 2 times"),
        (b'["llama"]', 'needed is a JSON object, got ["llama"]'),
        (b'{"a": "\xe9"}', "byte 7 is not UTF-8 text"),
    ],
)
def test_a_config_that_is_no_unambiguous_object_is_refused(
    folder: Path, content: bytes, complaint: str
):
    save(folder, "model.safetensors", a=ONE)
    (folder / "config.json").write_bytes(content)
    assert refusal(folder).startswith(f"{folder / 'config.json'}: {complaint}")


# Which files hold the weights


def test_a_complete_set_needs_no_index(folder: Path):
    save(folder, "model-00002-of-00002.safetensors", b=TWO)
    save(folder, "model-00001-of-00002.safetensors", a=ONE)
    opened = open_hf_folder(folder)
    assert sorted(opened.tensors) == ["a", "b"]
    assert [file.name[6:11] for file in opened.files] == ["00001", "00002"]


def test_an_incomplete_set_is_refused_with_all_that_is_missing(folder: Path):
    save(folder, "model-00002-of-00003.safetensors", a=ONE)
    assert "of the 3 files model-*-of-00003 these are missing: 1, 3." in refusal(folder)


def test_a_set_with_a_file_too_many_is_refused(folder: Path):
    for number in range(3):
        save(folder, f"model-0000{number}-of-00002.safetensors", **{f"t{number}": ONE})
    assert "more than 2 files model-*-of-00002" in refusal(folder)


@pytest.mark.parametrize(
    "others",
    [
        ["consolidated.safetensors"],
        ["other-00001-of-00002.safetensors", "other-00002-of-00002.safetensors"],
    ],
)
def test_several_files_without_an_index_are_refused_with_the_list(folder: Path, others: list[str]):
    names = [*others, "model-00001-of-00001.safetensors"]
    for name in names:
        save(folder, name, a=ONE)
    message = refusal(folder)
    assert "no index that says which belong to the model" in message
    assert all(name in message for name in names)


def test_the_index_decides_and_strangers_are_noted(folder: Path):
    save(folder, "x.safetensors", a=ONE, unused=ONE)
    save(folder, "y.safetensors", b=TWO, a=TWO)
    (folder / "consolidated.safetensors").write_bytes(b"broken")
    (folder / "pytorch_model.bin").write_bytes(b"broken")
    write_index(folder, {"a": "x.safetensors", "b": "y.safetensors"}, total_size=20)
    opened = open_hf_folder(folder)
    assert {name: info.file.name[0] for name, info in opened.tensors.items()} == {
        "a": "x",
        "b": "y",
    }
    assert opened.notes == [
        f"Not read, for {INDEX} does not name them: consolidated.safetensors.",
        f"Ignored, for {INDEX} does not map them to the files they are in: unused, a.",
        "Not read, for the safetensors files: pytorch_model.bin.",
    ]


def test_a_wrong_total_size_is_only_noted(folder: Path):
    save(folder, "x.safetensors", a=ONE)
    write_index(folder, {"a": "x.safetensors"}, total_size=13)
    assert open_hf_folder(folder).notes == [
        f"{INDEX} gives total_size 13; its tensors have 12 bytes."
    ]


@pytest.mark.parametrize("metadata", [{}, None, []])
def test_an_index_needs_no_total_size(folder: Path, metadata: object):
    save(folder, "x.safetensors", a=ONE)
    index = {"metadata": metadata, "weight_map": {"a": "x.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    assert open_hf_folder(folder).notes == []


def test_every_missing_file_is_listed(folder: Path):
    save(folder, "x.safetensors", a=ONE)
    (folder / "dangling.safetensors").symlink_to(folder / "nowhere")
    names = {"a": "x", "b": "gone", "c": "gone", "d": "dangling"}
    write_index(folder, {tensor: f"{name}.safetensors" for tensor, name in names.items()})
    assert refusal(folder).split("\n") == [
        f"{folder} cannot be converted; problems: 2",
        f"{folder / 'dangling.safetensors'}: is missing; by {INDEX} it holds 1 tensors. Copy or "
        "download it too.",
        f"{folder / 'gone.safetensors'}: is missing; by {INDEX} it holds 2 tensors. Copy or "
        "download it too.",
    ]


def test_a_tensor_that_its_file_lacks_is_refused(folder: Path):
    save(folder, "x.safetensors", a=ONE)
    save(folder, "y.safetensors", b=ONE)
    write_index(folder, {"a": "y.safetensors", "b": "y.safetensors"})
    assert refusal(folder) == (
        f"{folder / 'y.safetensors'}: lacks tensor 'a', which {INDEX} says is there."
    )


def test_a_tensor_in_two_files_without_index_is_refused(folder: Path):
    save(folder, "model-00001-of-00002.safetensors", a=ONE, b=ONE)
    save(folder, "model-00002-of-00002.safetensors", a=ONE)
    assert "model-00002-of-00002.safetensors: tensor 'a' is in model-00001-of-00002" in refusal(
        folder
    )


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[]", "needed is a weight_map"),
        ("{}", "needed is a weight_map"),
        ('{"weight_map": {}}', "needed is a weight_map"),
        ('{"weight_map": ["a"]}', "needed is a weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "the key 'a' stands"),
        ('{"weight_map": {"a": 1}}', "tensor 'a': needed is the name of a file beside it, got 1"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "got '../x.safetensors'"),
        ('{"weight_map": {"a": "/etc/x.safetensors"}}', "got '/etc/x.safetensors'"),
        ('{"weight_map": {"a": "sub\\\\x.safetensors"}}', "got 'sub"),
        ('{"weight_map": {"a": ".."}}', "got '..'"),
        ('{"weight_map": {"a": ""}}', "got ''"),
    ],
)
def test_a_damaged_index_is_refused(folder: Path, content: str, complaint: str):
    save(folder, "x.safetensors", a=ONE)
    (folder / INDEX).write_text(content)
    message = refusal(folder)
    assert message.startswith(f"{folder / INDEX}: ") and complaint in message


def test_a_folder_without_weights_is_refused_with_what_is_there_instead(folder: Path):
    (folder / "model.gguf").touch()
    (folder / "training_args.bin").touch()
    assert "no weights: needed is model.safetensors" in refusal(folder)
    assert "Of no use are model.gguf, training_args.bin." in refusal(folder)


def test_weights_without_any_tensor_are_refused(folder: Path):
    save(folder, "model.safetensors")
    assert "no tensor is in model.safetensors" in refusal(folder)


def test_hidden_files_do_not_count(folder: Path):
    save(folder, "model.safetensors", a=ONE)
    (folder / "._model.safetensors").write_bytes(b"left by macOS")
    assert list(open_hf_folder(folder).tensors) == ["a"]


def test_symlinked_files_are_followed(folder: Path, tmp_path: Path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    save(blobs, "abc", a=ONE)
    (folder / "config.json").rename(blobs / "def")
    (folder / "model.safetensors").symlink_to(os.path.relpath(blobs / "abc", folder))
    (folder / "config.json").symlink_to(os.path.relpath(blobs / "def", folder))
    opened = open_hf_folder(folder)
    np.testing.assert_array_equal(opened.view("a"), ONE)
    assert opened.config == {"model_type": "llama"}


def test_all_problems_of_all_files_are_told_at_once_and_sorted(folder: Path):
    (folder / "config.json").write_text("{")
    for name in "xyz":
        save(folder, f"{name}.safetensors", **{name: ONE})
    os.truncate(folder / "y.safetensors", 0)
    os.truncate(folder / "x.safetensors", (folder / "x.safetensors").stat().st_size - 1)
    write_index(folder, {name: f"{name}.safetensors" for name in ["x", "y", "z", "missing"]})
    lines = refusal(folder).split("\n")
    assert lines[0] == f"{folder} cannot be converted; problems: 4"
    assert [Path(line.split(": ")[0]).name for line in lines[1:]] == [
        "config.json",
        "missing.safetensors",
        "x.safetensors",
        "y.safetensors",
    ]


def test_of_very_many_problems_a_hundred_are_shown(folder: Path):
    save(folder, "x.safetensors", a=ONE)
    write_index(folder, {f"t{i}": "x.safetensors" for i in range(1000)})
    lines = refusal(folder).split("\n")
    assert len(lines) == 102
    assert lines[0].endswith("problems: 1000") and lines[-1] == "... and 900 more"


def test_random_damage_of_the_index_is_refused_or_read(folder: Path):
    save(folder, "x.safetensors", a=ONE, b=ONE)
    write_index(folder, {"a": "x.safetensors", "b": "x.safetensors"}, total_size=24)
    intact = (folder / INDEX).read_bytes()
    generator = random.Random(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(intact)
        for _ in range(generator.randint(1, 3)):
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        (folder / INDEX).write_bytes(damaged)
        try:
            assert open_hf_folder(folder).tensors.keys() <= {"a", "b"}
        except UserError:
            refused += 1
    assert refused > 150


# PyTorch's files, whose reader has its own tests


@pytest.fixture
def torch_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of PyTorch are told apart by name only; here their content is that of safetensors."""
    read = weight_files.read_header
    container = weight_files._TORCH
    monkeypatch.setattr(
        weight_files,
        "_TORCH",
        weight_files._Container(pattern=container.pattern, index=container.index, read=read),
    )


def test_pytorch_files_count_where_no_safetensors_are(folder: Path, torch_reader: None):
    save(folder, "pytorch_model.bin", a=ONE)
    (folder / "optimizer.bin").touch()
    opened = open_hf_folder(folder)
    assert (opened.files, opened.notes) == ([folder / "pytorch_model.bin"], [])
    save(folder, "model.safetensors", a=TWO)
    opened = open_hf_folder(folder)
    assert opened.files == [folder / "model.safetensors"]
    assert opened.notes == ["Not read, for the safetensors files: pytorch_model.bin."]


def test_pytorch_files_have_an_index_of_their_own(folder: Path, torch_reader: None):
    for i in (1, 2):
        save(folder, f"pytorch_model-0000{i}-of-00002.bin", **{f"t{i}": ONE})
    assert sorted(open_hf_folder(folder).tensors) == ["t1", "t2"]
    weight_map = {"t1": "pytorch_model-00001-of-00002.bin"}
    write_index(folder, weight_map, name="pytorch_model.bin.index.json")
    assert list(open_hf_folder(folder).tensors) == ["t1"]


# Reading


def made(folder: Path, *infos: TensorInfo) -> HFFolder:
    return HFFolder(
        path=folder,
        config={},
        tensors={info.name: info for info in infos},
        files=sorted({info.file for info in infos}),
        notes=[],
    )


def test_views_have_the_files_bits_whatever_dtype_and_alignment(folder: Path):
    generator = np.random.default_rng(0)
    header, data = {}, b""
    for dtype, numpy_dtype in NUMPY.items():
        for shape in [(), (3,), (2, 3), (0, 3)]:
            size = int(np.prod(shape)) * numpy_dtype.itemsize
            name = f"{dtype}{shape}"
            header[name] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [len(data), len(data) + size],
            }
            data += generator.integers(0, 2, size, dtype=np.uint8).tobytes()
    raw = json.dumps(header).encode()
    raw += b" " * (1 - len(raw) % 2)  # odd: nothing wider than a byte is aligned by chance
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    opened = open_hf_folder(folder)
    for name, entry in header.items():
        view = opened.view(name)
        begin, end = entry["data_offsets"]
        assert (view.dtype, view.shape) == (NUMPY[entry["dtype"]], entry["shape"])
        assert view.tobytes() == data[begin:end]
        assert not view.flags.writeable


def test_strides_of_pytorch_tensors_are_honoured(folder: Path):
    file = folder / "pytorch_model.bin"
    values = np.arange(24).astype(ml_dtypes.bfloat16)
    file.write_bytes(b"x" * 7 + values.tobytes())
    matrix = values.reshape(4, 6)

    def info(name: str, shape: tuple[int, ...], start: int, strides: tuple[int, ...]) -> TensorInfo:
        return TensorInfo(
            name=name, dtype="BF16", shape=shape, file=file, offset=7 + 2 * start, strides=strides
        )

    opened = made(
        folder,
        info("transposed", (6, 4), 0, (1, 6)),
        info("sliced", (2, 3), 7, (12, 2)),
        info("expanded", (3, 6), 18, (0, 1)),
        info("empty", (0, 6), 24, (6, 1)),
        info("beyond", (2, 2), 18, (6, 1)),
    )
    np.testing.assert_array_equal(opened.view("transposed"), matrix.T)
    np.testing.assert_array_equal(opened.view("sliced"), matrix[1::2, 1:6:2])
    np.testing.assert_array_equal(opened.view("expanded"), np.broadcast_to(matrix[3], (3, 6)))
    assert opened.view("empty").shape == (0, 6)
    for name in ("transposed", "expanded", "empty"):
        opened.release(name)
    with pytest.raises(UserError, match=r"pytorch_model\.bin: became shorter"):
        opened.view("beyond")


def test_a_file_that_changed_after_the_check_is_refused(folder: Path):
    save(folder, "model.safetensors", a=ONE)
    for damage in (
        lambda file: os.truncate(file, 30),
        lambda file: os.truncate(file, 0),
        os.unlink,
    ):
        opened = open_hf_folder(folder)
        damage(folder / "model.safetensors")
        with pytest.raises(UserError, match=r"model\.safetensors: (became|cannot be mapped)"):
            opened.view("a")
        save(folder, "model.safetensors", a=ONE)


def test_views_outlive_release_and_close(folder: Path):
    save(folder, "model.safetensors", a=np.arange(100_000), b=TWO)
    opened = open_hf_folder(folder)
    opened.release("a")  # nothing is mapped yet
    views = [opened.view("a"), opened.view("b")]
    opened.release("a")
    opened.close()
    np.testing.assert_array_equal(views[0], np.arange(100_000))
    np.testing.assert_array_equal(views[1], TWO)


def test_threads_may_read_and_release_at_the_same_time(folder: Path):
    arrays = {f"t{i}": np.random.default_rng(i).random(20_000) for i in range(6)}
    save(folder, "model.safetensors", **arrays)
    opened = open_hf_folder(folder)
    wrong = []

    def read(seed: int) -> None:
        for name in random.Random(seed).choices(list(arrays), k=50):
            if not np.array_equal(opened.view(name), arrays[name]):
                wrong.append(name)
            opened.release(name)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(opened._maps) == 1


# VmHWM and not ru_maxrss, which a process inherits from the one that started it.
READ_ALL = """
import sys
from pathlib import Path
import numpy as np
from convert.files.hf_folder import open_hf_folder

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024

with open_hf_folder(Path(sys.argv[1])) as folder:
    before = peak()
    for released in (True, False):
        for name in folder.tensors:
            folder.view(name).view(np.uint8).max(initial=0)
            if released:
                folder.release(name)
        print(peak() - before)
"""


def test_released_tensors_do_not_stay_in_memory(folder: Path):
    # 200 MB: a few tensors as big as 16 MB, and thousands of some KB whose pages meet.
    shapes = {f"big{i}": (1001, 4093) for i in range(20)} | {
        f"small{i}": (1023,) for i in range(9000)
    }
    writer = SafetensorsWriter(
        folder / "model.safetensors", {name: ("BF16", shape) for name, shape in shapes.items()}
    )
    size = writer._size
    os.close(writer._descriptor)
    os.truncate(folder / "model.safetensors", size)  # sparse
    assert size > 180e6
    result = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(folder)], capture_output=True, text=True, check=True
    )
    released, kept = map(int, result.stdout.split())
    assert released < 60, f"{released} MiB"
    assert kept > 150, f"{kept} MiB: what this test measures is not what it thinks"


# Files that travel along


def test_tokenizer_code_and_licence_are_carried_and_nothing_else(folder: Path):
    carried = [
        "LICENSE",
        "LICENSE-MODEL",
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
        "modeling_deepseek.py",
        "tokenizer.json",
        "tokenizer.model",
    ]
    others = [
        ".gitattributes",
        ".hidden.json",
        "README.md",
        "optimizer.bin",
        "picture.png",
        "x.gguf",
    ]
    for name in (*carried, *others):
        (folder / name).touch()
    (folder / "folder.json").mkdir()
    save(folder, "model.safetensors", a=ONE)
    write_index(folder, {"a": "model.safetensors"})
    write_index(folder, {}, name="pytorch_model.bin.index.json")
    assert [path.name for path in open_hf_folder(folder).carried_files()] == carried
