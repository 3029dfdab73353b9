"""The optimizer step: what it computes, on which clock, and that it leaves nothing behind."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from jaxseek.ops.cross_entropy import IGNORE_LABEL
from jaxseek.run_config import OptimConfig
from tests.tiny import TINY
from tests.train.programs import OPTIM, Stepper, moments_of, params_of, rows, stepper

CONSTANT = dataclasses.replace(OPTIM, schedule="constant")


def clipped() -> Stepper:
    """With a clipping norm that every gradient exceeds."""
    return stepper("qwen2", optim=dataclasses.replace(CONSTANT, clip_norm=0.05, weight_decay=0.2))


def test_three_steps_are_adamw_on_clipped_gradients_in_float64():
    """The gradients are read back from the first moments; all else is computed anew."""
    one = clipped()
    state = one.init()
    specs = {
        path: spec.role for path, spec in jax.tree_util.tree_flatten_with_path(one.program.specs)[0]
    }
    decays = [role in ("matrix", "embedding") for role in specs.values()]
    names = list(params_of(one, state))
    first = {name: 0.0 for name in names}
    second = {name: 0.0 for name in names}
    expected = {name: value.astype(np.float64) for name, value in params_of(one, state).items()}
    for t in range(1, 4):
        state, (metrics,) = one.run(state, one.batch(*rows(seed=t)))
        moments = moments_of(one, state)
        norm = 0.0
        for name, decay in zip(names, decays, strict=True):
            grad = (moments[name].astype(np.float64) - 0.9 * first[name]) / 0.1
            first[name] = moments[name].astype(np.float64)
            second[name] = 0.95 * second[name] + 0.05 * grad**2
            update = (first[name] / (1 - 0.9**t)) / (np.sqrt(second[name] / (1 - 0.95**t)) + 1e-8)
            expected[name] = expected[name] - 1e-2 * (update + 0.2 * decay * expected[name])
            norm += (grad**2).sum()
        assert float(metrics.grad_norm) > 0.05
        assert math.sqrt(norm) == pytest.approx(0.05, rel=1e-4)
    for name, value in params_of(one, state).items():
        # Where a gradient is near zero its sign, read back from the moment, is rounding.
        close = np.isclose(value, expected[name], rtol=0, atol=1e-5)
        assert close.mean() > 0.99, name
        np.testing.assert_allclose(value, expected[name], atol=1e-3, err_msg=name)


def test_metrics_are_those_of_all_devices():
    one, three = stepper("v3"), stepper("v3", mesh="3x1")
    (a,), (b,) = (s.run(s.init(), s.batch(*rows()))[1] for s in (one, three))
    labels = rows()[1]
    assert int(a.tokens) == int(b.tokens) == (labels != IGNORE_LABEL).sum()
    for name in ("loss", "balance", "grad_norm", "load"):
        assert float(getattr(b, name)) == pytest.approx(float(getattr(a, name)), rel=1e-5), name
    assert bool(a.applied) and bool(b.applied)


def test_loss_of_a_head_of_zeros_is_that_of_guessing():
    """Per token, whatever number of them has a label."""
    one = stepper("llama")
    tokens, labels = rows()
    few = np.where(np.arange(labels.shape[1]) < 14, IGNORE_LABEL, labels)
    state = one.init()
    head = state.params["lm_head"]
    head["kernel"] = 0 * head["kernel"]
    _, (metrics,) = one.run(state, one.batch(tokens, few))
    assert int(metrics.tokens) == (few != IGNORE_LABEL).sum()
    assert float(metrics.loss) == pytest.approx(math.log(131), rel=1e-6)


def in_two_micro_batches() -> Stepper:
    """With a warm-up of four steps."""
    return stepper("llama", optim=dataclasses.replace(CONSTANT, warmup_steps=4), accumulation=2)


def test_the_learning_rate_counts_optimizer_steps_and_not_micro_batches():
    one = in_two_micro_batches()
    batch = one.batch(*rows())
    _, metrics = one.run(one.init(), *[batch] * 6)
    rates = [float(m.learning_rate) for m in metrics]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


def test_a_batch_without_labels_has_zero_loss_and_is_skipped_with_its_weight_decay():
    one = clipped()
    tokens, labels = rows()
    state = one.init()
    before = params_of(one, state)
    state, (metrics,) = one.run(state, one.batch(tokens, np.full_like(labels, IGNORE_LABEL)))
    assert (int(metrics.tokens), float(metrics.loss), float(metrics.grad_norm)) == (0, 0.0, 0.0)
    assert not metrics.applied and (int(state.step), int(state.updates)) == (1, 0)
    assert not any(m.any() for m in moments_of(one, state).values())
    for path, value in params_of(one, state).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)


def test_micro_batches_weigh_by_their_tokens_not_by_their_number():
    """One row with 16 labels among rows with one: a mean of means would differ."""
    tokens, labels = rows()
    ragged = np.where(np.arange(labels.shape[1]) < 15, IGNORE_LABEL, tokens)
    ragged[0] = tokens[0]
    results = []
    for one in (stepper("llama"), in_two_micro_batches()):
        state, (metrics,) = one.run(one.init(), one.batch(tokens, ragged))
        results.append((float(metrics.loss), float(metrics.grad_norm), moments_of(one, state)))
    (loss, norm, moments), (other_loss, other_norm, other_moments) = results
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert other_norm == pytest.approx(norm, rel=1e-5)
    for path, moment in moments.items():
        assert np.linalg.norm(other_moments[path] - moment) <= 1e-5 * np.linalg.norm(moment), path


def test_bfloat16_compute_moves_float32_masters_as_float32_does():
    """200 updates at 1e-4: kept in bfloat16, most weights would not move at all."""
    optim = OptimConfig(learning_rate=1e-4, warmup_steps=0, schedule="constant", weight_decay=0.0)
    moved = {}
    for dtype in ("float32", "bfloat16"):
        one = stepper("llama", optim=optim, dtype=dtype, batch=2)
        state = one.init()
        before = params_of(one, state)
        batch = one.batch(*rows(batch=2))
        state, metrics = one.run(state, *[batch] * 200)
        after = params_of(one, state)
        assert after["lm_head.kernel"].dtype == np.float32
        moved[dtype] = {path: after[path] - before[path] for path in before}
        assert float(metrics[-1].loss) < 0.9 * float(metrics[0].loss)
    for path, exact in moved["float32"].items():
        distance = np.linalg.norm(moved["bfloat16"][path] - exact)
        assert distance < 0.25 * np.linalg.norm(exact), path
        same = np.linalg.norm(moved["bfloat16"][path]) / np.linalg.norm(exact)
        assert same == pytest.approx(1, abs=0.1), path


def test_a_later_step_compiles_nothing_and_keeps_every_sharding():
    three = stepper("v3", mesh="3x1")
    state = three.init()
    shardings = jax.tree.map(lambda x: x.sharding, state)
    state, _ = three.run(state, *[three.batch(*rows(seed=s)) for s in range(3)])
    assert three.step._cache_size() == 1
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, shardings)
    assert all(jax.tree.leaves(same))


def test_the_state_is_donated():
    """Its bytes are aliased in the program, and the old arrays are gone after a step."""
    three = stepper("v3", mesh="3x1")
    batch = three.batch(*rows())
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch
    )
    compiled = three.step.lower(three.program.abstract_state, abstract).compile()
    state = three.init()
    per_device = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= per_device
    three.step(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_a_tied_head_is_trained_alike_on_any_mesh():
    tied = dataclasses.replace(TINY["coder"], tie_word_embeddings=True)
    results = []
    for mesh, zero in (("1x1", 0), ("2x3", 3)):
        one = stepper(tied, mesh=mesh, zero=zero)
        state, metrics = one.run(one.init(), *[one.batch(*rows())] * 2)
        results.append(([float(m.loss) for m in metrics], moments_of(one, state)))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-5)
    for path, moment in results[0][1].items():
        distance = np.linalg.norm(results[1][1][path] - moment)
        assert distance <= 1e-4 * np.linalg.norm(moment), path


def test_what_no_token_meets_has_a_zero_gradient_and_only_decays():
    """All tokens are the same, so most experts and the rows of most words are idle."""
    one = stepper("v3")
    state = one.init()
    before = params_of(one, state)
    tokens, labels = rows()
    tokens[:] = 7
    state, _ = one.run(state, one.batch(tokens, labels))
    after, moments = params_of(one, state), moments_of(one, state)
    assert all(np.isfinite(p).all() for p in after.values())
    for path, dim, used in (("embed_tokens.embedding", 0, 1),
                            ("moe_layers.mlp.experts.up_proj", 1, 3)):  # fmt: skip
        idle = ~np.moveaxis(moments[path], dim, 0).reshape(moments[path].shape[dim], -1).any(axis=1)
        assert (~idle).sum() == used
        was, now = (np.compress(idle, x[path], axis=dim) for x in (before, after))
        np.testing.assert_allclose(now, was * (1 - 1e-2 * 0.1), rtol=1e-6)


def test_a_step_that_is_not_finite_changes_nothing_and_the_next_good_one_goes_on():
    """One value that one of three devices holds is enough; all of them skip. The rate of the cosine
    schedule goes by the updates, so that of the skipped step comes again.
    """
    three = stepper("v3", mesh="3x1")
    batches = [three.batch(*rows(seed=seed)) for seed in range(3)]
    straight, _ = three.run(three.init(), *batches)
    state, _ = three.run(three.init(), *batches[:2])
    good = jax.device_get(state)
    state.params["norm"]["scale"] = state.params["norm"]["scale"].at[0].set(np.inf)
    state, (metrics,) = three.run(state, batches[2])
    assert not metrics.applied and not np.isfinite(float(metrics.grad_norm))
    skipped = jax.device_get(state)
    assert (int(skipped.step), int(skipped.updates)) == (3, 2)
    np.testing.assert_array_equal(skipped.router_bias, good.router_bias)
    for was, now in zip(
        jax.tree.leaves(good.opt_state), jax.tree.leaves(skipped.opt_state), strict=True
    ):
        np.testing.assert_array_equal(now, was)
    skipped.params["norm"]["scale"] = good.params["norm"]["scale"]
    jax.tree.map(np.testing.assert_array_equal, skipped.params, good.params)
    state, (metrics,) = three.run(
        jax.device_put(skipped, three.program.state_shardings), batches[2]
    )
    assert metrics.applied and int(state.step) == 4
    jax.tree.map(np.testing.assert_array_equal, state.params, straight.params)
    np.testing.assert_array_equal(state.router_bias, straight.router_bias)
