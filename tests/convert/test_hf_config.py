"""`config.json` as the releases, transformers and other tools write it."""

import json

import pytest

from convert.hf_config import model_config_from_hf
from jaxseek.config import RopeScaling
from jaxseek.errors import UserError
from jaxseek.presets import load_preset
from tests.convert.hub_configs import (
    HUB_CONFIGS,
    LLAMA,
    MOE_16B,
    QWEN2_DISTILL,
    QWEN3,
    V2_LITE,
    V3,
    as_saved_by_transformers_5,
    with_rope_parameters,
    without,
)


@pytest.mark.parametrize("preset", HUB_CONFIGS)
def test_hub_file_and_its_re_saves_give_the_preset(preset):
    """transformers leaves out of V3 what it takes for granted; its head_dim is the rope dim."""
    hub = HUB_CONFIGS[preset]
    assert model_config_from_hf(hub) == load_preset(preset)
    assert model_config_from_hf(with_rope_parameters(hub)) == load_preset(preset)
    assert model_config_from_hf(as_saved_by_transformers_5(hub)) == load_preset(preset)


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
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "rope_theta: nowhere, although there is",
        ),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta: nowhere, although there is"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "rope_type": "linear"}},
            "rope_scaling.rope_type: needed is one",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"factor": 4.0}},
            "rope_scaling.rope_type: needed is one",
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
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
        ({"rope_scaling": "linear"}, "rope_scaling: must be a mapping"),
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


def test_a_deepseek_model_without_a_latent_is_a_moe_16b():
    latent = {"q_lora_rank": None, "kv_lora_rank": None}
    assert model_config_from_hf(MOE_16B | latent) == load_preset("deepseek-moe-16b")


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
        (without(V3, "n_group"), "n_group: missing"),
        (without(QWEN3, "head_dim"), "head_dim: missing"),
        (without(LLAMA, "vocab_size", "hidden_size"), "hidden_size: missing\nvocab_size: missing"),
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


@pytest.mark.parametrize(("given", "layers"), [({}, 0), ({"num_nextn_predict_layers": 2}, 2)])
def test_mtp_layers_are_as_many_as_the_file_says(given, layers):
    config = model_config_from_hf(without(V3, "num_nextn_predict_layers") | given)
    assert config.num_nextn_predict_layers == layers


def test_key_value_heads_default_to_the_query_heads():
    config = model_config_from_hf(without(LLAMA, "num_key_value_heads"))
    assert config.num_key_value_heads == 32
    assert config == model_config_from_hf(LLAMA)


def test_attention_factor_is_read_and_attn_factor_is_not():
    """R1-0528-Qwen3-8B has the latter, which transformers does not read either."""
    assert model_config_from_hf(QWEN3).rope_scaling.attention_factor is None
    scaling = without(QWEN3["rope_scaling"], "attn_factor") | {"attention_factor": 1}
    config = model_config_from_hf(QWEN3 | {"rope_scaling": scaling})
    assert config.rope_scaling.attention_factor == 1.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (V3 | {"topk_metod": "greedy"}, "topk_metod: .* the nearest known key is topk_method"),
        (QWEN2_DISTILL | {"use_mrope": True}, "use_mrope: only False is supported, got True"),
        (
            V3 | {"rope_scaling": V3["rope_scaling"] | {"beta_fats": 32}},
            r"rope_scaling.beta_fats: .* the nearest known key is beta_fast",
        ),
        (LLAMA | {"xyz": list(range(1000))}, r"xyz: unknown, .* \(\[0, 1, 2.{0,30}\.\.\.\]\)$"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(config, message):
    with pytest.raises(UserError, match=message):
        model_config_from_hf(config)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("rms_norm_eps", "NaN", "rms_norm_eps: needed is a finite number, got nan"),
        ("rope_theta", "1e400", "rope_theta: needed is a finite number, got inf"),
        ("routed_scaling_factor", "-Infinity", "routed_scaling_factor: needed is a finite number"),
        ("routed_scaling_factor", "-2.5", "routed_scaling_factor must be positive"),
        ("hidden_size", "NaN", "hidden_size: needed is a value of type int, got nan"),
        ("hidden_size", "-7168", "hidden_size must be at least 1, got -7168"),
        ("hidden_size", "0", "hidden_size must be at least 1, got 0"),
        ("hidden_size", "true", "hidden_size: needed is a value of type int, got True"),
        ("hidden_size", '"7168"', "hidden_size: needed is a value of type int, got '7168'"),
        ("hidden_size", "7168.0", "hidden_size: needed is a value of type int, got 7168.0"),
        ("vocab_size", "1" + "0" * 400, "vocab_size: needed is a number up to 2147483647"),
        ("rms_norm_eps", "1" + "0" * 400, "rms_norm_eps: needed is a number up to 2147483647"),
        ("rms_norm_eps", "false", "rms_norm_eps: needed is a value of type float, got False"),
        ("norm_topk_prob", "1", "norm_topk_prob: needed is a value of type bool, got 1"),
        ("moe_layer_freq", "true", "moe_layer_freq: only 1 is supported, got True"),
        ("attention_bias", "0", "attention_bias: only False is supported, got 0"),
        ("eos_token_id", "[]", "eos_token_id: needed is a value of type int"),
        ("eos_token_id", '["1"]', "eos_token_id: needed is a value of type int, got '1'"),
        ("model_type", '["deepseek_v3"]', "model_type: .* is not supported"),
        ("topk_method", "[]", "topk_method: .* is not supported"),
        ("layer_types", "3", "layer_types: only 'full_attention' is supported, got 3"),
    ],
)
def test_numbers_that_are_none_or_absurd_are_refused_with_the_key(key, text, message):
    line = json.dumps(V3 | {key: "@"}).replace('"@"', text)
    with pytest.raises(UserError, match=message):
        model_config_from_hf(json.loads(line))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": float("nan")}, "factor: needed is a finite number"),
        ({"factor": 0.5}, "factor must be at least 1"),
        ({"original_max_position_embeddings": 0}, "embeddings: must be positive, got 0"),
        ({"beta_fast": -32}, "beta_fast: must be positive, got -32.0"),
        ({"mscale": -1}, "mscale: must be zero or more, got -1.0"),
        ({"beta_slow": True}, "beta_slow: needed is a value of type float, got True"),
        ({"low_freq_factor": 4, "high_freq_factor": 4}, "high_freq_factor: must be above"),
    ],
)
def test_rope_numbers_that_make_no_frequencies_are_refused(change, message):
    with pytest.raises(UserError, match=f"rope_scaling.{message}|rope_scaling.*{message}"):
        model_config_from_hf(V3 | {"rope_scaling": V3["rope_scaling"] | change})


def test_problems_of_every_kind_are_reported_together():
    config = without(V3, "n_group") | {
        "hidden_size": "7168",
        "new_trick": 3,
        "rope_scaling": V3["rope_scaling"] | {"factor": "40", "trick": 1},
        "use_mrope": True,
    }
    with pytest.raises(UserError) as error:
        model_config_from_hf(config)
    named = [line.split(":")[0] for line in str(error.value).splitlines()[1:]]
    assert named == [
        "hidden_size",
        "n_group",
        "new_trick",
        "rope_scaling.factor",
        "rope_scaling.trick",
        "use_mrope",
    ]
