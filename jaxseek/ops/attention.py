"""Causal self-attention over packed sequences: one function, three ways to compute it.

Shape letters: B batch, T query length, S key length (S = T), K kv heads, G query heads per kv head,
H head dim of queries and keys, Hv head dim of values (MLA: H = 192, Hv = 128). In the blockwise
form also: n number of blocks, C tokens of a block, R = G * C query rows of a block.

- `plain`: all T x T scores at once. For short sequences, where that is fast and small.
- `blockwise`: online softmax over blocks and a backward pass of its own. Memory linear in T.
- `cudnn`: cuDNN's flash attention through JAX. NVIDIA GPUs, 16 bit, H = Hv <= 128.

The output is named "attn_out" and the blockwise log-sum-exp "attn_lse" (`checkpoint_name`). Under
a remat policy that saves both, the backward pass of the blockwise form does not run the forward
again; the other forms keep their softmax statistics unnamed, so they do.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxseek.errors import UserError
from jaxseek.ops.collectives import vary_like
from jaxseek.ops.platform import target_platform

Implementation = Literal["plain", "blockwise", "cudnn"]

# On 2 CPU cores, forward + backward, the blockwise form takes as long as the plain one at 128
# tokens, half at 512, a third at 2048: it skips the masked half, and its tiles stay in the cache.
_SHORT = 128
# From here on memory has to be linear in T. Below, an accelerator prefers few large kernels.
_LONG = 1024

_matmul = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    segment_ids: Array | None = None,
    implementation: Literal["auto"] | Implementation = "auto",
    block_size: int | None = None,
) -> Array:
    """softmax(scale * q k^T) v, where token i sees token j if j <= i and their segments are equal.

    `eager_attention_forward` of the HF Llama and DeepSeek classes, with scores and softmax in
    float32 whatever the inputs are. Inside a shard_map the batch and the kv heads may be split.

    Args:
        q: queries [B, T, K, G, H], float32, bfloat16 or float16.
        k: keys [B, T, K, H], dtype of q.
        v: values [B, T, K, Hv], dtype of q.
        scale: factor of the scores.
        segment_ids: int32 [B, T], the document of each token; None if every row is one document.
        implementation: "auto" takes what `choose_implementation` says.
        block_size: tokens of a block in the blockwise form, T need not be a multiple; None chooses.

    Returns:
        [B, T, K, G, Hv], dtype of q.

    Raises:
        UserError: `implementation` is unknown, or "cudnn" where cuDNN does not take these inputs.
    """
    assert q.shape[:3] == k.shape[:3] == v.shape[:3], (q.shape, k.shape, v.shape)
    assert q.shape[-1] == k.shape[-1], (q.shape, k.shape)
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    assert segment_ids is None or segment_ids.shape == q.shape[:2], (segment_ids.shape, q.shape)
    inputs = {
        "length": q.shape[1],
        "head_dim": q.shape[-1],
        "value_dim": v.shape[-1],
        "dtype": q.dtype,
        "packed": segment_ids is not None,
    }
    if implementation == "auto":
        implementation = choose_implementation(**inputs)
    q, k, v, segment_ids = vary_like((q, k, v, segment_ids), q, k, v, segment_ids)
    match implementation:
        case "plain":
            out = _plain(q, k, v, segment_ids, scale=scale)
        case "blockwise":
            block_size = block_size or _block_size(q.shape[1])
            return _blockwise(scale, block_size, q, k, v, segment_ids)
        case "cudnn":
            if problem := _cudnn_problem(**inputs):
                raise UserError(
                    f'attention implementation "cudnn" was asked for, but {problem}. '
                    'Use "auto" or "blockwise".'
                )
            out = _cudnn(q, k, v, segment_ids, scale=scale)
        case _:
            known = ", ".join(("auto", *get_args(Implementation)))
            raise UserError(
                f'unknown attention implementation "{implementation}": it is one of {known}.'
            )
    return checkpoint_name(out, "attn_out")


def choose_implementation(
    *,
    length: int,
    head_dim: int,
    value_dim: int,
    dtype: DTypeLike,
    packed: bool,
    platform: str | None = None,
    compute_capability: float | None = None,
) -> Implementation:
    """The form that `attention(implementation="auto")` takes, so that a run can report it.

    Args:
        length: T, in tokens.
        head_dim: H.
        value_dim: Hv.
        dtype: of q, k and v.
        packed: whether segment ids are given.
        platform: JAX's name of it; None is that of the mesh in scope, else JAX's default.
        compute_capability: of the GPU, such as 8.9; None is that of the GPU of this process, and
            where there is none (a program compiled for elsewhere) a GPU that cuDNN supports.
    """
    platform = platform or target_platform()
    if length <= _SHORT:
        return "plain"
    # Segment ids reach cuDNN only as a T x T bias in memory; blockwise keeps memory linear.
    if not packed and not _cudnn_problem(
        length=length,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        packed=packed,
        platform=platform,
        compute_capability=compute_capability,
    ):
        return "cudnn"
    return "plain" if platform != "cpu" and length < _LONG else "blockwise"


def _local_compute_capability() -> float | None:
    """Of the GPU of this process; 0 for one that is not NVIDIA's, None where there is no GPU."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return None
    try:
        return float(device.compute_capability)
    except ValueError:  # AMD: "gfx90a"
        return 0.0


