"""The gated activation silu(gate) * up with its backward pass written out. Letters: F ffn."""

import jax
import jax.numpy as jnp
from jax import Array


@jax.custom_vjp
def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up (GLU variants, arXiv:2002.05202), computed in float32.

    Keeps `gate` and `up` for the backward pass and nothing between.

    Args:
        gate: [..., F], any float dtype.
        up: [..., F], dtype of `gate`.

    Returns:
        [..., F] in the dtype of `gate`.
    """
    gate32 = gate.astype(jnp.float32)
    return (gate32 * jax.nn.sigmoid(gate32) * up.astype(jnp.float32)).astype(gate.dtype)


def _forward(gate: Array, up: Array):
    return swiglu(gate, up), (gate, up)


def _backward(saved: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    dtype = d_out.dtype
    gate, up, d_out = (x.astype(jnp.float32) for x in (*saved, d_out))
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_out * up * (sigmoid + silu * (1 - sigmoid))
    return d_gate.astype(dtype), (d_out * silu).astype(dtype)


swiglu.defvjp(_forward, _backward)
