"""`--mesh auto`: what the trainer hands to the plan, and what it takes from it."""

import json
import os
import subprocess
import sys

import pytest

from jaxseek.devices import Fleet
from jaxseek.errors import UserError
from jaxseek.plan import auto
from jaxseek.plan.auto import choose
from jaxseek.presets import load_preset
from jaxseek.run_config import RunConfig
from jaxseek.run_file import load_config
from jaxseek.train.cli import parse_arguments
from tests.plan.test_cli import ROOT

CHOICE = {"mesh": "1x3", "zero": 3, "remat": "full", "accumulation": 2, "fits": True}
TINY = {
    "model.vocab_size": 320,
    "model.hidden_size": 48,
    "model.intermediate_size": 96,
    "model.num_hidden_layers": 2,
    "model.first_k_dense_replace": 1,
    "model.n_routed_experts": 4,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 32,
}


@pytest.fixture
def plan_of(monkeypatch):
    """Let the plan answer with a choice; what it was asked is left in the list."""
    asked = []

    def answer(choice, *, returncode=0):
        def run(command, *, stdout, text):
            file = command[command.index("--config") + 1]
            with open(file) as stream:
                asked.append((command, stream.read()))
            text = json.dumps({"choices": [choice]})
            return subprocess.CompletedProcess(command, returncode, stdout=text)

        monkeypatch.setattr(auto.subprocess, "run", run)
        return asked

    monkeypatch.setattr(auto, "local_fleet", lambda: None)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    return answer


def test_the_first_choice_is_taken_and_all_else_stays(plan_of, tmp_path):
    asked = plan_of(CHOICE)
    run = RunConfig(model=load_preset("small-v3"), batch=36, dtype="float32", seed=5)
    chosen = choose(run, fixed={})
    assert (chosen.mesh, chosen.zero, chosen.remat, chosen.accumulation) == ("1x3", 3, "full", 2)
    assert (chosen.batch, chosen.dtype, chosen.seed, chosen.model) == (36, "float32", 5, run.model)
    [(command, text)] = asked
    assert command[command.index("--gpus") + 1] == "3xgeneric-24gb"
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(tmp_path / "run.yaml") == run


def test_what_the_user_has_set_is_given_to_the_plan(plan_of):
    asked = plan_of(CHOICE)
    choose(RunConfig(model=load_preset("small-v3")), fixed={"zero": 3, "accumulation": 2})
    command = asked[0][0]
    assert command[command.index("--zero") + 1] == "3"
    assert command[command.index("--accumulation") + 1] == "2"
    assert "--remat" not in command


def test_where_nothing_fits_or_no_plan_is_possible_the_run_is_refused(plan_of):
    run = RunConfig(model=load_preset("small-v3"))
    plan_of(CHOICE | {"fits": False})
    with pytest.raises(UserError, match="nothing fits on 3xgeneric-24gb"):
        choose(run, fixed={})
    plan_of(CHOICE, returncode=2)
    with pytest.raises(UserError, match="no plan could be made, for the reason above"):
        choose(run, fixed={})


def test_flags_and_files_leave_open_what_they_do_not_name(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("mesh: auto\nremat: full\nbatch: 24\n")
    invocation = parse_arguments(["--config", str(file), "--zero", "1"])
    assert invocation.auto == {"zero": 1, "remat": "full"}
    assert parse_arguments(["--mesh", "3x1"]).auto is None


def test_null_leaves_a_setting_to_the_plan(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("mesh: auto\nzero: null\naccumulation: 3\n")
    assert parse_arguments(["--config", str(file)]).auto == {"accumulation": 3}


def test_the_plan_looks_for_gpus_itself_where_there_are_any(plan_of, monkeypatch):
    # A name would stand for the table's memory, not for what this machine's cards have.
    monkeypatch.setattr(auto, "local_fleet", lambda: Fleet.parse("3xrtx4090"))
    [(command, _)] = asked_with(plan_of)
    assert "--gpus" not in command
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    [(command, _)] = asked_with(plan_of)
    assert command[command.index("--gpus") + 1] == "3xgeneric-24gb"


def asked_with(plan_of):
    """What a run is planned with, all left open."""
    asked = plan_of(CHOICE)
    del asked[:]
    choose(RunConfig(model=load_preset("small-v3")), fixed={})
    return asked


def test_gpus_that_cannot_be_planned_for_leave_the_mesh_to_the_user(plan_of, monkeypatch):
    def refuse():
        raise UserError("nvidia-smi shows 'Voodoo 2'; give the nearest with --gpus.")

    monkeypatch.setattr(auto, "local_fleet", refuse)
    with pytest.raises(UserError, match=r"GPUs; give --mesh AxB\. The reason: nvidia-smi"):
        choose(RunConfig(model=load_preset("small-v3")), fixed={})


def test_auto_trains_on_emulated_devices_and_says_why(tmp_path):
    flags = [word for key, value in TINY.items() for word in (f"--{key}", str(value))]
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("to be or not to be that is the question\n" * 400)
    flags += ["--mesh", "auto", "--steps", "2", "--batch", "6", "--seq-len", "32"]
    flags += ["--remat", "none", "--dtype", "float32"]
    flags += ["--data.source", str(text), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "jaxseek.train", *flags],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "planning for 3xgeneric-24gb" in done.stderr
    assert "Take mesh " in done.stderr
    run = load_config(out / "config.yaml")
    assert run.mesh in ("3x1", "1x3") and (run.remat, run.batch) == ("none", 6)
