"""Rows times the matrix of the group they belong to: what the experts of a MoE layer compute.

Letters: M rows, D model, F ffn, E experts. Rows are sorted by expert: a group is a run of rows.

The cost grows with the routed rows and with nothing else. Only groups that have rows are visited, a
group is cut into blocks of fixed sizes (XLA needs static shapes), and no array of size E x M
exists. `jax.lax.ragged_dot` is not that on CPU and CUDA, where it compiles to a dense masked
product over all experts.

The loops have as many steps as the routing asks for, which reverse-mode autodiff cannot
differentiate, so the backward pass is written out.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxseek.ops.collectives import vary_like
from jaxseek.ops.swiglu import swiglu

Implementation = Literal["auto", "loop", "ragged_dot"]

# What "auto" means on each backend. A kernel for CUDA gets its name in `Implementation` and its
# place here.
_AUTO_IMPLEMENTATION: dict[str, Implementation] = {
    "cpu": "loop",
    "gpu": "loop",
    "tpu": "ragged_dot",
}

# Rows of a block. A group takes as many of the largest as fit in it and one more that covers the
# rest: at most 31 rows are computed in vain, and a typical group of a training step is one block,
# so its weight and the gradient of that are touched once.
_BLOCK_ROWS = tuple(range(32, 257, 32))

_Carry = TypeVar("_Carry")


def grouped_matmul(
    lhs: Array, rhs: Array, group_sizes: Array, *, implementation: Implementation = "auto"
) -> Array:
    """Each row of `lhs` times the matrix of its group.

    Args:
        lhs: [M, D] rows, those of group 0 first, then those of group 1 and so on.
        rhs: [E, D, F] one matrix per group.
        group_sizes: [E] int32 number of rows of each group. Their sum may be less than M (the rows
            past it give zeros and cost nothing); it must not be more.
        implementation: "loop" (blocks of rows), "ragged_dot" (`jax.lax.ragged_dot`), or "auto" for
            the backend's best.

    Returns:
        [M, F] in the dtype of `lhs`, accumulated in float32. Gradients flow to `lhs` and `rhs`;
        rows past the sum and groups without rows get zeros.

    Raises:
        ValueError: `implementation` is unknown.
    """
    assert lhs.shape[1] == rhs.shape[1] and group_sizes.shape == rhs.shape[:1]
    if _resolve(implementation) == "ragged_dot":
        product = jax.lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=jnp.float32)
        return product.astype(lhs.dtype)
    lhs, rhs, group_sizes = _same_axes(lhs, rhs, group_sizes)
    return _matmul_loop(lhs, (rhs,), group_sizes)


def expert_mlp(
    x: Array,
    gate_w: Array,
    up_w: Array,
    down_w: Array,
    group_sizes: Array,
    *,
    row_weights: Array | None = None,
    implementation: Implementation = "auto",
) -> Array:
    """The experts of a MoE layer: w down(silu(gate x) * up x), each row through its own expert.

    The weight w of a row multiplies the F hidden values and not the D outputs: the same number, and
    less to keep for the backward pass.

    Source: DeepSeekMoE (arXiv:2401.06066, section 3); `DeepseekV3NaiveMoe` in transformers.

    Args:
        x: [M, D] rows sorted by expert.
        gate_w: [E, D, F].
        up_w: [E, D, F].
        down_w: [E, F, D].
        group_sizes: [E] int32 rows of each expert, as in `grouped_matmul`.
        row_weights: [M] float32; None is a weight of one.
        implementation: as in `grouped_matmul`.

    Returns:
        [M, D] in the dtype of `x`; products accumulate, and the activation is taken, in float32.

    Raises:
        ValueError: `implementation` is unknown.
    """
    assert gate_w.shape == up_w.shape and down_w.shape == (*gate_w.shape[:1], *gate_w.shape[:0:-1])
    assert x.shape[1] == gate_w.shape[1] and group_sizes.shape == gate_w.shape[:1]
    implementation = _resolve(implementation)
    if implementation == "ragged_dot":
        gate = grouped_matmul(x, gate_w, group_sizes, implementation=implementation)
        up = grouped_matmul(x, up_w, group_sizes, implementation=implementation)
    else:
        x, gate_w, up_w, group_sizes = _same_axes(x, gate_w, up_w, group_sizes)
        gate, up = jnp.split(_matmul_loop(x, (gate_w, up_w), group_sizes), 2, axis=1)
    hidden = swiglu(gate, up)
    if row_weights is not None:
        hidden = (hidden * row_weights[:, None]).astype(x.dtype)
    return grouped_matmul(hidden, down_w, group_sizes, implementation=implementation)


def block_counts(group_sizes: Array, num_rows: int) -> dict[int, Array]:
    """How many blocks of each size the loop runs for every group.

    Args:
        group_sizes: integers of any shape, rows of each group.
        num_rows: M; no block is larger.

    Returns:
        {rows of the block: counts, shaped like `group_sizes`}. The largest comes first, because the
        last block of a group is the one that may be partly empty.
    """
    largest = min(_BLOCK_ROWS[-1], num_rows)
    smaller = [size for size in _BLOCK_ROWS if size < largest]
    counts = {largest: group_sizes // largest}
    rest = group_sizes % largest
    covered = 0
    for size in (*smaller, largest):
        last = ((rest > covered) & (rest <= size)).astype(group_sizes.dtype)
        counts[size] = counts.get(size, 0) + last
        covered = size
    return counts


def _resolve(implementation: Implementation) -> Implementation:
    if implementation == "auto":
        return _AUTO_IMPLEMENTATION.get(jax.default_backend(), "loop")
    if implementation not in ("loop", "ragged_dot"):
        raise ValueError(f"implementation {implementation!r} is not auto, loop or ragged_dot")
    return implementation


def _same_axes(*values: Array) -> list[Array]:
    """The values, all varying over the same mesh axes, as loop carries inside a shard_map must."""
    return [vary_like(value, values) for value in values]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """Rows [start, start + size): those with `own` are the group's, the others its neighbours'."""

    start: Array
    size: int
    own: Array  # [size, 1] bool

    def read(self, rows: Array) -> Array:
        """This block of [M, N] rows, neighbours included."""
        return jax.lax.dynamic_slice_in_dim(rows, self.start, self.size)

    def read_own(self, rows: Array) -> Array:
        """This block of [M, N] rows, with zeros in place of the neighbours'."""
        return jnp.where(self.own, self.read(rows), 0)

    def write(self, rows: Array, values: Array) -> Array:
        """The [M, N] rows with the group's own replaced by [size, N] values."""
        merged = jnp.where(self.own, values.astype(rows.dtype), self.read(rows))
        return jax.lax.dynamic_update_slice_in_dim(rows, merged, self.start, 0)


