"""The whole model: embedding, a stack of dense layers, a stack of MoE layers, norm, head.

Layers of a kind are stacked in one array per parameter and scanned, so compile time does not grow
with depth. A `Transformer` is built abstractly (`Transformer(config)` holds shapes only); arrays
come in with `nnx.merge(graphdef, params)`.

Letters: B batch, T length, D model, V vocabulary, L layers, E experts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxseek.config import ModelConfig
from jaxseek.layers.block import Block
from jaxseek.layers.linear import RMSNorm, declare
from jaxseek.layers.mlp import MLP
from jaxseek.layers.moe import MoE, RouterStats
from jaxseek.layout import ParamSpec
from jaxseek.ops.collectives import Parallel, enter_tensor, reduce_tensor
from jaxseek.ops.cross_entropy import cross_entropy_sum
from jaxseek.ops.rope import rope_tables

Remat = Literal["none", "selective", "full"]
Params = dict[str, Any]
DENSE_STACK, MOE_STACK = "dense_layers", "moe_layers"
# Not a parameter of the optimizer: a state keeps it beside the others, as `router_bias`.
ROUTER_BIAS_PATH = (MOE_STACK, "mlp", "gate", "e_score_correction_bias")
# What "selective" keeps of a layer: all that follows its costly products.
_SELECTED = ("attn_out", "attn_lse", "attn_proj")
# What even "full" keeps under tensor parallelism: to compute it anew is an all-reduce.
_REDUCED = ("attn_proj",)


class Inputs(NamedTuple):
    """Token ids with what attention and rope need to know about them; all int32 [B, T]."""

    tokens: Array
    positions: Array
    segment_ids: Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How a forward pass runs; never what it computes.

    Attributes:
        parallel: the mesh axes, as seen from inside the shard_map.
        gather: `gather(part, params)` makes the parameters of `embed_tokens`, one layer of a stack,
            `norm` or `lm_head` whole (ZeRO 3); `None` where they are whole already.
        remat: what the backward pass recomputes of a layer.
    """

    parallel: Parallel = Parallel()
    gather: Callable[[str, Params], Params] | None = None
    remat: Remat = "none"

    def weights(self, part: str, params: Params) -> Params:
        """The parameters a layer computes with."""
        return params if self.gather is None else self.gather(part, params)

    def checkpoint(self, body: Callable) -> Callable:
        """`body` (a scanned layer) under the remat policy."""
        policies = jax.checkpoint_policies
        if self.remat == "none":
            # What is cheap is computed anew all the same: the float32 copies of norms and
            # activations, and gathered weights, which for all layers would be the whole model.
            policy = policies.save_from_both_policies(
                policies.dots_saveable, policies.save_only_these_names(*_SELECTED)
            )
        elif self.remat == "selective":
            policy = policies.save_only_these_names(*_SELECTED)
        else:
            kept = _REDUCED if self.parallel.tensor_axis is not None else ()
            policy = policies.save_only_these_names(*kept)
        return jax.checkpoint(body, policy=policy, prevent_cse=False)


class Embedding(nnx.Module):
    """Token embedding, the vocabulary split over the tensor axis."""

    def __init__(self, config: ModelConfig):
        dims = ("vocab", "embed")
        self.embedding = declare((config.vocab_size, config.hidden_size), dims, role="embedding")

    def __call__(self, tokens: Array, *, parallel: Parallel) -> Array:
        """int32 [B, T] to [B, T, D]; one all-reduce over the tensor axis."""
        table = self.embedding[...]
        if parallel.tensor_axis is None:
            return table[tokens]
        local = tokens - parallel.tensor_index() * table.shape[0]
        here = (local >= 0) & (local < table.shape[0])
        return reduce_tensor(jnp.where(here[..., None], table[local * here], 0), parallel)


class Head(nnx.Module):
    """The output projection, the vocabulary split over the tensor axis."""

    def __init__(self, config: ModelConfig):
        self.kernel = declare(
            (config.hidden_size, config.vocab_size), ("embed", "vocab"), role="matrix"
        )


