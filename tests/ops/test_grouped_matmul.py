"""Rows times the matrix of their group: against a loop over groups, and the laws of its cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from jaxseek.ops.grouped_loop import block_counts
from jaxseek.ops.grouped_matmul import expert_mlp, grouped_matmul

DIM, FFN = 7, 5

# name: (number of rows, rows per group)
ROUTINGS = {
    "odd_sizes": (61, (3, 17, 1, 40)),
    "several_blocks_per_group": (559, (257, 0, 159, 143)),
    "empty_groups": (37, (0, 20, 0, 0, 17, 0)),
    "all_rows_in_one_group": (50, (0, 0, 50)),
    "rows_past_the_sum": (75, (9, 0, 16)),
    "no_row_routed": (20, (0, 0)),
    "one_group": (33, (33,)),
    "fewer_rows_than_the_smallest_block": (5, (2, 0, 1)),
}
routings = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())


def normal(shape, seed, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def mlp_inputs(num_rows, num_experts, dtype=jnp.float32):
    shapes = [(num_rows, DIM), *[(num_experts, DIM, FFN)] * 2, (num_experts, FFN, DIM)]
    return [normal(shape, seed, dtype) for seed, shape in enumerate(shapes)]


def by_group(function, rows, weights, sizes):
    """`function(rows of a group, *its matrices)`, group by group; zeros for rows past the sum."""
    ends = np.cumsum(sizes)
    parts = [
        function(rows[end - size : end], *[w[group] for w in weights])
        for group, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    computed = jnp.concatenate(parts)
    return jnp.pad(computed, ((0, len(rows) - len(computed)), (0, 0)))


def plain_matmul(rows, weights, sizes):
    return by_group(jnp.matmul, rows, [weights], sizes)


def plain_mlp(rows, gate_w, up_w, down_w, sizes):
    def mlp(x, gate, up, down):
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    return by_group(mlp, rows, [gate_w, up_w, down_w], sizes)


def value_and_gradients(function, inputs, d_out):
    """[out, gradient of each input], compiled."""

    def run(inputs, d_out):
        out, pullback = jax.vjp(function, *inputs)
        return [out, *pullback(d_out)]

    return jax.jit(run)(inputs, d_out)


def assert_close(actual, expected, tolerance=1e-5):
    for a, b in zip(actual, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max()))


@routings
@pytest.mark.parametrize("implementation", ["loop", "ragged_dot"])
def test_grouped_matmul_and_its_gradients_equal_a_loop_over_groups(routing, implementation):
    num_rows, sizes = routing
    inputs = [normal((num_rows, DIM), 0), normal((len(sizes), DIM, FFN), 1)]
    d_out = normal((num_rows, FFN), 2)

    def grouped(lhs, rhs):
        return grouped_matmul(lhs, rhs, jnp.array(sizes), implementation=implementation)

    actual = value_and_gradients(grouped, inputs, d_out)
    expected = value_and_gradients(lambda *a: plain_matmul(*a, sizes), inputs, d_out)
    assert_close(actual, expected)


@routings
@pytest.mark.parametrize("implementation", ["loop", "ragged_dot"])
def test_expert_mlp_and_its_gradients_equal_a_loop_over_experts(routing, implementation):
    num_rows, sizes = routing
    inputs = mlp_inputs(num_rows, len(sizes))
    d_out = normal((num_rows, DIM), 9)

    def grouped(*inputs):
        return expert_mlp(*inputs, jnp.array(sizes), implementation=implementation)

    actual = value_and_gradients(grouped, inputs, d_out)
    expected = value_and_gradients(lambda *a: plain_mlp(*a, sizes), inputs, d_out)
    assert_close(actual, expected)


@pytest.mark.parametrize("implementation", ["loop", "ragged_dot"])
def test_bfloat16_stays_bfloat16_and_within_its_rounding(implementation):
    num_rows, sizes = ROUTINGS["several_blocks_per_group"]
    inputs = mlp_inputs(num_rows, len(sizes), jnp.bfloat16)
    d_out = normal((num_rows, DIM), 9, jnp.bfloat16)

    def grouped(*inputs):
        return expert_mlp(*inputs, jnp.array(sizes), implementation=implementation)

    actual = value_and_gradients(grouped, inputs, d_out)
    exact = [value.astype(jnp.float32) for value in (*inputs, d_out)]
    expected = value_and_gradients(lambda *a: plain_mlp(*a, sizes), exact[:-1], exact[-1])
    assert all(value.dtype == jnp.bfloat16 for value in actual)
    # bf16 carries 8 bits, and the roundings of three products in a row add up.
    assert_close(actual, expected, tolerance=2e-2)


def test_experts_without_rows_are_never_used_and_get_exactly_zero_gradient():
    num_rows, sizes = ROUTINGS["empty_groups"]
    inputs = mlp_inputs(num_rows, len(sizes))
    empty = np.array(sizes) == 0
    poisoned = [inputs[0], *[w.at[empty].set(jnp.nan) for w in inputs[1:]]]
    d_out = normal((num_rows, DIM), 9)

    def grouped(*inputs):
        return expert_mlp(*inputs, jnp.array(sizes), implementation="loop")

    actual = value_and_gradients(grouped, poisoned, d_out)
    for d_weight in actual[2:]:
        assert (np.asarray(d_weight[empty]) == 0).all()
    assert_close(actual, value_and_gradients(grouped, inputs, d_out), tolerance=0)


@pytest.mark.parametrize("poison", ["rows_past_the_sum", "rows_of_another_group"])
def test_a_nan_row_stays_in_its_group(poison):
    num_rows, sizes = 60, (21, 19, 10)
    bad_rows = slice(50, None) if poison == "rows_past_the_sum" else slice(21, 40)
    clean_groups = slice(None) if poison == "rows_past_the_sum" else np.array([0, 2])
    clean_rows = np.delete(np.arange(num_rows), bad_rows)
    inputs = mlp_inputs(num_rows, len(sizes))
    poisoned = [inputs[0].at[bad_rows].set(jnp.nan), *inputs[1:]]
    d_out = normal((num_rows, DIM), 9)

    def grouped(*inputs):
        return expert_mlp(*inputs, jnp.array(sizes), implementation="loop")

    def clean_part(results):
        out, d_x, *d_weights = results
        return [out[clean_rows], d_x[clean_rows], *[d[clean_groups] for d in d_weights]]

    actual = clean_part(value_and_gradients(grouped, poisoned, d_out))
    expected = clean_part(value_and_gradients(grouped, inputs, d_out))
    assert_close(actual, expected, tolerance=0)


def rows_computed(sizes, num_rows):
    counts = block_counts(jnp.array(sizes), num_rows)
    return sum(size * np.asarray(count) for size, count in counts.items())


@routings
def test_blocks_cover_every_group_with_less_than_one_smallest_block_in_vain(routing):
    num_rows, sizes = routing
    computed = rows_computed(sizes, num_rows)
    assert (computed >= sizes).all() and (computed < np.array(sizes) + 32).all()
    assert (computed[np.array(sizes) == 0] == 0).all()


def test_work_grows_with_routed_rows_and_not_with_experts_or_rows():
    sizes = np.random.default_rng(0).integers(0, 300, 8)
    work = rows_computed(sizes, 4000).sum()
    assert rows_computed(np.pad(sizes, (0, 56)), 12000).sum() == work
    assert 2.9 * work < rows_computed(np.tile(sizes, 3), 12000).sum() < 3.1 * work


def test_no_buffer_of_experts_times_rows():
    num_rows, num_experts = 256, 32

    def temporaries(num_experts):
        inputs = mlp_inputs(num_rows, num_experts)
        sizes = jnp.full((num_experts,), num_rows // num_experts)

        def step(inputs, d_out):
            out, pullback = jax.vjp(lambda *a: expert_mlp(*a, sizes), *inputs)
            return out, pullback(d_out)

        return jax.jit(step).lower(inputs, inputs[0]).compile().memory_analysis().temp_size_in_bytes

    one_masked_copy = num_experts * num_rows * min(DIM, FFN) * 4
    assert temporaries(num_experts) - temporaries(1) < one_masked_copy / 4


def test_gradients_are_the_same_under_remat():
    num_rows, sizes = ROUTINGS["odd_sizes"]
    inputs = mlp_inputs(num_rows, len(sizes))
    d_out = normal((num_rows, DIM), 9)

    def grouped(*inputs):
        return expert_mlp(*inputs, jnp.array(sizes), implementation="loop")

    actual = value_and_gradients(jax.checkpoint(grouped), inputs, d_out)
    assert_close(actual, value_and_gradients(grouped, inputs, d_out), tolerance=1e-6)


def devices(count, axis):
    assert jax.device_count() >= count, "tests/conftest.py emulates the devices"
    return jax.make_mesh((count,), (axis,), (AxisType.Auto,), devices=jax.devices()[:count])


@pytest.mark.parametrize("implementation", ["loop", "ragged_dot"])
def test_experts_split_over_three_devices_give_the_unsplit_result(implementation):
    """Each device runs its own experts on the rows routed to them; their sum is the whole."""
    num_rows, sizes = ROUTINGS["empty_groups"]
    inputs = mlp_inputs(num_rows, len(sizes))
    d_out = normal((num_rows, DIM), 9)
    local_experts = len(sizes) // 3

    def split(x, gate_w, up_w, down_w):
        first = jax.lax.axis_index("tensor") * local_experts
        own_sizes = jax.lax.dynamic_slice_in_dim(jnp.array(sizes), first, local_experts)
        skipped = jnp.where(jnp.arange(len(sizes)) < first, jnp.array(sizes), 0).sum()
        own_first = jnp.roll(x, -skipped, axis=0)
        out = expert_mlp(own_first, gate_w, up_w, down_w, own_sizes, implementation=implementation)
        return jax.lax.psum(jnp.roll(out, skipped, axis=0), "tensor")

    specs = (PartitionSpec(), *[PartitionSpec("tensor")] * 3)
    sharded = jax.shard_map(
        split, mesh=devices(3, "tensor"), in_specs=specs, out_specs=PartitionSpec()
    )
    actual = value_and_gradients(sharded, inputs, d_out)
    expected = value_and_gradients(lambda *a: plain_mlp(*a, sizes), inputs, d_out)
    assert_close(actual, expected)


@pytest.mark.parametrize("implementation", ["loop", "kernel_interpreted", "ragged_dot"])
def test_rows_split_over_three_devices_sum_their_weight_gradients(implementation):
    """Every device has all experts and a third of the rows, routed in its own way."""
    sizes = np.array([(3, 0, 9), (0, 12, 1), (5, 5, 2)])
    num_rows = 13
    inputs = mlp_inputs(3 * num_rows, 3)
    d_out = normal((3 * num_rows, DIM), 9)

    def split(x, gate_w, up_w, down_w):
        own_sizes = jnp.array(sizes)[jax.lax.axis_index("data")]
        return expert_mlp(x, gate_w, up_w, down_w, own_sizes, implementation=implementation)

    rows, whole = PartitionSpec("data"), PartitionSpec()
    sharded = jax.shard_map(
        split,
        mesh=devices(3, "data"),
        in_specs=(rows, whole, whole, whole),
        out_specs=rows,
        # Pallas' interpreter does not know of varying axes; the CUDA lane compiles with them.
        check_vma=implementation != "kernel_interpreted",
    )

    def plain(x, *weights):
        thirds = jnp.split(x, 3)
        return jnp.concatenate(
            [plain_mlp(third, *weights, own) for third, own in zip(thirds, sizes, strict=True)]
        )

    actual = value_and_gradients(sharded, inputs, d_out)
    assert_close(actual, value_and_gradients(plain, inputs, d_out))


def primitives_on(platform):
    """The program of the experts, traced in this process for a device of any platform."""
    device = AbstractDevice(device_kind="some device", num_cores=None, platform=platform)
    mesh = AbstractMesh((1,), ("data",), (AxisType.Auto,), abstract_device=device)
    whole = PartitionSpec()
    traced = jax.shard_map(expert_mlp, mesh=mesh, in_specs=whole, out_specs=whole)
    return str(jax.make_jaxpr(traced)(*mlp_inputs(20, 2), jnp.array([5, 9])))


@pytest.mark.parametrize(
    ("platform", "form"), [("cpu", None), ("gpu", "pallas_call"), ("tpu", "ragged_dot")]
)
def test_auto_is_the_form_for_the_platform_of_the_mesh(platform, form):
    program = primitives_on(platform)
    assert [name for name in ("pallas_call", "ragged_dot") if name in program] == [form] * bool(
        form
    )
    assert "interpret=True" not in program


def test_auto_without_a_mesh_is_the_form_for_the_default_platform():
    program = str(jax.make_jaxpr(expert_mlp)(*mlp_inputs(20, 2), jnp.array([5, 9])))
    assert "while[" in program and "pallas_call" not in program and "ragged_dot" not in program


def test_the_kernel_never_runs_interpreted_unless_asked_for():
    inputs = mlp_inputs(20, 2)
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        expert_mlp(*inputs, jnp.array([5, 9]), implementation="kernel")


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="'dense'"):
        expert_mlp(*mlp_inputs(2, 1), jnp.array([2]), implementation="dense")
