"""`grouped_matmul` and `expert_mlp` as loops over blocks of rows: for CPU, and wherever there is no
kernel.

Letters: M rows, D model, F ffn, E experts. Rows are sorted by expert: a group is a run of rows.

Only groups that have rows are visited, a group is cut into blocks of fixed sizes (XLA needs static
shapes), and no array of size E x M exists. The loops have as many steps as the routing asks for,
which reverse-mode autodiff cannot differentiate, so the backward passes are written out.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxseek.ops.collectives import vary_like
from jaxseek.ops.swiglu import swiglu

# Rows of a block. A group takes as many of the largest as fit in it and one more that covers the
# rest: at most 31 rows are computed in vain, and a typical group of a training step is one block,
# so its weight and the gradient of that are touched once.
_BLOCK_ROWS = tuple(range(32, 257, 32))

_Carry = TypeVar("_Carry")


class ExpertArrays(NamedTuple):
    """What the experts of a layer compute with, or its gradients; see `expert_mlp`."""

    x: Array
    gate_w: Array
    up_w: Array
    down_w: Array
    row_weights: Array


@dataclasses.dataclass(frozen=True)
class GroupedLoop:
    """The products of `grouped_matmul` and `expert_mlp`, each as a loop.

    Rows past the sum of the group sizes give zeros. All arrays must vary over the same mesh axes.
    """

    def matmul(self, lhs: Array, rhs: Array, group_sizes: Array) -> Array:
        """Rows [M, D] times the matrix [E, D, F] of their group: [M, F]."""
        return _rows_times_weights(lhs, (rhs,), group_sizes)

    def matmul_transposed(self, d_out: Array, rhs: Array, group_sizes: Array) -> Array:
        """Rows [M, F] times the transpose of the matrix [E, D, F] of their group: [M, D]."""
        return _rows_times_weights(d_out, (rhs,), group_sizes, transpose=True)

    def weight_gradient(self, lhs: Array, d_out: Array, group_sizes: Array) -> Array:
        """lhs^T d_out of each group, [M, D] and [M, F] to [E, D, F]; zeros without rows."""
        (gradient,) = _weight_gradients(lhs, d_out, group_sizes, count=1)
        return gradient

    def mlp_forward(self, arrays: ExpertArrays, group_sizes: Array) -> tuple[Array, Array, Array]:
        """The result [M, D] of `expert_mlp`; gate x and up x [M, F], for the backward pass."""
        x, gate_w, up_w, down_w, row_weights = arrays
        gate, up = jnp.split(_rows_times_weights(x, (gate_w, up_w), group_sizes), 2, axis=1)
        hidden = _weighted_swiglu(gate, up, row_weights)
        return self.matmul(hidden, down_w, group_sizes), gate, up

    def mlp_backward(
        self, arrays: ExpertArrays, group_sizes: Array, *, gate: Array, up: Array, d_out: Array
    ) -> ExpertArrays:
        """Gradients of the arrays."""
        x, gate_w, up_w, down_w, row_weights = arrays
        hidden, pullback = jax.vjp(_weighted_swiglu, gate, up, row_weights)
        d_down_w = self.weight_gradient(hidden, d_out, group_sizes)
        d_gate, d_up, d_row_weights = pullback(self.matmul_transposed(d_out, down_w, group_sizes))
        d_gate_up = jnp.concatenate([d_gate, d_up], axis=1)
        d_x = _rows_times_weights(d_gate_up, (gate_w, up_w), group_sizes, transpose=True)
        d_gate_w, d_up_w = _weight_gradients(x, d_gate_up, group_sizes, count=2)
        return ExpertArrays(d_x, d_gate_w, d_up_w, d_down_w, d_row_weights)


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


def _weighted_swiglu(gate: Array, up: Array, row_weights: Array) -> Array:
    """The hidden values [M, F] of the experts, in the dtype of `gate`."""
    return (swiglu(gate, up) * row_weights[:, None]).astype(gate.dtype)


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
    lhs: Array, d_out: Array, group_sizes: Array, *, count: int
) -> tuple[Array, ...]:
    """lhs^T d_out of each group, cut into `count` gradients [E, D, F] of matrices side by side."""

    def group(index: Array, first: Array, end: Array, gradients: tuple[Array, ...]):
        def block(part: _Block, total: Array) -> Array:
            # Both are masked, though one would do for finite numbers: 0 x NaN is NaN.
            return total + _dot(part.read_own(lhs).T, part.read_own(d_out))

        total = _zeros((lhs.shape[1], d_out.shape[1]), like=lhs, dtype=jnp.float32)
        total = _for_blocks(block, total, first=first, end=end, num_rows=lhs.shape[0])
        return tuple(
            jax.lax.dynamic_update_index_in_dim(gradient, part.astype(gradient.dtype), index, 0)
            for gradient, part in zip(gradients, jnp.split(total, count, axis=1), strict=True)
        )

    shape = (group_sizes.shape[0], lhs.shape[1], d_out.shape[1] // count)
    zeros = (_zeros(shape, like=lhs),) * count
    return _for_groups(group, zeros, group_sizes=group_sizes)
