"""`config.json` as the releases, transformers and other tools write it."""

import pytest

from convert.hf_config import model_config_from_hf
from jaxseek.config import RopeScaling
from jaxseek.errors import UserError
from jaxseek.presets import load_preset

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32256,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-06,
    "bos_token_id": 32013,
    "eos_token_id": 32014,
    "tie_word_embeddings": False,
}
CODER = LLAMA | {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "rope_scaling": {"factor": 4.0, "type": "linear"},
    "rope_theta": 100000,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.1",
    "use_cache": True,
}
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3 = V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attn_factor": 0.8782488562869419,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "rope_type": "yarn",
    },
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def without(config: dict, *keys: str) -> dict:
    return {key: value for key, value in config.items() if key not in keys}


def with_rope_parameters(config: dict) -> dict:
    """`config` with rope as transformers 5 writes it after reading an old file."""
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    if "type" in scaling:
        scaling = scaling | {"rope_type": scaling["type"]}
    rope = {"rope_theta": float(config["rope_theta"]), **scaling}
    return without(config, "rope_theta", "rope_scaling") | {"rope_parameters": rope}


@pytest.mark.parametrize(
    ("hub", "preset"),
    [
        (CODER, "deepseek-coder-6.7b"),
        (QWEN3, "deepseek-r1-0528-qwen3-8b"),
        (V2_LITE, "deepseek-v2-lite"),
        (V3, "deepseek-v3"),
        (
            V2_LITE | {"rope_scaling": None, "max_position_embeddings": 4096},
            "deepseek-esft-lite",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hub_file_and_its_re_save_give_the_preset(hub, preset):
    assert model_config_from_hf(hub) == load_preset(preset)
    assert model_config_from_hf(with_rope_parameters(hub)) == load_preset(preset)


def test_v3_as_the_class_of_transformers_writes_it():
    """Left out are what it takes for granted; its head_dim is the rope dim."""
    saved = without(V3, "scoring_func", "topk_method", "moe_layer_freq", "ep_size", "auto_map")
    saved |= {"head_dim": 64, "qk_head_dim": 192, "rope_interleave": True, "dtype": "bfloat16"}
    saved |= {"output_router_logits": False, "pad_token_id": None}
    assert model_config_from_hf(with_rope_parameters(saved)) == load_preset("deepseek-v3")


# Rope, of which old and new keys are read, and which is never guessed.
YARN = RopeScaling(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096)
YARN_KEYS = {"factor": 40, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("keys", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 50000}, 50000.0, None),
        ({"rope_theta": 50000, "rope_scaling": None}, 50000.0, None),
        ({"rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}}, 50000.0, None),
        ({"rope_theta": 5e4, "rope_parameters": {"rope_type": "default"}}, 50000.0, None),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **YARN_KEYS}}, 1e4, YARN),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", **YARN_KEYS}}, 1e4, YARN),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "yarn", **YARN_KEYS},
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN_KEYS},
            },
            1e4,
            YARN,
        ),
    ],
)
def test_rope_is_read_from_old_and_new_keys(keys, theta, scaling):
    config = model_config_from_hf(LLAMA | keys)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}},
            "rope_parameters.rope_theta is 50000.0, rope_theta is 10000.0",
        ),
        (
            {
                "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            "contradicts itself: rope_parameters is .*4.0.* rope_scaling is .*2.0",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_theta is nowhere"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is nowhere"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "rope_type": "linear"}},
            "one rope_type",
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"factor": 4.0}}, "one rope_type"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor is needed"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "rope_scaling.rope_type: 'dynamic' is not supported",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0, "attn": 2}},
            "rope_scaling.attn: unknown",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": "4"}},
            "rope_scaling.factor: needed is a value of type float, got '4'",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "truncate": False, **YARN_KEYS}},
            "rope_scaling.truncate: only True is supported",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling must be a mapping"),
        ({"rope_theta": True}, "rope_theta: needed is a value of type float, got True"),
    ],
)
def test_rope_that_is_contradictory_incomplete_or_unknown_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        model_config_from_hf(LLAMA | keys)


def test_a_deepseek_model_with_a_latent_is_a_v2():
    """The first public revision of DeepSeek-V2-Chat has MoE-16B's names."""
    named = V2_LITE | {"model_type": "deepseek", "architectures": ["DeepseekForCausalLM"]}
    assert model_config_from_hf(named) == model_config_from_hf(V2_LITE)


