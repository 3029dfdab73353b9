"""Load balance in the train step: the loss reaches the router, the bias moves once per step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxseek.layers.moe import RouterStats
from jaxseek.mesh import make_mesh
from jaxseek.ops.router import expert_counts, route
from jaxseek.run_config import RouterConfig
from jaxseek.train.state import TrainState, make_program, state_from_params
from jaxseek.train.step import _balance
from tests.tiny import TINY
from tests.train.programs import ALPHA, GAMMA, Stepper, moments_of, params_of, rows, stepper

GATE = "moe_layers.mlp.gate.kernel"


def in_four_micro_batches() -> Stepper:
    """With four times the weight of the balance loss, and every layer computed twice."""
    router = RouterConfig(balance_alpha=4 * ALPHA, bias_update_speed=GAMMA)
    return stepper("v3", router=router, accumulation=4, remat="full")


def with_zero_head(one: Stepper) -> TrainState:
    """A start from which the token loss has a gradient for the head and for nothing before it."""
    params = one.init().params
    head = {"kernel": jnp.zeros_like(params["lm_head"]["kernel"])}
    return state_from_params(one.program, {**params, "lm_head": head}, router_bias=None)


def test_the_balance_loss_alone_reaches_the_router_and_is_linear_in_its_weight():
    """The mean is over sequences, so four micro-batches weigh as one."""
    grads = []
    for one in (stepper("v3"), in_four_micro_batches()):
        state, (metrics,) = one.run(with_zero_head(one), one.batch(*rows()))
        assert metrics.applied and metrics.grad_norm < 1, "clipped"
        grads.append(moments_of(one, state))
    assert np.abs(grads[0][GATE]).max() > 1e-6
    np.testing.assert_allclose(grads[1][GATE], 4 * grads[0][GATE], rtol=1e-3, atol=1e-8)


def test_the_bias_moves_once_per_step_whatever_is_accumulated_recomputed_or_split():
    biases = []
    for one in (stepper("v3"), in_four_micro_batches(), stepper("v3", mesh="3x1")):
        state, _ = one.run(one.init(), one.batch(*rows()))
        biases.append(np.asarray(state.router_bias))
    np.testing.assert_array_equal(biases[1], biases[0])
    np.testing.assert_array_equal(biases[2], biases[0])
    np.testing.assert_allclose(np.abs(biases[0][biases[0] != 0]), GAMMA, rtol=1e-6)
    assert (biases[0] < 0).any() and (biases[0] > 0).any()


def test_the_bias_is_moved_by_gamma_alone_and_neither_decays_nor_has_moments():
    one = stepper("v3")
    start = np.linspace(-0.3, 0.4, 8, dtype=np.float32)[None]
    state = state_from_params(one.program, one.init().params, router_bias=jnp.asarray(start))
    state, _ = one.run(state, one.batch(*rows()))
    moved = np.abs(np.asarray(state.router_bias) - start)
    np.testing.assert_allclose(moved[moved > GAMMA / 2], GAMMA, rtol=1e-4)
    assert (moved[moved <= GAMMA / 2] < 1e-6).all()
    bias = "moe_layers.mlp.gate.e_score_correction_bias"
    assert bias not in moments_of(one, state)
    np.testing.assert_array_equal(params_of(one, state)[bias], np.asarray(state.router_bias))


def test_over_300_steps_the_bias_evens_out_a_skewed_router_and_stays_bounded():
    """The router stands still, so the bias alone does it. Scores lie between 0 and 1: a bias far
    outside would have lost its meaning.
    """
    program, model = stepper("v3").program, TINY["v3"]
    rng = np.random.default_rng(0)
    logits = jnp.float32(rng.normal(size=(512, 8)) + np.linspace(-1, 1, 8))

    def step(bias, _):
        ids = route(logits, bias[0], config=model).expert_ids
        counts = expert_counts(ids, num_experts=8)[None]
        return _balance(bias, RouterStats(jnp.zeros(1), counts), program=program)

    bias, loads = jax.jit(lambda b: jax.lax.scan(step, b, length=300))(jnp.zeros((1, 8)))
    assert loads[0] > 1.5 and loads[-50:].max() < 1.25
    assert np.ptp(bias) < 1 and abs(bias.mean()) < 0.25


def test_only_v3_has_a_bias():
    for family in ("llama", "v2", "v2-lite", "moe-16b", "v3"):
        run = dataclasses.replace(stepper("v3").program.run, model=TINY[family])
        program = make_program(run, make_mesh(run.mesh_shape))
        assert (program.bias_layout is not None) == (family == "v3")
        assert (program.abstract_state.router_bias is not None) == (family == "v3")


def test_load_is_the_largest_count_over_the_mean():
    """Of tokens that are all the same each has the same 3 of 8 experts."""
    one = stepper("v3")
    tokens, labels = rows()
    tokens[:] = 7
    _, (metrics,) = one.run(one.init(), one.batch(tokens, labels))
    assert float(metrics.load) == pytest.approx(8 / 3, rel=1e-6)


def test_dense_models_report_no_balance_and_no_load():
    one = stepper("llama")
    _, (metrics,) = one.run(one.init(), one.batch(*rows()))
    assert float(metrics.balance) == 0 and float(metrics.load) == 0
