"""The compiled programs of a run: one optimizer step, one evaluation, the next token's logits.

Each is a `jax.jit` around one `jax.shard_map`, manual over all mesh axes. Where its collectives
stand:

* ZeRO 3: a layer's weights are gathered inside the scanned layer (again in the backward pass),
  gradients come back scattered;
* ZeRO 1 and 2: all weights are gathered once a step; gradients are scattered once a step (1) or per
  micro-batch (2);
* ZeRO 0: weights lie whole, gradients are all-reduced once a step;
* tensor axis: `ops.collectives` in each sublayer, the embedding and the loss;
* scalars (loss, token count, gradient norm) and expert counts: one small sum each.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxseek.layers.moe import RouterStats
from jaxseek.model import Execution, Inputs, Params
from jaxseek.ops.collectives import vary, vary_like
from jaxseek.ops.cross_entropy import IGNORE_LABEL
from jaxseek.optim.adamw import global_norm
from jaxseek.train.state import Leaf, Program, TrainState, attach_bias


class StepBatch(NamedTuple):
    """The rows of one optimizer step, int32 [accumulation, batch, T] each, the batch split over the
    data axis.
    """

    tokens: Leaf
    labels: Leaf
    segment_ids: Leaf
    positions: Leaf


class StepMetrics(NamedTuple):
    """Scalars over the whole step: all devices, all micro-batches.

    Attributes:
        loss: mean cross-entropy in nats over the `tokens` that have a label.
        balance: mean balance loss per sequence, summed over layers, before alpha.
        grad_norm: before clipping.
        applied: whether the update was applied; it is skipped where loss or gradient are not
            finite, and where no token has a label: there is nothing but weight decay then.
        load: largest expert load over the mean load, largest of all layers; 1 is even, 0 without
            experts.
    """

    loss: Array
    balance: Array
    tokens: Array
    grad_norm: Array
    learning_rate: Array
    applied: Array
    load: Array


class EvalSums(NamedTuple):
    """Sum of token losses (float32) and number of tokens (int32), to be added over batches."""

    loss: Array
    tokens: Array


def make_train_step(
    program: Program,
) -> Callable[[TrainState, StepBatch], tuple[TrainState, StepMetrics]]:
    """The jitted optimizer step; the state it is given is donated."""
    state_specs = _partitions(program)
    batch_spec = program.batch_sharding.spec
    body = jax.shard_map(
        functools.partial(_train_step, program=program),
        mesh=program.mesh,
        in_specs=(state_specs, batch_spec),
        out_specs=(state_specs, PartitionSpec()),
    )
    shardings = program.state_shardings
    return jax.jit(
        body,
        in_shardings=(shardings, program.batch_sharding),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )


def make_eval_step(program: Program) -> Callable[[TrainState, StepBatch], EvalSums]:
    """Jitted sums over a batch with one micro-batch."""
    body = jax.shard_map(
        functools.partial(_eval_step, program=program),
        mesh=program.mesh,
        in_specs=(_partitions(program), program.batch_sharding.spec),
        out_specs=PartitionSpec(),
    )
    return jax.jit(body, in_shardings=(program.state_shardings, program.batch_sharding))


def make_logits(program: Program) -> Callable[[TrainState, Array, Array], Array]:
    """Jitted `(state, tokens [B, T], index) -> float32 [B, V]`: the logits after position `index`,
    equal on all devices.
    """
    body = jax.shard_map(
        functools.partial(_logits, program=program),
        mesh=program.mesh,
        in_specs=(_partitions(program), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    return jax.jit(body)


def _train_step(state: TrainState, batch: StepBatch, *, program: Program):
    tokens = _sum_over_data((batch.labels != IGNORE_LABEL).sum(dtype=jnp.int32), program)
    grads, sums = _gradients(state, batch, program=program, tokens=tokens)
    loss_sum, stats = sums
    loss = _sum_over_data(loss_sum, program) / jnp.maximum(tokens, 1)
    norm = global_norm(grads, program.layout)
    applied = (tokens > 0) & jnp.isfinite(norm) & jnp.isfinite(loss)
    rate = jnp.asarray(program.schedule(state.updates), jnp.float32)
    params, opt_state = _update(state, grads, norm=norm, rate=rate, program=program)
    bias, load = _balance(state.router_bias, stats, program=program)
    changed = (params, opt_state, bias)
    kept = (state.params, state.opt_state, state.router_bias)
    params, opt_state, bias = jax.tree.map(
        lambda new, old: jnp.where(applied, new, old), changed, kept
    )
    state = TrainState(
        step=state.step + 1,
        updates=state.updates + applied.astype(jnp.int32),
        params=params,
        router_bias=bias,
        opt_state=opt_state,
    )
    balance = jnp.zeros((), jnp.float32)
    if stats is not None:
        balance = _sum_over_data(stats.balance, program) / _sequences(batch, program)
    return state, StepMetrics(loss, balance, tokens, norm, rate, applied, load)


def _gradients(state: TrainState, batch: StepBatch, *, program: Program, tokens: Array):
    """Gradient of the step's loss, stored like the parameters, and (loss sum, router statistics) of
    this device.

    The loss is the sum of token losses over the tokens of the whole step, plus alpha times the mean
    balance loss per sequence.
    """
    alpha = _balance_alpha(program)
    sequences = _sequences(batch, program)
    gathers = program.zero == 3
    execution = Execution(
        parallel=program.parallel,
        gather=program.gather if gathers else None,
        remat=program.run.remat,
    )

    def loss(weights: Params, micro: StepBatch):
        transformer = nnx.merge(program.graphdef, attach_bias(weights, bias))
        inputs = Inputs(micro.tokens, micro.positions, micro.segment_ids)
        loss_sum, stats = transformer.loss_sum(inputs, micro.labels, execution=execution)
        value = loss_sum / jnp.maximum(tokens, 1).astype(jnp.float32)
        if stats is not None:
            stats = RouterStats(stats.balance.sum(), stats.counts)
            value = value + alpha / sequences * stats.balance
        return value, (loss_sum, stats)

    if gathers:
        weights, scatter, bias = state.params, lambda grads: grads, state.router_bias
    else:
        weights, pull = jax.vjp(program.gather_all, state.params)
        bias = _gathered_bias(state, program)

        def scatter(grads):
            return pull(jax.tree.map(lambda g, w: g.astype(w.dtype), grads, weights))[0]

    def micro_step(micro: StepBatch):
        grads, sums = jax.grad(loss, has_aux=True)(weights, micro)
        return (scatter(grads) if program.zero == 2 else grads), sums

    grads, sums = _accumulate(micro_step, batch)
    return (scatter(grads) if program.zero < 2 else grads), sums


def _accumulate(micro_step: Callable, batch: StepBatch):
    """Sum of `micro_step` over the micro-batches, gradients in float32."""
    first = jax.tree.map(lambda x: x[0], batch)
    if batch.tokens.shape[0] == 1:
        return micro_step(first)
    shapes = jax.eval_shape(micro_step, first)

    def zero(x):
        dtype = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        return vary(jnp.zeros(x.shape, dtype), x.manual_axis_type.varying)

    def body(total, micro):
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, micro_step(micro)), None

    return jax.lax.scan(body, jax.tree.map(zero, shapes), batch)[0]


def _update(state: TrainState, grads: Params, *, norm: Array, rate: Array, program: Program):
    """Clip by the global norm, then AdamW; everything elementwise on this device's slices."""
    clip = program.run.optim.clip_norm
    if clip:
        scale = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12))
        grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt_state = program.optimizer.update(grads, state.opt_state, state.params)
    return optax.apply_updates(state.params, jax.tree.map(lambda u: -rate * u, updates)), opt_state


