"""Two ops whose backward pass is written out: equal to autodiff of the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxseek.ops.linear import linear
from jaxseek.ops.swiglu import swiglu


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize(
    "op, plain, inputs",
    [
        (swiglu, lambda g, u: jax.nn.silu(g) * u, (normal(3, 5, 7), normal(3, 5, 7, seed=1))),
        (linear, lambda x, w: x @ w, (normal(11, 5), normal(5, 7, seed=1))),
    ],
)
def test_values_and_gradients_equal_the_plain_form(op, plain, inputs):
    out, pull = jax.vjp(op, *inputs)
    expected, pull_plain = jax.vjp(plain, *inputs)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    d_out = normal(*out.shape, seed=2)
    for actual, wanted in zip(pull(d_out), pull_plain(d_out), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


def test_bfloat16_in_gives_bfloat16_out_and_back():
    for op, shapes in ((swiglu, ((4, 6), (4, 6))), (linear, ((4, 6), (6, 3)))):
        inputs = [normal(*shape).astype(jnp.bfloat16) for shape in shapes]
        out, pull = jax.vjp(op, *inputs)
        assert {out.dtype, *(g.dtype for g in pull(out))} == {jnp.dtype(jnp.bfloat16)}
