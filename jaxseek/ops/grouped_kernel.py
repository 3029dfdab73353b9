"""`grouped_matmul` and `expert_mlp` for NVIDIA GPUs: Pallas kernels that Triton compiles.

Letters: M rows, D model, F ffn, E experts, N tiles. Rows are sorted by expert; a group is a run of
rows.

Two kinds of kernel:

- *Rows times weights*: a program computes a tile of `rows` x `columns`. Every group is cut into
  tiles of its own, and which rows a tile has is computed on the device from the group sizes, so
  that the grid, which is static, serves every routing: M / rows + E tiles are enough for all. The
  rows past the last group are a group of zeros.
- *Weight gradients*: a program computes a tile of one matrix and loops over the rows of its group.

What is computed in vain is the part of a group's last tile that has no rows: half a tile a group
on average. No array of size E x M exists, weights are read where they lie (a transposed product
turns tiles in registers), and the gate's activation and its derivative are computed on tiles that
are in registers anyway.

The tiles fit the 99 KiB of shared memory that a block has on consumer GPUs (compute capability 8.6,
8.9 and 12.0), so one choice serves every GPU.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from jaxseek.ops.collectives import vary_like

Shape = tuple[int, ...]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedKernel:
    """The products of a grouped matmul and of the expert MLP, each in a kernel.

    Arguments and results as in `jaxseek.ops.grouped_loop`; all arrays must vary over the same mesh
    axes.

    Attributes:
        tiles: None are those of the dtype.
        interpret: run the kernels in Pallas' interpreter, on any platform and very slowly.
    """

    tiles: Tiles | None = None
    interpret: bool = False

    def matmul(self, lhs: Array, rhs: Array, group_sizes: Array) -> Array:
        """[M, D] rows times the [E, D, F] matrix of their group: [M, F]."""
        return self._rows((lhs,), (rhs,), group_sizes, transpose=False)

    def matmul_transposed(self, d_out: Array, rhs: Array, group_sizes: Array) -> Array:
        """[M, F] rows times the transpose of the [E, D, F] matrix of their group: [M, D]."""
        return self._rows((d_out,), (rhs,), group_sizes, transpose=True)

    def weight_gradient(self, lhs: Array, d_out: Array, group_sizes: Array) -> Array:
        """lhs^T d_out of each group, [M, D] and [M, F] to [E, D, F]; zeros without rows."""
        (gradient,) = self._weight_gradients(lhs, (d_out,), group_sizes)
        return gradient

    def mlp_forward(
        self,
        x: Array,
        gate_w: Array,
        up_w: Array,
        down_w: Array,
        row_weights: Array,
        group_sizes: Array,
    ) -> tuple[Array, Array, Array]:
        """The result [M, D] of `expert_mlp`, and gate x and up x [M, F] for the backward pass."""
        num_rows, ffn = x.shape[0], gate_w.shape[2]
        tiles = self._tiles(x.dtype)
        gate, up, hidden = self._call(
            functools.partial(_gate_up_kernel, tiles=tiles),
            (tile_schedule(group_sizes, num_rows, tiles.rows), x, gate_w, up_w, row_weights),
            grid=_row_grid(group_sizes, num_rows, ffn, tiles),
            out=[((num_rows, ffn), x.dtype)] * 3,
        )
        return self.matmul(hidden, down_w, group_sizes), gate, up

    def mlp_backward(
        self,
        x: Array,
        gate_w: Array,
        up_w: Array,
        down_w: Array,
        row_weights: Array,
        group_sizes: Array,
        gate: Array,
        up: Array,
        d_out: Array,
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Gradients of x, gate_w, up_w, down_w and row_weights."""
        num_rows, ffn = gate.shape
        tiles = self._tiles(x.dtype)
        grid = _row_grid(group_sizes, num_rows, ffn, tiles)
        schedule = tile_schedule(group_sizes, num_rows, tiles.rows)
        d_gate, d_up, hidden, d_row_weights = self._call(
            functools.partial(_down_backward_kernel, tiles=tiles),
            (schedule, d_out, down_w, row_weights, gate, up),
            grid=grid,
            out=[((num_rows, ffn), x.dtype)] * 3 + [((grid[0], num_rows), jnp.float32)],
            aliases={4: 0, 5: 1},  # gate and up are needed no more
            num_warps=8,  # with 4, what the epilogue holds does not fit the registers
        )
        d_down_w = self.weight_gradient(hidden, d_out, group_sizes)
        d_gate_w, d_up_w = self._weight_gradients(x, (d_gate, d_up), group_sizes)
        d_x = self._rows((d_gate, d_up), (gate_w, up_w), group_sizes, transpose=True)
        return d_x, d_gate_w, d_up_w, d_down_w, d_row_weights.sum(axis=0)

    def _tiles(self, dtype: DTypeLike) -> Tiles:
        if self.tiles is not None:
            return self.tiles
        return Tiles() if jnp.dtype(dtype).itemsize == 2 else Tiles(inner=16)

    def _rows(
        self,
        lhs: tuple[Array, ...],
        weights: tuple[Array, ...],
        group_sizes: Array,
        *,
        transpose: bool,
    ) -> Array:
        """Sum of the products of each `lhs` with its weights."""
        num_rows, columns = lhs[0].shape[0], weights[0].shape[1 if transpose else 2]
        tiles = self._tiles(lhs[0].dtype)
        (out,) = self._call(
            functools.partial(_rows_kernel, tiles=tiles, transpose=transpose),
            (tile_schedule(group_sizes, num_rows, tiles.rows), *lhs, *weights),
            grid=_row_grid(group_sizes, num_rows, columns, tiles),
            out=[((num_rows, columns), lhs[0].dtype)],
        )
        return out

    def _weight_gradients(
        self, lhs: Array, d_outs: tuple[Array, ...], group_sizes: Array
    ) -> list[Array]:
        """lhs^T d_out of each group, for several d_out of one shape."""
        shape = (group_sizes.shape[0], lhs.shape[1], d_outs[0].shape[1])
        tiles = self._tiles(lhs.dtype)
        ends = jnp.cumsum(group_sizes)
        return self._call(
            functools.partial(_weight_gradients_kernel, tiles=tiles),
            (jnp.stack([ends - group_sizes, ends]), lhs, *d_outs),
            grid=(
                _count(shape[2], tiles.columns // len(d_outs)),
                _count(shape[1], tiles.columns),
                shape[0],
            ),
            out=[(shape, lhs.dtype)] * len(d_outs),
            num_warps=8,
        )

    def _call(
        self,
        kernel: Callable[..., None],
        arguments: Sequence[Array],
        *,
        grid: tuple[int, ...],
        out: Sequence[tuple[Shape, Any]],
        aliases: dict[int, int] | None = None,
        num_warps: int = 4,
    ) -> list[Array]:
        arguments = [vary_like(x, arguments) for x in arguments]
        axes = jax.typeof(arguments[0]).manual_axis_type
        return pl.pallas_call(
            kernel,
            grid=grid,
            out_shape=[
                jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes) for shape, dtype in out
            ],
            input_output_aliases=aliases or {},
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=3),
            interpret=self.interpret,
            name=getattr(kernel, "func", kernel).__name__.strip("_"),
        )(*arguments)