def _for_groups(
    body: Callable[[Array, Array, Array, _Carry], _Carry], carry: _Carry, *, group_sizes: Array
) -> _Carry:
    """Run `carry = body(group, first_row, end_row, carry)` for every group that has rows."""
    ends = jnp.cumsum(group_sizes)
    occupied_first = jnp.argsort(group_sizes == 0, stable=True)

    def step(i: Array, carry: _Carry) -> _Carry:
        group = occupied_first[i]
        return body(group, ends[group] - group_sizes[group], ends[group], carry)

    return jax.lax.fori_loop(0, jnp.count_nonzero(group_sizes), step, carry)


def _for_blocks(
    body: Callable[[_Block, _Carry], _Carry],
    carry: _Carry,
    *,
    first: Array,
    end: Array,
    num_rows: int,
) -> _Carry:
    """Run `carry = body(block, carry)` for blocks that cover rows [first, end) of `num_rows`."""
    for size, count in block_counts(end - first, num_rows).items():

        def step(i: Array, carry: _Carry, size: int = size, first: Array = first) -> _Carry:
            wanted = first + i * size
            start = jnp.minimum(wanted, num_rows - size)  # not past the end of the array
            row = start + jnp.arange(size)
            own = (row >= wanted) & (row < end)
            return body(_Block(start=start, size=size, own=own[:, None]), carry)

        carry = jax.lax.fori_loop(0, count, step, carry)
        first = first + count * size
    return carry


def _zeros(shape: tuple[int, ...], *, like: Array, dtype: DTypeLike | None = None) -> Array:
    return vary_like(jnp.zeros(shape, dtype or like.dtype), like)


def _dot(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _rows_times_weights(
    rows: Array, weights: tuple[Array, ...], group_sizes: Array, *, transpose: bool = False
) -> Array:
    """[M, D] rows times the matrices [E, D, F] of their group side by side, or their transpose.

    A group's matrices are copied out of the stack in any case, and one wide product is faster than
    two narrow ones.
    """
    num_rows = rows.shape[0]
    width = weights[0].shape[1] if transpose else sum(w.shape[2] for w in weights)

    def group(index: Array, first: Array, end: Array, out: Array) -> Array:
        parts = [jax.lax.dynamic_index_in_dim(w, index, keepdims=False) for w in weights]
        weight = jnp.concatenate(parts, axis=1)

        def block(part: _Block, out: Array) -> Array:
            return part.write(out, _dot(part.read(rows), weight.T if transpose else weight))

        return _for_blocks(block, out, first=first, end=end, num_rows=num_rows)

    out = _zeros((num_rows, width), like=rows)
    return _for_groups(group, out, group_sizes=group_sizes)


def _weight_gradients(
    lhs: Array, d_out: Array, weights: tuple[Array, ...], group_sizes: Array
) -> tuple[Array, ...]:
    """lhs^T d_out of each group, [E, D, F], cut into the gradients of the matrices side by side."""
    edges = np.cumsum([w.shape[2] for w in weights])[:-1]

    def group(index: Array, first: Array, end: Array, gradients: tuple[Array, ...]):
        def block(part: _Block, total: Array) -> Array:
            # Both are masked, though one would do for finite numbers: 0 x NaN is NaN.
            return total + _dot(part.read_own(lhs).T, part.read_own(d_out))

        total = _zeros((lhs.shape[1], d_out.shape[1]), like=lhs, dtype=jnp.float32)
        total = _for_blocks(block, total, first=first, end=end, num_rows=lhs.shape[0])
        return tuple(
            jax.lax.dynamic_update_index_in_dim(gradient, part.astype(gradient.dtype), index, 0)
            for gradient, part in zip(gradients, jnp.split(total, edges, axis=1), strict=True)
        )

    zeros = tuple(_zeros(w.shape, like=w) for w in weights)
    return _for_groups(group, zeros, group_sizes=group_sizes)


@jax.custom_vjp
def _matmul_loop(lhs: Array, weights: tuple[Array, ...], group_sizes: Array) -> Array:
    """`grouped_matmul` with several matrices per group, their products side by side."""
    return _rows_times_weights(lhs, weights, group_sizes)


def _matmul_loop_fwd(lhs: Array, weights: tuple[Array, ...], group_sizes: Array):
    return _matmul_loop(lhs, weights, group_sizes), (lhs, weights, group_sizes)


def _matmul_loop_bwd(saved: tuple[Array, tuple[Array, ...], Array], d_out: Array):
    lhs, weights, group_sizes = saved
    d_lhs = _rows_times_weights(d_out, weights, group_sizes, transpose=True)
    return d_lhs, _weight_gradients(lhs, d_out, weights, group_sizes), None


_matmul_loop.defvjp(_matmul_loop_fwd, _matmul_loop_bwd)
