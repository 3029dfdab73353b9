"""Cross-entropy straight from hidden states, a chunk of tokens at a time, so that the logits of a
batch never exist at once.

Letters: M tokens, D model, V vocabulary (this device's slice under tensor parallelism), C tokens of
a chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxseek.labels import IGNORE_LABEL
from jaxseek.ops.collectives import Parallel, vary_like

_CHUNK_BYTES = 64 * 2**20  # float32 logits of one chunk


def cross_entropy_sum(
    hidden: Array, kernel: Array, labels: Array, *, vocab_size: int, parallel: Parallel
) -> Array:
    """Sum over tokens of -log softmax(hidden kernel)[label], float32 scalar.

    The gradient is computed along with the value (both are linear in the incoming scalar), so the
    backward pass recomputes nothing. Under tensor parallelism each device holds a slice of the
    vocabulary; the softmax runs over all of them.

    Args:
        hidden: [M, D] in the compute dtype.
        kernel: [D, V] in any float dtype; this device's columns.
        labels: int32 [M], in [0, vocab_size) or `IGNORE_LABEL`.
        vocab_size: logical size; columns beyond it are padding and take no part.
    """
    return _loss(hidden, kernel, labels, vocab_size, parallel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _loss(hidden, kernel, labels, vocab_size, parallel):
    kernel = kernel.astype(hidden.dtype)

    def body(total, chunk):
        x, y = chunk
        loss, _ = _chunk_loss(x, y, kernel, vocab_size=vocab_size, parallel=parallel)
        return total + loss, None

    chunks = _chunks(hidden, kernel, labels)
    start = vary_like(jnp.zeros((), jnp.float32), *_reduced_refs(hidden, labels, parallel))
    return jax.lax.scan(body, start, chunks)[0]


def _loss_forward(hidden, kernel, labels, vocab_size, parallel):
    compute_kernel = kernel.astype(hidden.dtype)

    def body(carry, chunk):
        total, d_kernel = carry
        x, y = chunk
        loss, d_logits = _chunk_loss(x, y, compute_kernel, vocab_size=vocab_size, parallel=parallel)
        d_logits = d_logits.astype(x.dtype)
        d_x = jnp.einsum("cv,dv->cd", d_logits, compute_kernel)
        d_kernel = d_kernel + jnp.einsum(
            "cd,cv->dv", x, d_logits, preferred_element_type=jnp.float32
        )
        return (total + loss, d_kernel), d_x

    start = vary_like(jnp.zeros((), jnp.float32), *_reduced_refs(hidden, labels, parallel))
    d_start = vary_like(jnp.zeros(kernel.shape, jnp.float32), hidden, kernel, labels)
    chunks = _chunks(hidden, kernel, labels)
    (total, d_kernel), d_hidden = jax.lax.scan(body, (start, d_start), chunks)
    d_hidden = d_hidden.reshape(-1, hidden.shape[-1])[: hidden.shape[0]]
    return total, (d_hidden, d_kernel.astype(kernel.dtype))


def _loss_backward(vocab_size, parallel, residuals, g):
    del vocab_size, parallel
    return *((g * d).astype(d.dtype) for d in residuals), None


_loss.defvjp(_loss_forward, _loss_backward)


def _chunk_loss(
    x: Array, labels: Array, kernel: Array, *, vocab_size: int, parallel: Parallel
) -> tuple[Array, Array]:
    """Loss sum of one chunk and its gradient with respect to the logits, float32 [C, V]."""
    logits = jnp.einsum("cd,dv->cv", x, kernel, preferred_element_type=jnp.float32)
    column = jnp.arange(kernel.shape[1]) + parallel.tensor_index() * kernel.shape[1]
    if kernel.shape[1] * parallel.tensor_size() != vocab_size:
        logits = jnp.where(column < vocab_size, logits, -jnp.inf)
    hit = column == labels[:, None]
    top = logits.max(axis=-1)
    if parallel.tensor_axis is not None:
        top = jax.lax.pmax(top, parallel.tensor_axis)
    exp = jnp.exp(logits - top[:, None])
    sums = jnp.stack([exp.sum(axis=-1), jnp.where(hit, logits, 0.0).sum(axis=-1)])
    if parallel.tensor_axis is not None:
        sums = jax.lax.psum(sums, parallel.tensor_axis)
    counted = labels != IGNORE_LABEL
    loss = jnp.where(counted, jnp.log(sums[0]) + top - sums[1], 0.0).sum()
    d_logits = exp * (counted / sums[0])[:, None] - (hit & counted[:, None])
    return loss, d_logits


def _chunks(hidden: Array, kernel: Array, labels: Array) -> tuple[Array, Array]:
    """Hidden states [chunks, C, D] and labels [chunks, C], the last chunk filled up with ignored
    tokens.
    """
    tokens = hidden.shape[0]
    count = -(-tokens * kernel.shape[1] * 4 // _CHUNK_BYTES)
    size = -(-tokens // count)
    count = -(-tokens // size)
    missing = count * size - tokens
    hidden = jnp.pad(hidden, ((0, missing), (0, 0)))
    labels = jnp.pad(labels, (0, missing), constant_values=IGNORE_LABEL)
    return hidden.reshape(count, size, -1), labels.reshape(count, size)


def _reduced_refs(hidden: Array, labels: Array, parallel: Parallel) -> tuple[Array, ...]:
    """What the loss varies like: `hidden` may vary over the tensor axis too, over which the loss is
    summed.
    """
    if parallel.tensor_axis is None:
        return hidden, labels
    return (labels,)
