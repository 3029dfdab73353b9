"""`metrics.jsonl` stays readable: whole lines, plain JSON, no step twice."""

import datetime
import json
import math
from types import SimpleNamespace

import pytest

from jaxseek.errors import UserError
from jaxseek.presets import load_preset
from jaxseek.run_config import RunConfig
from jaxseek.run_file import load_config
from jaxseek.train import run_folder
from jaxseek.train.run_folder import RunFolder, default_path, read_metrics

RUN = RunConfig(model=load_preset("small-v3"))


def strict(text: str) -> dict:
    """One line of JSON as every reader takes it: no NaN, no Infinity."""

    def refuse(word):
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


def test_every_line_is_on_disk_at_once(tmp_path):
    folder = RunFolder.create(RUN, path=tmp_path / "run")
    folder.log({"step": 1, "loss": 2.5})
    assert read_metrics(folder.path) == [{"step": 1, "loss": 2.5}]
    folder.metrics.close()


def test_a_loss_that_is_not_finite_is_null(tmp_path):
    folder = RunFolder.create(RUN, path=tmp_path / "run")
    folder.log({"step": 1, "loss": math.nan, "grad_norm": math.inf, "applied": False})
    folder.metrics.close()
    line = strict((folder.path / "metrics.jsonl").read_text())
    assert line == {"step": 1, "loss": None, "grad_norm": None, "applied": False}


def test_a_plot_of_a_run_with_a_bad_step_is_drawn(tmp_path):
    folder = RunFolder.create(RUN, path=tmp_path / "run")
    for step, loss in enumerate([3.0, math.nan, 2.0]):
        folder.log({"step": step, "loss": loss})
    folder.log({"step": 2, "val_loss": 2.5})
    folder.metrics.close()
    folder.plot()
    assert (folder.path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_resuming_keeps_what_was_done_and_drops_what_will_be_done_again(tmp_path):
    folder = RunFolder.create(RUN, path=tmp_path / "run")
    for line in (
        {"step": 0, "val_loss": 9.0},
        {"step": 1, "loss": 5.0},
        {"step": 2, "loss": 4.0},
        {"step": 2, "val_loss": 4.5},
        {"step": 3, "loss": 3.0},
    ):
        folder.log(line)
    folder.metrics.write('{"step": 4, "lo')  # a crash in the middle of a line
    folder.metrics.close()
    resumed = RunFolder.resume(RunConfig(model=RUN.model, steps=7), path=folder.path, step=2)
    resumed.log({"step": 3, "loss": 2.0})
    resumed.metrics.close()
    assert [(line["step"], line.get("loss")) for line in read_metrics(folder.path)] == [
        (0, None),
        (1, 5.0),
        (2, 4.0),
        (3, 2.0),
    ]
    assert load_config(folder.path / "config.yaml").steps == 7
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "metrics.jsonl"]


def test_a_folder_that_holds_something_is_refused_and_an_empty_one_is_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    RunFolder.create(RUN, path=tmp_path / "empty").metrics.close()
    with pytest.raises(UserError, match="is not empty"):
        RunFolder.create(RUN, path=tmp_path / "empty")


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    moment = datetime.datetime(2024, 12, 26, 8, 9, 10)
    clock = SimpleNamespace(datetime=SimpleNamespace(now=lambda: moment))
    monkeypatch.setattr(run_folder, "datetime", clock)
    paths = []
    for _ in range(3):
        paths.append(default_path(RUN))
        paths[-1].mkdir(parents=True)
    stem = "deepseek_v3-20241226-080910"
    assert [path.name for path in paths] == [stem, f"{stem}-2", f"{stem}-3"]
