"""`python -m convert inspect`: what it says, and that it reads headers only."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from convert.files import hf_folder
from convert.progress import human_bytes
from convert.to_jax import to_jax
from jaxseek.model import parameter_count
from tests.convert.folders import main_with, tensor_shapes, with_vocabulary, write_folder
from tests.tiny import TINY

V3_WITH_MTP = dataclasses.replace(TINY["v3"], num_nextn_predict_layers=1)


@pytest.fixture
def inspected(monkeypatch, capfd):
    """What `inspect` prints on stdout; the exit code must be 0."""

    def run(folder: Path) -> str:
        code = main_with(monkeypatch, "inspect", folder)
        out, err = capfd.readouterr()
        assert (code, err) == (0, "")
        return out

    return run


@pytest.fixture
def refusal(monkeypatch, capfd):
    """The one message on stderr; nothing may be on stdout, and the exit code must be 2."""

    def run(folder: Path) -> str:
        code = main_with(monkeypatch, "inspect", folder)
        out, err = capfd.readouterr()
        assert (code, out) == (2, "")
        return err

    return run


@pytest.mark.parametrize("family", TINY)
def test_every_family_is_named_with_its_parameters(family, tmp_path, inspected):
    config = TINY[family]
    write_folder(tmp_path, config)
    out = inspected(tmp_path)
    assert f"{config.model_type} (" in out
    assert f"{parameter_count(config):,}" in out
    assert f"{config.num_attention_heads} heads of {config.attention_head_dim}" in out
    assert ("8 of width 12, 3 per token" in out) == config.is_moe
    assert ("1 dense, 1 with experts" in out) == config.is_moe
    assert ("latent (MLA)" in out) == config.is_mla


def test_parameters_that_a_token_meets_are_those_of_its_experts(tmp_path, inspected):
    config = TINY["v2"]
    write_folder(tmp_path, config)
    shapes = tensor_shapes(config)
    unused = sum(
        shape[0] * shape[1]
        for name, shape in shapes.items()
        for expert in range(config.num_experts_per_tok, config.n_routed_experts)
        if f".experts.{expert}." in name
    )
    assert f"{parameter_count(config) - unused:,} of them for each token" in inspected(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
def test_no_weight_is_read(shards, tmp_path, inspected, monkeypatch):
    # Router biases and a head that repeats its embedding are what other commands look at.
    config = dataclasses.replace(V3_WITH_MTP, tie_word_embeddings=True)
    write_folder(tmp_path, config, fp8=True, mtp=True, shards=shards)
    before = inspected(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        size = file.stat().st_size
        with file.open("rb") as opened:
            header = 8 + int.from_bytes(opened.read(8), "little")
        os.truncate(file, header)
        os.truncate(file, size)  # a hole where the values were
    monkeypatch.setattr(hf_folder.HFFolder, "view", lambda *_: pytest.fail("a weight was read"))
    assert inspected(tmp_path) == before


def test_dtypes_are_counted(tmp_path, inspected):
    tensors = write_folder(tmp_path, TINY["v3"], dtype="mixed")
    rows = [line.split() for line in inspected(tmp_path).splitlines()]
    counts = {row[0]: (row[1], row[2]) for row in rows if row and row[0] in ("BF16", "F32", "F16")}
    for name, dtype in (("BF16", "bfloat16"), ("F32", "float32"), ("F16", "float16")):
        arrays = [array for array in tensors.values() if array.dtype == dtype]
        size = sum(array.size for array in arrays)
        assert counts[name] == (str(len(arrays)), f"{size:,}")


@pytest.mark.parametrize("options", [{}, {"dtype": "mixed"}, {"fp8": True, "mtp": True}])
def test_the_size_after_conversion_is_foretold(options, tmp_path, inspected):
    write_folder(tmp_path / "hf", V3_WITH_MTP, **options)
    out = inspected(tmp_path / "hf")
    to_jax(tmp_path / "hf", tmp_path / "jax")
    state = tmp_path / "jax" / "checkpoints" / "0" / "state"
    size = sum(file.stat().st_size for file in state.glob("*/c/**/*") if file.is_file())
    mtp = tmp_path / "jax" / "checkpoints" / "0" / "mtp.safetensors"
    if mtp.exists():
        with mtp.open("rb") as file:
            size += mtp.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    assert f"to-jax       {human_bytes(size)} (" in out


def test_the_training_state_is_reckoned(tmp_path, inspected):
    write_folder(tmp_path, TINY["qwen2"])
    parameters = parameter_count(TINY["qwen2"])
    out = inspected(tmp_path)
    assert f"{human_bytes(12 * parameters)} of state" in out
    assert "12 bytes a parameter; with float32 gradients 16" in out
    assert human_bytes(16 * parameters) in out


def test_fp8_and_mtp_are_explained(tmp_path, inspected):
    write_folder(tmp_path, V3_WITH_MTP, fp8=True, mtp=True, shards=2)
    out = inspected(tmp_path)
    assert "become bfloat16" in out
    assert "blocks of 16 x 24" in out
    assert "1 more for multi-token prediction (MTP)" in out
    assert "44 tensors of MTP layers (from layer 2 on) are kept for the way back" in out
    assert "2 files (safetensors)" in out


def test_mtp_layers_that_only_the_config_has_are_mentioned(tmp_path, inspected):
    write_folder(tmp_path, V3_WITH_MTP)
    assert "MTP layers: config.json names 1, the files hold none" in inspected(tmp_path)


def test_a_head_that_repeats_its_embedding_is_left_out(tmp_path, inspected):
    write_folder(tmp_path, TINY["llama"])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"tie_word_embeddings": True}
    file.write_text(json.dumps(config))
    assert "left out     lm_head.weight" in inspected(tmp_path)


def test_tokenizer_and_template_are_found_or_missed(tmp_path, inspected):
    write_folder(tmp_path, with_vocabulary(TINY["llama"]))
    assert "training needs tokenizer.json" in inspected(tmp_path)
    write_folder(tmp_path, with_vocabulary(TINY["llama"]), tokenizer=True)
    out = inspected(tmp_path)
    assert "tokenizer.json, tokenizer_config.json; missing: generation_config.json, a chat" in out
    assert "training needs" not in out
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert "missing" not in inspected(tmp_path)


def test_a_template_within_the_tokenizer_config_counts(tmp_path, inspected):
    write_folder(tmp_path, with_vocabulary(TINY["llama"]), tokenizer=True)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ messages }}"}))
    assert "chat template" not in inspected(tmp_path)


def test_all_problems_of_a_folder_are_reported(tmp_path, refusal):
    write_folder(tmp_path, TINY["llama"])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"num_hidden_layers": 3, "intermediate_size": 45}
    file.write_text(json.dumps(config))
    message = refusal(tmp_path)
    assert "problems: 15" in message
    assert "model.layers.2.mlp.up_proj.weight: missing, needed with shape (45, 40)" in message
    assert "model.layers.0.mlp.down_proj.weight: shape (40, 44), needed (40, 45)" in message


def test_what_is_no_model_is_refused(tmp_path, refusal):
    assert "no config.json" in refusal(tmp_path)
    assert "does not exist" in refusal(tmp_path / "absent")
    (tmp_path / "file").touch()
    assert "is a file" in refusal(tmp_path / "file")


def test_a_converted_model_is_described(tmp_path, inspected):
    config = with_vocabulary(V3_WITH_MTP)
    write_folder(tmp_path / "hf", config, dtype="mixed", mtp=True, tokenizer=True)
    to_jax(tmp_path / "hf", tmp_path / "jax")
    out = inspected(tmp_path / "jax")
    assert "a checkpoint of jaxseek, step 0" in out
    assert "deepseek_v3 (" in out
    assert f"{parameter_count(config):,}" in out
    assert "came from    a Hugging Face folder" in out
    assert "optimizer    no state" in out
    assert "MTP          44 tensors kept" in out
    assert "tokenizer.json, tokenizer_config.json" in out
    for place in ("checkpoints", "checkpoints/0"):
        assert inspected(tmp_path / "jax" / place) == out


def test_optimizer_state_in_a_checkpoint_is_mentioned(tmp_path, inspected):
    write_folder(tmp_path / "hf", TINY["llama"])
    to_jax(tmp_path / "hf", tmp_path / "jax")
    file = tmp_path / "jax" / "checkpoints" / "0" / "jaxseek.json"
    manifest = json.loads(file.read_text())
    manifest["leaves"]["opt_state.mu"] = {"shape": [1], "dtype": "float32"}
    manifest["metadata"]["source"] = None
    file.write_text(json.dumps(manifest))
    out = inspected(tmp_path / "jax")
    assert "1 array beside the parameters" in out
    assert "came from    no other model" in out


def test_an_incomplete_checkpoint_is_refused(tmp_path, refusal):
    write_folder(tmp_path / "hf", TINY["llama"])
    to_jax(tmp_path / "hf", tmp_path / "jax")
    step = tmp_path / "jax" / "checkpoints" / "0"
    next(path for path in step.glob("state/*/c/**/0") if path.is_file()).unlink()
    assert "is missing" in refusal(step)
