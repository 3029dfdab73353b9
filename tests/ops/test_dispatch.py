"""Dispatch and combine: loops in numpy, gradients of a plain `take`, experts of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxseek.ops.dispatch import combine, dispatch, dispatch_weights, plan_dispatch

TOKENS, ACTIVE, EXPERTS, SIZE = 11, 3, 8, 5
SHARES = [(0, EXPERTS), (0, 3), (3, 3), (6, 3)]  # the last one holds a padded expert


def case(seed: int = 0):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(EXPERTS)[:ACTIVE] for _ in range(TOKENS)])
    x = rng.normal(size=(TOKENS, SIZE)).astype(np.float32)
    weights = rng.normal(size=(TOKENS, ACTIVE)).astype(np.float32)
    return jnp.asarray(ids, jnp.int32), jnp.asarray(x), jnp.asarray(weights)


def weighted(rows, weights, plan) -> jax.Array:
    return combine(rows * dispatch_weights(weights, plan)[:, None], plan)


@pytest.mark.parametrize("first, count", SHARES)
def test_rows_are_sorted_by_local_expert_in_the_order_of_tokens(first, count):
    ids, x, _ = case()
    plan = plan_dispatch(ids, first=first, count=count)
    rows = dispatch(x, plan)
    expected, sizes = [], []
    for expert in range(first, first + count):
        tokens = [t for t in range(TOKENS) if expert in ids[t].tolist()]
        expected += [x[t] for t in tokens]
        sizes.append(len(tokens))
    assert plan.group_sizes.tolist() == sizes
    np.testing.assert_array_equal(rows[: sum(sizes)], np.array(expected).reshape(-1, SIZE))


def test_no_pair_is_lost_and_none_is_doubled():
    plan = plan_dispatch(case()[0], first=3, count=3)
    everything = np.arange(TOKENS * ACTIVE)
    np.testing.assert_array_equal(np.sort(plan.order), everything)
    np.testing.assert_array_equal(plan.order[plan.inverse.reshape(-1)], everything)


def test_all_tokens_may_choose_the_same_experts():
    ids = jnp.tile(jnp.array([[4, 1, 6]], jnp.int32), (TOKENS, 1))
    plan = plan_dispatch(ids, first=0, count=EXPERTS)
    assert plan.group_sizes.tolist() == [0, TOKENS, 0, 0, TOKENS, 0, TOKENS, 0]
    _, x, weights = case()
    out = weighted(dispatch(x, plan), weights, plan)
    np.testing.assert_allclose(out, x * weights.sum(axis=1, keepdims=True), rtol=2e-5, atol=1e-6)


def expert_factor(plan) -> jax.Array:
    """A stand-in for the experts: expert e multiplies by e + 1, rows of no expert become zero."""
    local = plan.group_sizes.shape[0]
    rows = plan.order.shape[0]
    ends = jnp.cumsum(plan.group_sizes)
    expert = jnp.searchsorted(ends, jnp.arange(rows), side="right")
    return jnp.where(expert < local, expert + 1, 0).astype(jnp.float32)[:, None]


@pytest.mark.parametrize("first, count", SHARES)
def test_combine_is_the_weighted_sum_over_local_experts(first, count):
    ids, x, weights = case()
    plan = plan_dispatch(ids, first=first, count=count)
    expected = np.zeros((TOKENS, SIZE))
    for token in range(TOKENS):
        for slot, expert in enumerate(ids[token].tolist()):
            if first <= expert < first + count:
                expected[token] += float(weights[token, slot]) * (expert - first + 1) * x[token]
    actual = weighted(dispatch(x, plan) * expert_factor(plan), weights, plan)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first, count", SHARES)
def test_gradients_equal_those_of_plain_takes(first, count):
    ids, x, weights = case()
    plan = plan_dispatch(ids, first=first, count=count)
    target = jnp.float32(np.random.default_rng(1).normal(size=(TOKENS, SIZE)))

    def with_permutations(x, weights):
        return (weighted(dispatch(x, plan) * expert_factor(plan), weights, plan) * target).sum()

    def with_takes(x, weights):
        rows = jnp.take(x, plan.order // ACTIVE, axis=0) * expert_factor(plan)
        pairs = jnp.take(rows, plan.inverse, axis=0)
        return ((pairs * weights[..., None]).sum(axis=1) * target).sum()

    for actual, expected in zip(
        jax.grad(with_permutations, argnums=(0, 1))(x, weights),
        jax.grad(with_takes, argnums=(0, 1))(x, weights),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_the_backward_pass_has_no_scatter():
    ids, x, weights = case()
    plan = plan_dispatch(ids, first=0, count=EXPERTS)
    grad = jax.grad(lambda x: weighted(dispatch(x, plan), weights, plan).sum())
    assert "scatter" not in str(jax.make_jaxpr(grad)(x))


def test_gradients_of_a_tokens_copies_are_summed_in_float32():
    x = jnp.ones((1, 2), jnp.bfloat16)
    plan = plan_dispatch(jnp.arange(3, dtype=jnp.int32)[None], first=0, count=3)
    factors = jnp.bfloat16([[256.0], [1.0], [1.0]])  # a bfloat16 sum one by one stays at 256
    grad = jax.grad(lambda x: (dispatch(x, plan) * factors).astype(jnp.float32).sum())(x)
    np.testing.assert_array_equal(grad.astype(jnp.float32), 258.0)
