"""The command line of the trainer: precedence, spellings, resume, one clear line per mistake."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxseek.errors import UserError
from jaxseek.presets import load_preset
from jaxseek.run_config import RunConfig
from jaxseek.run_file import dump_config
from jaxseek.train.cli import Invocation, parse_arguments

ROOT = Path(__file__).parents[2]
SMALL = load_preset("small-v3")


def parse(line):
    return parse_arguments(line.split())


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 50\nseq_len: 64\noptim: {learning_rate: 1e-3, eps: 1e-7}\n")
    return path


@pytest.fixture
def run_folder(tmp_path):
    run = RunConfig(model=SMALL, mesh="3x1", steps=20, stop_after=5, data=_somewhere())
    (tmp_path / "config.yaml").write_text(dump_config(run))
    return tmp_path


def _somewhere():
    return dataclasses.replace(RunConfig(model=SMALL).data, source="texts/*.txt")


def test_no_arguments_is_the_default_run_of_the_default_preset():
    assert parse("") == Invocation(run=RunConfig(model=SMALL))


def test_every_short_flag_reaches_its_field():
    invocation = parse(
        "--mesh 3x1 --model deepseek-v2-lite --steps 6 --batch 24 --seq-len 128 --out DIR "
        "--dtype float32 --zero 2 --seed 1 --stop-after 3 --remat full --accumulation 2"
    )
    assert invocation.run == RunConfig(
        model=load_preset("deepseek-v2-lite"),
        mesh="3x1",
        steps=6,
        batch=24,
        seq_len=128,
        dtype="float32",
        zero=2,
        seed=1,
        stop_after=3,
        remat="full",
        accumulation=2,
    )
    assert str(invocation.out) == "DIR" and invocation.resume is None


def test_dashes_and_underscores_are_the_same_and_an_equals_sign_is_a_space():
    lines = (
        "--seq-len 128 --batch-tokens 3072 --optim.learning-rate 3e-4 --model.hidden-size 96",
        "--seq_len=128 --batch_tokens=3072 --optim.learning_rate=3e-4 --model.hidden_size=96",
    )
    first, second = map(parse, lines)
    assert first == second
    assert first.run.optim.learning_rate == 3e-4 and first.run.model.hidden_size == 96


def test_flags_win_over_the_file_and_the_file_over_the_defaults_in_any_order(config):
    for line in (
        f"--config {config} --steps 7 --optim.eps 1e-6",
        f"--steps 7 --optim.eps 1e-6 --config {config}",
    ):
        run = parse(line).run
        assert (run.steps, run.seq_len, run.batch) == (7, 64, 12)
        assert (run.optim.eps, run.optim.learning_rate, run.optim.beta1) == (1e-6, 1e-3, 0.9)


def test_last_of_a_repeated_flag_wins():
    assert parse("--steps 30 --steps 40").run.steps == 40


def test_batch_flag_replaces_a_batch_of_the_file_in_the_other_unit(config):
    config.write_text("batch: 6\nseq_len: 128\n")
    assert parse(f"--config {config} --batch-tokens 3072").run.sequences_per_step == 24


def test_model_flag_leaves_nothing_of_the_files_model_behind(config):
    config.write_text("model: deepseek-v3\nmodel.num_hidden_layers: 5\n")
    run = parse(f"--config {config} --model deepseek-llm-7b --model.num_hidden_layers 2").run
    assert run.model == dataclasses.replace(load_preset("deepseek-llm-7b"), num_hidden_layers=2)


def test_model_key_overrides_inside_rope_scaling_and_null_clears():
    run = parse("--model deepseek-v2 --model.rope_scaling.factor 8 --model.q_lora_rank null").run
    v2 = load_preset("deepseek-v2")
    assert v2.rope_scaling is not None
    scaling = dataclasses.replace(v2.rope_scaling, factor=8.0)
    assert run.model == dataclasses.replace(v2, rope_scaling=scaling, q_lora_rank=None)


def test_resume_takes_the_folders_run_without_its_stop(run_folder):
    invocation = parse(f"--resume {run_folder}")
    assert invocation.run == RunConfig(model=SMALL, mesh="3x1", steps=20, data=_somewhere())
    assert (invocation.resume, invocation.changed) == (run_folder, {})


def test_resume_tells_what_flags_change(run_folder):
    invocation = parse(f"--resume {run_folder} --mesh 1x1 --optim.eps 1e-7 --steps 20")
    assert invocation.changed == {"mesh": ("3x1", "1x1"), "optim.eps": (1e-8, 1e-7)}
    assert invocation.run.mesh == "1x1"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--optim.learning-rte 1", "--optim.learning-rte .* nearest is --optim.learning_rate"),
        ("--trian.lr 1", "--trian.lr .* nearest is --optim.learning_rate"),
        ("--learning-rate 1", "--learning-rate .* nearest is --optim.learning_rate"),
        ("--seqlen 1", "--seqlen .* nearest is --seq-len"),
        ("--optim 1", "--optim .* a section, with keys such as --optim.learning_rate"),
        ("--colour red", "--colour is not a known flag; --help lists them"),
        ("--step 6", "--step is not a known flag; the nearest is --steps"),
        ("stray", "'stray' is not expected; settings are given as --KEY VALUE"),
        ("--steps", "--steps: expected one argument"),
        ("--steps --mesh 3x1", "--steps: expected one argument"),
        ("--steps many", "--steps: 'many' is not a whole number"),
        ("--steps 3.5", "--steps: '3.5' is not a whole number"),
        ("--dtype float16", "--dtype: 'float16' is not one of bfloat16, float32"),
        ("--zero 4", "--zero: '4' is not one of 0, 1, 2, 3 or null"),
        ("--mesh 3", "mesh: '3' is not of the form AxB"),
        ("--mesh 5x1", r"batch 12 \(the default\) is not a multiple of 5.*use 10 or 15"),
        ("--seq-len 4096", "longer than the model's max_position_embeddings 2048"),
        ("--model.vocab_size 200", r"too small for the byte-level BPE .* needs 300"),
        ("--model.model_type deepseek_v4", "DeepSeek-V4, is not supported yet"),
        ("--model deepseek-v9", "neither a preset .* no such folder; the nearest preset is"),
        ("--config nowhere.yaml", "nowhere.yaml: there is no such file"),
        ("--resume nowhere", "--resume nowhere: there is no config.yaml in it"),
        ("--resume a --config b", "--config and --resume are both given"),
    ],
)
def test_mistakes_are_refused_in_one_line(line, message):
    with pytest.raises(UserError, match=message) as error:
        parse(line)
    assert "\n" not in str(error.value)


def test_a_small_vocabulary_is_fine_with_a_tokenizer_of_ones_own():
    run = parse("--model.vocab_size 200 --data.tokenizer tokenizer.json").run
    assert run.model.vocab_size == 200


def test_help_describes_every_setting_with_its_default(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert "--seq-len N tokens per sequence (default: 256)" in text
    assert "--checkpoint.keep N how many of the last checkpoints stay (default: 2)" in text
    assert "rope_scaling.factor" in text and "deepseek-v2-lite" in text


def test_help_takes_under_two_seconds_and_starts_no_jax():
    program = (
        "import sys\n"
        "from jaxseek.train.cli import parse_arguments\n"
        "try: parse_arguments(['--help'])\n"
        "finally: assert not {'jax', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.perf_counter() - start < 2
