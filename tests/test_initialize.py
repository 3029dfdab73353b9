"""Initial parameters: fixed by seed, path and layer, never by the mesh; as many as promised."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxseek import layout as layouts
from jaxseek import model
from jaxseek.config import ModelConfig
from jaxseek.initialize import init_params
from jaxseek.mesh import MeshShape, make_mesh
from tests.tiny import TINY


@functools.cache
def initial(
    config: ModelConfig, mesh: str = "1x1", *, zero: int = 3, seed: int = 7
) -> dict[str, np.ndarray]:
    """Logical initial parameters by path, after a look at how they are stored and padded."""
    shape, specs = MeshShape.parse(mesh), model.split(config)[1]
    layout = layouts.plan_layout(specs, config=config, shape=shape, zero=zero)
    params = init_params(specs, layout, mesh=make_mesh(shape), seed=seed, std=0.1)
    layouts.check_layout(params, layout, mesh=make_mesh(shape))
    logical = jax.tree.map(lambda x, leaf: leaf.unpad(np.asarray(x)), params, layout)
    for stored, inside in zip(jax.tree.leaves(params), jax.tree.leaves(logical), strict=True):
        assert np.count_nonzero(stored) == np.count_nonzero(inside), "padding is not zero"
    return layouts.flatten_paths(logical)


@pytest.mark.parametrize("family", ["qwen2", "v3"])
def test_the_mesh_does_not_matter(family):
    reference = initial(TINY[family])
    for mesh, zero in (("3x1", 3), ("1x3", 1), ("2x3", 3), ("2x3", 0), ("5x1", 2)):
        for path, value in initial(TINY[family], mesh, zero=zero).items():
            np.testing.assert_array_equal(value, reference[path], err_msg=f"{path} on {mesh}")


def test_the_seed_does():
    first, second = initial(TINY["v3"]), initial(TINY["v3"], seed=8)
    for path in ("lm_head.kernel", "moe_layers.mlp.experts.up_proj"):
        assert (first[path] != second[path]).mean() > 0.99


def test_a_layer_is_the_same_in_a_deeper_model_and_differs_from_its_neighbours():
    deep = dataclasses.replace(TINY["qwen2"], num_hidden_layers=5)
    shallow, deep = initial(TINY["qwen2"]), initial(deep)
    path = "dense_layers.self_attn.k_proj.kernel"
    np.testing.assert_array_equal(deep[path][:2], shallow[path])
    rows = [*deep[path], *deep["dense_layers.self_attn.v_proj.kernel"]]
    assert len({row.tobytes() for row in rows}) == len(rows)


def test_values_follow_their_role():
    params, specs = initial(TINY["qwen2"]), layouts.flatten_paths(model.split(TINY["qwen2"])[1])
    matrices = [x for path, x in params.items() if specs[path].role in ("matrix", "embedding")]
    values = np.concatenate([x.ravel() for x in matrices])
    assert values.std() == pytest.approx(0.1, rel=0.05) and abs(values.mean()) < 0.005
    for path, spec in specs.items():
        if spec.role in ("norm", "bias"):
            np.testing.assert_array_equal(params[path], 1 if spec.role == "norm" else 0)


def test_arrays_that_lie_in_one_buffer_are_donated_one_by_one():
    """On CPU the slices that two devices share may be one buffer; large ones are, if aligned."""
    config = dataclasses.replace(TINY["qwen2"], hidden_size=512, vocab_size=512)
    specs = model.split(config)[1]
    mesh = make_mesh(MeshShape(data=3, tensor=1))
    layout = layouts.plan_layout(specs, config=config, shape=MeshShape(data=3, tensor=1), zero=0)
    params = init_params(specs, layout, mesh=mesh, seed=7, std=0.1)
    before = np.array(params["lm_head"]["kernel"])
    double = jax.jit(lambda x: x + x, donate_argnums=0)
    doubled = double(params["lm_head"]["kernel"])
    for shard in doubled.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), before + before)


@pytest.mark.parametrize("family", TINY)
def test_as_many_values_are_made_as_the_parameter_count_says(family):
    made = sum(x.size for x in initial(TINY[family]).values())
    assert made == model.parameter_count(TINY[family])
