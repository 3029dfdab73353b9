"""The command line as a shell sees it: exit codes, streams, paths, what is left on the disk."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from convert.cli import parse_arguments
from jaxseek.errors import UserError
from tests.convert.files.test_torch_file import attacks
from tests.convert.files.torch_archives import write_archive
from tests.convert.folders import main_with, write_folder, write_weights
from tests.tiny import TINY

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        (["inspect", "hf"], ""),
        (["inspect", "hf"], "1"),
        (["verify", "hf", "--no-logits"], "1"),
        (["to-jax", "hf", "jax"], "1"),
    ],
)
def test_a_reader_that_has_enough_ends_it_without_a_word(words, unbuffered, tmp_path):
    write_folder(tmp_path / "hf", TINY["llama"])
    process = subprocess.Popen(
        [sys.executable, "-m", "convert", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout
    process.stdout.close()
    assert process.communicate()[1] == b""
    assert process.returncode == 141
    assert (tmp_path / "jax").exists() == (words[0] == "to-jax")  # what is done is done


def test_a_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_folder(tmp_path / "hf", TINY["llama"])
    for words in (("to-jax", "~/hf", "~/jax"), ("to-hf", "~/jax", "~/back"), ("inspect", "~/jax")):
        assert main_with(monkeypatch, *words) == 0
    assert (tmp_path / "back" / "config.json").is_file()
    capsys.readouterr()
    for words in (("inspect", "~nobody-here/x"), ("to-jax", "~/hf", "~nobody-here/x")):
        assert main_with(monkeypatch, *words) == 2
        assert "~nobody-here/x: there is no such home folder" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["hf", "./hf/", "a b ü 中", "link", "blobs"])
def test_folders_are_found_however_they_are_named(source, tmp_path, monkeypatch):
    tensors = write_folder(tmp_path / "hf", TINY["llama"], shards=2)
    monkeypatch.chdir(tmp_path)
    match source:
        case "a b ü 中":
            (tmp_path / "hf").rename(source)
        case "link":
            Path(source).symlink_to("hf")
        case "blobs":  # as in the hub's cache
            Path(source).mkdir()
            for file in (tmp_path / "hf").iterdir():
                (Path(source) / file.name).symlink_to(file)
    assert main_with(monkeypatch, "to-jax", source, f"{source.rstrip('/')} jax/") == 0
    assert main_with(monkeypatch, "to-hf", f"{source.rstrip('/')} jax", "deep/er/back") == 0
    assert main_with(monkeypatch, "verify", source, "deep/er/back", "--no-logits") == 0
    assert len(tensors) == 21


def test_good_conversions_say_nothing_on_stderr_and_nothing_only_terminals_understand(
    tmp_path, monkeypatch, capsys
):
    write_folder(tmp_path / "hf", TINY["v3"], dtype="F64")
    for words in (
        ("inspect", tmp_path / "hf"),
        ("to-jax", tmp_path / "hf", tmp_path / "jax"),
        ("to-hf", tmp_path / "jax", tmp_path / "back", "--dtype", "bfloat16"),
        ("verify", tmp_path / "hf", tmp_path / "back", "--no-logits"),
    ):
        assert main_with(monkeypatch, *words) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert out.isprintable() or not set("\r\x1b\b") & set(out)


@pytest.mark.parametrize("command", ["inspect", "to-jax", "verify"])
def test_a_pickle_that_asks_for_code_is_refused_by_every_command(
    command, tmp_path, monkeypatch, capsys
):
    write_folder(tmp_path / "hf", TINY["llama"])
    (tmp_path / "hf" / "model.safetensors").unlink()
    canary = tmp_path / "canary"
    write_archive(tmp_path / "hf" / "pytorch_model.bin", attacks(canary)["os.system"], {})
    out = [tmp_path / "out"] if command == "to-jax" else []
    assert main_with(monkeypatch, command, tmp_path / "hf", *out) == 2
    assert "pytorch_model.bin: data.pkl asks to run os.system" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("stored", "value", "dtype", "count"),
    [("F64", 1e300, "float32", 1), ("F64", -1e39, "bfloat16", 1), ("F32", 3.4e38, "bfloat16", 1)],
)
def test_no_finite_value_becomes_infinite_without_a_word(
    stored, value, dtype, count, tmp_path, monkeypatch, capsys
):
    tensors = write_folder(tmp_path / "hf", TINY["llama"], dtype=stored)
    tensors["model.norm.weight"][:2] = value, np.inf
    write_weights(tmp_path / "hf", tensors)
    words = ("to-jax", tmp_path / "hf", tmp_path / "jax")
    assert main_with(monkeypatch, *words, "--dtype", dtype) == 2
    message = f"model.norm.weight: {count} values are beyond the range of "
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert main_with(monkeypatch, *words) == 0
    words = ("to-hf", tmp_path / "jax", tmp_path / "back")
    assert main_with(monkeypatch, *words, "--dtype", dtype) == 2
    assert message in capsys.readouterr().err
    assert main_with(monkeypatch, *words) == 0


def test_mistakes_in_the_arguments_name_the_help():
    for words in ([], ["to-jax", "hf"], ["convert", "hf"], ["to-hf", "a", "b", "--hf-compat", "6"]):
        with pytest.raises(UserError, match=r"See python -m convert.* --help"):
            parse_arguments(words)
