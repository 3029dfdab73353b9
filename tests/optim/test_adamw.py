"""AdamW against float64, what decays, and the norm of a gradient that lies on many devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxseek import layout as layouts
from jaxseek import model
from jaxseek.layout import ParamSpec
from jaxseek.mesh import MeshShape, make_mesh
from jaxseek.optim.adamw import decay_mask, global_norm, make_adamw
from jaxseek.run_config import OptimConfig
from tests.tiny import TINY

OPTIM = OptimConfig(beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.3)
RATE = 0.01


def specs(shape=(4, 3)):
    matrix = ParamSpec(shape=shape, dims=("embed", "mlp"), role="matrix")
    return {"matrix": matrix, "norm": dataclasses.replace(matrix, role="norm")}


def apply(optimizer, params, state, grads):
    """As the train step does: the rate is multiplied in behind the chain."""
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, jax.tree.map(lambda u: -RATE * u, updates)), state


def test_three_steps_equal_adamw_in_float64():
    rng = np.random.default_rng(0)
    start = {name: rng.normal(size=(4, 3)) for name in specs()}
    gradients = [{name: rng.normal(size=(4, 3)) for name in specs()} for _ in range(3)]
    optimizer = make_adamw(OPTIM, specs())
    params = jax.tree.map(jnp.float32, start)
    state = optimizer.init(params)
    for grads in gradients:
        params, state = apply(optimizer, params, state, jax.tree.map(jnp.float32, grads))
    for name, value in start.items():
        first = second = np.zeros((4, 3))
        for t, grads in enumerate(gradients, start=1):
            first = 0.9 * first + 0.1 * grads[name]
            second = 0.95 * second + 0.05 * grads[name] ** 2
            update = (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.95**t)) + 1e-6)
            decay = 0.3 * value if name == "matrix" else 0.0
            value = value - RATE * (update + decay)
        np.testing.assert_allclose(params[name], value, rtol=1e-5, atol=1e-7)


def test_moments_are_float32_whatever_the_gradient_is():
    optimizer = make_adamw(OPTIM, specs())
    params = jax.tree.map(lambda s: jnp.ones(s.shape), specs())
    state = optimizer.init(params)
    _, state = optimizer.update(jax.tree.map(jnp.bfloat16, params), state, params)
    assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {jnp.dtype(jnp.float32)}


def test_a_parameter_without_a_gradient_stays_finite_and_only_decays():
    """An unused expert, the embedding of an unused word."""
    optimizer = make_adamw(OPTIM, specs())
    params = jax.tree.map(lambda s: jnp.ones(s.shape), specs())
    state = optimizer.init(params)
    for _ in range(3):
        params, state = apply(optimizer, params, state, jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_array_equal(params["norm"], 1.0)
    np.testing.assert_allclose(params["matrix"], (1 - RATE * 0.3) ** 3, rtol=1e-6)


def test_zeros_of_the_padding_stay_exactly_zero():
    optimizer = make_adamw(OPTIM, specs())
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape), specs())
    params, state = zeros, optimizer.init(zeros)
    for _ in range(3):
        params, state = apply(optimizer, params, state, zeros)
    assert not any(x.any() for x in jax.tree.leaves((params, state[0].mu, state[0].nu)))


def test_matrices_embeddings_and_routers_decay_and_norms_and_biases_do_not():
    decayed, kept = set(), set()
    for family in ("qwen2", "qwen3", "v3"):
        mask = layouts.flatten_paths(decay_mask(model.split(TINY[family])[1]))
        for path, decays in mask.items():
            (decayed if decays else kept).add(path.split(".", maxsplit=1)[-1])
    assert decayed & kept == set()
    assert {path.rsplit(".", maxsplit=1)[-1] for path in kept} == {
        "scale",
        "bias",
        "e_score_correction_bias",
    }
    assert {"embedding", "kernel", "mlp.gate.kernel", "mlp.experts.down_proj"} <= decayed


@pytest.mark.parametrize("mesh", ["2x3", "3x1"])
@pytest.mark.parametrize("zero", [0, 1])
def test_the_norm_of_slices_on_many_devices_is_the_norm_of_the_whole(mesh, zero):
    """The layout of V3 holds leaves split over no axis, one and two."""
    shape, all_specs = MeshShape.parse(mesh), model.split(TINY["v3"])[1]
    layout = layouts.plan_layout(all_specs, config=TINY["v3"], shape=shape, zero=zero)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(np.float32), all_specs)
    expected = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in jax.tree.leaves(grads)))
    padded = jax.tree.map(
        lambda g, leaf: np.pad(
            g, [(0, s - n) for n, s in zip(leaf.logical, leaf.stored, strict=True)]
        ),
        grads,
        layout,
    )
    run = jax.shard_map(
        lambda g: global_norm(g, layout),
        mesh=make_mesh(shape),
        in_specs=(jax.tree.map(lambda leaf: leaf.partition, layout),),
        out_specs=PartitionSpec(),
    )
    assert float(jax.jit(run)(padded)) == pytest.approx(expected, rel=1e-6)
