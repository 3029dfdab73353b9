"""`ModelConfig`: what it derives from config.json's fields, and what it refuses."""

import pytest

from jaxseek.config import LATER_MODEL_TYPES, ModelConfig, RopeScaling
from jaxseek.errors import UserError

DENSE = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MLA = DENSE | {
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
EXPERTS = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
V3 = (
    MLA
    | EXPERTS
    | {
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
)


def test_dense_model_has_only_dense_layers_and_splits_hidden_size_over_heads():
    config = ModelConfig(**DENSE)
    assert (config.num_dense_layers, config.num_moe_layers) == (3, 0)
    assert (config.attention_head_dim, config.rope_dim) == (16, 16)
    assert not (config.is_mla or config.is_moe or config.uses_router_bias)


def test_given_head_dim_wins_over_the_split_of_hidden_size():
    config = ModelConfig(**DENSE | {"head_dim": 32, "hidden_size": 62})
    assert (config.attention_head_dim, config.rope_dim) == (32, 32)


def test_mla_head_is_nope_plus_rope_dims_and_only_the_latter_rotate():
    config = ModelConfig(**MLA)
    assert (config.attention_head_dim, config.rope_dim) == (24, 8)


def test_moe_layers_follow_the_first_dense_ones():
    config = ModelConfig(**V3)
    assert (config.num_dense_layers, config.num_moe_layers) == (1, 2)
    assert config.uses_router_bias


def test_model_without_any_dense_layer_is_all_experts():
    config = ModelConfig(**V3 | {"first_k_dense_replace": 0})
    assert (config.num_dense_layers, config.num_moe_layers) == (0, 3)


@pytest.mark.parametrize(
    ("model_type", "bias", "norm"),
    [("llama", False, False), ("qwen2", True, False), ("qwen3", False, True)],
)
def test_qwen2_has_qkv_bias_and_qwen3_has_qk_norm(model_type, bias, norm):
    config = ModelConfig(**DENSE | {"model_type": model_type})
    assert (config.has_qkv_bias, config.has_qk_norm) == (bias, norm)


@pytest.mark.parametrize("model_type", LATER_MODEL_TYPES)
def test_later_model_types_are_refused_by_name(model_type):
    with pytest.raises(UserError, match=f"{model_type}.*not supported yet"):
        ModelConfig(**DENSE | {"model_type": model_type})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: 'gpt2' is unknown; known are llama, qwen2"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"n_group": 0}, "n_group must be at least 1, got 0"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"eos_token_id": -1}, "eos_token_id must be at least 0, got -1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive, got 0.0"),
        ({"rope_theta": -1.0}, "rope_theta must be positive, got -1.0"),
        ({"aux_loss_alpha": -0.1}, "aux_loss_alpha must not be negative, got -0.1"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of"),
        ({"hidden_size": 62}, "hidden_size 62 is not a multiple of num_attention_heads 4"),
        ({"head_dim": 15}, "the rotated size of a head is 15"),
        ({"model_type": "deepseek_v2"}, "kv_lora_rank is needed by model_type 'deepseek_v2'"),
        ({"kv_lora_rank": 32}, "qk_nope_head_dim is needed where kv_lora_rank is given"),
        ({"model_type": "deepseek"}, "n_routed_experts is needed by model_type 'deepseek'"),
        ({"n_routed_experts": 8}, "num_experts_per_tok is needed where n_routed_experts"),
        (EXPERTS | {"num_experts_per_tok": 17}, "num_experts_per_tok 17 is larger than"),
        (EXPERTS | {"seq_aux": False}, "seq_aux must be true"),
    ],
)
def test_impossible_dense_or_moe_shapes_are_refused_by_key(fields, message):
    with pytest.raises(UserError, match=message):
        ModelConfig(**DENSE | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_group": 3}, "n_group 3 does not divide n_routed_experts 16"),
        ({"topk_group": 5}, "topk_group 5 must be between 1 and n_group 4"),
        ({"topk_group": 1, "num_experts_per_tok": 5}, "larger than the 4 experts of topk_group 1"),
    ],
)
def test_impossible_expert_groups_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        ModelConfig(**V3 | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported; known are linear"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be at least 1, got 0.5"),
        ({"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings is needed"),
        (
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
            "low_freq_factor is needed by rope_type 'llama3'",
        ),
    ],
)
def test_impossible_rope_scaling_is_refused_by_key(fields, message):
    with pytest.raises(UserError, match=message):
        RopeScaling(**fields)
