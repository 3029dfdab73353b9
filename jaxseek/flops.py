"""Floating-point operations of the model itself, for model FLOPs utilisation (MFU, PaLM,
arXiv:2204.02311 appendix B).
"""

from typing import Any

from jaxseek.config import ModelConfig
from jaxseek.devices import device_of_kind
from jaxseek.layout import ParamSpec, flatten_paths


def model_flops_per_token(config: ModelConfig, specs: dict, *, seq_len: int) -> float:
    """Forward and backward FLOPs of one token: six per weight it meets in a product, plus causal
    attention; no recomputation.

    Of the routed experts a token meets `num_experts_per_tok`; the embedding is a lookup and counts
    nothing.
    """
    active = (config.num_experts_per_tok or 0) / (config.n_routed_experts or 1)
    weights = 0.0
    for path, spec in flatten_paths(specs).items():
        if spec.role in ("matrix", "router") or (
            spec.role == "embedding" and config.tie_word_embeddings
        ):
            weights += spec.size * (active if _is_expert(path, spec) else 1.0)
    heads = config.num_hidden_layers * config.num_attention_heads
    return 6 * weights + 3 * seq_len * heads * (config.attention_head_dim + config.value_head_dim)


def peak_flops(device: Any) -> float | None:
    """Peak dense bf16 FLOP/s of a `jax.Device`, or `None` where it is not known (always on CPU)."""
    known = device_of_kind(device.device_kind)
    return None if known is None else known.bf16_tflops * 1e12


def _is_expert(path: str, spec: ParamSpec) -> bool:
    return "experts" in spec.dims and ".experts." in path
