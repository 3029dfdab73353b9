"""`config.json` on the way back: what came with the model stays, what changed is written."""

import copy
import dataclasses

import pytest

from convert.hf_config import model_config_from_hf
from convert.hf_config_export import generation_config, hf_config, not_in_transformers
from jaxseek.config import ModelConfig, RopeScaling
from jaxseek.errors import UserError
from jaxseek.presets import load_preset, preset_names
from tests.convert.hub_configs import (
    CODER,
    HUB_CONFIGS,
    LLAMA,
    LLAMA_DISTILL,
    QWEN3,
    V2,
    V2_LITE,
    V3,
    as_saved_by_transformers_5,
    without,
)
from tests.tiny import TINY

COMPATS = ("4", "5", "both")
OLD, NEW = {"torch_dtype", "rope_theta", "rope_scaling"}, {"dtype", "rope_parameters"}
# What a source may look like: the hub's file, what transformers 5 makes of it, one of the first.
SOURCES = {
    **{f"hub {name}": config for name, config in HUB_CONFIGS.items()},
    **{f"saved {name}": as_saved_by_transformers_5(config) for name, config in HUB_CONFIGS.items()},
    "early llama": LLAMA,
    "without names": without(V2_LITE, "architectures", "q_lora_rank", "torch_dtype"),
    "v2 named deepseek": V2 | {"model_type": "deepseek", "architectures": ["DeepseekForCausalLM"]},
    "gready": V2_LITE | {"topk_method": "gready", "n_group": None, "eos_token_id": [100001, 3]},
}
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)


def export(source: dict, *, compat="both", dtype="BF16", **changes) -> dict:
    """`source` through our config, of which training changed a few values, and back."""
    config = dataclasses.replace(model_config_from_hf(source), **changes)
    written = hf_config(config, source=source, dtype=dtype, compat=compat)
    assert model_config_from_hf(written) == config
    return written


@pytest.mark.parametrize("compat", COMPATS)
@pytest.mark.parametrize("name", SOURCES)
def test_every_key_of_the_source_comes_back_in_its_order(name, compat):
    source = SOURCES[name]
    before = copy.deepcopy(source)
    written = export(source, compat=compat)
    kept = without(source, "quantization_config")
    assert list(written)[: len(kept)] == list(kept)
    assert {key: written[key] for key in kept} == kept
    assert source == before
    assert "quantization_config" not in written
    assert written["architectures"][0].endswith("ForCausalLM")


@pytest.mark.parametrize("name", [*preset_names(), *TINY])
def test_a_model_without_a_source_is_written_whole(name):
    config = TINY[name] if name in TINY else load_preset(name)
    for compat in COMPATS:
        written = hf_config(config, source=None, dtype="F32", compat=compat)
        back = dataclasses.replace(
            model_config_from_hf(written), initializer_range=config.initializer_range
        )
        assert back == config
        assert written["initializer_range"] == config.initializer_range
        assert list(written) == sorted(written)
        assert (written.keys() & OLD) == (OLD if compat != "5" else set())
        assert (written.keys() & NEW) == (NEW if compat != "4" else set())


@pytest.mark.parametrize("preset", HUB_CONFIGS)
def test_what_the_release_says_is_what_we_write_without_it(preset):
    """But for what is no fact of the model, and keys that change nothing where they are absent."""
    hub = HUB_CONFIGS[preset]
    written = hf_config(load_preset(preset), source=None, dtype="BF16", compat="4")
    ours = {"attention_bias", "attention_dropout", "hidden_act", "mlp_bias", "rope_scaling"}
    optional = {"rope_interleave", "use_sliding_window", "num_nextn_predict_layers", "use_cache"}
    assert written.keys() - hub.keys() <= ours | optional
    left_out = {"auto_map", "ep_size", "pretraining_tp", "quantization_config"}
    left_out |= {"transformers_version", "sliding_window", "max_window_layers", "use_mrope"}
    assert hub.keys() - written.keys() <= left_out
    for key in (hub.keys() & written.keys()) - {"initializer_range", "rope_scaling"}:
        assert written[key] == hub[key], key
    scaling = dict(written["rope_scaling"] or {})
    theirs = without(hub.get("rope_scaling") or {}, "attn_factor")
    if preset == "deepseek-r1-0528-qwen3-8b":
        theirs["type"] = theirs.pop("rope_type")
        theirs |= {"beta_fast": 32, "beta_slow": 1}
    assert scaling == theirs


def test_keys_of_the_other_generation_are_added_with_the_same_numbers():
    written = export(V3, compat="both")
    scaling = without(V3["rope_scaling"], "type")
    assert written["rope_parameters"] == {"rope_type": "yarn", "rope_theta": 10000, **scaling}
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    saved = as_saved_by_transformers_5(V3)
    written = export(saved, compat="both")
    assert written["rope_scaling"] == V3["rope_scaling"]
    assert written["rope_theta"] == 10000
    assert export(LLAMA_DISTILL)["rope_scaling"]["rope_type"] == "llama3"
    llama3 = hf_config(load_preset("deepseek-r1-distill-llama-8b"), source=None, dtype="BF16")
    assert llama3["rope_scaling"] == LLAMA_DISTILL["rope_scaling"]