@pytest.mark.parametrize("latent", [{}, {"q_lora_rank": None, "kv_lora_rank": None}])
def test_a_deepseek_model_without_a_latent_is_a_moe_16b(latent):
    mla = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    config = model_config_from_hf(
        without(V2_LITE, *mla, "n_group", "topk_group", "routed_scaling_factor", "rope_scaling")
        | {"model_type": "deepseek", "num_hidden_layers": 28, "max_position_embeddings": 4096}
        | latent
    )
    assert config == load_preset("deepseek-moe-16b")


def test_the_old_misspelling_of_greedy_is_read():
    assert model_config_from_hf(V2_LITE | {"topk_method": "gready"}).topk_method == "greedy"


@pytest.mark.parametrize(
    ("model_type", "extra", "name"),
    [
        ("deepseek_v32", {"index_topk": 2048}, "DeepSeek-V3.2"),
        ("deepseek_v3", {"index_topk": 2048}, "DeepSeek-V3.2"),
        ("deepseek_v4", {"compress_ratios": [0, 4]}, "DeepSeek-V4"),
        ("deepseek_v41", {"text_config": {"model_type": "deepseek_v41_text"}}, "DeepSeek-V4.1"),
    ],
)
def test_later_models_are_refused_by_name(model_type, extra, name):
    with pytest.raises(UserError, match=f"'{model_type}', {name}.* is not supported yet"):
        model_config_from_hf(V3 | {"model_type": model_type} | extra)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (without(V3, "model_type"), "lacks model_type"),
        (V3 | {"model_type": "mixtral"}, "'mixtral' is not supported; supported are llama"),
        (V3 | {"new_trick": 3}, r"new_trick: unknown, and may change the mathematics \(3\)"),
        (LLAMA | {"n_routed_experts": 8}, "n_routed_experts: unknown"),
        (LLAMA | {"attention_bias": True}, "attention_bias: only False is supported, got True"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias: only False"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act: only 'silu' is supported, got 'gelu'"),
        (QWEN3 | {"use_sliding_window": True}, "use_sliding_window: only False"),
        (QWEN3 | {"layer_types": ["sliding_attention"]}, "layer_types: only 'full_attention'"),
        (V2_LITE | {"moe_layer_freq": 2}, "moe_layer_freq: only 1 is supported, got 2"),
        (V2_LITE | {"topk_method": "random"}, "topk_method: 'random' is not supported"),
        (V2_LITE | {"kv_lora_rank": None}, "kv_lora_rank is needed"),
        (V2_LITE | {"kv_lora_rank": 512.5}, "kv_lora_rank: needed is a value of type int"),
        (without(V3, "n_group"), "lacks n_group"),
        (without(LLAMA, "vocab_size", "hidden_size"), "lacks hidden_size, vocab_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_read_safely_is_refused_with_the_key(config, message):
    with pytest.raises(UserError, match=message):
        model_config_from_hf(config)


def test_all_unknown_keys_and_values_are_named_at_once():
    with pytest.raises(UserError) as error:
        model_config_from_hf(V3 | {"zeta": 1, "alpha": 2, "hidden_act": "relu"})
    named = [line.split(":")[0] for line in str(error.value).splitlines()[1:]]
    assert named == ["alpha", "hidden_act", "zeta"]


@pytest.mark.parametrize(
    "change",
    [
        {"torch_dtype": None, "dtype": "float32"},
        {"quantization_config": None},
        {"architectures": None},
        {"initializer_range": 0.5},
        {"unknown_but_null": None},
        {"head_dim": 64},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_does_not_touch_the_mathematics_changes_nothing(change):
    assert model_config_from_hf(V3 | change) == model_config_from_hf(V3)


def test_null_groups_and_a_list_of_end_tokens_are_read():
    groups = {"n_group": None, "topk_group": None, "eos_token_id": [100001, 100015]}
    assert model_config_from_hf(V2_LITE | groups) == model_config_from_hf(V2_LITE)


def test_key_value_heads_default_to_the_query_heads():
    config = model_config_from_hf(without(LLAMA, "num_key_value_heads"))
    assert config.num_key_value_heads == 32
    assert config == model_config_from_hf(LLAMA)
