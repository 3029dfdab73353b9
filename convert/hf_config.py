"""A model's `config.json` to `ModelConfig`: old and new keys alike.

Every key is read, has the one value that is supported, is known to be harmless, or is refused.
"""

import dataclasses
import math
import reprlib
import typing
from collections.abc import Collection, Iterable, Mapping
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
    "use_mrope": False,
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

# Without these a model would be computed with other values than its authors' and nothing would
# tell: readers disagree on what their absence means.
_REQUIRED_BY_TYPE: dict[str, set[str]] = {
    "deepseek_v3": {"n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"},
    "qwen3": {"head_dim"},
}
# transformers leaves these out of a V3 config, because its class knows nothing else.
_V3_DEFAULTS: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}

# `attn_factor` (R1-0528-Qwen3-8B) means something to other engines; transformers reads
# `attention_factor` only, and so do we.
_HARMLESS_ROPE = {"attn_factor"}
_FIXED_ROPE: dict[str, Any] = {"truncate": True, "partial_rotary_factor": 1.0}
_MAY_BE_ZERO_IN_ROPE = {"mscale", "mscale_all_dim"}  # zero is as good as absent there

# No count or size of a model is beyond this; one that is comes from a damaged file.
_LARGEST_INT = 2**31 - 1


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """`ModelConfig` from the contents of a `config.json`.

    The family follows from `model_type` and from the presence of `kv_lora_rank` and `index_topk`,
    never from `architectures`. A key whose value is null counts as absent.

    Raises:
        UserError: for a model that is not supported, and for keys that are missing, unknown,
            contradictory, of a wrong type or of a value that is not supported; all are named.
    """
    config = _present(config)
    model_type = _model_type(config)
    fields = field_names(model_type)
    harmless = _HARMLESS
    if model_type in ("deepseek_v2", "deepseek_v3"):
        harmless = _HARMLESS | _HARMLESS_LATENT_ATTENTION
    known = fields | _ROPE | {"model_type", "layer_types"} | harmless
    problems = _unfit_keys(config, known=known, fixed=_FIXED)
    required = _REQUIRED | _REQUIRED_BY_TYPE.get(model_type, set())
    problems += [f"{key}: missing" for key in required - config.keys()]
    layer_types = config.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        problems.append(f"layer_types: only 'full_attention' is supported, got {layer_types!r}")
    values = _typed_values(ModelConfig, fields & config.keys(), config, problems=problems)
    theta, scaling = _rope(config, problems=problems)
    _refuse(problems)
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    if model_type == "deepseek_v3":
        values = _V3_DEFAULTS | values
    return ModelConfig(model_type=model_type, rope_theta=theta, rope_scaling=scaling, **values)


def field_names(model_type: ModelType) -> set[str]:
    """The fields of `ModelConfig` that are keys of a `config.json` of this type, without rope's."""
    fields = _REQUIRED | _OPTIONAL
    fields |= (
        _LATENT_ATTENTION if model_type in ("deepseek_v2", "deepseek_v3") else _DENSE_ATTENTION
    )
    return fields | _EXPERTS if model_type.startswith("deepseek") else fields


def _present(block: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if value is not None}


def _refuse(problems: Iterable[str]) -> None:
    if problems := sorted(problems):
        raise UserError("config.json cannot be read safely:\n" + "\n".join(problems))


def _model_type(config: Mapping[str, Any]) -> ModelType:
    given = config.get("model_type")
    if given is None:
        raise UserError("config.json lacks model_type; it says to which family a model belongs.")
    supported = typing.get_args(ModelType)
    if given not in (*supported, *LATER_MODEL_TYPES):
        raise UserError(
            f"model_type: {given!r} is not supported; supported are {', '.join(supported)}."
        )
    later = (
        given if given in LATER_MODEL_TYPES else "deepseek_v32" if "index_topk" in config else ""
    )
    if later:
        raise UserError(f"model_type: {given!r}, {LATER_MODEL_TYPES[later]}, is not supported yet.")
    if given == "deepseek" and "kv_lora_rank" in config:
        return "deepseek_v2"  # the first public revision of DeepSeek-V2-Chat
    return typing.cast(ModelType, given)


def _unfit_keys(
    values: Mapping[str, Any],
    *,
    known: Collection[str],
    fixed: Mapping[str, Any],
    where: str = "",
) -> list[str]:
    """Keys that may change the mathematics without our knowing, and unsupported values."""
    problems = []
    for key, value in values.items():
        if key in fixed:
            supported = fixed[key]
            # In Python True equals 1, in a config.json it is a mistake.
            if value != supported or isinstance(value, bool) != isinstance(supported, bool):
                problems.append(f"{where}{key}: only {supported!r} is supported, got {value!r}")
        elif key not in known:
            near, shown = _nearest(key, [*known, *fixed]), reprlib.repr(value)
            problems.append(
                f"{where}{key}: unknown, and may change the mathematics ({shown}){near}"
            )
    return problems


