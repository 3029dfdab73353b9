"""The name table by itself; tests/parity has what transformers computes with these names."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from convert.names import hf_tensors, params_from_hf, params_to_hf
from jaxseek.config import ModelConfig
from jaxseek.errors import UserError
from jaxseek.layout import flatten_paths
from jaxseek.model import parameter_count, split
from jaxseek.presets import load_preset, preset_names
from tests.tiny import TINY

# Stacks of more than one layer; the head size makes q_proj of "llama" square.
MODELS = {name: dataclasses.replace(config, num_hidden_layers=4) for name, config in TINY.items()}
LAYOUTS = ("separate", "fused")


def random_tensors(config: ModelConfig, *, experts="separate") -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, no two values alike."""
    rng = np.random.default_rng(0)
    tensors = hf_tensors(config, experts=experts)
    return {name: rng.random(t.shape, dtype=np.float32) for name, t in tensors.items()}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.mark.parametrize("experts", LAYOUTS)
@pytest.mark.parametrize("family", MODELS)
def test_parameters_come_back_bit_for_bit(family, experts):
    config = MODELS[family]
    params = params_from_hf(config, random_tensors(config))
    specs = flatten_paths(split(config)[1])
    assert {path: leaf.shape for path, leaf in flatten_paths(params).items()} == {
        path: spec.shape for path, spec in specs.items()
    }
    tensors = params_to_hf(config, params, experts=experts)
    assert_equal(flatten_paths(params_from_hf(config, tensors)), flatten_paths(params))


@pytest.mark.parametrize("experts", LAYOUTS)
@pytest.mark.parametrize("family", MODELS)
def test_tensors_come_back_bit_for_bit_and_contiguous(family, experts):
    config = MODELS[family]
    tensors = random_tensors(config, experts=experts)
    back = params_to_hf(config, params_from_hf(config, tensors), experts=experts)
    assert_equal(back, tensors)
    assert all(tensor.flags.c_contiguous for tensor in back.values())


@pytest.mark.parametrize("experts", LAYOUTS)
@pytest.mark.parametrize("name", [*preset_names(), *MODELS])
def test_the_tensors_of_a_model_hold_each_parameter_once(name, experts):
    config = MODELS[name] if name in MODELS else load_preset(name)
    tensors = hf_tensors(config, experts=experts).values()
    assert sum(math.prod(tensor.shape) for tensor in tensors) == parameter_count(config)
    slots = [(path, tensor.index) for tensor in tensors for path in tensor.paths]
    assert len(set(slots)) == len(slots)


@pytest.mark.parametrize("family", ["llama", "coder", "coder-mqa"])
def test_a_row_of_q_proj_is_a_query_head_counted_within_kv_heads_first(family):
    config = MODELS[family]
    tensors = random_tensors(config)
    params = params_from_hf(config, tensors)["dense_layers"]["self_attn"]
    kv_heads, head = config.num_key_value_heads, config.attention_head_dim
    group = config.num_attention_heads // kv_heads
    for kv_head, member, dim in [(0, 0, 1), (kv_heads - 1, group - 1, 0), (0, group - 1, head - 1)]:
        row = (kv_head * group + member) * head + dim
        q = tensors["model.layers.2.self_attn.q_proj.weight"][row]
        np.testing.assert_array_equal(params["q_proj"]["kernel"][2, :, kv_head, member, dim], q)
        o = tensors["model.layers.2.self_attn.o_proj.weight"][:, row]
        np.testing.assert_array_equal(params["o_proj"]["kernel"][2, kv_head, member, dim], o)


def test_layers_count_through_the_dense_stack_into_the_moe_stack():
    config = dataclasses.replace(MODELS["v3"], first_k_dense_replace=3)
    tensors = random_tensors(config)
    params = params_from_hf(config, tensors)
    np.testing.assert_array_equal(
        params["dense_layers"]["mlp"]["up_proj"]["kernel"][2],
        tensors["model.layers.2.mlp.up_proj.weight"].T,
    )
    np.testing.assert_array_equal(
        params["moe_layers"]["mlp"]["experts"]["down_proj"][0, 5],
        tensors["model.layers.3.mlp.experts.5.down_proj.weight"].T,
    )


def test_fused_experts_are_the_separate_ones_gate_rows_first():
    config = MODELS["moe-16b"]
    separate = random_tensors(config)
    fused = params_to_hf(config, params_from_hf(config, separate), experts="fused")
    layer = "model.layers.1.mlp.experts."
    gate, up = (separate[f"{layer}6.{name}_proj.weight"] for name in ("gate", "up"))
    np.testing.assert_array_equal(fused[layer + "gate_up_proj"][6], np.concatenate([gate, up]))
    down = separate[f"{layer}6.down_proj.weight"]
    np.testing.assert_array_equal(fused[layer + "down_proj"][6], down)


