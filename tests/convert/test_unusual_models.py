"""Models at the edges of the family, and folders that lack what only their config.json promises."""

import dataclasses
import json

import numpy as np
import pytest

from convert.to_hf import to_hf
from convert.to_jax import to_jax
from tests.convert.folders import write_folder, write_weights
from tests.convert.test_conversion import (
    assert_same_bits,
    edit_config,
    read_folder,
    refused,
    there_and_back,
)
from tests.tiny import TINY

SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "one layer": ("llama", {"num_hidden_layers": 1}),
    "a vocabulary of one": ("qwen2", {"vocab_size": 1}),
    "no dense layer": ("v3", {"first_k_dense_replace": 0}),
    "dense layers only": ("v3", {"first_k_dense_replace": 2}),
    "no shared experts": ("v2-lite", {"n_shared_experts": 0}),
    "one expert": ("moe-16b", {"n_routed_experts": 1, "num_experts_per_tok": 1}),
    "numbers of two digits": ("v3", {"num_hidden_layers": 64, "num_nextn_predict_layers": 2}),
}


@pytest.mark.parametrize("size", SIZES)
def test_models_of_unusual_sizes_come_back_bit_for_bit(size, tmp_path):
    family, changes = SIZES[size]
    config = dataclasses.replace(TINY[family], **changes)
    mtp = config.num_nextn_predict_layers > 0
    tensors = write_folder(tmp_path / "hf", config, mtp=mtp)
    assert_same_bits(there_and_back(tmp_path / "hf", tmp_path), tensors)


def test_a_shard_for_every_tensor_is_the_most_there_are(tmp_path):
    tensors = write_folder(tmp_path / "hf", TINY["v3"])
    to_jax(tmp_path / "hf", tmp_path / "jax")
    to_hf(tmp_path / "jax", tmp_path / "back", shard_size=1)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) == len(tensors)
    assert_same_bits(read_folder(tmp_path / "back"), tensors)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("llama", "model.embed_tokens.weight"),
        ("llama", "lm_head.weight"),
        ("v2-lite", "model.layers.0.self_attn.q_proj.weight"),  # q_lora_rank is null
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),  # which config.json does not mention
        ("v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("v3", "model.layers.1.mlp.experts.7.down_proj.weight"),
    ],
)
def test_a_tensor_that_is_missing_is_never_made_up(family, missing, tmp_path):
    tensors = write_folder(tmp_path / "hf", TINY[family])
    del tensors[missing]
    write_weights(tmp_path / "hf", tensors)
    refused(tmp_path, f"{missing}: missing, needed with shape")


def test_a_tensor_of_size_zero_is_refused(tmp_path):
    tensors = write_folder(tmp_path / "hf", TINY["llama"])
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:0]
    write_weights(tmp_path / "hf", tensors)
    refused(tmp_path, r"model\.norm\.weight: shape \(0,\), needed \(40,\)")


@pytest.mark.parametrize(("claimed", "stored"), [("bfloat16", "F32"), ("float32", "BF16")])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_that_config_json_claims_casts_nothing(key, claimed, stored, tmp_path):
    tensors = write_folder(tmp_path / "hf", TINY["llama"], dtype=stored)
    edit_config(tmp_path / "hf", dtype=None, torch_dtype=None)
    edit_config(tmp_path / "hf", **{key: claimed})
    assert_same_bits(there_and_back(tmp_path / "hf", tmp_path), tensors)


def test_no_dtype_is_inferred_from_the_first_tensor(tmp_path):
    tensors = write_folder(tmp_path / "hf", TINY["v3"])
    first = next(iter(tensors))
    tensors[first] = tensors[first].astype(np.float32)
    write_weights(tmp_path / "hf", tensors)
    assert_same_bits(there_and_back(tmp_path / "hf", tmp_path), tensors)


def test_a_model_type_is_enough_and_an_export_names_the_class(tmp_path):
    write_folder(tmp_path / "hf", TINY["v3"])
    edit_config(tmp_path / "hf", architectures=None)
    there_and_back(tmp_path / "hf", tmp_path)
    exported = json.loads((tmp_path / "back" / "config.json").read_text())
    assert exported["architectures"] == ["DeepseekV3ForCausalLM"]


def test_an_export_says_what_transformers_would_compute_otherwise(tmp_path):
    write_folder(tmp_path / "hf", dataclasses.replace(TINY["v2"], norm_topk_prob=True))
    to_jax(tmp_path / "hf", tmp_path / "jax")
    notes = to_hf(tmp_path / "jax", tmp_path / "back").notes
    assert any(note.startswith("norm_topk_prob is True; the 'deepseek_v2' class") for note in notes)


def test_a_llama_distill_is_no_deepseek_v3(tmp_path):
    write_folder(tmp_path / "hf", TINY["v3"])
    tensors = write_folder(tmp_path / "llama", TINY["llama-distill"])
    write_weights(tmp_path / "hf", tensors)
    refused(tmp_path, r"do not fit the config \(model_type 'deepseek_v3'.*k_proj\.weight: not a t")
