"""Layouts: padding comes and goes without a trace, every device holds its share, gather and its
gradient fit together.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxseek import layout as layouts
from jaxseek import model
from jaxseek.initialize import init_params
from jaxseek.layout import LeafLayout, ParamSpec, plan_layout, tensor_dims
from jaxseek.mesh import DATA_AXIS, TENSOR_AXIS, MeshShape, make_mesh
from tests.tiny import TINY

MESHES = [MeshShape.parse(m) for m in ("1x1", "2x1", "3x1", "1x2", "1x3", "1x5", "2x3", "3x2")]
ZERO = (0, 1, 2, 3)
AXES = (DATA_AXIS, TENSOR_AXIS)


@functools.cache
def specs_of(family: str):
    return model.split(TINY[family])[1]


@functools.cache
def plan(family: str, mesh: MeshShape, zero: int):
    return plan_layout(specs_of(family), config=TINY[family], shape=mesh, zero=zero)


def named_leaves(family: str, mesh: MeshShape, zero: int):
    specs = layouts.flatten_paths(specs_of(family))
    leaves = layouts.flatten_paths(plan(family, mesh, zero))
    return [(path, specs[path], leaf) for path, leaf in leaves.items()]


def axis_sizes(mesh: MeshShape) -> dict[str, int]:
    return {DATA_AXIS: mesh.data, TENSOR_AXIS: mesh.tensor}


EVERY_PLAN = list(itertools.product(TINY, MESHES, ZERO))


def test_unpadding_undoes_padding_and_padding_is_zeros_at_the_end():
    seen = set()
    meshes = (MeshShape.parse(mesh) for mesh in ("3x1", "1x3", "2x3"))
    for family, mesh in itertools.product(("qwen2", "v3"), meshes):
        for path, spec, leaf in named_leaves(family, mesh, 3):
            assert leaf.logical == spec.shape
            if (leaf.logical, leaf.stored) in seen:
                continue
            seen.add((leaf.logical, leaf.stored))
            x = np.arange(1, spec.size + 1).reshape(spec.shape)
            padded = np.asarray(leaf.pad(jnp.asarray(x)))
            assert padded.shape == leaf.stored, path
            assert padded.sum() == x.sum()
            np.testing.assert_array_equal(leaf.unpad(padded), x)
    assert len(seen) > 30


def test_every_split_dim_divides_by_its_devices_with_less_than_one_share_of_padding():
    for family, mesh, zero in EVERY_PLAN:
        sizes = axis_sizes(mesh)
        for path, spec, leaf in named_leaves(family, mesh, zero):
            for logical, stored, entry in itertools.zip_longest(
                spec.shape, leaf.stored, leaf.partition
            ):
                names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
                ways = math.prod(sizes[name] for name in names)
                assert stored % ways == 0 and 0 <= stored - logical < ways, path


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_from_zero_1_on_every_parameter_is_split_over_all_devices(zero):
    for family, mesh in itertools.product(TINY, MESHES):
        for path, spec, leaf in named_leaves(family, mesh, zero):
            devices = math.prod(axis_sizes(mesh)[axis] for axis in leaf.split_axes())
            assert devices == (1 if spec.role == "router_bias" else mesh.devices), path


def test_at_zero_0_only_the_tensor_axis_splits_and_nothing_is_gathered():
    for family, mesh in itertools.product(TINY, MESHES):
        for path, _, leaf in named_leaves(family, mesh, 0):
            assert set(leaf.split_axes()) <= {TENSOR_AXIS}, path
            assert leaf.zero_axes == () and leaf.zero_dim is None


def test_what_a_tensor_device_computes_with_is_split_whatever_the_zero_level():
    split = {"lm_head.kernel", "embed_tokens.embedding", "moe_layers.mlp.experts.gate_proj",
             "moe_layers.self_attn.o_proj.kernel", "moe_layers.mlp.shared_experts.up_proj.kernel",
             "dense_layers.mlp.down_proj.kernel"}  # fmt: skip
    for zero in ZERO:
        leaves = layouts.flatten_paths(plan("v3", MeshShape(data=1, tensor=3), zero))
        for path in split:
            leaf = leaves[path]
            assert TENSOR_AXIS in leaf.split_axes() and TENSOR_AXIS not in leaf.zero_axes, path


def test_the_zero_dim_is_the_one_that_needs_the_least_padding():
    for family, mesh in itertools.product(TINY, MESHES):
        sizes = axis_sizes(mesh)
        for path, spec, leaf in named_leaves(family, mesh, 3):
            if leaf.zero_dim is None:
                continue
            ways = math.prod(sizes[axis] for axis in leaf.zero_axes)
            chosen = len(spec.shape) + leaf.zero_dim
            free = [
                size
                for i, (size, name) in enumerate(zip(spec.shape, spec.dims, strict=True))
                if i == chosen or (name != "layers" and leaf.partition[i] is None)
            ]
            growth = leaf.stored[leaf.zero_dim] / leaf.logical[leaf.zero_dim]
            assert growth == min(math.ceil(size / ways) * ways / size for size in free), path


def attention_cost(kv_heads: int, group: int, *, tensor: int, split: frozenset[str]) -> int:
    """Heads of q, k and v that one device projects, by the shapes that the layout stores."""
    q = ParamSpec(shape=(7, kv_heads, group, 8), dims=("embed", "kv_heads", "q_per_kv", "head_dim"),
                  role="matrix")  # fmt: skip
    kv = ParamSpec(shape=(7, kv_heads, 8), dims=("embed", "kv_heads", "head_dim"), role="matrix")
    mesh, cost = MeshShape(data=1, tensor=tensor), 0
    for spec, times in ((q, 1), (kv, 2)):
        leaf = layouts.plan_leaf(spec, shape=mesh, zero=0, split=split)
        ways = tensor if leaf.split_axes() else 1
        cost += times * math.prod(leaf.stored[1:-1]) // ways
    return cost


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tensor", [2, 3, 5])
def test_grouped_query_attention_is_split_where_a_device_has_least_to_do(kv_heads, tensor):
    for group in (1, 2, 4, 8):
        config = dataclasses.replace(
            TINY["coder"], num_attention_heads=kv_heads * group, num_key_value_heads=kv_heads
        )
        taken = tensor_dims(config, tensor)
        cost = attention_cost(kv_heads, group, tensor=tensor, split=taken)
        others = taken - {"kv_heads", "q_per_kv"}
        assert cost == min(
            attention_cost(kv_heads, group, tensor=tensor, split=others | {choice})
            for choice in ("kv_heads", "q_per_kv")
        )


def test_one_kv_head_does_not_keep_three_devices_from_helping():
    assert "q_per_kv" in tensor_dims(TINY["coder-mqa"], 3)
    assert "kv_heads" in tensor_dims(TINY["llama"], 3)


def test_a_replicated_leaf_is_found_and_named():
    shape = MeshShape.parse("3x1")
    layout, mesh = plan("v3", shape, 3), make_mesh(shape)
    params = init_params(specs_of("v3"), layout, mesh=mesh, seed=0, std=0.1)
    layouts.check_layout(params, layout, mesh=mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    params["norm"]["scale"] = jax.device_put(params["norm"]["scale"], whole)
    with pytest.raises(AssertionError, match=r"norm\.scale") as error:
        layouts.check_layout(params, layout, mesh=mesh)
    assert str(error.value).count("planned") == 2  # the headline and the one leaf


def leaf_cases() -> dict[str, tuple[ParamSpec, str, int]]:
    matrix = ParamSpec(shape=(5, 7), dims=("embed", "mlp"), role="matrix")
    norm = ParamSpec(shape=(7,), dims=("embed",), role="norm")
    return {
        "split over data, padded in both dims": (matrix, "2x3", 3),
        "not split by tensor, so over both axes": (norm, "2x3", 3),
        "data only": (matrix, "3x1", 1),
        "tensor only": (matrix, "1x3", 0),
        "whole everywhere": (norm, "2x3", 0),
    }


@pytest.mark.parametrize("case", leaf_cases())
def test_the_gradient_of_gather_is_its_adjoint(case):
    """<gather x, y> = <x, gather' y> summed over devices, where every device has its own y."""
    spec, mesh_name, zero = leaf_cases()[case]
    shape = MeshShape.parse(mesh_name)
    mesh = make_mesh(shape)
    leaf = layouts.plan_leaf(spec, shape=shape, zero=zero, split=frozenset({"mlp"}))
    rng = np.random.default_rng(0)
    x = jnp.float32(rng.normal(size=leaf.stored))
    varying = leaf.model_axes

    def body(x, seed):
        gather = functools.partial(layouts.gather, leaf=leaf, dtype=jnp.float32, wire_dtype=None)
        whole, pull = jax.vjp(gather, x)
        y = jax.random.normal(jax.random.key(seed[0, 0]), whole.shape)
        grad = pull(y)[0]
        forward = jax.lax.psum((whole * y).sum(), varying)
        backward = (x * grad).sum()
        return forward, jax.lax.psum(backward, leaf.split_axes()) if leaf.split_axes() else backward

    in_specs = (leaf.partition, PartitionSpec(*(a if a in varying else None for a in AXES)))
    run = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec())
    seeds = jnp.arange(shape.devices, dtype=jnp.uint32).reshape(shape.data, shape.tensor)
    forward, backward = jax.jit(run)(x, seeds)
    assert abs(float(forward)) > 0.1
    assert float(backward) == pytest.approx(float(forward), rel=1e-5)