def _cudnn_problem(
    *,
    length: int,
    head_dim: int,
    value_dim: int,
    dtype: DTypeLike,
    packed: bool,
    platform: str | None = None,
    compute_capability: float | None = None,
) -> str | None:
    """Why cuDNN does not take such inputs, or None. Arguments as in `choose_implementation`."""
    platform = platform or target_platform()
    if platform not in ("gpu", "cuda"):
        return f'the platform is "{platform}" and cuDNN needs an NVIDIA GPU'
    if compute_capability is None:
        compute_capability = _local_compute_capability()
    if compute_capability is not None and compute_capability < 8.0:
        return "it needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16 and the inputs are {jnp.dtype(dtype).name}"
    if head_dim != value_dim or head_dim > 128 or head_dim % 8:
        return (
            "it needs one head dim for queries, keys and values, a multiple of 8 up to 128, and "
            f"they are {head_dim} (queries, keys) and {value_dim} (values)"
        )
    if packed and length % 2:
        return f"it needs an even sequence length for packed documents and it is {length}"
    return None


def _block_size(length: int) -> int:
    """Tokens of a block, at most 512: smaller tiles would fit the cache better, but a step of the
    loop costs more than that gains.

    The blocks are of even size, so that little of the last one is padding.
    """
    tokens = math.ceil(length / math.ceil(length / 512))
    return -(-tokens // 16) * 16


def _plain(q: Array, k: Array, v: Array, segment_ids: Array | None, *, scale: float) -> Array:
    """Attention with all scores in memory. Arguments and result as in `attention`."""
    token = jnp.arange(q.shape[1])
    visible = _visible(token, token, segment_ids, segment_ids)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v)


def _cudnn(q: Array, k: Array, v: Array, segment_ids: Array | None, *, scale: float) -> Array:
    """cuDNN's flash attention; segments are a mask. Arguments and result as in `attention`."""
    same_segment = None
    if segment_ids is not None:
        same_segment = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    heads = q.reshape(*q.shape[:2], -1, q.shape[-1])
    out = jax.nn.dot_product_attention(
        heads, k, v, mask=same_segment, scale=scale, is_causal=True, implementation="cudnn"
    )
    return out.reshape(*q.shape[:4], v.shape[-1])


def _visible(
    query_token: Array, key_token: Array, query_segment: Array | None, key_segment: Array | None
) -> Array:
    """Which keys each query sees, bool [B or 1, T, S], from positions [T], [S] and segment ids."""
    causal = (query_token[:, None] >= key_token[None, :])[None]
    if query_segment is None or key_segment is None:
        return causal
    return causal & (query_segment[:, :, None] == key_segment[:, None, :])


# The blockwise form. q, k and v are cut into n blocks of C tokens, and one loop runs over the
# n (n + 1) / 2 pairs of a query block i and a key block j <= i: no pair above the diagonal exists,
# and the compiler knows the length of the loop. The last block is filled up with zeros: causality
# hides these keys from every real query, and the rows of these queries are cut off.
#
# The heads of a group share their keys, so a query block holds its R = G * C rows in one matrix.
# Every product in the loops is a row-major [rows, inner] x [inner, columns] one, at which CPUs are
# fastest: what stands transposed in a formula is transposed once, outside of the loop.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _blockwise(
    scale: float, block_size: int, q: Array, k: Array, v: Array, segment_ids: Array | None
) -> Array:
    """FlashAttention-2 (arXiv:2307.08691) in jnp. Arguments and result as in `attention`."""
    return _blockwise_forward(scale, block_size, q, k, v, segment_ids)[0]