def _balance(bias: Array | None, stats: RouterStats | None, *, program: Program):
    """The next router bias (V3: up by gamma where an expert got less than the mean, down where
    more) and the largest load.
    """
    if stats is None:
        return None, jnp.zeros((), jnp.float32)
    counts = _sum_over_data(stats.counts, program)
    if program.parallel.tensor_axis is not None:  # every tensor rank counted the same tokens
        counts = jax.lax.pmax(counts, program.parallel.tensor_axis)
    counts = counts.astype(jnp.float32)
    mean = counts.mean(axis=-1, keepdims=True)
    load = (counts / jnp.maximum(mean, 1)).max()
    if bias is None:
        return None, load
    return bias + program.run.router.bias_update_speed * jnp.sign(mean - counts), load


def _eval_step(state: TrainState, batch: StepBatch, *, program: Program) -> EvalSums:
    transformer, execution = _forward(state, program)
    tokens, labels, segments, positions = (x[0] for x in batch)
    loss, _ = transformer.loss_sum(Inputs(tokens, positions, segments), labels, execution=execution)
    count = (labels != IGNORE_LABEL).sum(dtype=jnp.int32)
    return EvalSums(_sum_over_data(loss, program), _sum_over_data(count, program))


def _logits(state: TrainState, tokens: Array, index: Array, *, program: Program) -> Array:
    transformer, execution = _forward(state, program)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = transformer.hidden(Inputs(tokens, positions, None), execution=execution)
    logits = transformer.logits(hidden[:, index], execution=execution)
    parallel = program.parallel
    if parallel.tensor_axis is not None:
        width = logits.shape[-1]
        whole = jnp.zeros((logits.shape[0], width * parallel.tensor_size()), logits.dtype)
        whole = vary_like(whole, logits)
        start = parallel.tensor_index() * width
        whole = jax.lax.dynamic_update_slice_in_dim(whole, logits, start, axis=1)
        logits = jax.lax.psum(whole, parallel.tensor_axis)
    if parallel.data_axis is not None:  # the same on all of them
        logits = jax.lax.pmax(logits, parallel.data_axis)
    return logits[:, : program.run.model.vocab_size]


def _forward(state: TrainState, program: Program) -> tuple[Any, Execution]:
    """The model and how to run it without gradients."""
    if program.zero == 3:
        weights, bias, gather = state.params, state.router_bias, program.gather
    else:
        weights, bias, gather = (
            program.gather_all(state.params),
            _gathered_bias(state, program),
            None,
        )
    execution = Execution(parallel=program.parallel, gather=gather)
    return nnx.merge(program.graphdef, attach_bias(weights, bias)), execution


def _balance_alpha(program: Program) -> float:
    """Weight of the balance loss: the run's, else the model's own (V2), or 1e-4 where a router bias
    does the main work (V3).
    """
    config, alpha = program.run.model, program.run.router.balance_alpha
    if alpha is not None:
        return alpha
    return 1e-4 if config.uses_router_bias else config.aux_loss_alpha


def _gathered_bias(state: TrainState, program: Program) -> Array | None:
    """The router bias as a layer sees it: the same everywhere, but typed like the other weights."""
    if state.router_bias is None or program.bias_layout is None:
        return None
    return jax.lax.stop_gradient(vary_like(state.router_bias, *jax.tree.leaves(state.params)))


def _partitions(program: Program) -> Any:
    return jax.tree.map(lambda leaf: leaf.partition, program.state_layout)


def _sum_over_data(x: Array, program: Program) -> Array:
    axis = program.parallel.data_axis
    return x if axis is None else jax.lax.psum(x, axis)


def _sequences(batch: StepBatch, program: Program) -> int:
    """Sequences of the whole step."""
    return batch.tokens.shape[0] * batch.tokens.shape[1] * program.mesh.shape["data"]
