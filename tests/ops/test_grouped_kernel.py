"""The Pallas kernels of the grouped matmul, interpreted, with tiles so small that even a few rows
make several: against a dense masked product, and the laws of their schedule.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxseek.ops.grouped_kernel import GroupedKernel, num_tiles, tile_schedule
from jaxseek.ops.grouped_loop import ExpertArrays
from jaxseek.ops.grouped_matmul import expert_mlp
from jaxseek.ops.grouped_program import Tiles

KERNEL = GroupedKernel(tiles=Tiles(rows=16, columns=32, inner=16), interpret=True)
# Two tiles of columns and, of the contracted dim, two steps that are full and one that is not.
ROWS, DIM, FFN = 75, 39, 35

ROUTINGS = {
    "odd_sizes": (3, 17, 1, 40, 5, 9),
    "whole_tiles": (16, 0, 32, 0, 16, 11),
    "empty_groups": (0, 20, 0, 0, 55, 0),
    "all_rows_in_one_group": (0, 0, 75, 0, 0, 0),
    "rows_past_the_sum": (9, 0, 16, 0, 0, 2),
    "no_row_routed": (0, 0, 0, 0, 0, 0),
}
routings = pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS.keys())


def normal(shape, seed, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def inputs_of(sizes, dtype=jnp.float32):
    """x, gate_w, up_w, down_w, row_weights and sizes."""
    experts = len(sizes)
    shapes = [(ROWS, DIM), *[(experts, DIM, FFN)] * 2, (experts, FFN, DIM)]
    arrays = [normal(shape, seed, dtype) for seed, shape in enumerate(shapes)]
    return [*arrays, normal((ROWS,), len(shapes)), jnp.array(sizes, jnp.int32)]


def dense_matmul(rows, weights, sizes):
    """Every row times every matrix, and a mask."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(len(rows))[:, None]
    own = (row >= ends - sizes) & (row < ends)
    return jnp.einsum("me,md,edf->mf", own.astype(rows.dtype), rows, weights)


def dense_mlp(x, gate_w, up_w, down_w, row_weights, sizes):
    hidden = jax.nn.silu(dense_matmul(x, gate_w, sizes)) * dense_matmul(x, up_w, sizes)
    return dense_matmul(hidden, down_w, sizes) * row_weights[:, None]


@jax.jit
def dense_products(lhs, rhs, d_out, sizes):
    out, pullback = jax.vjp(lambda lhs, rhs: dense_matmul(lhs, rhs, sizes), lhs, rhs)
    return [out, *pullback(d_out)]


@jax.jit
def dense_mlp_and_gradients(inputs, d_out):
    *arrays, sizes = inputs
    out, pullback = jax.vjp(lambda *arrays: dense_mlp(*arrays, sizes), *arrays)
    return [out, *pullback(d_out)]


@jax.jit
def kernel_products(lhs, rhs, d_out, sizes):
    return [
        KERNEL.matmul(lhs, rhs, sizes),
        KERNEL.matmul_transposed(d_out, rhs, sizes),
        KERNEL.weight_gradient(lhs, d_out, sizes),
    ]


@jax.jit
def kernel_mlp_and_gradients(inputs, d_out):
    *arrays, sizes = inputs
    arrays = ExpertArrays(*arrays)
    out, gate, up = KERNEL.mlp_forward(arrays, sizes)
    return [out, *KERNEL.mlp_backward(arrays, sizes, gate=gate, up=up, d_out=d_out)]


schedule_of = jax.jit(tile_schedule, static_argnums=(1, 2))


def assert_close(actual, expected, tolerance=1e-5):
    for a, b in zip(actual, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max()))


@routings
def test_all_three_products_equal_the_dense_ones(sizes):
    lhs, rhs, *_, sizes = inputs_of(sizes)
    inputs = lhs, rhs, normal((ROWS, FFN), 9), sizes
    assert_close(kernel_products(*inputs), dense_products(*inputs))


@routings
def test_the_mlp_and_its_gradients_equal_the_dense_ones(sizes):
    inputs, d_out = inputs_of(sizes), normal((ROWS, DIM), 9)
    actual = kernel_mlp_and_gradients(inputs, d_out)
    assert_close(actual, dense_mlp_and_gradients(inputs, d_out))


