"""RMSNorm against the formula in float64, and where its precision matters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxseek.ops.norm import rms_norm


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_equals_the_formula_in_float64(eps):
    x, scale = 3 * random(2, 5, 7), 1 + 0.1 * random(7, seed=1)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale
    actual = rms_norm(jnp.float32(x), jnp.float32(scale), eps=eps)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_bfloat16_is_rounded_once_behind_float32_statistics():
    x = jnp.bfloat16(3 * random(20, 64))
    y = rms_norm(x, jnp.ones(64, jnp.bfloat16), eps=1e-6)
    x = np.asarray(x, np.float64)
    expected = jnp.bfloat16(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6))
    assert (y == expected).mean() > 0.99  # the rest lies on the border of two


def test_a_long_bfloat16_row_is_not_summed_in_bfloat16():
    """Such a sum of ones stops at 256."""
    ones = jnp.ones((1, 4096), jnp.bfloat16)
    np.testing.assert_array_equal(rms_norm(ones, ones[0], eps=0.0).astype(jnp.float32), 1.0)


def test_a_float32_scale_leaves_the_dtype_of_the_activation():
    y = rms_norm(jnp.ones((3, 4), jnp.bfloat16), jnp.ones(4, jnp.float32), eps=1e-6)
    assert y.dtype == jnp.bfloat16


def test_a_zero_vector_has_a_finite_gradient():
    grad = jax.grad(lambda x: rms_norm(x, jnp.ones(4), eps=1e-6).sum())(jnp.zeros(4))
    np.testing.assert_allclose(grad, 1e3, rtol=1e-5)  # eps^(-1/2)
