"""The MoE layer where its router is at its limits: constant, overloaded, hardly distinct scores."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxseek.layers.moe import MoE, Router, RouterStats
from jaxseek.ops.collectives import Parallel
from tests.tiny import TINY


def with_random_weights(module: nnx.Module, *, seed: int = 0) -> nnx.Module:
    """`module` with normal weights of standard deviation 0.3."""
    graphdef, state = nnx.split(module)
    rng = np.random.default_rng(seed)

    def make(x):
        return jnp.float32(0.3 * rng.normal(size=x.shape))

    return nnx.merge(graphdef, jax.tree.map(make, nnx.to_pure_dict(state)))


@functools.partial(jax.jit, static_argnums=0)
def run(graphdef: nnx.GraphDef, params: dict, x: jax.Array) -> tuple[jax.Array, RouterStats]:
    return nnx.merge(graphdef, params)(x, parallel=Parallel())


def apply(moe: MoE, x: jax.Array) -> tuple[jax.Array, RouterStats]:
    """Output and statistics of `moe` for x [B, T, D]."""
    graphdef, state = nnx.split(moe)
    return run(graphdef, nnx.to_pure_dict(state), x)


def activations(model, *, batch: int = 2, length: int = 9) -> jax.Array:
    rng = np.random.default_rng(0)
    return jnp.float32(rng.normal(size=(batch, length, model.hidden_size)))


def expert(moe: MoE, number: int, rows: np.ndarray) -> np.ndarray:
    gate, up, down = (
        np.asarray(w[...], np.float64)[number]
        for w in (moe.experts.gate_proj, moe.experts.up_proj, moe.experts.down_proj)
    )
    hidden = rows @ gate
    return (hidden / (1 + np.exp(-hidden)) * (rows @ up)) @ down


@pytest.mark.parametrize("family", ["moe-16b", "v3"])
def test_output_is_the_weighted_sum_of_the_chosen_experts_and_the_shared_one(family):
    model = TINY[family]
    moe = with_random_weights(MoE(model))
    x = activations(model)
    y, stats = apply(moe, x)
    rows = np.asarray(x, np.float64).reshape(-1, model.hidden_size)
    logits = rows @ np.asarray(moe.gate.kernel[...], np.float64)
    if family == "v3":
        scores = 1 / (1 + np.exp(-logits))
        choice = scores + np.asarray(moe.gate.e_score_correction_bias[...])
        groups = choice.reshape(len(rows), model.n_group, -1)
        best = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
        keep = np.argsort(best, axis=-1)[:, -model.topk_group :]
        kept = (keep[:, :, None] == np.arange(model.n_group)).any(axis=1)
        choice = np.where(np.repeat(kept, groups.shape[-1], axis=1), choice, -np.inf)
    else:
        scores = choice = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = np.asarray(moe.shared_experts(x), np.float64).reshape(rows.shape).copy()
    counts = np.zeros(model.n_routed_experts, int)
    for t, row in enumerate(rows):
        chosen = np.argsort(choice[t])[-model.num_experts_per_tok :]
        weights = scores[t, chosen]
        if model.norm_topk_prob:
            weights = weights / weights.sum() * model.routed_scaling_factor
        counts[chosen] += 1
        expected[t] += sum(w * expert(moe, e, row) for w, e in zip(weights, chosen, strict=True))
    np.testing.assert_allclose(y.reshape(rows.shape), expected, rtol=1e-4, atol=1e-4)
    assert stats.counts.tolist() == counts.tolist()


@pytest.mark.parametrize("family", ["moe-16b", "v2", "v3"])
def test_a_constant_router_gives_finite_outputs_and_gradients(family):
    """Every token takes the same experts; the others have none."""
    model = TINY[family]
    graphdef, state = nnx.split(with_random_weights(MoE(model)))
    params = nnx.to_pure_dict(state)
    params["gate"] = jax.tree.map(jnp.zeros_like, params["gate"])

    def loss(params):
        y, stats = run(graphdef, params, activations(model))
        return (y**2).mean() + stats.balance, stats

    (value, stats), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert sorted(set(stats.counts.tolist())) == [0, 18]
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    idle = np.asarray(stats.counts) == 0
    for name in ("gate_proj", "up_proj", "down_proj"):
        per_expert = np.abs(grads["experts"][name]).max(axis=(1, 2))
        assert (per_expert[idle] == 0).all() and (per_expert[~idle] > 0).all()


def test_fewer_tokens_than_experts_per_token_are_routed_like_any():
    model = TINY["v3"]
    moe = with_random_weights(MoE(model))
    x = activations(model)
    one, stats = apply(moe, x[:1, :1])
    np.testing.assert_allclose(one, apply(moe, x)[0][:1, :1], rtol=1e-4, atol=1e-5)
    assert stats.counts.sum() == model.num_experts_per_tok


def test_the_router_is_float32_where_activations_are_bfloat16():
    """Columns that are the same in bfloat16 and differ in float32."""
    model = dataclasses.replace(
        TINY["moe-16b"], hidden_size=40, n_routed_experts=4, num_experts_per_tok=1
    )
    graphdef, state = nnx.split(Router(model))
    params = nnx.to_pure_dict(state)
    columns = 1 + 1e-4 * np.array([0, 2, 3, 1], np.float32)
    params["kernel"] = jnp.tile(columns, (40, 1))
    assert (params["kernel"].astype(jnp.bfloat16) == 1).all()
    logits, bias = nnx.merge(graphdef, params)(jnp.ones((1, 40), jnp.bfloat16))
    assert bias is None and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[0], 40 * columns, rtol=1e-6)
    assert int(logits.argmax()) == 2


def test_the_balance_bias_has_no_gradient():
    model = TINY["v3"]
    graphdef, state = nnx.split(with_random_weights(MoE(model)))

    def loss(params):
        y, stats = run(graphdef, params, activations(model))
        return (y**2).sum() + stats.balance

    grads = jax.jit(jax.grad(loss))(nnx.to_pure_dict(state))["gate"]
    assert not grads["e_score_correction_bias"].any() and grads["kernel"].any()