def test_bfloat16_rounds_only_what_it_writes():
    inputs = inputs_of(ROUTINGS["odd_sizes"], jnp.bfloat16)
    d_out = normal((ROWS, DIM), 9, jnp.bfloat16)
    actual = kernel_mlp_and_gradients(inputs, d_out)
    assert [value.dtype for value in actual[1:]] == [value.dtype for value in inputs[:-1]]
    exact = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), inputs[:-1])
    expected = dense_mlp_and_gradients([*exact, inputs[-1]], d_out.astype(jnp.float32))
    # 8 bits are 0.4 %, and the roundings of the gate, up and hidden values add up.
    assert_close(actual, expected, tolerance=1e-2)


def test_the_products_are_each_others_adjoints():
    lhs, rhs, *_, sizes = inputs_of(ROUTINGS["rows_past_the_sum"])
    d_out = normal((ROWS, FFN), 9)
    out, d_lhs, d_rhs = kernel_products(lhs, rhs, d_out, sizes)
    pairings = [jnp.vdot(out, d_out), jnp.vdot(lhs, d_lhs), jnp.vdot(rhs, d_rhs)]
    np.testing.assert_allclose(pairings, pairings[0], rtol=1e-5)


def test_the_order_of_the_groups_does_not_matter():
    """Not to a single bit: every tile is computed alone."""
    sizes = np.array(ROUTINGS["odd_sizes"])
    x, *weights, row_weights, _ = inputs_of(sizes)
    d_out = normal((ROWS, DIM), 9)
    groups = np.array([2, 0, 5, 3, 1, 4])
    starts = np.cumsum(sizes) - sizes
    rows = np.concatenate([np.arange(starts[g], starts[g] + sizes[g]) for g in groups])
    moved = [x[rows], *[w[groups] for w in weights], row_weights[rows], jnp.array(sizes[groups])]
    actual = kernel_mlp_and_gradients(moved, d_out[rows])
    expected = kernel_mlp_and_gradients(inputs_of(sizes), d_out)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        gradient_of_weights = i in (2, 3, 4)
        np.testing.assert_array_equal(a, b[groups if gradient_of_weights else rows])


def test_experts_without_rows_are_never_used_and_get_exactly_zero_gradient():
    sizes = ROUTINGS["empty_groups"]
    x, *weights, row_weights, group_sizes = inputs_of(sizes)
    d_out = normal((ROWS, DIM), 9)
    empty = np.array(sizes) == 0
    poisoned = [x, *[w.at[empty].set(jnp.nan) for w in weights], row_weights, group_sizes]
    actual = kernel_mlp_and_gradients(poisoned, d_out)
    for d_weight in actual[2:5]:
        assert (np.asarray(d_weight[empty]) == 0).all()
    assert_close(actual, kernel_mlp_and_gradients(inputs_of(sizes), d_out), tolerance=0)


@pytest.mark.parametrize(
    ("bad_rows", "clean_groups"), [(slice(27, None), [0, 2, 5]), (slice(9, 25), [0, 5])]
)
def test_a_nan_row_stays_in_its_group(bad_rows, clean_groups):
    """Rows past the sum, and rows of group 2."""
    inputs = inputs_of(ROUTINGS["rows_past_the_sum"])
    d_out = normal((ROWS, DIM), 9)
    clean_rows = np.delete(np.arange(ROWS), bad_rows)
    poisoned = [inputs[0].at[bad_rows].set(jnp.nan), *inputs[1:]]

    def clean_part(results):
        out, d_x, d_gate_w, d_up_w, d_down_w, d_row_weights = results
        by_row = [value[clean_rows] for value in (out, d_x, d_row_weights)]
        return [*by_row, *[d[np.array(clean_groups)] for d in (d_gate_w, d_up_w, d_down_w)]]

    actual = clean_part(kernel_mlp_and_gradients(poisoned, d_out))
    expected = clean_part(kernel_mlp_and_gradients(inputs, d_out))
    assert_close(actual, expected, tolerance=0)