def tile_schedule(group_sizes: Array, num_rows: int, rows: int) -> Array:
    """Which rows each tile computes.

    Args:
        group_sizes: int32 [E].
        num_rows: M.
        rows: of a tile.

    Returns:
        int32 [3, N]: group, first row and end of the group of every tile. Tiles of group E have the
        rows past the last group, and those that are left over have end 0: no rows at all.
    """
    sizes = jnp.append(group_sizes, num_rows - group_sizes.sum()).astype(jnp.int32)
    row_ends, tile_ends = jnp.cumsum(sizes), jnp.cumsum(_count(sizes, rows))
    tile = jnp.arange(num_tiles(group_sizes.shape[0], num_rows, rows), dtype=jnp.int32)
    group = (tile[:, None] >= tile_ends).sum(axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, sizes.shape[0] - 1)
    first_tile = tile_ends[group] - _count(sizes[group], rows)
    first_row = row_ends[group] - sizes[group] + (tile - first_tile) * rows
    used = tile < tile_ends[-1]
    return jnp.stack([group, *(jnp.where(used, x, 0) for x in (first_row, row_ends[group]))])


def num_tiles(num_groups: int, num_rows: int, rows: int) -> int:
    """N: as many tiles as the worst routing needs, the rows past the last group included."""
    return min(num_rows // rows + num_groups + 1, num_rows)


def _count(size: Any, part: int) -> Any:
    """How many parts cover `size`."""
    return (size + part - 1) // part


def _row_grid(group_sizes: Array, num_rows: int, columns: int, tiles: Tiles) -> tuple[int, int]:
    """Neighbouring programs share their rows."""
    count = num_tiles(group_sizes.shape[0], num_rows, tiles.rows)
    return (_count(columns, tiles.columns), count)


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
    steps = has_weights * _count(inner_size, tiles.inner)

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


def _rows_kernel(schedule_ref: Any, *refs: Any, tiles: Tiles, transpose: bool) -> None:
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


def _gate_up_kernel(
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


def _down_backward_kernel(
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


def _weight_gradients_kernel(group_rows_ref: Any, lhs_ref: Any, *refs: Any, tiles: Tiles) -> None:
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

    steps = _count(end - first, tiles.inner)
    totals = jax.lax.fori_loop(0, steps, step, _zeros(count, *sides))
    for ref, total in zip(gradient_refs, totals, strict=True):
        _store(ref, total, *columns, at=(group,))
