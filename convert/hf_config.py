"""A model's `config.json` to `ModelConfig`: old and new keys alike.

Every key is read, has the one value that is supported, is known to be harmless, or is refused.
"""

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal

from jaxseek.config import LATER_MODEL_TYPES, ModelConfig, ModelType, RopeScaling
from jaxseek.errors import UserError

# Keys that become fields of `ModelConfig`, by what a model is made of.
_REQUIRED = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
}
_OPTIONAL = {"num_key_value_heads", "tie_word_embeddings", "bos_token_id", "eos_token_id"}
_DENSE_ATTENTION = {"head_dim"}
_LATENT_ATTENTION = {
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
}
_EXPERTS = {
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "aux_loss_alpha",
    "seq_aux",
    "num_nextn_predict_layers",
}
_ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}

# Keys of which one value is supported.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "moe_layer_freq": 1,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}

# Keys that change neither a forward pass nor what a checkpoint holds. Two of them mislead: the
# `initializer_range` of the releases is 0.02, with which none was trained, and their dtype and
# quantisation are known for certain from the tensors only.
_HARMLESS = {
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "ep_size",
    "finetuning_task",
    "id2label",
    "initializer_range",
    "label2id",
    "max_window_layers",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "quantization_config",
    "return_dict",
    "sliding_window",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "use_bfloat16",
    "use_cache",
}
# transformers writes both; its `head_dim` of a latent attention is the size of the rotated part.
_HARMLESS_LATENT_ATTENTION = {"head_dim", "qk_head_dim"}

# A V3 without these would be computed with other values than its authors' and nothing would tell.
_REQUIRED_V3 = {"n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"}
# transformers leaves these out of a V3 config, because its class knows nothing else.
_V3_DEFAULTS: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}

# `attn_factor` (R1-0528-Qwen3-8B) means something to other engines; transformers reads
# `attention_factor` only, and so do we.
_HARMLESS_ROPE = {"attn_factor"}
_FIXED_ROPE: dict[str, Any] = {"truncate": True, "partial_rotary_factor": 1.0}


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """`ModelConfig` from the contents of a `config.json`.

    The family follows from `model_type` and from the presence of `kv_lora_rank` and `index_topk`,
    never from `architectures`. A key whose value is null counts as absent.

    Raises:
        UserError: for a model that is not supported, and for a key that is missing, unknown,
            contradictory, of a wrong type or of a value that is not supported; the key is named.
    """
    config = {key: value for key, value in config.items() if value is not None}
    model_type = _model_type(config)
    is_mla = model_type in ("deepseek_v2", "deepseek_v3")
    fields = _REQUIRED | _OPTIONAL | (_LATENT_ATTENTION if is_mla else _DENSE_ATTENTION)
    if model_type.startswith("deepseek"):
        fields |= _EXPERTS
    harmless = _HARMLESS | (_HARMLESS_LATENT_ATTENTION if is_mla else set())
    known = fields | _ROPE | {"model_type", "layer_types"} | harmless
    _refuse_unknown(config, known=known, fixed=_FIXED)
    required = _REQUIRED | (_REQUIRED_V3 if model_type == "deepseek_v3" else set())
    if missing := required - set(config):
        raise UserError(f"config.json lacks {', '.join(sorted(missing))}.")
    if set(config.get("layer_types", ())) - {"full_attention"}:
        raise UserError(
            f"layer_types: only 'full_attention' is supported, got {config['layer_types']}."
        )
    values = {key: _typed(ModelConfig, key, config[key]) for key in fields & set(config)}
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    if model_type == "deepseek_v3":
        values = _V3_DEFAULTS | values
    theta, scaling = _rope(config)
    return ModelConfig(model_type=model_type, rope_theta=theta, rope_scaling=scaling, **values)


def _model_type(config: Mapping[str, Any]) -> ModelType:
    given = config.get("model_type")
    if given is None:
        raise UserError("config.json lacks model_type; it says to which family a model belongs.")
    later = (
        given if given in LATER_MODEL_TYPES else "deepseek_v32" if "index_topk" in config else ""
    )
    if later:
        raise UserError(f"model_type: {given!r}, {LATER_MODEL_TYPES[later]}, is not supported yet.")
    if given == "deepseek" and "kv_lora_rank" in config:
        return "deepseek_v2"  # the first public revision of DeepSeek-V2-Chat
    supported = typing.get_args(ModelType)
    if given not in supported:
        raise UserError(
            f"model_type: {given!r} is not supported; supported are {', '.join(supported)}."
        )
    return typing.cast(ModelType, given)


