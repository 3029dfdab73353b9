"""Tokens to the rows of their experts and back, by permutations whose gradients are permutations
too: `dispatch` and `combine` are each other's transpose, and nothing scatters.

Letters: M tokens, D model, A active experts per token, E experts of this device.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class DispatchPlan(NamedTuple):
    """Where each of the M A (token, choice) pairs goes.

    Attributes:
        order: int32 [M A], the pair (token * A + choice) that stands in each row; rows are sorted
            by expert, other devices' pairs come last.
        inverse: int32 [M, A], the row of each pair.
        group_sizes: int32 [E], rows of each local expert.
    """

    order: Array
    inverse: Array
    group_sizes: Array

    @property
    def token(self) -> Array:
        """int32 [M A], the token of each row."""
        return self.order // self.inverse.shape[1]


def plan_dispatch(expert_ids: Array, *, first: Array | int, count: int) -> DispatchPlan:
    """Sort the choices expert_ids [M, A] by expert, for the `count` experts from number `first` on
    that this device has.
    """
    local = expert_ids.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < count), local, count)
    order = jnp.argsort(local, stable=True).astype(jnp.int32)
    # A second sort would give the same; it takes longer, and XLA compiles a sort to many kernels.
    pairs = jnp.arange(order.size, dtype=jnp.int32)
    inverse = (
        jnp.zeros_like(order).at[order].set(pairs, unique_indices=True, mode="promise_in_bounds")
    )
    inverse = inverse.reshape(expert_ids.shape)
    group_sizes = (local[:, None] == jnp.arange(count)).sum(axis=0, dtype=jnp.int32)
    return DispatchPlan(order, inverse, group_sizes)


@jax.custom_vjp
def dispatch(x: Array, plan: DispatchPlan) -> Array:
    """x [M, D] to one row for each (token, choice), [M A, D] in the order of the plan."""
    return x[plan.token]


@jax.custom_vjp
def combine(rows: Array, plan: DispatchPlan) -> Array:
    """Sum of each token's rows, in float32: [M A, D] to [M, D] in the dtype of `rows`."""
    return rows[plan.inverse].astype(jnp.float32).sum(axis=1).astype(rows.dtype)


@jax.custom_vjp
def dispatch_weights(weights: Array, plan: DispatchPlan) -> Array:
    """weights [M, A] to the weight of each row, [M A] in the order of the plan."""
    return weights.reshape(-1)[plan.order]


dispatch.defvjp(lambda x, plan: (dispatch(x, plan), plan), lambda plan, g: (combine(g, plan), None))
combine.defvjp(
    lambda rows, plan: (combine(rows, plan), plan), lambda plan, g: (dispatch(g, plan), None)
)
dispatch_weights.defvjp(
    lambda weights, plan: (dispatch_weights(weights, plan), plan),
    lambda plan, g: (g[plan.inverse], None),
)
