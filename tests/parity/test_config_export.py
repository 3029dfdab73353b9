"""What transformers makes of the config.json we write: the same model as before, in either form."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig

from convert.hf_config import model_config_from_hf
from convert.hf_config_export import generation_config, hf_config, not_in_transformers
from jaxseek.presets import load_preset, preset_names
from tests.convert.hub_configs import HUB_CONFIGS
from tests.parity.oracle import FAMILIES, VARIANTS, build

COMPATS = ("4", "5", "both")
_UNSAID = {"transformers_version", "_name_or_path"}


@pytest.fixture(scope="module", params=(*FAMILIES, *VARIANTS))
def original(request) -> dict[str, Any]:
    """The `config.json` that transformers 5 writes of a family."""
    model, _ = build(request.param)
    if request.param == "moe-16b":
        config, name = model.model.config, "DeepseekForCausalLM"
    else:
        config, name = model.config, type(model).__name__
    config.dtype, config.architectures = torch.float32, [name]
    return json.loads(config.to_json_string(use_diff=False))


def as_jaxseek_reads(saved: dict[str, Any]) -> dict[str, Any]:
    """`saved` under the model type of MoE-16B, which has no class in transformers but a sibling."""
    if saved["model_type"] != "deepseek_ocr2_text":
        return saved
    read = {key: value for key, value in saved.items() if key != "mlp_layer_types"}
    dense = saved["mlp_layer_types"].count("dense")
    return read | {"model_type": "deepseek", "first_k_dense_replace": dense}


def old_keys(saved: dict[str, Any]) -> dict[str, Any]:
    """`saved` as transformers 4 would have written it."""
    old = {key: value for key, value in saved.items() if key not in ("dtype", "rope_parameters")}
    rope = dict(saved["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    scaling = None if kind == "default" else {"type": kind, **rope}
    return old | {"torch_dtype": saved["dtype"], "rope_theta": theta, "rope_scaling": scaling}


def read(written: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All that transformers knows after reading `written`, rope in its own terms."""
    if written["model_type"] == "deepseek":
        layers, dense = written["num_hidden_layers"], written["first_k_dense_replace"]
        kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
        given = {key: value for key, value in written.items() if key != "model_type"}
        config = DeepseekOcr2TextConfig(**given, mlp_layer_types=kinds)
    else:
        (folder / "config.json").write_text(json.dumps(written))
        config = transformers.AutoConfig.from_pretrained(folder)
    known = json.loads(config.to_json_string(use_diff=False))
    assert "rope_scaling" not in known
    assert "torch_dtype" not in known
    known["rope_parameters"] = normal_rope(known["rope_parameters"])
    return known


def normal_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """With the betas that are taken where none are given, and without the type's old name."""
    rope = dict(rope)
    assert rope.pop("type", rope["rope_type"]) == rope["rope_type"]
    betas = {"beta_fast": 32.0, "beta_slow": 1.0} if rope["rope_type"] == "yarn" else {}
    return betas | rope


@pytest.mark.parametrize("source", ["new keys", "old keys", "none"])
@pytest.mark.parametrize("compat", COMPATS)
def test_transformers_reads_the_same_model_from_what_we_write(original, source, compat, tmp_path):
    saved = as_jaxseek_reads(original)
    if source == "old keys":
        saved = old_keys(saved)
    config = model_config_from_hf(saved)
    written = hf_config(
        config, source=None if source == "none" else saved, dtype="F32", compat=compat
    )
    known = read(written, tmp_path)
    unsaid = _UNSAID | ({"initializer_range"} if source == "none" else set())
    for key in original.keys() - unsaid - {"rope_parameters"}:
        assert known[key] == original[key], key
    assert known["dtype"] == "float32"
    assert known["rope_parameters"] == normal_rope(original["rope_parameters"])
    assert model_config_from_hf(written) == config
    if source != "none":
        assert {key: written[key] for key in saved} == saved


@pytest.mark.parametrize("preset", [name for name in preset_names() if name != "deepseek-moe-16b"])
def test_presets_are_read_by_transformers_as_they_are(preset, tmp_path):
    config = load_preset(preset)
    assert not not_in_transformers(config)
    for compat in COMPATS:
        known = read(hf_config(config, source=None, dtype="BF16", compat=compat), tmp_path)
        assert known["dtype"] == "bfloat16"
        assert hasattr(transformers, known["architectures"][0])
        assert known["initializer_range"] == config.initializer_range
        back = model_config_from_hf(known)
        # transformers writes the head size of Llama out.
        assert back.attention_head_dim == config.attention_head_dim
        unread = {"head_dim": config.head_dim, "initializer_range": config.initializer_range}
        assert dataclasses.replace(back, **unread) == config


@pytest.mark.parametrize("compat", COMPATS)
@pytest.mark.parametrize("preset", [name for name in HUB_CONFIGS if name != "deepseek-moe-16b"])
def test_transformers_reads_a_release_the_same_before_and_after(preset, compat, tmp_path):
    hub = {key: value for key, value in HUB_CONFIGS[preset].items() if key != "auto_map"}
    before = read({k: v for k, v in hub.items() if k != "quantization_config"}, tmp_path)
    config = model_config_from_hf(hub)
    after = read(hf_config(config, source=hub, dtype="BF16", compat=compat), tmp_path)
    assert {key: after[key] for key in before} == before


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "moe-16b"])
def test_a_folder_with_our_config_gives_the_same_logits_bit_for_bit(name, tmp_path):
    model, config = build(name)
    model.save_pretrained(tmp_path)
    tokens = torch.arange(80)[None] % config.vocab_size
    saved = json.loads((tmp_path / "config.json").read_text())

    def logits(given: dict[str, Any]) -> torch.Tensor:
        (tmp_path / "config.json").write_text(json.dumps(given))
        generation = generation_config(config, source=given)
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert loaded.generation_config.eos_token_id == config.eos_token_id
        with torch.no_grad():
            return loaded(tokens).logits

    expected = logits(saved)
    assert expected.abs().max() > 1
    old = old_keys(saved)
    for source, compat in [(saved, "both"), (old, "both"), *((None, c) for c in COMPATS)]:
        written = hf_config(config, source=source, dtype="F32", compat=compat)
        assert torch.equal(logits(written), expected), (source, compat)
