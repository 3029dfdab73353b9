"""Products of rows with the weight of the group they belong to: what the experts of a mixture-of-experts layer compute.

Letters: M rows, D model, F ffn, E experts. Rows are sorted by expert, so a group is a run of consecutive rows.

The cost grows with the routed rows and with nothing else: only groups that have rows are visited, a group is cut into
blocks of fixed sizes (XLA needs static shapes), and no array of size E x M exists. `jax.lax.ragged_dot` is not that on
CPU and CUDA, where it compiles to a dense masked product over all experts.

The loops have as many steps as the routing asks for, which reverse-mode autodiff cannot differentiate, so the backward
passes are written out.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from jaxseek.ops.collectives import vary_like

Implementation = Literal["auto", "loop", "ragged_dot"]

# What "auto" means on each backend. A kernel for CUDA gets its own name in `Implementation` and its place here.
_AUTO_IMPLEMENTATION: dict[str, Implementation] = {"cpu": "loop", "gpu": "loop", "tpu": "ragged_dot"}

# A group is cut into as many of the largest blocks as fit, then of the next size: at most 15 rows are computed in vain,
# and most rows are in blocks big enough for a matmul to run at its full rate.
_BLOCK_ROWS = (128, 64, 32, 16)

_Carry = TypeVar("_Carry")


def grouped_matmul(
    lhs: Array, rhs: Array, group_sizes: Array, *, implementation: Implementation = "auto"
) -> Array:
    """Each row of `lhs` times the matrix of its group.

    Args:
        lhs: [M, D] rows, those of group 0 first, then those of group 1 and so on.
        rhs: [E, D, F] one matrix per group.
        group_sizes: [E] int32 number of rows of each group. Their sum may be less than M (the rows past it give zeros and
            cost nothing); it must not be more.
        implementation: "loop" (blocks of rows), "ragged_dot" (`jax.lax.ragged_dot`), or "auto" for the backend's best.

    Returns:
        [M, F] in the dtype of `lhs`, accumulated in float32. Gradients flow to `lhs` and `rhs`; rows past the sum and
        groups without rows get zeros.

    Raises:
        ValueError: `implementation` is unknown.
    """
    assert lhs.shape[1] == rhs.shape[1] and group_sizes.shape == rhs.shape[:1]
    if _resolve(implementation) == "ragged_dot":
        product = jax.lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=jnp.float32)
        return product.astype(lhs.dtype)
    return _matmul_loop(*_same_axes(lhs, rhs, group_sizes))


def expert_mlp(
    x: Array,
    gate_w: Array,
    up_w: Array,
    down_w: Array,
    group_sizes: Array,
    *,
    implementation: Implementation = "auto",
) -> Array:
    """The experts of a MoE layer: down(silu(gate x) * up x), each row through its own expert (DeepSeekMoE, arXiv:2401.06066
    equation 3; `DeepseekV3NaiveMoe` in transformers).

    The loop runs the three products of a block back to back, while its rows are in cache, and keeps gate x and up x
    ([M, 2F] in the dtype of `x`) for the backward pass.

    Args:
        x: [M, D] rows sorted by expert.
        gate_w: [E, D, F].
        up_w: [E, D, F].
        down_w: [E, F, D].
        group_sizes: [E] int32 rows of each expert, as in `grouped_matmul`.
        implementation: as in `grouped_matmul`.

    Returns:
        [M, D] in the dtype of `x`; products accumulated, and the activation taken, in float32.

    Raises:
        ValueError: `implementation` is unknown.
    """
    assert gate_w.shape == up_w.shape and down_w.shape == (*gate_w.shape[:1], *gate_w.shape[:0:-1])
    assert x.shape[1] == gate_w.shape[1] and group_sizes.shape == gate_w.shape[:1]
    if _resolve(implementation) == "ragged_dot":
        gate = grouped_matmul(x, gate_w, group_sizes, implementation="ragged_dot")
        up = grouped_matmul(x, up_w, group_sizes, implementation="ragged_dot")
        hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        return grouped_matmul(
            hidden.astype(x.dtype), down_w, group_sizes, implementation="ragged_dot"
        )
    return _mlp_loop(*_same_axes(x, gate_w, up_w, down_w, group_sizes))


def block_counts(group_sizes: Array, num_rows: int) -> dict[int, Array]:
    """How many blocks of each size the loop runs for every group: {rows per block: counts shaped like `group_sizes`}.

    Largest size first, which is also the order in which a group's rows are covered. `num_rows` is M: no block is larger.
    """
    sizes = [size for size in _BLOCK_ROWS if size <= num_rows] or [max(num_rows, 1)]
    counts = {}
    remaining = group_sizes
    for size in sizes[:-1]:
        counts[size] = remaining // size
        remaining = remaining % size
    counts[sizes[-1]] = (remaining + sizes[-1] - 1) // sizes[-1]
    return counts


def _resolve(implementation: Implementation) -> Implementation:
    if implementation == "auto":
        return _AUTO_IMPLEMENTATION.get(jax.default_backend(), "loop")
    if implementation not in ("loop", "ragged_dot"):
        raise ValueError(f"implementation is {implementation!r}; it can be auto, loop or ragged_dot")
    return implementation


def _same_axes(*values: Array) -> list[Array]:
    """The values, all varying over the same mesh axes, as loop carries inside a shard_map must."""
    return [vary_like(value, values) for value in values]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """Rows [start, start + size), of which those with `own` belong to the group; the others are its neighbours'."""

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
    body: Callable[[_Block, _Carry], _Carry], carry: _Carry, *, first: Array, end: Array, num_rows: int
) -> _Carry:
    """Run `carry = body(block, carry)` for the blocks that cover rows [first, end) of `num_rows`."""
    for size, count in block_counts(end - first, num_rows).items():

        def step(i: Array, carry: _Carry, size: int = size, first: Array = first) -> _Carry:
            wanted = first + i * size
            start = jnp.minimum(wanted, num_rows - size)  # the last block must not reach past the array
            row = start + jnp.arange(size)
            own = (row >= wanted) & (row < end)
            return body(_Block(start=start, size=size, own=own[:, None]), carry)

        carry = jax.lax.fori_loop(0, count, step, carry)
        first = first + count * size
    return carry