def test_gather_gives_every_device_the_whole_logical_zero_dim_in_the_compute_dtype():
    shape = MeshShape.parse("3x1")
    spec = ParamSpec(shape=(2, 7, 5), dims=("layers", "embed", "mlp"), role="matrix")
    leaf = layouts.plan_leaf(spec, shape=shape, zero=3, split=frozenset({"mlp"}))
    value = jnp.arange(70, dtype=jnp.float32).reshape(2, 7, 5)

    def body(x):
        stack = layouts.gather(x, leaf, dtype=jnp.bfloat16, wire_dtype=jnp.float32)
        layer = layouts.gather(x[1], leaf, dtype=jnp.bfloat16, wire_dtype=jnp.float32)
        return stack[None], layer[None]

    run = jax.shard_map(
        body,
        mesh=make_mesh(shape),
        in_specs=leaf.partition,
        out_specs=PartitionSpec(DATA_AXIS),
    )
    stacks, layers = jax.jit(run)(leaf.pad(value))
    assert stacks.dtype == jnp.bfloat16
    for device in range(3):
        np.testing.assert_array_equal(stacks[device], value)
        np.testing.assert_array_equal(layers[device], value[1])


def test_norms_and_routers_stay_float32_when_gathered():
    leaves: list[tuple[str, ParamSpec, LeafLayout]] = named_leaves("v3", MESHES[0], 0)
    for path, spec, leaf in leaves:
        x = layouts.gather(jnp.ones(leaf.stored), leaf, dtype=jnp.bfloat16, wire_dtype=None)
        expected = jnp.float32 if spec.role in ("norm", "router", "router_bias") else jnp.bfloat16
        assert x.dtype == expected, path
