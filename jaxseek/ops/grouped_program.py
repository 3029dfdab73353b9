"""What one program (a block of threads) computes in each kernel of the grouped matmul.

Letters: M rows, D model, F ffn, E experts, N tiles. `schedule` is that of `tile_schedule` in
`jaxseek/ops/grouped_kernel.py`: int32 [3, N].
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of what one program computes; powers of two, at least 16, as tensor cores want.

    Attributes:
        rows: of a tile of rows times weights.
        columns: of a tile, and the side of a tile of a weight gradient.
        inner: of the contracted dim, per step of the loop. For a weight gradient these are rows.
    """

    rows: int = 64
    columns: int = 128
    inner: int = 32


def num_parts(size: Any, part: int) -> Any:
    """How many parts cover `size`."""
    return (size + part - 1) // part


class _Span(NamedTuple):
    """A run of indices along one dim; `inside` says which of them exist, None that all do."""

    start: Array
    size: int
    inside: Array | None


def _span(start: Array, size: int, *, end: Array | int) -> _Span:
    if isinstance(end, int) and end % size == 0:
        return _Span(start, size, None)
    return _Span(start, size, start + jnp.arange(size) < end)


def _mask(spans: Sequence[_Span]) -> Array | None:
    shape = tuple(span.size for span in spans)
    masks = [
        jnp.broadcast_to(
            jnp.expand_dims(span.inside, [d for d in range(len(spans)) if d != dim]), shape
        )
        for dim, span in enumerate(spans)
        if span.inside is not None
    ]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _load(ref: Any, *spans: _Span, at: tuple[Array, ...] = ()) -> Array:
    """A part of an array, zeros for what does not exist; `at` are indices of its first dims."""
    mask = _mask(spans)
    index = (*at, *(pl.ds(span.start, span.size) for span in spans))
    return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else 0)


def _store(ref: Any, values: Array, *spans: _Span, at: tuple[Array, ...] = ()) -> None:
    """Write the values that exist, in the dtype of the array."""
    index = (*at, *(pl.ds(span.start, span.size) for span in spans))
    plgpu.store(ref.at[index], values.astype(ref.dtype), mask=_mask(spans))


def _tile_of_rows(schedule_ref: Any, *, columns: int, tiles: Tiles) -> tuple[Array, _Span, _Span]:
    """Group, rows and columns of this program's tile; the rows are those of the group."""
    column, tile = pl.program_id(0), pl.program_id(1)
    group, first, end = (schedule_ref[i, tile] for i in range(3))
    return (
        group,
        _span(first, tiles.rows, end=end),
        _span(column * tiles.columns, tiles.columns, end=columns),
    )