def _dot(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _weight(weights: Array, group: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(weights, group, keepdims=False)


def _set_weight(weights: Array, value: Array, group: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(weights, value.astype(weights.dtype), group, 0)


def _zeros(shape: tuple[int, ...], like: Array, dtype=None) -> Array:
    return vary_like(jnp.zeros(shape, dtype or like.dtype), like)


def _rows_times(
    weight_of: Callable[[Array], Array], rows: Array, *, width: int, group_sizes: Array
) -> Array:
    """[M, width]: the rows of each group times `weight_of(group)`, in the dtype of `rows`."""
    num_rows = rows.shape[0]

    def group(index: Array, first: Array, end: Array, out: Array) -> Array:
        weight = weight_of(index)

        def block(part: _Block, out: Array) -> Array:
            return part.write(out, _dot(part.read(rows), weight))

        return _for_blocks(block, out, first=first, end=end, num_rows=num_rows)

    out = _zeros((num_rows, width), rows)
    return _for_groups(group, out, group_sizes=group_sizes)


@jax.custom_vjp
def _matmul_loop(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    return _rows_times(
        functools.partial(_weight, rhs), lhs, width=rhs.shape[2], group_sizes=group_sizes
    )


def _matmul_loop_fwd(lhs: Array, rhs: Array, group_sizes: Array):
    return _matmul_loop(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _matmul_loop_bwd(saved, d_out: Array):
    lhs, rhs, group_sizes = saved

    def group(index: Array, first: Array, end: Array, carry):
        d_lhs, d_rhs = carry
        weight = _weight(rhs, index)

        def block(rows: _Block, carry):
            d_lhs, d_weight = carry
            d_block = rows.read_own(d_out)
            d_lhs = rows.write(d_lhs, _dot(d_block, weight.T))
            return d_lhs, d_weight + _dot(rows.read_own(lhs).T, d_block)

        d_weight = _zeros(rhs.shape[1:], rhs, jnp.float32)
        d_lhs, d_weight = _for_blocks(
            block, (d_lhs, d_weight), first=first, end=end, num_rows=lhs.shape[0]
        )
        return d_lhs, _set_weight(d_rhs, d_weight, index)

    zeros = (_zeros(lhs.shape, lhs), _zeros(rhs.shape, rhs))
    return *_for_groups(group, zeros, group_sizes=group_sizes), None


_matmul_loop.defvjp(_matmul_loop_fwd, _matmul_loop_bwd)


@jax.custom_vjp
def _mlp_loop(x: Array, gate_w: Array, up_w: Array, down_w: Array, group_sizes: Array) -> Array:
    return _mlp_loop_fwd(x, gate_w, up_w, down_w, group_sizes)[0]


def _gate_up_weight(gate_w: Array, up_w: Array, index: Array) -> Array:
    """[D, 2F]: one wide product is faster than two narrow ones, and the weights of a group are copied anyway."""
    return jnp.concatenate([_weight(gate_w, index), _weight(up_w, index)], axis=1)


def _mlp_loop_fwd(x: Array, gate_w: Array, up_w: Array, down_w: Array, group_sizes: Array):
    # Two loops and not one, so that under remat, where only `gate_up` is asked for again, the second is dropped.
    gate_up = _rows_times(
        functools.partial(_gate_up_weight, gate_w, up_w),
        x,
        width=2 * gate_w.shape[2],
        group_sizes=group_sizes,
    )
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    hidden = (jax.nn.silu(gate) * up).astype(x.dtype)
    out = _matmul_loop(hidden, down_w, group_sizes)
    return out, (x, gate_w, up_w, down_w, group_sizes, gate_up)


def _swiglu_backward(gate_up: Array, d_hidden: Array) -> tuple[Array, Array]:
    """silu(gate) * up again, and the gradient of gate and up side by side; all float32."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_hidden * up * (sigmoid + silu * (1 - sigmoid))
    return silu * up, jnp.concatenate([d_gate, d_hidden * silu], axis=1)


def _mlp_loop_bwd(saved, d_out: Array):
    x, gate_w, up_w, down_w, group_sizes, gate_up = saved

    def group(index: Array, first: Array, end: Array, carry):
        d_x, d_gate_w, d_up_w, d_down_w = carry
        gate_up_weight = _gate_up_weight(gate_w, up_w, index)
        down_weight = _weight(down_w, index)

        def block(rows: _Block, carry):
            d_x, d_gate_up_weight, d_down_weight = carry
            d_block = rows.read_own(d_out)
            hidden, d_pre = _swiglu_backward(rows.read(gate_up), _dot(d_block, down_weight.T))
            hidden, d_pre = hidden.astype(x.dtype), d_pre.astype(x.dtype)
            return (
                rows.write(d_x, _dot(d_pre, gate_up_weight.T)),
                d_gate_up_weight + _dot(rows.read_own(x).T, d_pre),
                d_down_weight + _dot(hidden.T, d_block),
            )

        d_weights = [_zeros(w.shape, w, jnp.float32) for w in (gate_up_weight, down_weight)]
        d_x, d_gate_up_weight, d_down_weight = _for_blocks(
            block, (d_x, *d_weights), first=first, end=end, num_rows=x.shape[0]
        )
        d_gate_weight, d_up_weight = jnp.split(d_gate_up_weight, 2, axis=1)
        return (
            d_x,
            _set_weight(d_gate_w, d_gate_weight, index),
            _set_weight(d_up_w, d_up_weight, index),
            _set_weight(d_down_w, d_down_weight, index),
        )

    zeros = tuple(_zeros(a.shape, a) for a in (x, gate_w, up_w, down_w))
    return *_for_groups(group, zeros, group_sizes=group_sizes), None


_mlp_loop.defvjp(_mlp_loop_fwd, _mlp_loop_bwd)
