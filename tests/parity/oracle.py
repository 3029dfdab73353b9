"""transformers in float32 on the CPU, on tiny random models of every family, as the reference.

Weights are far from their initial values (matrices of standard deviation 0.15, norms around 1,
biases of both signs), so that no part of the mathematics is hidden by a zero, a one or a small
number. Positions go beyond `original_max_position_embeddings`.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as ocr2
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig

from convert.hf_config import model_config_from_hf
from jaxseek.config import ModelConfig

BATCH, LENGTH = 2, 160
ORIGINAL_LENGTH = 64

_COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2560,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
_DENSE = _COMMON | {"intermediate_size": 176, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
_MOE = _COMMON | {"intermediate_size": 96, "moe_intermediate_size": 24, "num_key_value_heads": 4}
_MLA = _MOE | {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
_V2 = _MLA | {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
}
_LITE = _V2 | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}
_V3 = _MLA | {
    "q_lora_rank": 24,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}


def _rope(rope_type: str = "default", theta: float = 1e4, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **scaling}}


def _yarn(mscale: float, mscale_all_dim: float) -> dict[str, Any]:
    return _rope(
        "yarn",
        factor=40.0,
        beta_fast=32,
        beta_slow=1,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        original_max_position_embeddings=ORIGINAL_LENGTH,
    )


_LLAMA3 = _rope(
    "llama3",
    5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=ORIGINAL_LENGTH,
)
_QWEN3_YARN = _rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=ORIGINAL_LENGTH)

# Name -> model type and the arguments of its config class.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _DENSE | {"num_key_value_heads": 4} | _rope()),
    "coder": ("llama", _DENSE | _rope("linear", 1e5, factor=4.0)),
    "llama-distill": ("llama", _DENSE | {"rms_norm_eps": 1e-5} | _LLAMA3),
    "qwen2-distill": ("qwen2", _DENSE | {"use_sliding_window": False} | _rope()),
    "qwen3-distill": ("qwen3", _DENSE | {"head_dim": 32} | _QWEN3_YARN),
    "moe-16b": (
        "deepseek_ocr2_text",
        _MOE
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
        }
        | _rope(),
    ),
    "v2-lite": ("deepseek_v2", _LITE | _yarn(0.707, 0.707)),
    "v2": (
        "deepseek_v2",
        _V2
        | {
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
        }
        | _yarn(0.707, 0.707),
    ),
    "v3": ("deepseek_v3", _V3 | {"rope_interleave": True} | _yarn(1.0, 1.0)),
}
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "coder-mqa": ("llama", _DENSE | {"num_key_value_heads": 1} | _rope("linear", 1e5, factor=4.0)),
    "v2-lite-unequal-mscale": ("deepseek_v2", _LITE | _yarn(1.0, 0.5)),
    "v3-half-split-rope": ("deepseek_v3", _V3 | {"rope_interleave": False} | _yarn(1.0, 1.0)),
    "v3-negative-biases": ("deepseek_v3", _V3 | _yarn(1.0, 1.0)),
}
_MODELS = _FAMILIES | _VARIANTS
FAMILIES, VARIANTS = tuple(_FAMILIES), tuple(_VARIANTS)
MOE_MODELS = tuple(name for name, (_, given) in _MODELS.items() if "n_routed_experts" in given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sublayer:
    """Input and output [B, T, D] of one attention or MoE module of the reference."""

    inputs: np.ndarray
    outputs: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle:
    """One model of the reference and what it computes. B batch, T length, V vocabulary, M = B T.

    Attributes:
        config: what our reader makes of its `config.json`.
        tokens: int32 [B, T].
        tensors: its parameters by hub name, experts fused as transformers holds them in memory.
        logits: [B, T, V].
        loss: mean cross-entropy of the next token.
        gradients: of the loss, named like `tensors`; without the router's correction biases.
        expert_ids: [M, A] of each MoE layer.
        attention: of each layer.
        moe: of each MoE layer.
    """

    config: ModelConfig
    tokens: np.ndarray
    tensors: dict[str, np.ndarray]
    logits: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]
    expert_ids: list[np.ndarray]
    attention: list[Sublayer]
    moe: list[Sublayer]


class _Moe16B(torch.nn.Module):
    """MoE-16B's stand-in: the only class of transformers with its arithmetic, and a head to it."""

    def __init__(self, config: DeepseekOcr2TextConfig):
        super().__init__()
        self.model = ocr2.DeepseekOcr2TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.model(input_ids=tokens).last_hidden_state
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(hidden))


@functools.cache
def oracle(name: str) -> Oracle:
    """The reference of a family or variant, computed once per process."""
    model, config = build(name)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (BATCH, LENGTH))
    attention, moe, expert_ids = [], [], []
    for path, module in model.named_modules():
        if path.endswith(".self_attn"):
            module.register_forward_hook(_recorder(attention), with_kwargs=True)
        elif path.endswith(".mlp.gate"):
            module.register_forward_hook(lambda *call: expert_ids.append(call[-1][2].numpy()))
        elif path.endswith(".mlp") and hasattr(module, "gate"):
            module.register_forward_hook(_recorder(moe), with_kwargs=True)
    logits = model(torch.from_numpy(tokens)).logits
    labels = torch.from_numpy(tokens)[:, 1:].reshape(-1)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(len(labels), -1), labels)
    loss.backward()
    return Oracle(
        config=config,
        tokens=tokens.astype(np.int32),
        tensors={name: tensor.numpy() for name, tensor in model.state_dict().items()},
        logits=logits.detach().numpy(),
        loss=loss.item(),
        gradients={name: p.grad.numpy() for name, p in model.named_parameters()},
        expert_ids=expert_ids,
        attention=attention,
        moe=moe,
    )


def build(name: str) -> tuple[torch.nn.Module, ModelConfig]:
    """A model of transformers with random weights, and our config of its `config.json`."""
    model_type, arguments = _MODELS[name]
    stand_in = model_type == "deepseek_ocr2_text"
    if stand_in:
        config = DeepseekOcr2TextConfig(**arguments)
    else:
        config = transformers.AutoConfig.for_model(model_type, **arguments)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    saved = json.loads(config.to_json_string())
    if stand_in:
        dense = saved.pop("mlp_layer_types").count("dense")
        saved |= {"model_type": "deepseek", "first_k_dense_replace": dense}
        model = _Moe16B(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    _randomise(model, bias_mean=-1.0 if name == "v3-negative-biases" else 0.0)
    return model, model_config_from_hf(saved)


def _randomise(model: torch.nn.Module, *, bias_mean: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(bias_mean + 0.1 * noise)
        elif name.endswith(".bias"):
            tensor.copy_(0.5 * noise)
        elif tensor.ndim == 1:
            tensor.copy_(1.0 + 0.1 * noise)
        else:
            tensor.copy_(0.15 * noise)


def _recorder(records: list[Sublayer]) -> Callable[..., None]:
    """A forward hook that keeps what goes in and out."""

    def record(module, args, kwargs, output):
        inputs = args[0] if args else kwargs["hidden_states"]
        outputs = output[0] if isinstance(output, tuple) else output
        records.append(Sublayer(inputs=inputs.detach().numpy(), outputs=outputs.detach().numpy()))

    return record