@pytest.mark.parametrize("experts", LAYOUTS)
@pytest.mark.parametrize("family", ["v3", "qwen2"])
def test_nothing_is_copied_on_the_way_into_the_stack(family, experts):
    config = MODELS[family]
    values = random_tensors(config, experts=experts)
    for name, tensor in hf_tensors(config, experts=experts).items():
        for part in tensor.to_parts(values[name]):
            assert part.shape == tensor.part_shape
            assert np.shares_memory(part, values[name])


def test_dtypes_are_kept_and_mixed_ones_widened():
    config = MODELS["v3"]
    tensors = random_tensors(config)
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    for name, tensor in tensors.items():
        if "bias" not in name and name != "model.layers.0.self_attn.o_proj.weight":
            tensors[name] = tensor.astype(bfloat16)
    params = flatten_paths(params_from_hf(config, tensors))
    assert params["embed_tokens.embedding"].dtype == bfloat16
    assert params["moe_layers.mlp.gate.e_score_correction_bias"].dtype == np.float32
    assert params["dense_layers.self_attn.o_proj.kernel"].dtype == np.float32
    assert params["moe_layers.self_attn.o_proj.kernel"].dtype == bfloat16


def test_a_tied_model_has_no_head():
    config = dataclasses.replace(MODELS["qwen2"], tie_word_embeddings=True)
    assert "lm_head.weight" not in hf_tensors(config)
    assert "lm_head" not in params_from_hf(config, random_tensors(config))


def test_buffers_of_old_files_and_mtp_layers_are_left_out():
    config = dataclasses.replace(MODELS["v3"], num_nextn_predict_layers=1)
    tensors = random_tensors(config)
    expected = flatten_paths(params_from_hf(config, tensors))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2)
    tensors["model.layers.4.eh_proj.weight"] = np.zeros((40, 80))
    tensors["model.layers.4.mlp.experts.0.up_proj.weight"] = np.zeros((12, 40))
    assert_equal(flatten_paths(params_from_hf(config, tensors)), expected)


@pytest.mark.parametrize(
    ("layer", "mtp_layers"), [(4, 0), (5, 1), (44, 1)], ids=["no-mtp", "beyond-mtp", "prefix"]
)
def test_layers_beyond_the_model_are_refused(layer, mtp_layers):
    config = dataclasses.replace(MODELS["v3"], num_nextn_predict_layers=mtp_layers)
    name = f"model.layers.{layer}.input_layernorm.weight"
    tensors = random_tensors(config) | {name: np.zeros(40, np.float32)}
    with pytest.raises(UserError, match=f"{name}: not a tensor of this model"):
        params_from_hf(config, tensors)


@pytest.mark.parametrize("experts", LAYOUTS)
def test_every_problem_is_reported_at_once_and_sorted(experts):
    config = MODELS["v3"]
    tensors = random_tensors(config, experts=experts)
    tensors["model.layers.9.extra"] = tensors.pop("lm_head.weight")
    norm = "model.layers.1.input_layernorm.weight"
    tensors[norm] = tensors[norm][:-1]
    expert = "model.layers.2.mlp.experts."
    expert += "3.down_proj.weight" if experts == "separate" else "down_proj"
    shape = tensors[expert].shape
    tensors[expert] = tensors[expert].swapaxes(-1, -2)
    with pytest.raises(UserError) as error:
        params_from_hf(config, tensors)
    assert str(error.value).splitlines()[1:] == [
        "lm_head.weight: missing, needed with shape (131, 40)",
        f"{norm}: shape (39,), needed (40,)",
        f"{expert}: shape {tensors[expert].shape}, needed {shape}",
        "model.layers.9.extra: not a tensor of this model",
    ]


def test_one_misnamed_expert_is_refused():
    config = MODELS["v2-lite"]
    tensors = random_tensors(config)
    name = "model.layers.3.mlp.experts.7.up_proj.weight"
    tensors[name.replace("up_proj", "w3")] = tensors.pop(name)
    with pytest.raises(UserError, match=r"up_proj\.weight: missing"):
        params_from_hf(config, tensors)


def test_a_file_of_foreign_names_gives_a_message_that_can_be_read():
    config = MODELS["v3"]
    tensors = {f"foreign.{name}": value for name, value in random_tensors(config).items()}
    with pytest.raises(UserError, match=f"problems: {2 * len(tensors)}") as error:
        params_from_hf(config, tensors)
    lines = str(error.value).splitlines()
    assert len(lines) == 102
    assert lines[-1] == f"... and {2 * len(tensors) - 100} more"
