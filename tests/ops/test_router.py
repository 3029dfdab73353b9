"""Routing and the balance loss: the traps that ports of DeepSeek fell into, and loops in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxseek.ops.router import Routing, balance_loss, expert_counts, route
from tests.tiny import TINY

# Every test states what it depends on; the rest is V3's.
PLAIN = dataclasses.replace(
    TINY["v3"],
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
)


def config(**changes):
    return dataclasses.replace(PLAIN, **changes)


def logits_of(scores) -> jax.Array:
    """The logits whose sigmoid is `scores`."""
    scores = np.asarray(scores, np.float64)
    return jnp.float32(np.log(scores / (1 - scores)))


def chosen(routing: Routing) -> list[list[int]]:
    return np.sort(routing.expert_ids, axis=-1).tolist()


def test_the_bias_selects_and_the_score_without_it_weighs():
    routing = route(
        logits_of([[0.9, 0.6, 0.2, 0.1]]),
        jnp.array([0.0, 0.0, 0.0, 5.0]),
        config=config(n_routed_experts=4),
    )
    assert routing.expert_ids.tolist() == [[3, 0]]
    np.testing.assert_allclose(routing.weights, [[0.1, 0.9]], rtol=1e-6)


@pytest.mark.parametrize(
    "scoring, norm, total",
    [
        ("sigmoid", True, 2.5),  # V3 normalises and scales
        ("sigmoid", False, 2.5 * (0.9 + 0.6)),
        ("softmax", True, 1.0),  # V2 does the one or the other
        ("softmax", False, 2.5 * (9 + 1.5) / (9 + 1.5 + 0.25 + 1 / 9)),
    ],
)
def test_weights_are_normalised_and_scaled_as_the_family_does(scoring, norm, total):
    routing = route(
        logits_of([[0.9, 0.6, 0.2, 0.1]]),  # odds 9, 1.5, 0.25, 1/9
        None,
        config=config(
            n_routed_experts=4,
            scoring_func=scoring,
            topk_method="greedy",
            norm_topk_prob=norm,
            routed_scaling_factor=2.5,
        ),
    )
    assert routing.expert_ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(routing.weights.sum(), total, rtol=1e-5)


@pytest.mark.parametrize("shift", [0.0, -46.0, -50.0])
def test_tiny_sigmoid_scores_have_the_weights_of_the_plain_formula_and_its_gradient(shift):
    """At -50 the square of the sum of scores is below the smallest float32."""
    model = config(norm_topk_prob=True, topk_method="greedy")
    logits = np.float32(np.random.default_rng(0).normal(size=(5, 8)) + shift)
    routing = route(jnp.float32(logits), None, config=model)
    ids = np.asarray(routing.expert_ids)
    scores = 1 / (1 + np.exp(-np.take_along_axis(logits, ids, axis=-1).astype(np.float64)))
    total = scores.sum(axis=-1, keepdims=True) + 1e-20
    np.testing.assert_allclose(routing.weights, scores / total, rtol=2e-5 if shift else 1e-6)
    grad = jax.grad(lambda x: route(x, None, config=model).weights[:, 0].sum())(jnp.float32(logits))
    slope = scores * (1 - scores)
    expected = np.zeros(logits.shape)
    first = slope[:, :1] / total
    np.put_along_axis(expected, ids, -scores[:, :1] * slope / total**2, axis=-1)
    expected[np.arange(5), ids[:, 0]] += first[:, 0]
    np.testing.assert_allclose(grad, expected, rtol=1e-4)


def test_one_expert_per_token_is_not_normalised_away():
    one = config(n_routed_experts=4, num_experts_per_tok=1, norm_topk_prob=True)
    routing = route(logits_of([[0.9, 0.6, 0.2, 0.1]]), jnp.zeros(4), config=one)
    np.testing.assert_allclose(routing.weights, [[0.9]], rtol=1e-6)


@pytest.mark.parametrize("method, group", [("group_limited_greedy", [0, 1]), ("noaux_tc", [2, 3])])
def test_v2_ranks_groups_by_the_best_score_and_v3_by_the_two_best(method, group):
    routing = route(
        logits_of([[0.9, 0.1, 0.6, 0.5, 0.3, 0.2]]),
        None,
        config=config(n_routed_experts=6, n_group=3, topk_method=method),
    )
    assert chosen(routing) == [group]


@pytest.mark.parametrize("method", ["group_limited_greedy", "noaux_tc"])
def test_groups_of_one_expert_are_the_experts_themselves(method):
    logits = jnp.float32(np.random.default_rng(0).normal(size=(50, 8)))
    groups = config(n_group=8, topk_group=3, topk_method=method)
    plain = config(topk_method="greedy")
    assert chosen(route(logits, None, config=groups)) == chosen(route(logits, None, config=plain))


def test_experts_of_other_groups_stay_out_where_biased_scores_are_negative():
    """Filled with 0 instead of -inf, the groups left out would win."""
    routing = route(
        logits_of([[0.9, 0.8, 0.2, 0.1]]),
        jnp.full(4, -2.0),
        config=config(n_routed_experts=4, n_group=2),
    )
    assert chosen(routing) == [[0, 1]]


def test_biases_apart_by_less_than_bfloat16_decide():
    bias = jnp.array([0.1, 0.1001, 0.1, 0.1002])
    routing = route(jnp.zeros((1, 4)), bias, config=config(n_routed_experts=4))
    assert chosen(routing) == [[1, 3]]


@pytest.mark.parametrize("family", ["moe-16b", "v2", "v3"])
def test_a_constant_router_has_finite_weights_and_gradients(family):
    model = TINY[family]

    def total(logits):
        bias = jnp.zeros(8) if model.uses_router_bias else None
        routing = route(logits, bias, config=model)
        return routing.weights.sum() + balance_loss(routing, batch=1, config=model)

    for constant in (0.0, 30.0, -30.0, -50.0, -100.0):
        value, grad = jax.value_and_grad(total)(jnp.full((6, 8), constant))
        assert np.isfinite(value) and np.isfinite(grad).all()


def test_the_choice_itself_has_no_gradient():
    """A weight's gradient goes to its own expert's score alone."""
    logits = logits_of([[0.9, 0.6, 0.2, 0.1]])
    model = config(n_routed_experts=4)
    grad = jax.grad(lambda x: route(x, jnp.zeros(4), config=model).weights[0, 0])(logits)
    np.testing.assert_allclose(grad, [[0.9 * 0.1, 0, 0, 0]], rtol=1e-5)


def test_counts_are_of_tokens_per_expert_along_the_leading_dims():
    ids = jnp.array([[[0, 2], [2, 1]], [[2, 0], [2, 0]]])
    counts = expert_counts(ids, num_experts=4)
    assert counts.tolist() == [[1, 1, 2, 0], [2, 0, 2, 0]] and counts.dtype == jnp.int32


def loop_balance(routing: Routing, *, sequences: int, sigmoid: bool) -> float:
    """DeepSeek-V3 equations 17 to 20 as written, summed over sequences."""
    tokens, experts = routing.scores.shape
    length, total = tokens // sequences, 0.0
    active = routing.expert_ids.shape[1]
    scores = np.asarray(routing.scores, np.float64)
    for sequence in range(sequences):
        rows = range(sequence * length, (sequence + 1) * length)
        for expert in range(experts):
            hits = sum(expert in routing.expert_ids[t].tolist() for t in rows)
            shares = [scores[t, expert] / (scores[t].sum() if sigmoid else 1) for t in rows]
            total += experts / (active * length) * hits * sum(shares) / length
    return total


@pytest.mark.parametrize("family", ["moe-16b", "v2-lite", "v2", "v3"])
def test_balance_loss_equals_the_papers_sums(family):
    model = TINY[family]
    logits = jnp.float32(np.random.default_rng(0).normal(size=(15, 8)) + np.arange(8) / 4)
    routing = route(logits, jnp.zeros(8) if model.uses_router_bias else None, config=model)
    sigmoid = model.scoring_func == "sigmoid"
    expected = loop_balance(routing, sequences=3, sigmoid=sigmoid)
    actual = balance_loss(routing, batch=3, config=model)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("family", ["v2-lite", "v3"])
def test_an_even_load_costs_one_per_sequence_and_an_uneven_one_more(family):
    model = dataclasses.replace(
        TINY[family], num_experts_per_tok=2, topk_method="greedy", n_group=1, topk_group=1
    )
    even = np.full((8, 8), -2.0)
    for token in range(8):
        even[token, [token, (token + 1) % 8]] = 2.0
    uneven = np.tile(even[:1], (8, 1))
    one, many = (
        float(balance_loss(route(jnp.float32(x), None, config=model), batch=1, config=model))
        for x in (even, uneven)
    )
    assert one == pytest.approx(1, rel=1e-6)
    assert many > 1.5


def test_the_balance_loss_pushes_loaded_experts_down():
    model = TINY["v3"]
    logits = jnp.float32(np.random.default_rng(0).normal(size=(16, 8))) + 3 * (jnp.arange(8) == 5)

    def loss(x):
        return balance_loss(route(x, jnp.zeros(8), config=model), batch=2, config=model)

    grad = jax.grad(loss)(logits).sum(axis=0)
    assert grad[5] > 0 and np.argmax(grad) == 5 and (grad < 0).any()