def test_keys_that_only_some_readers_take_for_granted_are_added():
    written = export(as_saved_by_transformers_5(V3), compat="4")
    added = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    assert added.items() <= written.items()
    lite = export(without(V2_LITE, "q_lora_rank"))
    assert lite["q_lora_rank"] is None  # transformers would take 1536
    early = export(LLAMA | {"eos_token_id": None})
    assert early["eos_token_id"] is None
    assert "initializer_range" not in early


@pytest.mark.parametrize("compat", COMPATS)
@pytest.mark.parametrize(
    ("source", "keys"),
    [
        (CODER, ["torch_dtype"]),
        (CODER | {"torch_dtype": "torch.float16"}, ["torch_dtype"]),
        (as_saved_by_transformers_5(CODER), ["dtype"]),
        (CODER | {"dtype": "bfloat16", "torch_dtype": "float16"}, ["dtype", "torch_dtype"]),
        (CODER | {"dtype": "float32", "torch_dtype": "float16"}, ["dtype", "torch_dtype"]),
    ],
)
def test_another_dtype_is_written_in_every_key_that_says_it(source, keys, compat):
    written = export(source, dtype="F32", compat=compat)
    assert {written[key] for key in keys} == {"float32"}
    assert {written.get(key, "float32") for key in ("dtype", "torch_dtype")} == {"float32"}


def test_a_null_dtype_stays_null():
    written = export(CODER | {"torch_dtype": None}, dtype="F32")
    assert written["torch_dtype"] is None
    assert written["dtype"] == "float32"


@pytest.mark.parametrize("compat", COMPATS)
@pytest.mark.parametrize(
    "source", [V3, as_saved_by_transformers_5(V3), CODER, LLAMA, QWEN3], ids=lambda config: ""
)
@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
def test_a_changed_rope_is_written_in_every_key_that_says_it(source, scaling, compat):
    written = export(
        source,
        compat=compat,
        max_position_embeddings=1234,
        rope_theta=7e4,
        rope_scaling=scaling,
        eos_token_id=5,
    )
    assert written["max_position_embeddings"] == 1234
    assert written["eos_token_id"] == 5
    blocks = [written.get("rope_scaling") or {}, written.get("rope_parameters") or {}]
    assert {block["factor"] for block in blocks if "factor" in block} == (
        {4.0} if scaling else set()
    )
    assert {place["rope_theta"] for place in (written, *blocks) if "rope_theta" in place} == {7e4}
    assert not any("attn_factor" in block or "mscale" in block for block in blocks)
    assert list(written)[:5] == list(source)[:5]


def test_a_changed_theta_alone_leaves_the_scaling_with_keys_that_are_not_ours():
    written = export(QWEN3, rope_theta=5e6)
    theirs = without(QWEN3["rope_scaling"], "rope_type")
    assert written["rope_scaling"] == theirs | {"type": "yarn"}
    assert written["rope_theta"] == 5e6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            dataclasses.replace(
                TINY["llama"], kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4
            ),
            "'llama' .* has no .*kv_lora_rank 8",
        ),
        (dataclasses.replace(TINY["moe-16b"], model_type="qwen2"), "'qwen2' .* n_routed_experts 8"),
    ],
)
def test_a_model_that_its_type_cannot_be_is_refused(config, message):
    with pytest.raises(UserError, match=message):
        hf_config(config, source=None, dtype="BF16")


def test_a_source_of_another_type_is_refused():
    with pytest.raises(UserError, match="has model_type 'llama', the model is a 'qwen3'"):
        hf_config(TINY["qwen3"], source=LLAMA, dtype="BF16")


@pytest.mark.parametrize("eos", [100001, [100001, 100015]])
def test_generation_stops_where_the_source_says(eos):
    source = V2_LITE | {"eos_token_id": eos, "pad_token_id": 100001}
    config = model_config_from_hf(source)
    assert generation_config(config, source=source) == {
        "_from_model_config": True,
        "bos_token_id": 100000,
        "eos_token_id": eos,
        "pad_token_id": 100001,
    }
    changed = dataclasses.replace(config, eos_token_id=7)
    assert generation_config(changed, source=source)["eos_token_id"] == 7


def test_generation_without_a_source_has_the_token_ids_there_are():
    config: ModelConfig = dataclasses.replace(TINY["llama"], eos_token_id=9)
    assert generation_config(config, source=None) == {"_from_model_config": True, "eos_token_id": 9}


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("v3", {}, []),
        ("v2", {}, []),
        ("v3", {"scoring_func": "softmax"}, ["scoring_func"]),
        ("v3", {"topk_method": "greedy"}, ["topk_method"]),
        (
            "v2",
            {"norm_topk_prob": True, "rope_interleave": False},
            ["norm_topk_prob", "rope_interleave"],
        ),
        ("moe-16b", {"routed_scaling_factor": 2.0}, ["routed_scaling_factor"]),
        ("qwen3", {}, []),
    ],
)
def test_what_the_class_of_transformers_would_compute_otherwise_is_named(family, change, named):
    config = dataclasses.replace(TINY[family], **change)
    assert [line.split(" ")[0] for line in not_in_transformers(config)] == named
