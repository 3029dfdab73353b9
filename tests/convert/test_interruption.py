"""Signals to a conversion that is half way, sent by the conversion to its own process."""

import contextlib
import gc
import shutil
import signal
import sys

import pytest

from convert import interruption
from convert.files.safetensors_file import SafetensorsWriter
from convert.pipeline import Job, run_all
from convert.staging import new_folder
from tests.convert.folders import kept_signal_handlers, main_with, write_folder
from tests.tiny import TINY

# With the exit code of each.
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture(autouse=True)
def heeded():
    """The signals as a terminal leaves them; a shell's background job ignores Ctrl-C."""
    with kept_signal_handlers():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        yield


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("command", ["to-jax", "to-hf"])
def test_a_signal_half_way_leaves_nothing_behind(command, number, tmp_path, monkeypatch):
    source = _source(command, tmp_path, monkeypatch)
    _call_in_the_middle(command, monkeypatch, lambda: signal.raise_signal(number))
    assert _exit_code(monkeypatch, command, source, tmp_path / "out") == SIGNALS[number]
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("command", ["to-jax", "to-hf"])
def test_a_signal_whose_exception_is_lost_ends_a_conversion_all_the_same(
    command, tmp_path, monkeypatch
):
    source = _source(command, tmp_path, monkeypatch)
    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    def collect():
        gc.callbacks.append(lambda *_: signal.raise_signal(signal.SIGTERM))
        try:
            gc.collect()
        finally:
            gc.callbacks.pop()

    _call_in_the_middle(command, monkeypatch, collect)
    assert _exit_code(monkeypatch, command, source, tmp_path / "out") == 143
    assert [type(entry.exc_value) for entry in lost] == [SystemExit]
    assert not list(tmp_path.glob("out*"))


def test_a_second_signal_does_not_end_the_cleaning_up():
    with kept_signal_handlers():
        interruption.end_by_exception()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        for number in SIGNALS:
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            interruption.check()
        interruption.end_by_exception()
        interruption.check()  # another conversion is not ended by it


def test_a_lost_signal_begins_no_job_and_finishes_no_folder(tmp_path):
    begun = []
    job = Job(run=lambda: begun.append(1), nbytes=1)
    with kept_signal_handlers():
        interruption.end_by_exception()
        with new_folder(tmp_path / "in time", needed_bytes=1):
            pass
        with (
            pytest.raises(SystemExit),
            new_folder(tmp_path / "late", needed_bytes=1),
            contextlib.suppress(SystemExit),
        ):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            run_all([job], done=lambda nbytes: None)
        interruption.end_by_exception()
    assert not begun
    assert [path.name for path in tmp_path.iterdir()] == ["in time"]


def test_a_signal_that_is_ignored_stays_so():
    with kept_signal_handlers():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        interruption.end_at_once()
        interruption.end_by_exception()
        signal.raise_signal(signal.SIGHUP)
    interruption.check()


@pytest.mark.parametrize("command", ["to-jax", "to-hf"])
def test_what_a_killed_conversion_left_is_called_unfinished(command, tmp_path, monkeypatch, capsys):
    source = _source(command, tmp_path, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **kw: None)  # as if it was killed at once
        _call_in_the_middle(command, patch, lambda: signal.raise_signal(signal.SIGINT))
        assert main_with(monkeypatch, command, source, tmp_path / "out") == 130
    rest, other = tmp_path / "out.partial", tmp_path / "other"
    capsys.readouterr()
    for words in (
        ("inspect", rest),
        ("to-jax", rest, other),
        ("to-hf", rest, other),
        ("verify", tmp_path / "hf", rest),
    ):
        assert main_with(monkeypatch, *words) == 2
        assert f"{rest} is not finished: a conversion" in capsys.readouterr().err
    assert main_with(monkeypatch, command, source, tmp_path / "out") == 2
    assert "Delete it if none runs" in capsys.readouterr().err
    assert not other.exists()


def _source(command, tmp_path, monkeypatch):
    write_folder(tmp_path / "hf", TINY["llama"])
    if command == "to-jax":
        return tmp_path / "hf"
    assert main_with(monkeypatch, "to-jax", tmp_path / "hf", tmp_path / "jax") == 0
    return tmp_path / "jax"


def _call_in_the_middle(command, monkeypatch, action):
    """`action` is called on the main thread when the first file of weights begins."""
    if command == "to-hf":
        init = SafetensorsWriter.__init__
        monkeypatch.setattr(
            SafetensorsWriter, "__init__", lambda *args, **kw: (init(*args, **kw), action())[0]
        )
        return
    from convert import to_jax as module

    write = module.write_orbax_metadata
    monkeypatch.setattr(module, "write_orbax_metadata", lambda *args: (write(*args), action())[0])


def _exit_code(monkeypatch, *words):
    try:
        return main_with(monkeypatch, *words)
    except SystemExit as error:
        return error.code
