"""Laws of the whole model: causality, isolated documents, remat, size of the program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxseek import layout as layouts
from jaxseek import model
from jaxseek.layout import ParamSpec
from jaxseek.model import Execution, Inputs
from tests.tiny import TINY

LENGTH = 9
# MLA without experts: rows of a grouped product meet other rows of their block, so a MoE layer is
# isolated to rounding only.
DENSE_MLA = dataclasses.replace(TINY["v2"], n_routed_experts=None, n_shared_experts=0)


@functools.cache
def with_weights(config):
    """Graph definition and random weights, norms and biases included."""
    graphdef, specs = model.split(config)
    rng = np.random.default_rng(0)

    def make(spec: ParamSpec):
        value = 0.15 * rng.normal(size=spec.shape) + (1 if spec.role == "norm" else 0)
        return jnp.float32(value)

    return graphdef, jax.tree.map(make, specs)


def tokens_of(config, *, batch: int = 1, length: int = LENGTH, seed: int = 0) -> jax.Array:
    """Rows of distinct tokens."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(config.vocab_size)[:length] for _ in range(batch)]
    return jnp.asarray(np.array(rows), jnp.int32)


def inputs_of(tokens, segments=None) -> Inputs:
    """Positions from 0 in every segment."""
    segments = np.ones(tokens.shape[1], np.int32) if segments is None else np.asarray(segments)
    starts = np.array([np.argmax(segments == s) for s in segments])
    positions = np.broadcast_to(np.arange(len(segments)) - starts, tokens.shape)
    ids = np.broadcast_to(segments, tokens.shape)
    return Inputs(tokens, jnp.asarray(positions, jnp.int32), jnp.asarray(ids, jnp.int32))


@functools.cache
def compiled_logits(config):
    graphdef, _ = with_weights(config)

    @jax.jit
    def run(params, inputs):
        hidden, _ = nnx.merge(graphdef, params).hidden(inputs, execution=Execution())
        return nnx.merge(graphdef, params).logits(hidden, execution=Execution())

    return run


def logits_of(config, inputs: Inputs) -> np.ndarray:
    return np.asarray(compiled_logits(config)(with_weights(config)[1], inputs))


@pytest.mark.parametrize("family", ["qwen3", "v3"])
def test_a_position_depends_on_itself_and_what_comes_before_and_on_nothing_else(family):
    """By gradients with respect to the embeddings of distinct tokens."""
    config = TINY[family]
    graphdef, params = with_weights(config)
    tokens = tokens_of(config)
    weights = jnp.float32(np.random.default_rng(1).normal(size=config.vocab_size))

    @jax.jit
    def jacobian(table):
        def outputs(table):
            merged = nnx.merge(graphdef, {**params, "embed_tokens": {"embedding": table}})
            return (merged(tokens)[0] * weights).sum(axis=-1)

        return jax.jacrev(outputs)(table)[:, tokens[0]]

    size = np.abs(jacobian(params["embed_tokens"]["embedding"])).max(axis=-1)
    assert (size[np.triu_indices(LENGTH, 1)] == 0).all()
    assert (size[np.tril_indices(LENGTH)] > 0).all()


@pytest.mark.parametrize("config", [TINY["coder"], DENSE_MLA], ids=["gqa", "mla"])
def test_a_document_is_exactly_untouched_by_its_neighbours_in_the_row(config):
    first, second = slice(0, 5), slice(5, LENGTH)
    segments = [1] * 5 + [2] * 4
    tokens = tokens_of(config)
    other = tokens.at[:, first].set(tokens_of(config, seed=1)[:, first])
    before, after = (logits_of(config, inputs_of(x, segments)) for x in (tokens, other))
    np.testing.assert_array_equal(before[:, second], after[:, second])
    assert (before[:, first] != after[:, first]).any()


@pytest.mark.parametrize("family", ["coder", "v2-lite", "v3"])
def test_a_document_in_a_row_is_what_it_is_alone(family):
    config = TINY[family]
    tokens = tokens_of(config)
    packed = logits_of(config, inputs_of(tokens, [1] * 5 + [2] * 4))
    alone = logits_of(config, inputs_of(tokens[:, 5:]))
    np.testing.assert_allclose(packed[:, 5:], alone, rtol=1e-4, atol=1e-5)
    running = logits_of(config, inputs_of(tokens))
    assert np.abs(running[:, 5:] - alone).max() > 1e-2


@pytest.mark.parametrize("family", ["coder", "v3"])
def test_rows_of_a_batch_do_not_meet(family):
    config = TINY[family]
    tokens = tokens_of(config, batch=4)
    order = np.array([2, 0, 3, 1])
    straight, permuted = (logits_of(config, inputs_of(x)) for x in (tokens, tokens[order]))
    np.testing.assert_allclose(permuted, straight[order], rtol=1e-4, atol=1e-5)