class Transformer(nnx.Module):
    """Any model of the family (HF `LlamaForCausalLM`, `Qwen2-`, `Qwen3-`, `DeepseekV2-`,
    `DeepseekV3ForCausalLM`, MoE-16B).
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self.embed_tokens = Embedding(config)
        dense = MLP(config.hidden_size, config.intermediate_size)
        self.dense_layers = Block(config, mlp=dense) if config.num_dense_layers else None
        self.moe_layers = Block(config, mlp=MoE(config)) if config.num_moe_layers else None
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Head(config)

    def __call__(
        self, tokens: Array, *, positions: Array | None = None, segment_ids: Array | None = None
    ) -> Array:
        """Logits float32 [B, T, V] of int32 tokens [B, T], on whole arrays; positions default to 0,
        1, 2, ...
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        inputs = Inputs(tokens, positions, segment_ids)
        hidden, _ = self.hidden(inputs, execution=Execution())
        return self.logits(hidden, execution=Execution())

    def hidden(self, inputs: Inputs, *, execution: Execution) -> tuple[Array, RouterStats | None]:
        """Hidden states [B, T, D] after the final norm, and the MoE layers' statistics stacked [L,
        ...].

        Under tensor parallelism the result is ready to meet split weights (`enter_tensor` is done).
        """
        parallel = execution.parallel
        embed = _with(self.embed_tokens, "embed_tokens", execution)
        with jax.named_scope("embed_tokens"):
            x = embed(inputs.tokens, parallel=parallel)
        rope = rope_tables(inputs.positions, self.config)
        stats = None
        for name in (DENSE_STACK, MOE_STACK):
            if (block := getattr(self, name)) is not None:
                x, stats = _scan(block, name, x, rope=rope, inputs=inputs, execution=execution)
        norm = _with(self.norm, "norm", execution)
        with jax.named_scope("norm"):
            return norm(enter_tensor(x, parallel)), stats

    def logits(self, hidden: Array, *, execution: Execution) -> Array:
        """float32 [..., V] of hidden states [..., D]; this device's slice of V, padding included,
        under tensor parallelism.
        """
        kernel = self._head_kernel(execution).astype(hidden.dtype)
        return jnp.einsum("...d,dv->...v", hidden, kernel, preferred_element_type=jnp.float32)

    def loss_sum(
        self, inputs: Inputs, labels: Array, *, execution: Execution
    ) -> tuple[Array, RouterStats | None]:
        """Sum of this device's token losses (float32 scalar; labels int32 [B, T]) and the MoE
        layers' statistics [L, ...].
        """
        hidden, stats = self.hidden(inputs, execution=execution)
        kernel = self._head_kernel(execution)
        with jax.named_scope("cross_entropy"):
            loss = cross_entropy_sum(
                hidden.reshape(-1, hidden.shape[-1]),
                kernel,
                labels.reshape(-1),
                vocab_size=self.config.vocab_size,
                parallel=execution.parallel,
            )
        return loss, stats

    def _head_kernel(self, execution: Execution) -> Array:
        if self.lm_head is None:
            return _with(self.embed_tokens, "embed_tokens", execution).embedding[...].T
        return _with(self.lm_head, "lm_head", execution).kernel[...]


def split(config: ModelConfig) -> tuple[nnx.GraphDef, Params]:
    """The abstract model as a graph definition and a nested dict of `ParamSpec` in the shapes of
    the stacked parameters.
    """
    graphdef, state = nnx.split(Transformer(config))
    layers: dict[Any, int] = {
        DENSE_STACK: config.num_dense_layers,
        MOE_STACK: config.num_moe_layers,
    }
    specs = {}
    for path, variable in nnx.to_flat_state(state):
        spec: ParamSpec = variable.get_metadata()["spec"]
        node: dict[Any, Any] = specs
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = spec.stacked(layers[path[0]]) if path[0] in layers else spec
    return graphdef, specs


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters, router biases included (as the checkpoint files count), without MTP
    layers.
    """
    return sum(spec.size for spec in jax.tree.leaves(split(config)[1]))


def _with(module: Any, part: str, execution: Execution) -> Any:
    """`module` with its parameters made whole."""
    if execution.gather is None:
        return module
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, execution.weights(part, nnx.to_pure_dict(state)))


def _scan(
    block: Block,
    name: str,
    x: Array,
    *,
    rope: tuple[Array, Array],
    inputs: Inputs,
    execution: Execution,
) -> tuple[Array, RouterStats | None]:
    """Run a stack of layers; the body makes one layer's weights whole, and the backward pass does
    so again.
    """
    graphdef, state = nnx.split(block)

    def body(x, params):
        layer = nnx.merge(graphdef, execution.weights(name, params))
        with jax.named_scope(name):
            return layer(x, rope=rope, segment_ids=inputs.segment_ids, parallel=execution.parallel)

    return jax.lax.scan(execution.checkpoint(body), x, nnx.to_pure_dict(state))
