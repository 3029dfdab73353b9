"""The command line: what is read, and one message with exit code 2 for every mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxseek.errors import UserError
from jaxseek.plan.cli import parse_arguments
from jaxseek.presets import load_preset

ROOT = Path(__file__).parents[2]
GPUS = ["--model", "deepseek-coder-1.3b", "--gpus", "3xrtx4090"]


def run_plan(*arguments):
    """`python -m jaxseek.plan`, compiled for emulated CPU devices by LLVM's short way."""
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    return subprocess.run(
        [sys.executable, "-m", "jaxseek.plan", *arguments],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_flags_become_a_request():
    line = [*GPUS, "--mesh", "3x1", "--zero", "3", "--seq-len", "2048", "--batch-per-gpu", "4096"]
    asked = parse_arguments([*line, "--bandwidth", "20", "--json"])
    request = asked.request
    assert request.run.model == load_preset("deepseek-coder-1.3b")
    assert (str(request.fleet), request.run.seq_len, request.micro_batch_tokens) == (
        "3xrtx4090",
        2048,
        4096,
    )
    assert request.only == {"mesh": "3x1", "zero": "3"}
    assert (asked.json, asked.bandwidth, asked.efficiency) == (True, 20.0, None)
    assert (asked.explain, asked.most_compiled, request.batch) == (False, 3, None)


def test_explain_pins_its_mesh():
    asked = parse_arguments([*GPUS, "--explain", "1x3", "--zero", "0"])
    assert asked.explain and asked.request.only == {"mesh": "1x3", "zero": "0"}


def test_a_short_model_is_planned_at_its_own_length():
    asked = parse_arguments(["--model", "small-v3", "--gpus", "rtx4090"])
    model = load_preset("small-v3")
    assert asked.request.run.seq_len == min(4096, model.max_position_embeddings)


@pytest.mark.parametrize(("text", "gib"), [("64GiB", 64.0), ("64", 64.0), ("64gb", 64e9 / 2**30)])
def test_ram_is_read_with_its_unit(text, gib):
    assert parse_arguments([*GPUS, "--ram", text]).request.ram_gib == pytest.approx(gib)


def test_a_runs_file_fixes_all_but_the_choice(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: deepseek-coder-1.3b\nseq_len: 512\nbatch: 48\ndtype: float32\n")
    request = parse_arguments(["--config", str(file), "--gpus", "3xrtx4090"]).request
    assert (request.batch, request.run.seq_len, request.run.dtype) == (48, 512, "float32")
    more = parse_arguments(
        ["--config", str(file), "--gpus", "3xrtx4090", "--tokens-per-step", "99999"]
    ).request
    assert (more.batch, more.tokens_per_step) == (None, 99999)


def hf_folder(path):
    """A model's folder before the download of its weights."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(config))


def test_a_runs_file_may_leave_its_mesh_to_the_plan_and_name_a_folder(tmp_path):
    hf_folder(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {tmp_path}\nmesh: auto\nseq_len: 512\nbatch: 48\n")
    request = parse_arguments(["--config", str(file), "--gpus", "3xrtx4090"]).request
    assert (request.run.model.hidden_size, request.batch) == (64, 48)


def test_a_config_json_without_weights_is_enough(tmp_path):
    hf_folder(tmp_path)
    asked = parse_arguments(["--model", str(tmp_path), "--gpus", "2xrtx3090"])
    assert (asked.request.run.model.hidden_size, asked.request.run.model.num_key_value_heads) == (
        64,
        4,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--gpus", "3xrtx4090"],
            "give the model with --model, or a run's YAML file with --config",
        ),
        ([*GPUS, "--config", "run.yaml"], "give the model with --model, or a run's YAML file"),
        ([*GPUS, "--ram", "much"], "--ram: 'much' is not a size, for example 64GiB"),
        ([*GPUS, "--explain", "3x1", "--json"], "give one of them"),
        ([*GPUS, "--explain", "3x1", "--mesh", "1x3"], "--explain 3x1 and mesh=1x3 disagree"),
        ([*GPUS, "--compile", "0"], "--compile must be at least 1, got 0"),
        (["--model", "coder-6.7", "--gpus", "rtx4090"], "neither a preset nor a YAML file"),
        ([*GPUS, "--zero", "4"], "invalid choice: '4'"),
        ([*GPUS, "--efficiency", "1.5"], "--efficiency must be above 0 and at most 1, got 1.5"),
        ([*GPUS, "--bandwidth", "0"], "--bandwidth must be above 0 and finite, got 0"),
        ([*GPUS, "--bandwidth", "inf"], "--bandwidth must be above 0 and finite, got inf"),
        ([*GPUS, "--tokens-per-step", "0"], "--tokens-per-step must be at least 1"),
        ([*GPUS, "--seq-len", "0"], "seq_len must be at least 1"),
        ([*GPUS, "--seq-len", "100000"], "longer than the model's max_position_embeddings"),
        ([*GPUS, "--zero", "1", "--only", "zero=3"], "--zero 1 and zero=3 disagree"),
        ([*GPUS, "--only", "zero:3"], "not of the form KEY=VALUE"),
    ],
)
def test_a_mistake_is_one_message(arguments, message):
    with pytest.raises(UserError, match=message):
        parse_arguments(arguments)


def test_a_damaged_config_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        parse_arguments(["--model", str(tmp_path), "--gpus", "rtx4090"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--gpus", "3xrtx4091"],
            "'rtx4091' is not known; the nearest is rtx4090; known are rtx3090",
        ),
        (["--gpus", "3xrtx4090", "--mesh", "2x2"], "--mesh 2x2 has 4 devices"),
    ],
)
def test_unknown_gpus_and_impossible_meshes_exit_with_code_2(arguments, message):
    done = run_plan("--model", "deepseek-coder-1.3b", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jaxseek.plan: error: ") and message in done.stderr
    assert len(done.stderr.splitlines()) == 1
