"""Training from the command line's words to the run folder, and going on where a run stopped."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml

from jaxseek.errors import UserError
from jaxseek.run_file import load_config
from jaxseek.train.cli import parse_arguments
from jaxseek.train.run_folder import RunFolder
from tests.train.runs import STEPS, arguments, losses, make_base, metrics, run, step_lines


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def whole(base) -> Path:
    """A run that never stopped."""
    folder = base / "whole"
    run(*arguments(base, "--out", folder, **{"checkpoint.every": 4, "eval.every": 3}))
    return folder


@pytest.fixture(scope="module")
def stopped(base, whole) -> Path:
    """The same run, ended after step 3."""
    folder = base / "stopped"
    run(
        *arguments(
            base, "--out", folder, "--stop-after", 3, **{"checkpoint.every": 4, "eval.every": 3}
        )
    )
    return folder


@pytest.fixture(scope="module")
def resumed(base, stopped) -> Path:
    """The stopped run, gone on with as it was."""
    folder = Path(shutil.copytree(stopped, base / "resumed"))
    run("--resume", folder)
    return folder


@pytest.fixture
def halfway(stopped, tmp_path) -> Path:
    """A copy of the stopped run, to go on with."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def test_the_run_folder_is_complete(whole):
    names = {path.name for path in whole.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "loss.png", "checkpoints", "tokenizer"}
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert checkpoints(whole) == [4, 6]
    assert (whole / "tokenizer" / "tokenizer.json").is_file()


def test_the_written_config_reloads_to_the_same_run(base, whole):
    words = arguments(base, **{"checkpoint.every": 4, "eval.every": 3})
    assert load_config(whole / "config.yaml") == parse_arguments(list(map(str, words))).run
    assert yaml.safe_load((whole / "config.yaml").read_text())["mesh"] == "3x1"


def test_there_is_one_line_per_step_with_all_its_fields(whole):
    lines = step_lines(whole)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert {"step", "loss", "tokens", "tokens_per_second", "learning_rate", "grad_norm",
                "step_seconds", "mfu"} <= set(line)  # fmt: skip
        assert line["mfu"] is None, "there is no peak known for a CPU"
        assert line["applied"] is True
        assert 0 < line["tokens"] <= 6 * 16
        assert line["tokens_per_second"] == pytest.approx(6 * 16 / line["step_seconds"], rel=1e-6)
        assert np.isfinite([line["loss"], line["grad_norm"], line["expert_load"]]).all()


def test_validation_is_measured_before_between_and_after(whole):
    lines = [line for line in metrics(whole) if "val_loss" in line]
    assert [line["step"] for line in lines] == [0, 3, 6]
    assert len({line["val_tokens"] for line in lines}) == 1
    assert lines[-1]["val_loss"] < lines[0]["val_loss"]


def test_a_run_that_stopped_and_went_on_equals_one_that_never_stopped(whole, stopped, resumed):
    assert losses(stopped) == losses(whole)[:3]
    assert checkpoints(stopped) == [3]
    assert losses(resumed) == losses(whole)
    norms, expected = ([x["grad_norm"] for x in step_lines(run)] for run in (resumed, whole))
    assert norms == expected
    assert metrics(resumed)[-1]["val_loss"] == metrics(whole)[-1]["val_loss"]
    assert (resumed / "loss.png").is_file()


def test_no_step_stands_twice_in_the_metrics_after_a_resume(whole, resumed):
    for field in ("loss", "val_loss"):
        steps = [line["step"] for line in metrics(resumed) if field in line]
        assert steps == sorted(set(steps))
        assert steps == [line["step"] for line in metrics(whole) if field in line]


def test_a_run_goes_on_on_one_device_and_then_on_two(whole, halfway):
    run("--resume", halfway, "--mesh", "1x1", "--stop-after", 4)
    assert load_config(halfway / "config.yaml").mesh == "1x1"
    run("--resume", halfway, "--mesh", "2x1")
    np.testing.assert_allclose(losses(halfway), losses(whole), rtol=1e-5)


def test_sigterm_ends_the_step_with_a_checkpoint_to_go_on_from(whole, base, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    log = RunFolder.log

    def log_and_terminate(self, line):
        log(self, line)
        if line["step"] == 2 and "loss" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", log_and_terminate)
        run(*arguments(base, "--out", folder))
    assert signal.getsignal(signal.SIGTERM) is before
    (last,) = checkpoints(folder)
    assert last < STEPS and len(losses(folder)) == last
    run("--resume", folder)
    assert losses(folder) == losses(whole)


@pytest.mark.parametrize(
    "words, message",
    [
        (("--seed", "1"), "seed was 0 and is now 1"),
        (("--model.hidden_size", "36"), "model.hidden_size was 24 and is now 36"),
        (("--seq-len", "32"), "seq_len was 16 and is now 32"),
        (("--out", "elsewhere"), "--resume and --out"),
        (("--steps", "3"), "step 3 of 3 is done already"),
    ],
)
def test_a_resume_that_would_be_another_run_is_refused_and_changes_nothing(words, message, stopped):
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=message):
        run("--resume", stopped, *words)
    assert before == {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}


def test_a_resume_with_another_text_is_refused_and_changes_nothing(tmp_path):
    base = make_base(tmp_path)
    folder = base / "run"
    run(*arguments(base, "--out", folder, "--stop-after", 1))
    for file in (base / "text").iterdir():
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("return", "yield"), encoding="utf-8")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"text or the tokenizer has changed .* [0-9a-f]{12}, now"):
        run("--resume", folder)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_resumed_run_may_change_what_makes_it_no_other_run_and_says_so(halfway, capsys):
    run("--resume", halfway, "--optim.max_bad_steps", "4", "--stop-after", "5")
    assert "optim.max_bad_steps 10 -> 4" in capsys.readouterr().out.replace("\n", " ")
    assert [line["step"] for line in step_lines(halfway)] == [1, 2, 3, 4, 5]
    assert load_config(halfway / "config.yaml").optim.max_bad_steps == 4
