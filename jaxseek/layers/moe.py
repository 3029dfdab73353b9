"""DeepSeekMoE: routed experts of which each token takes a few, and a shared one it always takes.

Letters: B batch, T length, M = B T tokens, D model, F ffn of an expert, E experts, A active experts
per token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxseek.config import ModelConfig
from jaxseek.layers.linear import declare
from jaxseek.layers.mlp import MLP
from jaxseek.ops.collectives import Parallel
from jaxseek.ops.dispatch import combine, dispatch, dispatch_weights, plan_dispatch
from jaxseek.ops.grouped_matmul import expert_mlp
from jaxseek.ops.router import balance_loss, expert_counts, route


class RouterStats(NamedTuple):
    """What a MoE layer reports beside its output; the trainer balances the load with it.

    Attributes:
        balance: float32 scalar, sum over this device's sequences of the balance loss; equal on all
            tensor ranks.
        counts: int32 [E], how many of this device's tokens chose each expert.
    """

    balance: Array
    counts: Array


class Router(nnx.Module):
    """The gate: a float32 product [D, E] and, in V3, the balance bias that only chooses."""

    def __init__(self, config: ModelConfig):
        assert config.n_routed_experts
        experts = config.n_routed_experts
        self.kernel = declare(
            (config.hidden_size, experts), ("embed", "router_experts"), role="router"
        )
        self.e_score_correction_bias = (
            declare((experts,), ("router_experts",), role="router_bias")
            if config.uses_router_bias
            else None
        )

    def __call__(self, x: Array) -> tuple[Array, Array | None]:
        """x [M, D] to float32 logits [M, E] and the bias [E] or None."""
        kernel = self.kernel[...].astype(jnp.float32)
        logits = jnp.einsum(
            "md,de->me", x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST
        )
        bias = self.e_score_correction_bias
        return logits, None if bias is None else jax.lax.stop_gradient(bias[...])


class Experts(nnx.Module):
    """The weights of all routed experts, [E, D, F] twice and [E, F, D]."""

    def __init__(self, config: ModelConfig):
        assert config.n_routed_experts and config.moe_intermediate_size
        experts, model, ffn = (
            config.n_routed_experts,
            config.hidden_size,
            config.moe_intermediate_size,
        )
        up, down = ("experts", "embed", "expert_mlp"), ("experts", "expert_mlp", "embed")
        self.gate_proj = declare((experts, model, ffn), up, role="matrix")
        self.up_proj = declare((experts, model, ffn), up, role="matrix")
        self.down_proj = declare((experts, ffn, model), down, role="matrix")

    def __call__(self, rows: Array, weights: Array, group_sizes: Array) -> Array:
        """Rows [M A, D] sorted by expert, of which the first sum(group_sizes) are real, and their
        weights [M A] to [M A, D].
        """
        gate, up, down = (
            w[...].astype(rows.dtype) for w in (self.gate_proj, self.up_proj, self.down_proj)
        )
        return expert_mlp(rows, gate, up, down, group_sizes, row_weights=weights)


class MoE(nnx.Module):
    """HF `DeepseekV3MoE`, `DeepseekV2Moe`. No token is dropped, whatever the routing."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.gate = Router(config)
        self.experts = Experts(config)
        shared = config.n_shared_experts * (config.moe_intermediate_size or 0)
        self.shared_experts = MLP(config.hidden_size, shared) if shared else None

    def __call__(self, x: Array, *, parallel: Parallel) -> tuple[Array, RouterStats]:
        """x [B, T, D] to [B, T, D] and the router's statistics.

        Experts are split over the tensor axis: every tensor rank routes all tokens and computes
        those that chose its experts, so the output is a partial sum there.
        """
        rows = x.reshape(-1, x.shape[-1])
        logits, bias = self.gate(rows)
        routing = route(logits, bias, config=self.config)
        local = self.experts.gate_proj[...].shape[0]
        plan = plan_dispatch(routing.expert_ids, first=parallel.tensor_index() * local, count=local)
        weights = dispatch_weights(routing.weights, plan)
        outputs = self.experts(dispatch(rows, plan), weights, plan.group_sizes)
        y = combine(outputs, plan).reshape(x.shape)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x)
        balance = balance_loss(routing, batch=x.shape[0], config=self.config)
        if (
            parallel.tensor_axis is not None
        ):  # each rank computed the same: its share of the gradient is 1/T
            balance = jax.lax.pmean(balance, parallel.tensor_axis)
        counts = expert_counts(routing.expert_ids, num_experts=routing.scores.shape[-1])
        return y, RouterStats(balance, counts)
