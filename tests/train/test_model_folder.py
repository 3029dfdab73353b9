"""`--model DIR`: a run that takes model, first weights and tokenizer from a folder."""

import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from convert.files.safetensors_file import read_header
from convert.names import hf_tensors
from convert.to_hf import to_hf
from convert.to_jax import to_jax
from jaxseek.checkpoint_files import read_manifest
from jaxseek.config import ModelConfig
from jaxseek.errors import UserError
from jaxseek.presets import load_preset
from jaxseek.run_file import load_config
from jaxseek.train.cli import parse_arguments
from jaxseek.train.pretrained import open_pretrained
from tests.convert.folders import with_vocabulary, write_folder, write_weights
from tests.tiny import TINY
from tests.train.runs import contents, losses, main_with, make_base, metrics, run

ROOT = Path(__file__).parents[2]
MODEL = dataclasses.replace(with_vocabulary(TINY["v3"]), num_nextn_predict_layers=1)
LLAMA = with_vocabulary(TINY["coder"])
# What a config.json does not hold, or holds wrongly in the releases.
SAME = {"initializer_range": ModelConfig.__dataclass_fields__["initializer_range"].default}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Text, `hf`, the same model as `jax`, and `bare`, a Llama without a tokenizer."""
    base = make_base(tmp_path_factory.mktemp("base"))
    write_folder(base / "hf", MODEL, tokenizer=True, fp8=True, mtp=True, shards=2)
    (base / "hf" / "LICENSE").write_text("free")
    (base / "hf" / "generation_config.json").write_text('{"temperature": 0.6}')
    to_jax(base / "hf", base / "jax")
    write_folder(base / "bare", LLAMA)
    return base


def words(base: Path, model: str | Path, *more: object, **changes: object) -> list[str]:
    """The command line of two steps."""
    settings = {
        "mesh": "3x1",
        "steps": 2,
        "batch": 6,
        "seq-len": 16,
        "dtype": "float32",
        "eval.sequences": 6,
        "data.validation_fraction": 0.3,
        "data.source": base / "text",
        "optim.warmup_steps": 0,
    } | changes
    given = ["--model", model, *more]
    for key, value in settings.items():
        given += [f"--{key}", value]
    return list(map(str, given))


@pytest.fixture(scope="module")
def trained(base) -> Path:
    """The run folder of two steps from `hf`, whose folder is gone."""
    gone = Path(shutil.copytree(base / "hf", base / "gone"))
    with (base / "said.txt").open("w") as out, contextlib.redirect_stdout(out):
        run(*words(base, gone, "--out", base / "run", "--stop-after", 1))
    shutil.rmtree(gone)
    return base / "run"


def parse(*line: object):
    return parse_arguments(list(map(str, line))).run


def metadata(folder: Path, step: int) -> dict:
    return read_manifest(folder / "checkpoints" / str(step)).metadata


def test_a_hugging_face_folder_gives_model_weights_and_tokenizer(base, monkeypatch):
    monkeypatch.chdir(base)
    got = parse("--model", "hf", "--seq-len", 64)
    assert got.model == dataclasses.replace(MODEL, **SAME)
    assert (got.init_from, got.data.tokenizer) == (str(base / "hf"), str(base / "hf"))


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/0"])
def test_a_converted_model_gives_model_weights_and_tokenizer(base, below):
    got = parse("--model", base / "jax" / below, "--seq-len", 64)
    assert got.model == dataclasses.replace(MODEL, **SAME)
    assert got.init_from == str(base / "jax" / below)
    assert got.data.tokenizer == str(base / "jax" / "hf")


def test_a_run_gives_its_own_tokenizer_where_its_weights_came_from_nowhere(base, tmp_path):
    made = Path(shutil.copytree(base / "jax", tmp_path / "run"))
    (made / "hf").rename(made / "tokenizer")
    assert parse("--model", made, "--seq-len", 64).data.tokenizer == str(made / "tokenizer")


def test_a_step_that_was_copied_elsewhere_takes_no_tokenizer_of_its_neighbours(base, tmp_path):
    shutil.copytree(base / "jax" / "checkpoints" / "0", tmp_path / "copies" / "0")
    shutil.copytree(base / "hf", tmp_path / "hf")
    for folder in (tmp_path / "copies", tmp_path / "copies" / "0"):
        with pytest.raises(UserError, match=r"has no tokenizer\.json"):
            parse("--model", folder, "--seq-len", 64)
        got = parse("--model", folder, "--seq-len", 64, "--data.tokenizer", base / "hf")
        assert got.model == dataclasses.replace(MODEL, **SAME)


def test_flags_override_what_the_folder_says(base):
    got = parse(
        "--model", base / "hf", "--model.max_position_embeddings", 64, "--seq-len", 64,
        "--data.tokenizer", "mine.json",
    )  # fmt: skip
    assert got.model == dataclasses.replace(MODEL, max_position_embeddings=64, **SAME)
    assert got.data.tokenizer == "mine.json"


def test_a_run_file_may_name_a_folder_which_a_flag_replaces_with_all_that_came_of_it(
    base, tmp_path
):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {base / 'hf'}\nseq_len: 64\n")
    got = parse("--config", file)
    assert got == parse("--model", base / "hf", "--seq-len", 64)
    assert parse("--config", file, "--model", base / "jax").data.tokenizer == str(base / "jax/hf")
    fresh = parse("--config", file, "--model", "small-v3")
    assert (fresh.model, fresh.init_from, fresh.data.tokenizer) == (
        load_preset("small-v3"), None, None,
    )  # fmt: skip


def test_the_weights_of_a_folder_may_be_left_out(base):
    got = parse("--model", base / "hf", "--init-from", "null", "--seq-len", 64)
    assert (got.init_from, got.data.tokenizer) == (None, None)


def test_weights_may_be_given_without_their_model(base):
    got = parse("--init-from", base / "hf", "--model", base / "model.yaml", "--seq-len", 64)
    assert got.model == load_preset(str(base / "model.yaml"))
    assert (got.init_from, got.data.tokenizer) == (str(base / "hf"), str(base / "hf"))


@pytest.mark.parametrize("folder", ["hf", "jax"])
def test_reading_the_settings_of_a_folder_starts_no_jax(base, folder):
    program = (
        "import sys\n"
        "from jaxseek.train.cli import parse_arguments\n"
        f"parse_arguments(['--model', {str(base / folder)!r}, '--seq-len', '64'])\n"
        "assert not {'jax', 'transformers', 'torch', 'tensorstore'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_from_the_folder_equals_one_from_its_conversion(base, trained, capsys):
    run(*words(base, base / "jax", "--out", base / "other", "--stop-after", 1))
    said = capsys.readouterr().out.replace("\n", " ")
    assert "step 0" in said and "MTP layers are not trained" in said
    assert losses(base / "other") == losses(trained)
    assert metadata(base / "other", 1)["source"] == metadata(trained, 1)["source"]


def test_the_console_says_what_is_loaded(base, trained):
    said = " ".join((base / "said.txt").read_text().split())
    assert f"weights of {base / 'gone'}: 2 files" in said
    assert "FP8 tensors are dequantised" in said and "tensors of MTP layers are not trained" in said
    assert "loaded in" in said


def test_a_run_goes_on_when_the_folder_it_started_from_is_gone(base, trained, tmp_path):
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    run("--resume", folder)
    assert len(losses(folder)) == 2
    assert metadata(folder, 2)["source"] == metadata(trained, 1)["source"]
    config = load_config(folder / "config.yaml")
    assert (config.init_from, config.data.tokenizer) == (str(base / "gone"), str(base / "gone"))


def test_the_checkpoint_says_where_the_weights_came_from_and_in_what_dtypes(base, trained):
    source = metadata(trained, 1)["source"]
    assert source["config"] == json.loads((base / "hf" / "config.json").read_text())
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert source["dtypes"] == {"default": "BF16", "exceptions": {bias: "F32"}}


def test_the_run_folder_holds_the_other_files_of_the_folder(trained):
    assert {path.name for path in (trained / "hf").iterdir()} == {
        "LICENSE", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_the_tokenizer_of_the_folder_is_left_out_where_the_run_uses_another(base, tmp_path):
    other = json.loads((base / "hf" / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(other, indent=1))

    def carried(model: str, tokenizer: Path) -> set[str]:
        given = parse(*words(base, base / model, "--data.tokenizer", tokenizer))
        return {file.name for file in open_pretrained(given).files_for(given.data.tokenizer)}

    for tokenizer in (tmp_path, tmp_path / "tokenizer.json"):
        assert carried("hf", tokenizer) == {"LICENSE", "generation_config.json"}
    for tokenizer in (base / "hf", base / "hf" / "tokenizer.json"):
        assert carried("hf", tokenizer) == carried("jax", tokenizer) == {
            "LICENSE", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        }  # fmt: skip
        assert carried("bare", tokenizer) == set()


def test_a_trained_run_exports_with_the_tokenizer_and_dtypes_of_the_folder(base, trained):
    to_hf(trained, base / "exported")
    names = {path.name for path in (base / "exported").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "LICENSE",
    }  # fmt: skip
    tensors = read_header(base / "exported" / "model.safetensors")
    assert tensors.keys() == hf_tensors(MODEL).keys()
    assert {n.rsplit(".", 1)[1]: t.dtype for n, t in tensors.items()} == {
        "weight": "BF16", "e_score_correction_bias": "F32",
    }  # fmt: skip


def test_a_run_from_an_export_begins_at_the_loss_where_the_exported_run_ended(
    base, trained, tmp_path
):
    to_hf(trained, tmp_path / "hf", dtype="float32")
    run(*words(base, tmp_path / "hf", "--out", tmp_path / "run", "--stop-after", 1))
    before, after = (
        [line["val_loss"] for line in metrics(folder) if "val_loss" in line]
        for folder in (trained, tmp_path / "run")
    )
    assert before[0] != before[-1] == after[0]


def damaged(folder: Path) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def other_tensors(folder: Path) -> Path:
    tensors = write_folder(folder, LLAMA)
    write_weights(folder, {name: x for name, x in tensors.items() if "layers.1" not in name})
    return folder


def changed_bytes(base: Path, folder: Path) -> Path:
    shutil.copytree(base / "jax", folder)
    file = next((folder / "checkpoints/0/state").rglob("c/0/0*"))
    file = file if file.is_file() else next(path for path in file.rglob("*") if path.is_file())
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    return folder


def interrupted(base: Path, folder: Path) -> Path:
    shutil.copytree(base / "jax", folder)
    (folder / "checkpoints" / "0" / "jaxseek.json").unlink()
    return folder


def with_model_type(folder: Path, model_type: str) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    return folder


def bare(folder: Path) -> Path:
    write_folder(folder, LLAMA)
    return folder


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


MISTAKES = {
    "empty folder": (lambda base, new: [empty(new)], "has no config.json"),
    "a file": (lambda base, new: [base / "hf/model-00001-of-00002.safetensors"], "is a file"),
    "nowhere": (lambda base, new: [new], "there is no such folder"),
    "a name of the Hub": (lambda base, new: ["deepseek-ai/none"], "are not downloaded here"),
    "config.json itself": (lambda base, new: [base / "hf/config.json"], "give the .* folder"),
    "no tokenizer": (lambda base, new: [base / "bare"], "no tokenizer.json.*--data.tokenizer"),
    "another family": (lambda base, new: [with_model_type(bare(new), "gpt2")], "'gpt2' is not"),
    "a later family": (
        lambda base, new: [with_model_type(bare(new), "deepseek_v4")],
        "DeepSeek-V4, is not supported yet",
    ),
    "weights cut short": (lambda base, new: [damaged(bare(new))], "model.safetensors"),
    "weights missing": (
        lambda base, new: [other_tensors(new), "--data.tokenizer", base / "hf"],
        r"model.layers.1.mlp.down_proj.weight: missing",
    ),
    "weights changed": (
        lambda base, new: [changed_bytes(base, new)],
        "these files have changed since they were written: state/",
    ),
    "another width": (
        lambda base, new: [base / "hf", "--model.hidden_size", 48],
        r"init_from .*model.norm.weight: shape \(40,\), needed \(48,\)",
    ),
    "another width of a conversion": (
        lambda base, new: [base / "jax", "--model.hidden_size", 48],
        r"init_from .*model.norm.weight: shape \(40,\), needed \(48,\)",
    ),
    "fewer layers": (
        lambda base, new: [base / "hf", "--model.num_hidden_layers", 1],
        "layers.1.self_attn.o_proj.weight: not a tensor of this model",
    ),
    "twice the heads of half the size": (
        lambda base, new: [
            base / "bare", "--data.tokenizer", base / "hf", "--model.head_dim", 4,
            "--model.num_attention_heads", 8, "--model.num_key_value_heads", 4,
        ],
        r"q_proj.weight: holds .* of \(40, 2, 2, 8\) in the folder, .* \(40, 4, 2, 4\) are needed",
    ),
    "weights of another family": (
        lambda base, new: [base / "model.yaml", "--init-from", base / "bare",
                           "--data.tokenizer", base / "hf"],
        "model_type is 'llama', that of the run is 'deepseek_v3'",
    ),
    "weights from nowhere": (
        lambda base, new: [base / "model.yaml", "--init-from", new], "--init-from: .* no folder",
    ),
    "an interrupted conversion": (
        lambda base, new: [interrupted(base, new)],
        "no complete checkpoint of jaxseek. Complete steps: none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_end_with_code_2_one_message_and_no_run_folder(
    mistake, base, tmp_path, monkeypatch, capsys
):
    make, message = MISTAKES[mistake]
    model, *more = make(base, tmp_path / "model")
    before = contents(base), contents(tmp_path)
    code = main_with(monkeypatch, *words(base, model, *more, "--out", tmp_path / "out"))
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("jaxseek.train: error: ")
    assert error.count("error:") == 1 and "Traceback" not in error
    assert re.search(message, error, re.DOTALL), error
    assert (contents(base), contents(tmp_path)) == before and not (tmp_path / "out").exists()


def test_a_preset_and_a_folder_of_one_name_are_told_apart(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base / "hf", "deepseek-v3")
    with pytest.raises(UserError, match=r"a preset and a folder too; write \./deepseek-v3"):
        parse("--model", "deepseek-v3")
    assert parse("--model", "./deepseek-v3").init_from == str(tmp_path / "deepseek-v3")