def _add_products(
    totals: tuple[Array, ...],
    lhs_ref: Any,
    weight_refs: Sequence[Any],
    *,
    tile: tuple[Array, _Span, _Span],
    tiles: Tiles,
    transpose: bool = False,
) -> tuple[Array, ...]:
    """Add to each of the float32 totals the tile of the rows' product with each of the weights.

    The rows past the last group have no weights: they take no step, and their total stays zero.
    """
    group, rows, columns = tile
    inner_size = lhs_ref.shape[1]
    has_weights = (group < weight_refs[0].shape[0]).astype(jnp.int32)
    steps = has_weights * num_parts(inner_size, tiles.inner)

    def step(i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        inner = _span(i * tiles.inner, tiles.inner, end=inner_size)
        lhs = _load(lhs_ref, rows, inner)
        spans = (columns, inner) if transpose else (inner, columns)
        weights = [_load(ref, *spans, at=(group,)) for ref in weight_refs]
        return tuple(
            total + _dot(lhs, w.T if transpose else w)
            for total, w in zip(totals, weights, strict=True)
        )

    return jax.lax.fori_loop(0, steps, step, totals)


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _zeros(count: int, rows: int, columns: int) -> tuple[Array, ...]:
    return tuple(jnp.zeros((rows, columns), jnp.float32) for _ in range(count))


def rows_kernel(schedule_ref: Any, *refs: Any, tiles: Tiles, transpose: bool) -> None:
    """refs: n arrays of rows, the n weights that they meet, and the sum of the products."""
    *operands, out_ref = refs
    count = len(operands) // 2
    tile = _tile_of_rows(schedule_ref, columns=out_ref.shape[1], tiles=tiles)
    totals = _zeros(1, tiles.rows, tiles.columns)
    for lhs_ref, weight_ref in zip(operands[:count], operands[count:], strict=True):
        totals = _add_products(
            totals, lhs_ref, [weight_ref], tile=tile, tiles=tiles, transpose=transpose
        )
    _store(out_ref, totals[0], *tile[1:])


def gate_up_kernel(
    schedule_ref: Any,
    x_ref: Any,
    gate_w_ref: Any,
    up_w_ref: Any,
    row_weights_ref: Any,
    gate_ref: Any,
    up_ref: Any,
    hidden_ref: Any,
    *,
    tiles: Tiles,
) -> None:
    tile = _tile_of_rows(schedule_ref, columns=hidden_ref.shape[1], tiles=tiles)
    totals = _zeros(2, tiles.rows, tiles.columns)
    gate, up = _add_products(totals, x_ref, [gate_w_ref, up_w_ref], tile=tile, tiles=tiles)
    _store(gate_ref, gate, *tile[1:])
    _store(up_ref, up, *tile[1:])
    # The backward pass computes the hidden values again, from what was stored.
    gate, up = (x.astype(gate_ref.dtype).astype(jnp.float32) for x in (gate, up))
    weight = _load(row_weights_ref, tile[1])[:, None]
    _store(hidden_ref, gate * jax.nn.sigmoid(gate) * up * weight, *tile[1:])


def down_backward_kernel(
    schedule_ref: Any,
    d_out_ref: Any,
    down_w_ref: Any,
    row_weights_ref: Any,
    gate_ref: Any,
    up_ref: Any,
    d_gate_ref: Any,
    d_up_ref: Any,
    hidden_ref: Any,
    d_row_weights_ref: Any,
    *,
    tiles: Tiles,
) -> None:
    """d_row_weights is summed over the columns of the tile only."""
    tile = _tile_of_rows(schedule_ref, columns=hidden_ref.shape[1], tiles=tiles)
    (d_hidden,) = _add_products(
        _zeros(1, tiles.rows, tiles.columns),
        d_out_ref,
        [down_w_ref],
        tile=tile,
        tiles=tiles,
        transpose=True,
    )
    gate, up = (_load(ref, *tile[1:]).astype(jnp.float32) for ref in (gate_ref, up_ref))
    weight = _load(row_weights_ref, tile[1])[:, None]
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    d_weight = jnp.sum(d_hidden * silu * up, axis=1)
    d_hidden = d_hidden * weight
    _store(d_gate_ref, d_hidden * up * (sigmoid + silu * (1 - sigmoid)), *tile[1:])
    _store(d_up_ref, d_hidden * silu, *tile[1:])
    _store(hidden_ref, silu * up * weight, *tile[1:])
    _store(d_row_weights_ref, d_weight, tile[1], at=(pl.program_id(0),))


def weight_gradients_kernel(group_rows_ref: Any, lhs_ref: Any, *refs: Any, tiles: Tiles) -> None:
    """refs: n arrays d_out [M, F], then the n gradients [E, D, F]."""
    count = len(refs) // 2
    d_out_refs, gradient_refs = refs[:count], refs[count:]
    group = pl.program_id(2)
    first, end = group_rows_ref[0, group], group_rows_ref[1, group]
    sides = tiles.columns, tiles.columns // count
    columns = [
        _span(pl.program_id(1 - dim) * side, side, end=gradient_refs[0].shape[1 + dim])
        for dim, side in enumerate(sides)
    ]

    def step(i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        rows = _span(first + i * tiles.inner, tiles.inner, end=end)
        # Both are masked, though one would do for finite numbers: 0 x NaN is NaN.
        lhs = _load(lhs_ref, rows, columns[0]).T
        return tuple(
            total + _dot(lhs, _load(ref, rows, columns[1]))
            for total, ref in zip(totals, d_out_refs, strict=True)
        )

    steps = num_parts(end - first, tiles.inner)
    totals = jax.lax.fori_loop(0, steps, step, _zeros(count, *sides))
    for ref, total in zip(gradient_refs, totals, strict=True):
        _store(ref, total, *columns, at=(group,))