def test_gradients_are_the_same_in_a_scan_under_remat():
    x, *weights, row_weights, sizes = inputs_of(ROUTINGS["rows_past_the_sum"])
    layers = [jnp.stack([w, 0.5 * w]) for w in weights]
    d_out = normal((ROWS, DIM), 9)

    def scanned(x, *layers):
        @jax.checkpoint
        def layer(x, weights):
            out = expert_mlp(
                x, *weights, sizes, row_weights=row_weights, implementation="kernel_interpreted"
            )
            return x + out, None

        return jax.lax.scan(layer, x, layers)[0]

    def dense(x, *layers):
        for weights in zip(*layers, strict=True):
            x = x + dense_mlp(x, *weights, row_weights, sizes)
        return x

    def run(function):
        out, pullback = jax.vjp(function, x, *layers)
        return [out, *pullback(d_out)]

    assert_close(jax.jit(lambda: run(scanned))(), jax.jit(lambda: run(dense))())


def rows_of_tiles(schedule, rows):
    """(group, its rows) of every tile of a schedule, tiles without rows left out."""
    tiles = [(g, range(first, min(first + rows, end))) for g, first, end in schedule.T.tolist()]
    return [(group, own) for group, own in tiles if own]


@routings
@pytest.mark.parametrize("rows", [16, 64])
def test_the_tiles_have_every_row_once_and_rows_of_one_group_only(sizes, rows):
    schedule = np.asarray(schedule_of(jnp.array(sizes), ROWS, rows))
    group_of_row = np.repeat(range(len(sizes) + 1), [*sizes, ROWS - sum(sizes)])
    tiles = rows_of_tiles(schedule, rows)
    assert [row for _, own in tiles for row in own] == list(range(ROWS))
    assert all(set(group_of_row[list(own)]) == {group} for group, own in tiles)


def test_there_are_tiles_for_the_worst_routing():
    """Every group has one row more than fills its tiles, and so have the rows past the last."""
    sizes = np.array([1, 1, 129, 1, 65])
    num_rows = sizes.sum() + 1
    schedule = np.asarray(schedule_of(jnp.array(sizes), num_rows, 64))
    assert len(rows_of_tiles(schedule, 64)) == num_tiles(len(sizes), num_rows, 64)


TOKENS, EXPERTS, ACTIVE = 8192, 64, 6  # of a GPU and micro-batch, and of DeepSeek-V2-Lite


def routed_rows(popularity):
    """Rows of each expert when tokens take ACTIVE different ones, drawn by their popularity."""
    noise = np.random.default_rng(0).gumbel(size=(TOKENS, EXPERTS))
    chosen = np.argsort(-(np.log(popularity) + noise), axis=1)[:, :ACTIVE]
    return np.bincount(chosen.ravel(), minlength=EXPERTS)


@pytest.mark.parametrize("exponent", [0, 1, 2], ids=["even", "zipf", "steep_zipf"])
def test_a_v2_lite_layer_executes_at_most_a_twentieth_more_than_its_routed_rows(exponent):
    """Of the nine products of a row with a matrix of 2048 x 1408, six are computed in tiles of rows
    (gate, up and down; back through down, gate and up) and three, the gradients of the weights, in
    steps of `inner` rows. 2048 and 1408 are multiples of the other sizes of the tiles.
    """
    tiles = Tiles()
    assert all(dim % size == 0 for dim in (2048, 1408) for size in (tiles.columns, tiles.inner))
    sizes = routed_rows(1 / np.arange(1, EXPERTS + 1) ** exponent)
    schedule = np.asarray(schedule_of(jnp.array(sizes), TOKENS * ACTIVE, tiles.rows))
    used = [own for group, own in rows_of_tiles(schedule, tiles.rows) if group < EXPERTS]
    in_tiles = len(used) * tiles.rows
    in_steps = sum(-(-sizes // tiles.inner) * tiles.inner)
    assert 9 * sizes.sum() < 6 * in_tiles + 3 * in_steps < 1.05 * 9 * sizes.sum()


def test_a_device_whose_experts_nobody_chose_reads_no_weight():
    lhs, rhs, *_, sizes = inputs_of(ROUTINGS["no_row_routed"])
    results = kernel_products(lhs, jnp.full_like(rhs, jnp.nan), normal((ROWS, FFN), 9), sizes)
    assert all((np.asarray(value) == 0).all() for value in results)
