"""The presets: exact parameter counts of the releases, and how a model's name is read."""

import dataclasses

import pytest

from jaxseek.config import ModelConfig, RopeScaling
from jaxseek.errors import UserError
from jaxseek.model import parameter_count
from jaxseek.presets import DEFAULT_PRESET, load_preset, preset_names

# Counted from the released shapes, embeddings and untied head included, multi-token-prediction
# layers left out; they agree with the published sizes.
PARAMETERS = {
    "deepseek-llm-7b": 6_910_365_696,
    "deepseek-llm-67b": 67_425_001_472,
    "deepseek-coder-1.3b": 1_346_471_936,
    "deepseek-coder-5.7b-mqa": 5_700_325_376,
    "deepseek-coder-6.7b": 6_740_512_768,
    "deepseek-coder-33b": 33_342_991_360,
    "deepseek-coder-7b-v1.5": 6_910_365_696,
    "deepseek-math-7b": 6_910_365_696,
    "deepseek-prover-v1.5-7b": 6_910_365_696,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "deepseek-r1-distill-qwen-7b": 7_615_616_512,
    "deepseek-r1-distill-qwen-14b": 14_770_033_664,
    "deepseek-r1-distill-qwen-32b": 32_763_876_352,
    "deepseek-r1-distill-llama-8b": 8_030_261_248,
    "deepseek-r1-distill-llama-70b": 70_553_706_496,
    "deepseek-r1-0528-qwen3-8b": 8_190_735_360,
    "deepseek-moe-16b": 16_375_728_128,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-coder-v2-lite": 15_706_484_224,
    "deepseek-esft-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-coder-v2": 235_741_434_880,
    "deepseek-v2.5": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "deepseek-r1": 671_026_419_200,
    "deepseek-v3.1": 671_026_419_200,
    "deepseek-prover-v2-671b": 671_026_419_200,
    "bench-dense-58m": 58_073_600,
    "bench-v2-167m": 166_962_688,
    "bench-v3-164m": 163_892_672,
}
MLA_YARN = RopeScaling(
    rope_type="yarn",
    factor=40.0,
    original_max_position_embeddings=4096,
    mscale=0.707,
    mscale_all_dim=0.707,
)


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset_has_exactly_the_parameters_of_the_release(name):
    assert parameter_count(load_preset(name)) == PARAMETERS[name]


def test_every_preset_but_the_default_one_has_a_count_here():
    assert set(preset_names()) == {*PARAMETERS, DEFAULT_PRESET}


def test_default_preset_has_every_part_of_deepseek_v3_at_a_small_size():
    small, v3 = load_preset(DEFAULT_PRESET), load_preset("deepseek-v3")
    for name in ("model_type", "topk_method", "scoring_func", "norm_topk_prob", "n_shared_experts"):
        assert getattr(small, name) == getattr(v3, name)
    assert small.q_lora_rank and small.num_dense_layers and small.num_moe_layers
    assert 1 < small.topk_group < small.n_group
    assert parameter_count(small) < 50_000_000


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "deepseek-coder-6.7b",
            {
                "rope_theta": 1e5,
                "rope_scaling": RopeScaling(rope_type="linear", factor=4.0),
                "max_position_embeddings": 16384,
                "bos_token_id": 32013,
                "eos_token_id": 32014,
            },
        ),
        ("deepseek-llm-67b", {"num_key_value_heads": 8, "rope_scaling": None, "rope_theta": 1e4}),
        ("deepseek-r1-distill-qwen-14b", {"rms_norm_eps": 1e-5, "rope_theta": 1e6}),
        ("deepseek-r1-distill-qwen-7b", {"rms_norm_eps": 1e-6, "rope_theta": 1e4}),
        (
            "deepseek-r1-distill-llama-8b",
            {
                "rope_scaling": RopeScaling(
                    rope_type="llama3",
                    factor=8.0,
                    original_max_position_embeddings=8192,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                )
            },
        ),
        (
            "deepseek-r1-0528-qwen3-8b",
            {
                "head_dim": 128,
                "rope_scaling": RopeScaling(
                    rope_type="yarn", factor=4.0, original_max_position_embeddings=32768
                ),
            },
        ),
        ("deepseek-moe-16b", {"norm_topk_prob": False, "routed_scaling_factor": 1.0}),
        ("deepseek-v2-lite", {"q_lora_rank": None, "rope_scaling": MLA_YARN}),
        ("deepseek-esft-lite", {"rope_scaling": None, "max_position_embeddings": 4096}),
        (
            "deepseek-v2",
            {
                "topk_method": "group_limited_greedy",
                "n_group": 8,
                "topk_group": 3,
                "routed_scaling_factor": 16.0,
                "rope_scaling": MLA_YARN,
            },
        ),
        (
            "deepseek-v3",
            {
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.5,
                "n_group": 8,
                "topk_group": 4,
                "first_k_dense_replace": 3,
                "num_nextn_predict_layers": 1,
                "max_position_embeddings": 163840,
                "rope_scaling": dataclasses.replace(MLA_YARN, mscale=1.0, mscale_all_dim=1.0),
            },
        ),
    ],
)
def test_preset_has_the_values_that_no_parameter_count_shows(name, fields):
    config = load_preset(name)
    assert {field: getattr(config, field) for field in fields} == fields


def test_initial_parameters_have_the_papers_spread_and_not_config_jsons():
    assert {load_preset(name).initializer_range for name in preset_names()} == {0.006}


def test_model_of_a_users_file_is_read_by_its_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "{model_type: llama, vocab_size: 300, hidden_size: 8, intermediate_size: 16, "
        "num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}"
    )
    assert load_preset(str(path)) == ModelConfig(
        model_type="llama",
        vocab_size=300,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deepsek-v3", r"neither a preset .* no such folder; the nearest preset is deepseek-v3\."),
        ("gpt", r"presets are bench-dense-58m, .*, small-v3\."),
        ("deepseek-v3.2-exp", "'deepseek_v32', DeepSeek-V3.2 .* is not supported yet"),
        ("DeepSeek-V4-Flash", "'deepseek_v4', DeepSeek-V4, is not supported yet"),
        ("nowhere.yaml", "there is no such file"),
        ("config.json", "a JSON file; give the Hugging Face folder that it is in"),
    ],
)
def test_unknown_models_are_refused_with_what_there_is(name, message):
    with pytest.raises(UserError, match=message):
        load_preset(name)


def test_folder_is_no_preset(tmp_path):
    with pytest.raises(UserError, match=r"is a folder; only jaxseek.train takes one"):
        load_preset(str(tmp_path))


def test_unknown_key_of_a_model_file_names_the_nearest(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model_type: llama\nhiden_size: 8\n")
    with pytest.raises(UserError, match=r"line 2: hiden_size .*the nearest is hidden_size\."):
        load_preset(str(path))