def _blockwise_forward(scale, block_size, q, k, v, segment_ids):
    """The output and the residuals: inputs, output, log-sum-exp of the scores [n, B, K, R]."""
    queries = _query_blocks(q, block_size)
    keys_t, values = _key_blocks(k, block_size).mT, _key_blocks(v, block_size)
    visible = _block_mask(segment_ids, block_size=block_size, groups=q.shape[3])

    def step(carry, pair):
        i, j = pair
        acc, peak, total = (x[i] for x in carry)
        scores = jnp.where(visible(i, j), _matmul(queries[i], keys_t[j]) * scale, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        weights = jnp.exp(scores - new_peak[..., None])
        shrink = jnp.exp(peak - new_peak)
        acc = acc * shrink[..., None] + _matmul(weights.astype(v.dtype), values[j])
        total = total * shrink + weights.sum(axis=-1)
        updates = acc, new_peak, total
        return tuple(x.at[i].set(y) for x, y in zip(carry, updates, strict=True)), None

    rows = queries.shape[:-1]
    start = (
        jnp.zeros((*rows, v.shape[-1]), jnp.float32),
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    (acc, peak, total), _ = jax.lax.scan(step, vary_like(start, q), _block_pairs(len(queries)))
    out = _from_query_blocks(acc / total[..., None], like=q)
    out = checkpoint_name(out.astype(q.dtype), "attn_out")
    lse = checkpoint_name(peak + jnp.log(total), "attn_lse")
    return out, (q, k, v, segment_ids, out, lse)


def _blockwise_backward(scale, block_size, residuals, d_out):
    """Gradients of q, k and v; the weights of each pair of blocks are computed again."""
    q, k, v, segment_ids, out, lse = residuals
    queries, d_rows = _query_blocks(q, block_size), _query_blocks(d_out, block_size)
    queries_t, d_rows_t = queries.mT, d_rows.mT
    keys, values_t = _key_blocks(k, block_size), _key_blocks(v, block_size).mT
    keys_t = keys.mT
    # sum_s weight * d_weight, which the softmax takes from the gradient of every score of a row
    mean = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    mean = _query_blocks(mean, block_size)
    visible = _block_mask(segment_ids, block_size=block_size, groups=q.shape[3])

    def step(carry, pair):
        i, j = pair
        d_queries, d_keys_t, d_values_t = carry
        scores = jnp.where(visible(i, j), _matmul(queries[i], keys_t[j]) * scale, -jnp.inf)
        weights = jnp.exp(scores - lse[i][..., None])
        d_scores = (weights * (_matmul(d_rows[i], values_t[j]) - mean[i])).astype(q.dtype)
        d_queries = d_queries.at[i].add(_matmul(d_scores, keys[j]))
        d_keys_t = d_keys_t.at[j].add(_matmul(queries_t[i], d_scores))
        d_values_t = d_values_t.at[j].add(_matmul(d_rows_t[i], weights.astype(q.dtype)))
        return (d_queries, d_keys_t, d_values_t), None

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (queries, keys_t, values_t))
    grads, _ = jax.lax.scan(step, vary_like(start, q), _block_pairs(len(queries)))
    d_queries, d_keys_t, d_values_t = grads
    d_q = _from_query_blocks(d_queries * scale, like=q)
    d_k = _from_key_blocks(d_keys_t.mT * scale, like=k)
    d_v = _from_key_blocks(d_values_t.mT, like=v)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _block_pairs(count: int) -> tuple[Array, Array]:
    """Indices i, j of all pairs of blocks with j <= i, for each i the diagonal first.

    There each row sees itself, so its peak is finite before a block comes that it sees nothing of.
    """
    i, back = np.tril_indices(count)
    return jnp.asarray(i), jnp.asarray(i - back)


def _block_mask(
    segment_ids: Array | None, *, block_size: int, groups: int
) -> Callable[[Array, Array], Array]:
    """Of (i, j): which keys of block j the rows of query block i see, bool [B or 1, 1, R, C]."""
    segments = None
    if segment_ids is not None:
        segments = _pad_to_blocks(segment_ids, block_size)
        segments = segments.reshape(len(segments), -1, block_size).swapaxes(0, 1)
    offsets = jnp.arange(block_size)

    def visible(i: Array, j: Array) -> Array:
        pair = (None, None) if segments is None else (segments[i], segments[j])
        block = _visible(i * block_size + offsets, j * block_size + offsets, *pair)
        return jnp.tile(block, (1, groups, 1))[:, None]

    return visible


def _pad_to_blocks(x: Array, block_size: int) -> Array:
    """x [B, T, ...] with zeros behind it, up to a whole number of blocks."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % block_size)] + [(0, 0)] * (x.ndim - 2))


def _query_blocks(x: Array, block_size: int) -> Array:
    """[B, T, K, G, H] -> [n, B, K, R, H]."""
    x = _pad_to_blocks(x, block_size)
    batch, length, kv_heads, groups, dim = x.shape
    x = x.reshape(batch, length // block_size, block_size, kv_heads, groups, dim)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(-1, batch, kv_heads, groups * block_size, dim)


def _from_query_blocks(x: Array, *, like: Array) -> Array:
    """[n, B, K, R, H] -> [B, T, K, G, H]; all dims but the last are those of `like`."""
    batch, length, kv_heads, groups, _ = like.shape
    x = x.reshape(len(x), batch, kv_heads, groups, -1, x.shape[-1])
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, kv_heads, groups, x.shape[-1])
    return x[:, :length]


def _key_blocks(x: Array, block_size: int) -> Array:
    """[B, S, K, H] -> [n, B, K, C, H]."""
    return _query_blocks(x[:, :, :, None], block_size)


def _from_key_blocks(x: Array, *, like: Array) -> Array:
    """[n, B, K, C, H] -> [B, S, K, H], the shape of `like`."""
    return _from_query_blocks(x, like=like[:, :, :, None])[:, :, :, 0]
