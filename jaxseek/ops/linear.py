"""A product with a weight, its backward pass written out. Letters: M tokens, D in, F out."""

import jax
import jax.numpy as jnp
from jax import Array

_ROWS = ((0,), (0,))  # contract the token dims of both operands


@jax.custom_vjp
def linear(x: Array, weight: Array) -> Array:
    """x weight, accumulated in float32.

    The transpose rule of a product gives the weight's gradient as a transposed product, for which
    XLA's CPU compiler first writes a transposed copy of the output's gradient; stated as
    x^T d_out it needs none.

    Args:
        x: [M, D].
        weight: [D, F], dtype of `x`.

    Returns:
        [M, F] in the dtype of `x`.
    """
    return jnp.matmul(x, weight)


def _forward(x: Array, weight: Array):
    return jnp.matmul(x, weight), (x, weight)


def _backward(saved: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, weight = saved
    d_x = jax.lax.dot_general(d_out, weight, (((1,), (1,)), ((), ())))
    return d_x, jax.lax.dot_general(x, d_out, (_ROWS, ((), ())))


linear.defvjp(_forward, _backward)
