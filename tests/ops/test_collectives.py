"""What the collectives do forward and backward, on emulated devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxseek.mesh import DATA_AXIS, TENSOR_AXIS, MeshShape, make_mesh
from jaxseek.ops.collectives import (
    Parallel,
    enter_tensor,
    reduce_tensor,
    vary,
    vary_like,
    varying_axes,
)

SPLIT = Parallel(tensor_axis=TENSOR_AXIS, wire_dtype=jnp.float32)
DEVICES = 3


def on_tensor_devices(function, *, in_specs, out_specs):
    mesh = make_mesh(MeshShape(data=2, tensor=DEVICES))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(mapped)


def test_without_axes_everything_is_the_identity():
    x = jnp.arange(3.0)
    alone = Parallel()
    assert enter_tensor(x, alone) is x and reduce_tensor(x, alone) is x
    assert alone.to_wire(x) is x
    assert alone.tensor_index() == 0 and alone.tensor_size() == 1
    assert varying_axes(x) == frozenset() and vary_like(x, x) is x


def test_index_and_size_are_those_of_the_tensor_axis():
    def body():
        return jnp.array([SPLIT.tensor_index(), SPLIT.tensor_size()])[None]

    out = on_tensor_devices(body, in_specs=(), out_specs=P(TENSOR_AXIS))()
    assert out.tolist() == [[0, 3], [1, 3], [2, 3]]


def test_vary_like_takes_the_axes_of_all_references_and_of_pytrees():
    def body(x, y):
        zeros = {"a": jnp.zeros(2), "b": x}
        carried = vary_like(zeros, x, {"y": y})
        assert varying_axes(carried["a"]) == {DATA_AXIS, TENSOR_AXIS}
        assert varying_axes(carried["b"]) == {DATA_AXIS, TENSOR_AXIS}
        assert varying_axes(vary(jnp.zeros(2), (DATA_AXIS,))) == {DATA_AXIS}
        assert vary_like(x, x) is x
        return x, y

    run = on_tensor_devices(
        body, in_specs=(P(DATA_AXIS), P(TENSOR_AXIS)), out_specs=(P(DATA_AXIS), P(TENSOR_AXIS))
    )
    run(jnp.zeros(2), jnp.zeros(3))


def test_reduce_is_a_sum_forward_and_nothing_backward():
    def body(x):
        value, pull = jax.vjp(functools.partial(reduce_tensor, parallel=SPLIT), x)
        return value, pull(jnp.array([[7.0]]))[0]

    run = on_tensor_devices(body, in_specs=P(TENSOR_AXIS), out_specs=(P(), P(TENSOR_AXIS)))
    value, grad = run(jnp.array([[1.0], [2.0], [4.0]]))
    assert value.tolist() == [[7.0]]
    assert grad.tolist() == [[7.0]] * DEVICES


def test_enter_is_nothing_forward_and_a_sum_backward():
    def body(x, g):
        value, pull = jax.vjp(functools.partial(enter_tensor, parallel=SPLIT), x)
        return value, pull(g)[0]

    run = on_tensor_devices(body, in_specs=(P(), P(TENSOR_AXIS)), out_specs=(P(TENSOR_AXIS), P()))
    value, grad = run(jnp.array([[5.0]]), jnp.array([[1.0], [2.0], [4.0]]))
    assert value.tolist() == [[5.0]] * DEVICES
    assert grad.tolist() == [[7.0]]


def test_a_pair_of_them_around_a_split_product_is_the_whole_product_and_its_gradient():
    """Column-parallel, then row-parallel, as in every sublayer."""
    rng = np.random.default_rng(0)
    x, up, down = (jnp.float32(rng.normal(size=s)) for s in ((2, 5), (5, 6), (6, 5)))

    def sublayer(x, up, down, parallel):
        hidden = jnp.tanh(enter_tensor(x, parallel) @ up)
        return (reduce_tensor(hidden @ down, parallel) ** 2).sum()

    def body(x, up, down):
        return jax.value_and_grad(sublayer, argnums=(0, 1, 2))(x, up, down, SPLIT)

    columns, rows = P(None, TENSOR_AXIS), P(TENSOR_AXIS)
    run = on_tensor_devices(
        body, in_specs=(P(), columns, rows), out_specs=(P(), (P(), columns, rows))
    )
    actual = run(x, up, down)
    expected = jax.value_and_grad(sublayer, argnums=(0, 1, 2))(x, up, down, Parallel())
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("collective", [enter_tensor, reduce_tensor])
def test_bfloat16_stays_bfloat16_and_is_summed_in_the_wire_dtype(collective):
    """1 + 2^-8 + 2^-8 is 1 in bfloat16 added one by one, and more in float32."""

    def body(x, g):
        value, pull = jax.vjp(functools.partial(collective, parallel=SPLIT), x)
        return value if collective is reduce_tensor else pull(g)[0]

    parts = jnp.bfloat16([[1.0], [2.0**-8], [2.0**-8]])
    in_specs = (P(TENSOR_AXIS) if collective is reduce_tensor else P(), P(TENSOR_AXIS))
    run = on_tensor_devices(body, in_specs=in_specs, out_specs=P())
    arguments = parts if collective is reduce_tensor else jnp.bfloat16([[0.0]]), parts
    total = run(*arguments)
    assert total.dtype == jnp.bfloat16
    assert float(total[0, 0]) == 1 + 2.0**-7
    # XLA may promote the sum by itself; what is asked for must not depend on that.
    sums = re.findall(r"(\w+)\[[\d,]*\]\S* = psum", str(jax.make_jaxpr(run)(*arguments)))
    assert sums == ["f32"]


def test_integers_cross_the_wire_as_they_are():
    assert SPLIT.to_wire(jnp.arange(3)).dtype == jnp.int32
    assert SPLIT.to_wire(jnp.ones(3, jnp.bfloat16)).dtype == jnp.float32
