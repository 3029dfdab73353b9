"""Mistakes that only show when the run begins: exit code 2, one message, nothing written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxseek.data.tokenizer import TextTokenizer, train_tokenizer
from tests.train.runs import arguments, contents, main_with, make_base

ROOT = Path(__file__).parents[2]


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    """A model and text; the current directory is an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return make_base(tmp_path)


def refused(base, monkeypatch, capsys, **changes: object) -> str:
    """The message with which the run is refused; fails where it wrote anything."""
    before = contents(base)
    code = main_with(monkeypatch, *arguments(base, "--out", base / "out", **changes))
    message = capsys.readouterr().err
    assert code == 2
    assert message.startswith("jaxseek.train: error: ") and message.count("\n") == 1
    assert contents(base) == before and not (base / "out").exists()
    assert os.listdir() == []
    return message


def test_a_source_that_is_not_there(base, monkeypatch, capsys):
    message = refused(base, monkeypatch, capsys, **{"data.source": base / "nowhere"})
    assert "nowhere' does not exist" in message


def test_a_source_without_text(base, monkeypatch, capsys):
    (base / "empty.txt").touch()
    message = refused(base, monkeypatch, capsys, **{"data.source": base / "empty.txt"})
    assert "empty.txt is empty" in message


def test_a_source_shorter_than_a_sequence(base, monkeypatch, capsys):
    (base / "short.txt").write_text("a few words\nand a few more\n")
    message = refused(
        base, monkeypatch, capsys, **{"data.source": base / "short.txt", "seq-len": 64}
    )
    assert "tokens, need at least 65" in message


def test_a_file_that_is_no_text_is_named_with_its_line(base, monkeypatch, capsys):
    (base / "text" / "bad.txt").write_bytes(b"fine\nnot \xff fine\n")
    assert "bad.txt:2: not valid UTF-8" in refused(base, monkeypatch, capsys)


def test_a_tokenizer_that_is_not_there(base, monkeypatch, capsys):
    message = refused(base, monkeypatch, capsys, **{"data.tokenizer": base / "nowhere.json"})
    assert "nowhere.json" in message


def test_a_tokenizer_with_more_ids_than_the_model(base, monkeypatch, capsys):
    texts = [path.read_text() for path in (base / "text").iterdir()]
    (base / "tokenizer").mkdir()
    TextTokenizer(train_tokenizer(texts, vocab_size=310)).save(base / "tokenizer")
    message = refused(
        base,
        monkeypatch,
        capsys,
        **{"data.tokenizer": base / "tokenizer", "model.vocab_size": 305},
    )
    assert "ids up to 309" in message and "model.vocab_size is 305" in message


def test_a_mesh_of_more_devices_than_there_are(base, monkeypatch, capsys):
    message = refused(base, monkeypatch, capsys, mesh="7x1", batch=7)
    assert "7" in message and "6" in message


def test_a_folder_that_holds_something(base, monkeypatch, capsys):
    (base / "taken").mkdir()
    (base / "taken" / "thesis.txt").write_text("precious")
    before = contents(base)
    code = main_with(monkeypatch, *arguments(base, "--out", base / "taken"))
    message = capsys.readouterr().err
    assert code == 2 and contents(base) == before
    assert os.listdir(base / "taken") == ["thesis.txt"]
    assert "taken is not empty" in message and "--resume" in message


def test_a_disk_that_will_not_hold_the_checkpoints(base, monkeypatch, capsys):
    monkeypatch.setattr("jaxseek.checkpoint.free_bytes", lambda _: 10**6)
    changes = {"steps": 9, "checkpoint.every": 2}
    message = refused(base, monkeypatch, capsys, **changes, **{"checkpoint.keep": 4})
    assert "5 checkpoints of" in message and f"the disk of {base / 'out'}" in message
    assert "4 checkpoints of" in refused(
        base, monkeypatch, capsys, **changes, **{"checkpoint.keep": 4, "stop-after": 7}
    )


def test_a_folder_that_is_a_file(base, monkeypatch, capsys):
    (base / "file").write_text("precious")
    code = main_with(monkeypatch, *arguments(base, "--out", base / "file"))
    assert code == 2 and (base / "file").read_text() == "precious"
    assert "file" in capsys.readouterr().err


def test_the_command_itself_ends_with_code_2_and_no_traceback(base):
    words = arguments(base, **{"data.source": base / "nowhere"})
    done = subprocess.run(
        [sys.executable, "-m", "jaxseek.train", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("jaxseek.train: error: data.source")
    assert "Traceback" not in done.stderr + done.stdout
    assert os.listdir() == []
