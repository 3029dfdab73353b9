"""`ModelConfig` to the `config.json` and `generation_config.json` beside exported weights.

A model that came from a `config.json` gets it back, key by key; only what changed is written anew.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from convert.hf_config import field_names, model_config_from_hf
from jaxseek.config import ModelConfig, RopeScaling
from jaxseek.errors import UserError

# Which generation of transformers must find its keys: `torch_dtype`, `rope_theta` and
# `rope_scaling` (4), `dtype` and `rope_parameters` (5), or either of them.
Compat = Literal["4", "5", "both"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "deepseek": "DeepseekForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}

_DTYPE_KEYS: dict[str, tuple[str, ...]] = {"4": ("torch_dtype",), "5": ("dtype",)}
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "4": ("rope_theta", "rope_scaling"),
    "5": ("rope_parameters",),
}

# Keys with one value in every model we know, written because readers expect them.
_CONSTANTS: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, "use_cache": True}
_MOE_CONSTANTS: dict[str, Any] = {"attention_bias": False, "moe_layer_freq": 1}
_CONSTANTS_BY_TYPE: dict[str, dict[str, Any]] = {
    # Qwen2 has biases at q, k and v; no key of its config.json says so.
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"attention_bias": False, "use_sliding_window": False},
    "deepseek": _MOE_CONSTANTS,
    "deepseek_v2": _MOE_CONSTANTS,
    "deepseek_v3": _MOE_CONSTANTS,
}
# Fields that the releases of a type do not have in their config.json; only another value than the
# default is written. They have the others, which older readers and vLLM need, V3's scoring_func and
# topk_method among them.
_NOT_RELEASED: dict[str, set[str]] = {
    "llama": {"head_dim"},
    "qwen2": {"head_dim"},
    "deepseek": {
        "head_dim",
        "n_group",
        "topk_group",
        "topk_method",
        "routed_scaling_factor",
        "num_nextn_predict_layers",
    },
    "deepseek_v2": {"rope_interleave", "num_nextn_predict_layers"},
}
# Mathematics that the class of a type has in one way, whatever its config.json says.
_FIXED_IN_CLASS: dict[str, dict[str, Any]] = {
    "deepseek": {
        "n_group": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
    },
    "deepseek_v2": {"norm_topk_prob": False, "rope_interleave": True, "scoring_func": "softmax"},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
# A model that came with a config.json has these as they are there, present or absent: what it is
# initialised with is no fact of a trained model, and absent token ids are the tokenizer's matter.
_OF_THE_SOURCE = {"initializer_range", "bos_token_id", "eos_token_id", *_CONSTANTS}
_RENEWED = {"quantization_config"}  # the weights that are written are not quantised

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
_ROPE_FIELDS = ("rope_theta", "rope_scaling")


def hf_config(
    config: ModelConfig,
    *,
    source: Mapping[str, Any] | None,
    dtype: str,
    compat: Compat = "both",
) -> dict[str, Any]:
    """The contents of the `config.json` of an exported model.

    With both generations of keys transformers 5 reads `rope_scaling` before `rope_parameters` and
    `dtype` before `torch_dtype`; 4 makes nothing of the keys it does not know. They say the same.

    Args:
        source: the `config.json` that the model came from. All of it comes back, in its order, but
            for `quantization_config`, fields that `config` has another value of, and the dtype if
            it is another; what it lacks is added at the end.
        dtype: of most weights, by its safetensors name (`BF16`).
        compat: whose keys are added; those of the source stay.

    Raises:
        UserError: for a model that no class of its type in transformers can be, and for a source
            that is not readable or of another type.
    """
    if source is None:
        written = dict(_model_keys(config))
        theta, scaling = config.rope_theta, _scaling_block(config.rope_scaling)
        rope_changed = False
    else:
        before = model_config_from_hf(source)
        written = _from_source(config, source=source, before=before)
        theta, scaling = _rope_from_source(config, source=source, before=before)
        rope_changed = any(getattr(before, key) != getattr(config, key) for key in _ROPE_FIELDS)
    rope = _rope_values(theta, scaling)
    _write_generations(written, rope, keys=_ROPE_KEYS, compat=compat, renew=rope_changed)
    names = {key: _DTYPES[dtype] for keys in _DTYPE_KEYS.values() for key in keys}
    dtype_changed = any(_differs(written.get(key), names[key]) for key in names)
    _write_generations(written, names, keys=_DTYPE_KEYS, compat=compat, renew=dtype_changed)
    _check(written, config)
    return dict(sorted(written.items())) if source is None else written


def generation_config(config: ModelConfig, *, source: Mapping[str, Any] | None) -> dict[str, Any]:
    """The contents of a `generation_config.json` where none is carried along.

    Args:
        source: the `config.json` that the model came from; it may name several end tokens and one
            for padding.
    """
    source = source or {}
    eos = source.get("eos_token_id")
    if (eos[0] if isinstance(eos, list) and eos else eos) != config.eos_token_id:
        eos = config.eos_token_id
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos,
        "pad_token_id": source.get("pad_token_id"),
    }
    present = {key: value for key, value in ids.items() if value is not None}
    return {"_from_model_config": True, **present}


def not_in_transformers(config: ModelConfig) -> list[str]:
    """What of the model its class in transformers (MoE-16B: its release's code) computes otherwise.

    One line each; no release has any. Other programs, vLLM among them, read some of these keys.
    """
    return [
        f"{name} is {getattr(config, name)!r}; the {config.model_type!r} class of transformers "
        f"computes with {fixed!r}"
        for name, fixed in _FIXED_IN_CLASS.get(config.model_type, {}).items()
        if getattr(config, name) != fixed
    ]


def _model_keys(config: ModelConfig) -> dict[str, Any]:
    """All keys that do not come in generations, for a model without a source."""
    fields = field_names(config.model_type)
    values = {name: getattr(config, name) for name in sorted(fields)}
    foreign = [
        f"{name} {getattr(config, name)!r}"
        for name, default in _DEFAULTS.items()
        if name not in {*fields, *_ROPE_FIELDS, "model_type", "initializer_range"}
        and getattr(config, name) != default
    ]
    if foreign:
        raise UserError(
            f"A {config.model_type!r} of transformers has no {', '.join(foreign)}: this model "
            f"cannot be exported under that model_type."
        )
    if config.model_type == "qwen3":  # transformers takes 128 where it is not given
        values["head_dim"] = config.attention_head_dim
    for name in _NOT_RELEASED.get(config.model_type, ()):
        if values[name] == _DEFAULTS[name]:
            del values[name]
    return {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "initializer_range": config.initializer_range,
        **_CONSTANTS,
        **_CONSTANTS_BY_TYPE[config.model_type],
        **values,
    }


def _from_source(
    config: ModelConfig, *, source: Mapping[str, Any], before: ModelConfig
) -> dict[str, Any]:
    """The source, with what training or its user changed, and keys it lacks; rope and dtype as they
    were. `before` is what our reader makes of the source.
    """
    if before.model_type != config.model_type:
        raise UserError(
            f"The config.json that the model came from has model_type {before.model_type!r}, the "
            f"model is a {config.model_type!r}."
        )
    written = {key: value for key, value in source.items() if key not in _RENEWED}
    for name in sorted(field_names(config.model_type)):
        if getattr(config, name) != getattr(before, name):
            written[name] = getattr(config, name)
    for key, value in _model_keys(config).items():
        if key not in written and key not in _OF_THE_SOURCE:
            written[key] = value
    if written["architectures"] is None:
        written["architectures"] = [_ARCHITECTURES[config.model_type]]
    return written


def _rope_from_source(
    config: ModelConfig, *, source: Mapping[str, Any], before: ModelConfig
) -> tuple[Any, dict[str, Any] | None]:
    """theta and the scaling's block. What did not change keeps the source's way of writing it (40
    for 40.0) and keys that are not ours.
    """
    blocks = [block for key in ("rope_scaling", "rope_parameters") if (block := source.get(key))]
    thetas = [place.get("rope_theta") for place in (source, *blocks)]
    theta = next((value for value in thetas if value is not None), config.rope_theta)
    if before.rope_theta != config.rope_theta:
        theta = config.rope_theta
    block = next(iter(blocks), None)
    if before.rope_scaling != config.rope_scaling:
        block = _scaling_block(config.rope_scaling)
    return theta, block


def _scaling_block(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The keys of `rope_scaling`, as few as say it: older readers count those of `linear`."""
    if scaling is None:
        return None
    optional = {"beta_fast", "beta_slow"} if scaling.rope_type == "yarn" else set()
    return {
        field.name: getattr(scaling, field.name)
        for field in dataclasses.fields(scaling)
        if field.name in optional or getattr(scaling, field.name) != field.default
    }


def _rope_values(theta: Any, block: Mapping[str, Any] | None) -> dict[str, Any]:
    """Both generations' keys of the same rope."""
    block = {key: value for key, value in (block or {}).items() if value is not None}
    kind = block.pop("rope_type", None) or block.get("type", "default")
    rest = {key: value for key, value in block.items() if key not in ("type", "rope_theta")}
    # `rope_type` came with llama3; what was there before is sure to be found under `type`.
    name = "rope_type" if kind == "llama3" else "type"
    return {
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {name: kind, **rest},
        "rope_parameters": {"rope_type": kind, "rope_theta": theta, **rest},
    }


def _write_generations(
    written: dict[str, Any],
    values: Mapping[str, Any],
    *,
    keys: Mapping[str, tuple[str, ...]],
    compat: Compat,
    renew: bool,
) -> None:
    """Add the keys of a generation that is asked for, or that the source has; keep those that are
    there, unless they are to be renewed.
    """
    for generation, names in keys.items():
        if compat in (generation, "both") or any(name in written for name in names):
            for name in names:
                if renew or name not in written:
                    written[name] = values[name]


def _differs(given: Any, name: str) -> bool:
    return given is not None and str(given).removeprefix("torch.") != name


def _check(written: Mapping[str, Any], config: ModelConfig) -> None:
    """What is written is read as the same model, but for what no config.json is asked."""
    expected = dataclasses.replace(config, initializer_range=_DEFAULTS["initializer_range"])
    if config.model_type == "qwen3":
        expected = dataclasses.replace(expected, head_dim=config.attention_head_dim)
    assert model_config_from_hf(written) == expected
