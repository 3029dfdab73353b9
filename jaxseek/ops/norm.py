"""RMSNorm. Letters: D model (or any size of the last dim)."""

import jax
import jax.numpy as jnp
from jax import Array


def rms_norm(x: Array, scale: Array, *, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last dim.

    Statistics in float32; the normalised value is cast to the dtype of `x` before the product, as
    HF `LlamaRMSNorm` and `DeepseekV3RMSNorm` do.

    Args:
        x: [..., D], any float dtype.
        scale: [D].

    Returns:
        [..., D] in the dtype of `x`.
    """
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse).astype(x.dtype) * scale.astype(x.dtype)