def _refuse_unknown(
    values: Mapping[str, Any],
    *,
    known: Collection[str],
    fixed: Mapping[str, Any],
    where: str = "",
) -> None:
    """Refuse keys that may change the mathematics without our knowing, and unsupported values."""
    problems = []
    for key, value in sorted(values.items()):
        if key in fixed:
            if value != fixed[key]:
                problems.append(f"{where}{key}: only {fixed[key]!r} is supported, got {value!r}")
        elif key not in known:
            problems.append(f"{where}{key}: unknown, and may change the mathematics ({value!r})")
    if problems:
        raise UserError("config.json cannot be read safely:\n" + "\n".join(problems))


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """`rope_theta` and the scaling from the keys of transformers 5, the older ones, or both."""
    thetas: dict[str, float] = {}
    scalings: dict[str, RopeScaling | None] = {}
    for key in ("rope_parameters", "rope_scaling"):
        if block := config.get(key):
            theta, scalings[key] = _rope_block(block, name=key)
            if theta is not None:
                thetas[f"{key}.rope_theta"] = theta
    if "rope_theta" in config:
        thetas["rope_theta"] = _typed(ModelConfig, "rope_theta", config["rope_theta"])
    for values in (thetas, scalings):
        if len(set(values.values())) > 1:
            both = ", ".join(f"{key} is {value}" for key, value in values.items())
            raise UserError(f"config.json contradicts itself: {both}.")
    if scalings and not thetas:
        raise UserError(f"config.json has {', '.join(scalings)}, but rope_theta is nowhere.")
    # With no word about rope at all it is one of the first Llama files.
    return next(iter(thetas.values()), 10000.0), next(iter(scalings.values()), None)


def _rope_block(block: Any, *, name: str) -> tuple[float | None, RopeScaling | None]:
    """`rope_theta`, where it is there, and the scaling of `rope_scaling` or `rope_parameters`."""
    if not isinstance(block, Mapping):
        raise UserError(f"{name} must be a mapping, got {block!r}.")
    block = {key: value for key, value in block.items() if value is not None}
    fields = {field.name for field in dataclasses.fields(RopeScaling)}
    known = {"type", "rope_theta"} | fields | _HARMLESS_ROPE
    _refuse_unknown(block, known=known, fixed=_FIXED_ROPE, where=f"{name}.")
    kinds = {str(block[key]) for key in ("type", "rope_type") if key in block}
    if len(kinds) != 1:
        raise UserError(f"{name} needs one rope_type (or type), got {sorted(kinds)}.")
    theta = block.get("rope_theta")
    if theta is not None:
        theta = _typed(ModelConfig, "rope_theta", theta, where=f"{name}.")
    if kinds == {"default"}:
        return theta, None
    kind = _typed(RopeScaling, "rope_type", kinds.pop(), where=f"{name}.")
    if "factor" not in block:
        raise UserError(f"{name}.factor is needed by rope_type {kind!r}.")
    values = {
        key: _typed(RopeScaling, key, block[key], where=f"{name}.")
        for key in fields & set(block) - {"rope_type"}
    }
    return theta, RopeScaling(rope_type=kind, **values)


def _typed(cls: type, key: str, value: Any, *, where: str = "") -> Any:
    """`value` as the type of the field `key` of a config class; JSON may write 40 for 40.0."""
    if key == "topk_method" and value == "gready":  # so it stood in DeepSeek's own code
        return "greedy"
    if key == "eos_token_id" and isinstance(value, list) and value:
        value = value[0]  # generation may stop at others too; training ends documents with this one
    annotation = typing.get_type_hints(cls)[key]
    options = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        if value not in options:
            raise UserError(
                f"{where}{key}: {value!r} is not supported; supported are {', '.join(options)}."
            )
        return value
    kind = next(option for option in (*options, annotation) if option is not type(None))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise UserError(f"{where}{key}: needed is a value of type {kind.__name__}, got {value!r}.")
    return value
