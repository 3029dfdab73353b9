"""One table of names for the whole family, read both ways: jaxseek's parameters and HF's tensors.

The table gives every parameter its HF name and says how its dims are laid out there. What is
transposed follows from the table and never from a shape: square matrices exist. Which parameters a
model has comes from its specs, so that none can be forgotten.

Letters: L layers of a stack, E experts, D model, F ffn.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxseek.config import ModelConfig
from jaxseek.errors import UserError
from jaxseek.layout import LAYERS_DIM, ParamSpec, flatten_paths, unflatten_paths
from jaxseek.model import DENSE_STACK, MOE_STACK, ROUTER_BIAS_PATH, split

# How the dims of a layer's parameter become those of its HF tensor. HF matrices are [out, in], as
# torch.nn.Linear has them.
Form = Literal[
    "same",
    "flat",  # [...] to one dim
    "one_input",  # [in, out...] to [out, in]
    "one_output",  # [in..., out] to [out, in]
    "expert",  # [..., in, out] to [..., out, in]
]

# Hub files hold a matrix per expert; transformers 5 has all experts of a layer in one tensor, gate
# rows before up rows, and can save them so.
ExpertLayout = Literal["separate", "fused"]

_LAYER = "model.layers.{layer}."
_FUSED_NAME = ".mlp.experts.gate_up_proj"
_SHOWN_PROBLEMS = 100  # a V3 file with another naming scheme has 90,000

# Layer parameters are named from within the layer, whichever stack it is in.
_TOP_NAMES: dict[Form, dict[str, str]] = {
    "same": {"embed_tokens.embedding": "model.embed_tokens.weight"},
    "flat": {"norm.scale": "model.norm.weight"},
    "one_input": {"lm_head.kernel": "lm_head.weight"},
}
_LAYER_NAMES: dict[Form, dict[str, str]] = {
    "flat": {
        "input_layernorm.scale": "input_layernorm.weight",
        "post_attention_layernorm.scale": "post_attention_layernorm.weight",
        "self_attn.q_proj.bias": "self_attn.q_proj.bias",
        "self_attn.k_proj.bias": "self_attn.k_proj.bias",
        "self_attn.v_proj.bias": "self_attn.v_proj.bias",
        "self_attn.q_norm.scale": "self_attn.q_norm.weight",
        "self_attn.k_norm.scale": "self_attn.k_norm.weight",
        "self_attn.q_a_layernorm.scale": "self_attn.q_a_layernorm.weight",
        "self_attn.kv_a_layernorm.scale": "self_attn.kv_a_layernorm.weight",
        "mlp.gate.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    },
    "one_input": {
        "self_attn.q_proj.kernel": "self_attn.q_proj.weight",
        "self_attn.k_proj.kernel": "self_attn.k_proj.weight",
        "self_attn.v_proj.kernel": "self_attn.v_proj.weight",
        "self_attn.q_a_proj.kernel": "self_attn.q_a_proj.weight",
        "self_attn.q_b_proj.kernel": "self_attn.q_b_proj.weight",
        "self_attn.kv_a_proj_with_mqa.kernel": "self_attn.kv_a_proj_with_mqa.weight",
        "self_attn.kv_b_proj.kernel": "self_attn.kv_b_proj.weight",
        "mlp.gate_proj.kernel": "mlp.gate_proj.weight",
        "mlp.up_proj.kernel": "mlp.up_proj.weight",
        "mlp.down_proj.kernel": "mlp.down_proj.weight",
        "mlp.gate.kernel": "mlp.gate.weight",
        "mlp.shared_experts.gate_proj.kernel": "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.kernel": "mlp.shared_experts.up_proj.weight",
        "mlp.shared_experts.down_proj.kernel": "mlp.shared_experts.down_proj.weight",
    },
    "one_output": {"self_attn.o_proj.kernel": "self_attn.o_proj.weight"},
}
_EXPERT_NAMES: dict[ExpertLayout, dict[tuple[str, ...], str]] = {
    "separate": {
        ("mlp.experts.gate_proj",): "mlp.experts.{expert}.gate_proj.weight",
        ("mlp.experts.up_proj",): "mlp.experts.{expert}.up_proj.weight",
        ("mlp.experts.down_proj",): "mlp.experts.{expert}.down_proj.weight",
    },
    "fused": {
        ("mlp.experts.gate_proj", "mlp.experts.up_proj"): "mlp.experts.gate_up_proj",
        ("mlp.experts.down_proj",): "mlp.experts.down_proj",
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HFTensor:
    """One tensor of a checkpoint and where it goes.

    Attributes:
        shape: as it stands in the file.
        paths: the parameters it holds, one after the other along its rows: a single one, but for
            the fused gate and up projections.
        layer: index within the stack; None for what is not in a stack.
        expert: index of the expert; None for what is not per expert.
        form: how its dims are laid out.
        part_shape: shape of `parameter[index]`, alike for all `paths`.
    """

    shape: tuple[int, ...]
    paths: tuple[str, ...]
    layer: int | None
    expert: int | None
    form: Form
    part_shape: tuple[int, ...]

    @property
    def index(self) -> tuple[int, ...]:
        """Where in the (stacked) parameter it goes."""
        return tuple(i for i in (self.layer, self.expert) if i is not None)

    @property
    def order(self) -> tuple[int, ...]:
        """The dims of a part in the order in which the tensor has them: row-major in this order,
        a part's values stand in the file one after the other.
        """
        dims = tuple(range(len(self.part_shape)))
        match self.form:
            case "one_input":
                return (*dims[1:], 0)
            case "one_output":
                return (dims[-1], *dims[:-1])
            case "expert":
                return (*dims[:-2], dims[-1], dims[-2])
        return dims

    @property
    def stack_dims(self) -> int:
        """How many leading dims of the parameter count layers and experts."""
        return (self.layer is not None) + (self.form == "expert")

    @property
    def leaf_order(self) -> tuple[int, ...]:
        """`order` for the whole (stacked) parameter; alike for all tensors of a parameter."""
        lead = len(self.index)
        return (*range(lead), *(lead + dim for dim in self.order))

    def file_parts(self, tensor: np.ndarray) -> list[np.ndarray]:
        """What belongs to each of `paths`, its dims still in the tensor's `order`; views."""
        shape = tuple(self.part_shape[dim] for dim in self.order)
        rows = np.split(tensor, len(self.paths), axis=-2) if len(self.paths) > 1 else [tensor]
        return [part.reshape(shape) for part in rows]

    def to_parts(self, tensor: np.ndarray) -> list[np.ndarray]:
        """What goes to `parameter[index]` for each of `paths`; views, not copies."""
        return [part.transpose(np.argsort(self.order)) for part in self.file_parts(tensor)]

    def from_parts(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor, contiguous, from `parameter[index]` of each of `paths`."""
        turned = [part.transpose(self.order) for part in parts]
        whole = np.concatenate(turned, axis=-2) if len(turned) > 1 else turned[0]
        return np.ascontiguousarray(whole).reshape(self.shape)


def hf_tensors(config: ModelConfig, *, experts: ExpertLayout = "separate") -> dict[str, HFTensor]:
    """Every tensor of the model's HF checkpoint by name, without those of MTP layers."""
    specs = flatten_paths(split(config)[1])
    first_layer = {DENSE_STACK: 0, MOE_STACK: config.num_dense_layers}
    tensors: dict[str, HFTensor] = {}
    covered: list[str] = []
    for paths, form, pattern in _rules(specs, experts=experts):
        covered += paths
        shape = specs[paths[0]].shape
        layers, numbers = [None], [None]
        if specs[paths[0]].dims[0] == LAYERS_DIM:
            layers, shape = list(range(shape[0])), shape[1:]
        if "{expert}" in pattern:
            numbers, shape = list(range(shape[0])), shape[1:]
        first = first_layer.get(paths[0].split(".")[0], 0)
        for layer, expert in itertools.product(layers, numbers):
            name = pattern.format(layer=first + (layer or 0), expert=expert)
            tensors[name] = HFTensor(
                shape=_hf_shape(shape, form=form, count=len(paths)),
                paths=paths,
                layer=layer,
                expert=expert,
                form=form,
                part_shape=shape,
            )
    assert sorted(covered) == sorted(specs), "each parameter has one line in the table"
    return tensors


def expert_layout(names: Iterable[str]) -> ExpertLayout:
    """How a checkpoint with tensors of these names holds its experts."""
    return "fused" if any(name.endswith(_FUSED_NAME) for name in names) else "separate"


def is_mtp(config: ModelConfig, name: str) -> bool:
    """Whether a tensor belongs to a layer for multi-token prediction: those after the last."""
    last = config.num_hidden_layers
    layers = range(last, last + config.num_nextn_predict_layers)
    return name.startswith(tuple(f"model.layers.{layer}." for layer in layers))


def is_buffer(name: str) -> bool:
    """Whether a tensor is no weight: the rotary frequencies that files of 2023 hold."""
    return name.endswith("rotary_emb.inv_freq")


def problems(
    config: ModelConfig, wanted: Mapping[str, HFTensor], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """A line for each tensor that is missing, unknown or of another shape than `wanted` says."""
    found = []
    for name, tensor in wanted.items():
        if name not in shapes:
            found.append(f"{name}: missing, needed with shape {tensor.shape}")
        elif tuple(shapes[name]) != tensor.shape:
            found.append(f"{name}: shape {tuple(shapes[name])}, needed {tensor.shape}")
    for name in shapes:
        if name not in wanted and not is_mtp(config, name) and not is_buffer(name):
            found.append(f"{name}: not a tensor of this model")
    return found


def refuse(config: ModelConfig, lines: Sequence[str]) -> None:
    """Raise a `UserError` with all `lines`, sorted, where there are any."""
    if not lines:
        return
    shown = sorted(lines)[:_SHOWN_PROBLEMS]
    if len(lines) > len(shown):
        shown.append(f"... and {len(lines) - len(shown)} more")
    raise UserError(
        f"The tensors do not fit the config (model_type {config.model_type!r}, "
        f"{config.num_hidden_layers} layers); problems: {len(lines)}\n" + "\n".join(shown)
    )


def checkpoint_leaf(path: str) -> str:
    """The name under which checkpoints hold the parameter `path`: that of its place in a training
    state, where the router bias stands beside the parameters.
    """
    return "router_bias" if path == ".".join(ROUTER_BIAS_PATH) else f"params.{path}"


def params_from_hf(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Nested dict of numpy parameters, stacked and in logical shapes, from a checkpoint's tensors.

    Both layouts of the experts are taken. Each parameter is allocated once and filled slice by
    slice, so that memory-mapped tensors are read once and nothing is held twice.
    `*rotary_emb.inv_freq` and the tensors of MTP layers are left out.

    Args:
        tensors: of any dtypes. A parameter gets the dtype of its tensors; where they differ, the
            one that holds them all.

    Raises:
        UserError: with every tensor that is missing, unknown or of a wrong shape, sorted.
    """
    wanted = hf_tensors(config, experts=expert_layout(tensors))
    refuse(config, problems(config, wanted, {name: t.shape for name, t in tensors.items()}))
    sources: dict[tuple[str, ...], list[str]] = {}
    for name, tensor in wanted.items():
        sources.setdefault(tensor.paths, []).append(name)
    specs = flatten_paths(split(config)[1])
    params: dict[str, np.ndarray] = {}
    for paths, names in sources.items():
        dtype = np.result_type(*{tensors[name].dtype for name in names})
        leaves = [np.empty(specs[path].shape, dtype) for path in paths]
        for name in names:
            for leaf, part in zip(leaves, wanted[name].to_parts(tensors[name]), strict=True):
                leaf[wanted[name].index] = part
        params |= dict(zip(paths, leaves, strict=True))
    return unflatten_paths(params)


def params_to_hf(
    config: ModelConfig, params: Mapping[str, Any], *, experts: ExpertLayout = "separate"
) -> dict[str, np.ndarray]:
    """A checkpoint's tensors from a nested dict of parameters, stacked and in logical shapes.

    Every tensor is contiguous (safetensors writes wrong values of others) and keeps its dtype.
    """
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_paths(params).items()}
    return {
        name: tensor.from_parts([leaves[path][tensor.index] for path in tensor.paths])
        for name, tensor in hf_tensors(config, experts=experts).items()
    }


def _rules(
    specs: Mapping[str, ParamSpec], *, experts: ExpertLayout
) -> Iterator[tuple[tuple[str, ...], Form, str]]:
    """The lines of the table that hold for a model: parameters, form and pattern of the name."""
    for form, names in _TOP_NAMES.items():
        for path, name in names.items():
            if path in specs:
                yield (path,), form, name
    for stack in (DENSE_STACK, MOE_STACK):
        for form, names in _LAYER_NAMES.items():
            for path, name in names.items():
                if f"{stack}.{path}" in specs:
                    yield (f"{stack}.{path}",), form, _LAYER + name
        for paths, name in _EXPERT_NAMES[experts].items():
            if f"{stack}.{paths[0]}" in specs:
                yield tuple(f"{stack}.{path}" for path in paths), "expert", _LAYER + name


def _hf_shape(shape: tuple[int, ...], *, form: Form, count: int) -> tuple[int, ...]:
    """Shape in the file of `count` parameters of a shape, one after the other along the rows."""
    match form:
        case "flat":
            return (math.prod(shape),)
        case "one_input":
            return (math.prod(shape[1:]), shape[0])
        case "one_output":
            return (shape[-1], math.prod(shape[:-1]))
        case "expert":
            return (*shape[:-2], count * shape[-1], shape[-2])
    return shape
