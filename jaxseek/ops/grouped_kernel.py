"""`grouped_matmul` and `expert_mlp` for NVIDIA GPUs: Pallas kernels that Triton compiles.

Letters: M rows, D model, F ffn, E experts, N tiles. Rows are sorted by expert; a group is a run of
rows.

Two kinds of kernel:

- *Rows times weights*: a program (a block of threads) computes a tile of rows x columns. Every
  group is cut into tiles of its own, and which rows a tile has is computed on the device from the
  group sizes, so that the grid, which is static, serves every routing: M / rows + E + 1 tiles are
  enough for all. The rows past the last group are a group of their own, which gets zeros.
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
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from jaxseek.ops.collectives import vary_like
from jaxseek.ops.grouped_loop import ExpertArrays
from jaxseek.ops.grouped_program import (
    Tiles,
    down_backward_kernel,
    gate_up_kernel,
    num_parts,
    rows_kernel,
    weight_gradients_kernel,
)

Shape = tuple[int, ...]


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

    def mlp_forward(self, arrays: ExpertArrays, group_sizes: Array) -> tuple[Array, Array, Array]:
        """The result [M, D] of `expert_mlp`; gate x and up x [M, F], for the backward pass."""
        x, gate_w, up_w, down_w, row_weights = arrays
        num_rows, ffn = x.shape[0], gate_w.shape[2]
        tiles = self._tiles(x.dtype)
        gate, up, hidden = self._call(
            functools.partial(gate_up_kernel, tiles=tiles),
            (tile_schedule(group_sizes, num_rows, tiles.rows), x, gate_w, up_w, row_weights),
            grid=_row_grid(group_sizes, num_rows, ffn, tiles),
            out=[((num_rows, ffn), x.dtype)] * 3,
        )
        return self.matmul(hidden, down_w, group_sizes), gate, up

    def mlp_backward(
        self, arrays: ExpertArrays, group_sizes: Array, *, gate: Array, up: Array, d_out: Array
    ) -> ExpertArrays:
        """Gradients of the arrays."""
        x, gate_w, up_w, down_w, row_weights = arrays
        num_rows, ffn = gate.shape
        tiles = self._tiles(x.dtype)
        grid = _row_grid(group_sizes, num_rows, ffn, tiles)
        schedule = tile_schedule(group_sizes, num_rows, tiles.rows)
        d_gate, d_up, hidden, d_row_weights = self._call(
            functools.partial(down_backward_kernel, tiles=tiles),
            (schedule, d_out, down_w, row_weights, gate, up),
            grid=grid,
            out=[((num_rows, ffn), x.dtype)] * 3 + [((grid[0], num_rows), jnp.float32)],
            aliases={4: 0, 5: 1},  # gate and up are needed no more
            num_warps=8,  # with 4, what the epilogue holds does not fit the registers
        )
        d_down_w = self.weight_gradient(hidden, d_out, group_sizes)
        d_gate_w, d_up_w = self._weight_gradients(x, (d_gate, d_up), group_sizes)
        d_x = self._rows((d_gate, d_up), (gate_w, up_w), group_sizes, transpose=True)
        return ExpertArrays(d_x, d_gate_w, d_up_w, d_down_w, d_row_weights.sum(axis=0))

    def _tiles(self, dtype: DTypeLike) -> Tiles:
        if self.tiles is not None:
            return self.tiles
        # A step of the loop takes the same bytes of shared memory, whatever the dtype.
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
            functools.partial(rows_kernel, tiles=tiles, transpose=transpose),
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
            functools.partial(weight_gradients_kernel, tiles=tiles),
            (jnp.stack([ends - group_sizes, ends]), lhs, *d_outs),
            grid=(
                num_parts(shape[2], tiles.columns // len(d_outs)),
                num_parts(shape[1], tiles.columns),
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
            name=getattr(kernel, "func", kernel).__name__,
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
    row_ends, tile_ends = jnp.cumsum(sizes), jnp.cumsum(num_parts(sizes, rows))
    tile = jnp.arange(num_tiles(group_sizes.shape[0], num_rows, rows), dtype=jnp.int32)
    group = (tile[:, None] >= tile_ends).sum(axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, sizes.shape[0] - 1)
    first_tile = tile_ends[group] - num_parts(sizes[group], rows)
    first_row = row_ends[group] - sizes[group] + (tile - first_tile) * rows
    used = tile < tile_ends[-1]
    return jnp.stack([group, *(jnp.where(used, x, 0) for x in (first_row, row_ends[group]))])


def num_tiles(num_groups: int, num_rows: int, rows: int) -> int:
    """N: as many tiles as the worst routing needs, the rows past the last group included."""
    return min(num_rows // rows + num_groups + 1, num_rows)


def _row_grid(group_sizes: Array, num_rows: int, columns: int, tiles: Tiles) -> tuple[int, int]:
    """Neighbouring programs share their rows."""
    count = num_tiles(group_sizes.shape[0], num_rows, tiles.rows)
    return (num_parts(columns, tiles.columns), count)
