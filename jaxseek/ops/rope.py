"""Rotary position embedding with the scalings of the family. Letters: B batch, T length, P rotated
dims of a head.
"""

import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxseek.config import ModelConfig, RopeScaling

# Which two dims of a head form a pair: (i, i + P/2) in Llama and Qwen, (2i, 2i + 1) in DeepSeek's
# MLA.
Pairing = Literal["half", "interleaved"]


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position for each rotated pair: float32 [P/2] (HF `modeling_rope_utils`)."""
    dim, base, scaling = config.rope_dim, config.rope_theta, config.rope_scaling
    frequencies = base ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None:
        return frequencies.astype(np.float32)
    scale = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}[scaling.rope_type]
    return scale(frequencies, scaling, base=base, dim=dim).astype(np.float32)


def rope_amplitude(config: ModelConfig) -> float:
    """Factor on cos and sin: 1 but for yarn, where it is m(mscale) / m(mscale_all_dim), or m(1) if
    neither is given.
    """
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_magnitude(scaling.factor, scaling.mscale) / yarn_magnitude(
            scaling.factor, scaling.mscale_all_dim
        )
    return yarn_magnitude(scaling.factor, 1.0)


def softmax_scale(config: ModelConfig) -> float:
    """Factor on attention scores: head_dim^-1/2, under MLA with yarn times m(mscale_all_dim)^2
    (DeepSeek-V2, HF `yarn_apply_mscale`).
    """
    scale = config.attention_head_dim**-0.5
    scaling = config.rope_scaling
    if config.is_mla and scaling is not None and scaling.mscale_all_dim:
        scale *= yarn_magnitude(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale


def yarn_magnitude(factor: float, mscale: float) -> float:
    """m(s) = 0.1 s ln(factor) + 1 (arXiv:2309.00071, equation 22, with DeepSeek's s)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_tables(positions: Array, config: ModelConfig) -> tuple[Array, Array]:
    """cos and sin of every position's angles, float32 [B, T, P/2] each; `positions` is int32 [B,
    T].
    """
    angles = positions.astype(jnp.float32)[..., None] * rope_frequencies(config)
    amplitude = rope_amplitude(config)
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def apply_rope(x: Array, tables: tuple[Array, Array], *, pairing: Pairing) -> Array:
    """Rotate each pair (a, b) of the last dim to (a cos - b sin, a sin + b cos).

    Args:
        x: [B, T, ..., P] with any number of head dims between T and P.
        tables: cos and sin [B, T, P/2] from `rope_tables`.
        pairing: which dims form a pair; the order of the dims is kept, so weights stay as the
            checkpoint has them.

    Returns:
        The shape and dtype of `x`; the rotation itself is float32.
    """
    heads = (1,) * (x.ndim - 3)
    cos, sin = (t.reshape(*t.shape[:2], *heads, t.shape[-1]) for t in tables)
    x32 = x.astype(jnp.float32)
    if pairing == "half":
        a, b = jnp.split(x32, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
    a, b = x32[..., ::2], x32[..., 1::2]
    return (
        jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape).astype(x.dtype)
    )


def _linear(frequencies: np.ndarray, scaling: RopeScaling, **_) -> np.ndarray:
    return frequencies / scaling.factor


def _llama3(frequencies: np.ndarray, scaling: RopeScaling, **_) -> np.ndarray:
    """Long waves are stretched, short ones kept, those between blended (Llama 3.1, HF
    `_compute_llama3_parameters`).
    """
    assert scaling.low_freq_factor is not None and scaling.high_freq_factor is not None
    assert scaling.original_max_position_embeddings is not None
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return frequencies / scaling.factor * (1 - smooth) + frequencies * smooth


def _yarn(frequencies: np.ndarray, scaling: RopeScaling, *, base: float, dim: int) -> np.ndarray:
    """Interpolate the dims that turn seldom within the original context, keep those that turn often
    (arXiv:2309.00071).
    """
    original = scaling.original_max_position_embeddings
    assert original is not None

    def dim_of(turns: float) -> float:
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    return frequencies * (1 - ramp) + frequencies / scaling.factor * ramp