def _nearest(key: str, known: Iterable[str]) -> str:
    from jaxseek.schema import nearest_names  # it takes long to import, and only mistakes need it

    names = nearest_names(key, sorted(name for name in known if not name.startswith("_")))
    return f"; the nearest known key is {' or '.join(names)}" if names else ""


def _rope(config: Mapping[str, Any], *, problems: list[str]) -> tuple[float, RopeScaling | None]:
    """`rope_theta` and the scaling from the keys of transformers 5, the older ones, or both."""
    thetas: dict[str, float] = {}
    scalings: dict[str, RopeScaling | None] = {}
    earlier = len(problems)
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key) not in (None, {}):
            try:
                theta, scalings[key] = _rope_block(config[key], name=key)
            except UserError as error:
                problems.append(str(error))
            else:
                thetas |= {} if theta is None else {f"{key}.rope_theta": theta}
    thetas |= _typed_values(ModelConfig, {"rope_theta"} & config.keys(), config, problems=problems)
    if len(problems) == earlier:
        for values in (thetas, scalings):
            if len(set(values.values())) > 1:
                both = ", ".join(f"{key} is {value}" for key, value in values.items())
                problems.append(f"config.json contradicts itself: {both}")
        if scalings and not thetas:
            problems.append(f"rope_theta: nowhere, although there is {', '.join(scalings)}")
    # With no word about rope at all it is one of the first Llama files.
    return next(iter(thetas.values()), 10000.0), next(iter(scalings.values()), None)


def _rope_block(block: Any, *, name: str) -> tuple[float | None, RopeScaling | None]:
    """`rope_theta`, where it is there, and the scaling of `rope_scaling` or `rope_parameters`."""
    if not isinstance(block, Mapping):
        raise UserError(f"{name}: must be a mapping, got {block!r}")
    block, where = _present(block), f"{name}."
    fields = {field.name for field in dataclasses.fields(RopeScaling)}
    known = {"type", "rope_theta"} | fields | _HARMLESS_ROPE
    problems = _unfit_keys(block, known=known, fixed=_FIXED_ROPE, where=where)
    kinds = sorted({str(block[key]) for key in ("type", "rope_type") if key in block})
    if len(kinds) != 1:
        problems.append(f"{where}rope_type: needed is one (or one type), got {kinds}")
    theta = _typed_values(
        ModelConfig, {"rope_theta"} & block.keys(), block, where=where, problems=problems
    ).get("rope_theta")
    values: dict[str, Any] = {}
    if kinds != ["default"]:
        if kinds:
            block["rope_type"] = kinds[0]
        problems += [] if "factor" in block else [f"{where}factor: missing"]
        keys = fields & block.keys()
        values = _typed_values(RopeScaling, keys, block, where=where, problems=problems)
        problems += _impossible_scaling(values, where=where)
    if problems:
        raise UserError("\n".join(sorted(problems)))
    return theta, RopeScaling(**values) if values else None


def _impossible_scaling(values: Mapping[str, Any], *, where: str) -> list[str]:
    problems = []
    for key, value in values.items():
        least = "zero or more" if key in _MAY_BE_ZERO_IN_ROPE else "positive"
        if key != "rope_type" and (value < 0 or (value == 0 and least == "positive")):
            problems.append(f"{where}{key}: must be {least}, got {value}")
    low, high = values.get("low_freq_factor"), values.get("high_freq_factor")
    if low is not None and high is not None and low >= high:
        problems.append(f"{where}high_freq_factor: must be above low_freq_factor {low}, got {high}")
    return problems


def _typed_values(
    cls: type,
    keys: Iterable[str],
    block: Mapping[str, Any],
    *,
    where: str = "",
    problems: list[str],
) -> dict[str, Any]:
    """The values of `keys` as the types of the fields of a config class; what fits none is added to
    `problems`.
    """
    values, annotations = {}, typing.get_type_hints(cls)
    for key in sorted(keys):
        try:
            values[key] = _typed(key, block[key], annotation=annotations[key])
        except UserError as error:
            problems.append(f"{where}{key}: {error}")
    return values


def _typed(key: str, value: Any, *, annotation: Any) -> Any:
    """`value` of the field `key` as its type; JSON may write 40 for 40.0."""
    if key == "topk_method" and value == "gready":  # so it stood in DeepSeek's own code
        return "greedy"
    if key == "eos_token_id" and isinstance(value, list) and value:
        value = value[0]  # generation may stop at others too; training ends documents with this one
    options = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        if value not in options:
            raise UserError(f"{value!r} is not supported; supported are {', '.join(options)}")
        return value
    kind = next(option for option in (*options, annotation) if option is not type(None))
    if type(value) is int and abs(value) > _LARGEST_INT:
        raise UserError(f"needed is a number up to {_LARGEST_INT}, got a larger one")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise UserError(f"needed is a value of type {kind.__name__}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"needed is a finite number, got {value!r}")
    return value