def loss_and_gradients(config, remat):
    graphdef, params = with_weights(config)
    tokens = tokens_of(config, batch=2)

    @jax.jit
    def run(params):
        def loss(params):
            merged = nnx.merge(graphdef, params)
            total, stats = merged.loss_sum(
                inputs_of(tokens), tokens, execution=Execution(remat=remat)
            )
            return total + stats.balance.sum(), stats

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, stats), grads = run(params)
    return loss, stats, layouts.flatten_paths(grads)


def test_remat_changes_neither_loss_nor_gradients_nor_counts():
    """V3's two stacks hold every kind of sublayer."""
    loss, stats, grads = loss_and_gradients(TINY["v3"], "none")
    for remat in ("selective", "full"):
        other_loss, other_stats, other_grads = loss_and_gradients(TINY["v3"], remat)
        assert float(other_loss) == pytest.approx(float(loss), rel=1e-6)
        np.testing.assert_array_equal(other_stats.counts, stats.counts)
        for path, grad in grads.items():
            error = np.abs(other_grads[path] - grad).max()
            assert error <= 1e-6 * np.abs(grad).max() + 1e-9, f"{path}, {remat}"


@functools.cache
def lowered_gradient(config, remat: model.Remat) -> jax.stages.Lowered:
    graphdef, specs = model.split(config)
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), specs)
    rows = jax.ShapeDtypeStruct((2, 64), jnp.int32)

    def loss(params, inputs, labels):
        execution = Execution(remat=remat)
        return nnx.merge(graphdef, params).loss_sum(inputs, labels, execution=execution)[0]

    return jax.jit(jax.grad(loss)).lower(params, Inputs(rows, rows, rows), rows)


@pytest.mark.parametrize("family", ["qwen3", "v3"])
def test_the_program_does_not_grow_with_depth(family):
    lines = [
        len(lowered_gradient(
            dataclasses.replace(TINY[family], num_hidden_layers=layers), "selective"
        ).as_text().splitlines())
        for layers in (8, 32)
    ]  # fmt: skip
    assert lines[1] <= 1.02 * lines[0]


def test_remat_saves_memory_in_the_order_of_its_names():
    deep = dataclasses.replace(TINY["coder"], num_hidden_layers=16)
    memory = [
        lowered_gradient(deep, remat).compile().memory_analysis().temp_size_in_bytes
        for remat in ("full", "selective", "none")
    ]
    assert memory[0] < 0.8 * memory[1] and memory[1] < 0.8 * memory[2]


def leaves_of(config) -> dict[str, ParamSpec]:
    return layouts.flatten_paths(model.split(config)[1])


def test_stacks_hold_the_layers_of_their_kind_and_an_empty_one_is_not_there():
    deep = dataclasses.replace(TINY["v3"], num_hidden_layers=5, first_k_dense_replace=2)
    stacked = {path: spec for path, spec in leaves_of(deep).items() if "layers." in path}
    for path, spec in stacked.items():
        assert spec.dims[0] == "layers"
        assert spec.shape[0] == (2 if path.startswith("dense_layers") else 3), path
    assert not any(path.startswith("moe_layers") for path in leaves_of(TINY["qwen3"]))
    all_experts = dataclasses.replace(TINY["v3"], first_k_dense_replace=0)
    assert not any(path.startswith("dense_layers") for path in leaves_of(all_experts))


def test_a_model_of_expert_layers_only_runs():
    config = dataclasses.replace(TINY["v3"], first_k_dense_replace=0)
    logits = logits_of(config, inputs_of(tokens_of(config)))
    assert logits.shape == (1, LENGTH, config.vocab_size) and np.isfinite(logits).all()


def test_without_shared_experts_there_are_no_leaves_of_them():
    config = dataclasses.replace(TINY["v2-lite"], n_shared_experts=0)
    assert not any("shared_experts" in path for path in leaves_of(config))
    assert np.isfinite(logits_of(config, inputs_of(tokens_of(config)))).all()


def test_a_tied_head_is_the_embedding_transposed():
    untied = TINY["coder"]
    tied = dataclasses.replace(untied, tie_word_embeddings=True)
    assert set(leaves_of(untied)) - set(leaves_of(tied)) == {"lm_head.kernel"}
    graphdef, params = with_weights(tied)
    tokens = tokens_of(tied)
    table = params["embed_tokens"]["embedding"]
    copied = {**params, "lm_head": {"kernel": table.T}}
    expected = nnx.merge(with_weights(untied)[0], copied)(tokens)
    np.testing.assert_allclose(nnx.merge(graphdef, params)(tokens), expected, rtol=1e-5, atol=1e-5)
