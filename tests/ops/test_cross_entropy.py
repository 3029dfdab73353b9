"""Cross-entropy from hidden states against float64, plain autodiff, and a bound on its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxseek.mesh import DATA_AXIS, TENSOR_AXIS, MeshShape, make_mesh
from jaxseek.ops import cross_entropy
from jaxseek.ops.collectives import Parallel, enter_tensor
from jaxseek.ops.cross_entropy import IGNORE_LABEL, cross_entropy_sum

ALONE = Parallel()


def case(tokens: int, size: int, vocab: int, *, seed: int = 0):
    """Logits of standard deviation about 5; every third label is ignored."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(tokens, size))
    kernel = rng.normal(size=(size, vocab)) * 5 / np.sqrt(size)
    labels = rng.integers(0, vocab, tokens)
    labels[::3] = IGNORE_LABEL
    return jnp.float32(hidden), jnp.float32(kernel), jnp.asarray(labels, jnp.int32)


def reference(hidden, kernel, labels) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss sum and both gradients in float64."""
    hidden, kernel = np.asarray(hidden, np.float64), np.asarray(kernel, np.float64)
    labels, counted = np.asarray(labels), np.asarray(labels) != IGNORE_LABEL
    logits = hidden @ kernel
    top = logits.max(axis=1, keepdims=True)
    exp = np.exp(logits - top)
    total = exp.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))[counted]
    loss = (np.log(total) + top)[counted, 0].sum() - logits[rows, labels[counted]].sum()
    d_logits = exp / total * counted[:, None]
    d_logits[rows, labels[counted]] -= 1
    return loss, d_logits @ kernel.T, hidden.T @ d_logits


def loss_and_grads(hidden, kernel, labels, *, vocab: int):
    @jax.jit
    def run(hidden, kernel):
        return jax.value_and_grad(cross_entropy_sum, argnums=(0, 1))(
            hidden, kernel, labels, vocab_size=vocab, parallel=ALONE
        )

    loss, grads = run(hidden, kernel)
    return loss, *grads


def assert_close(actual, expected, *, tolerance: float):
    """Loss relative, gradients relative to their largest entry."""
    np.testing.assert_allclose(actual[0], expected[0], rtol=tolerance)
    for a, e in zip(actual[1:], expected[1:], strict=True):
        error = np.abs(np.asarray(a, np.float64) - e).max()
        assert error <= tolerance * np.abs(e).max()


@pytest.mark.parametrize("vocab", [131, 129280])
def test_equals_float64_with_ignored_labels(vocab):
    arrays = case(12, 8, vocab)
    actual = loss_and_grads(*arrays, vocab=vocab)
    assert actual[0].dtype == jnp.float32
    assert_close(actual, reference(*arrays), tolerance=1e-5)


def test_gradient_equals_that_of_a_plain_implementation():
    hidden, kernel, labels = case(10, 7, 33)

    def plain(hidden, kernel):
        log_probs = jax.nn.log_softmax(hidden @ kernel)
        picked = jnp.take_along_axis(log_probs, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
        return -jnp.where(labels == IGNORE_LABEL, 0.0, picked).sum()

    expected = plain(hidden, kernel), *jax.grad(plain, argnums=(0, 1))(hidden, kernel)
    actual = loss_and_grads(hidden, kernel, labels, vocab=33)
    assert_close(actual, [np.asarray(x, np.float64) for x in expected], tolerance=1e-5)


def test_value_without_gradient_is_the_value_with_it():
    arrays = case(12, 8, 131)
    alone = cross_entropy_sum(*arrays, vocab_size=131, parallel=ALONE)
    assert float(alone) == float(loss_and_grads(*arrays, vocab=131)[0])


def test_the_gradient_is_linear_in_what_comes_in():
    hidden, kernel, labels = case(6, 5, 17)

    def scaled(factor):
        return jax.grad(
            lambda h: factor * cross_entropy_sum(h, kernel, labels, vocab_size=17, parallel=ALONE)
        )(hidden)

    np.testing.assert_allclose(scaled(0.25), 0.25 * scaled(1.0), rtol=1e-6)


@pytest.mark.parametrize("tokens_per_chunk", [1, 4, 5, 13])
def test_chunk_borders_change_nothing(tokens_per_chunk, monkeypatch):
    """13 tokens in chunks that do and do not divide them."""
    arrays = case(13, 6, 50)
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", tokens_per_chunk * 50 * 4)
    assert_close(loss_and_grads(*arrays, vocab=50), reference(*arrays), tolerance=1e-5)


def test_nothing_to_predict_is_zero_loss_and_exactly_zero_gradient():
    hidden, kernel, labels = case(9, 6, 50)
    ignored = jnp.full_like(labels, IGNORE_LABEL)
    for value in loss_and_grads(hidden, kernel, ignored, vocab=50):
        np.testing.assert_array_equal(value, 0)


def test_huge_logits_are_finite():
    hidden, kernel, labels = case(6, 4, 20)
    arrays = 1e4 * hidden, kernel, labels
    actual = loss_and_grads(*arrays, vocab=20)
    assert all(np.isfinite(x).all() for x in actual)
    np.testing.assert_allclose(actual[0], reference(*arrays)[0], rtol=1e-5)


def test_columns_beyond_the_vocabulary_take_no_part():
    hidden, kernel, labels = case(9, 6, 50)
    padded = jnp.pad(kernel, ((0, 0), (0, 2)), constant_values=3.0)
    loss, d_hidden, d_kernel = loss_and_grads(hidden, padded, labels, vocab=50)
    assert_close(
        (loss, d_hidden, d_kernel[:, :50]), reference(hidden, kernel, labels), tolerance=1e-5
    )
    np.testing.assert_array_equal(d_kernel[:, 50:], 0)


@pytest.mark.parametrize("vocab", [131, 129280])
def test_a_vocabulary_split_over_three_devices_is_the_whole_one(vocab):
    """Neither size divides by three: the last device holds padding, of any value here. Tokens are
    split over two data devices.
    """
    hidden, kernel, labels = case(12, 8, vocab)
    stored = -(-vocab // 3) * 3
    padded = jnp.pad(kernel, ((0, 0), (0, stored - vocab)), constant_values=9.0)
    parallel = Parallel(data_axis=DATA_AXIS, tensor_axis=TENSOR_AXIS, wire_dtype=jnp.float32)

    def loss(hidden, kernel, labels):
        hidden = enter_tensor(hidden, parallel)
        kernel = jax.lax.pcast(kernel, DATA_AXIS, to="varying")
        part = cross_entropy_sum(hidden, kernel, labels, vocab_size=vocab, parallel=parallel)
        return jax.lax.psum(part, DATA_AXIS)

    rows, columns = P(DATA_AXIS), P(None, TENSOR_AXIS)
    run = jax.shard_map(
        jax.value_and_grad(loss, argnums=(0, 1)),
        mesh=make_mesh(MeshShape(data=2, tensor=3)),
        in_specs=(rows, columns, rows),
        out_specs=(P(), (rows, columns)),
    )
    value, (d_hidden, d_kernel) = jax.jit(run)(hidden, padded, labels)
    expected = reference(hidden, kernel, labels)
    assert_close((value, d_hidden, d_kernel[:, :vocab]), expected, tolerance=1e-5)
    np.testing.assert_array_equal(d_kernel[:, vocab:], 0)


def test_bfloat16_products_are_summed_and_normalised_in_float32():
    """The loss of bfloat16 inputs is float32's; the gradients differ by bfloat16's rounding."""
    hidden, kernel, labels = case(12, 8, 129280)
    hidden, kernel = hidden.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    loss, d_hidden, d_kernel = loss_and_grads(hidden, kernel, labels, vocab=129280)
    expected = reference(hidden, kernel, labels)
    assert loss.dtype == jnp.float32 and d_hidden.dtype == d_kernel.dtype == jnp.bfloat16
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    assert_close((expected[0], d_hidden, d_kernel), expected, tolerance=1e-2)


def test_a_float32_kernel_meets_bfloat16_activations_in_bfloat16_and_keeps_a_float32_gradient():
    hidden, kernel, labels = case(12, 8, 131)
    loss, _, d_kernel = loss_and_grads(hidden.astype(jnp.bfloat16), kernel, labels, vocab=131)
    rounded = reference(hidden.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), labels)
    np.testing.assert_allclose(loss, rounded[0], rtol=1e-5)
    assert d_kernel.dtype == jnp.float32
    assert np.abs(d_kernel - rounded[2]).max() < 1e-2 * np.abs(rounded[2]).max()


def test_memory_does_not_hold_the_logits_of_all_tokens(monkeypatch):
    """Of 8192 tokens and 1024 words the logits are 32 MiB."""
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", 2**20)
    grad = jax.grad(
        functools.partial(cross_entropy_sum, vocab_size=1024, parallel=ALONE), argnums=(0, 1)
    )
    shapes = (
        jax.ShapeDtypeStruct((8192, 8), jnp.float32),
        jax.ShapeDtypeStruct((8, 1024), jnp.float32),
        jax.ShapeDtypeStruct((8192,), jnp.int32),
    )
    memory = jax.jit(grad).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 2**20
