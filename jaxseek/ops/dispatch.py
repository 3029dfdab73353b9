"""Tokens to the rows of their experts and back, by permutations whose gradients are permutations
too (no scatter).

Letters: M tokens, D model, A active experts per token, E experts of this device.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class DispatchPlan(NamedTuple):
    """Where each of the M A (token, choice) pairs goes.

    Attributes:
        order: int32 [M A], the pair that stands in each row; rows are sorted by expert, other
            devices' pairs come last.
        inverse: int32 [M A], the row of each pair.
        group_sizes: int32 [E], rows of each local expert.
    """

    order: Array
    inverse: Array
    group_sizes: Array


def plan_dispatch(expert_ids: Array, *, first: Array | int, count: int) -> DispatchPlan:
    """Sort the choices expert_ids [M, A] by expert, for the `count` experts from number `first` on
    that this device has.
    """
    local = expert_ids.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < count), local, count)
    order = jnp.argsort(local, stable=True).astype(jnp.int32)
    inverse = jnp.argsort(order).astype(jnp.int32)
    group_sizes = (local[:, None] == jnp.arange(count)).sum(axis=0, dtype=jnp.int32)
    return DispatchPlan(order, inverse, group_sizes)


@jax.custom_vjp
def dispatch(x: Array, plan: DispatchPlan) -> Array:
    """x [M, D] to one row for each (token, choice), [M A, D] in the order of the plan."""
    active = plan.order.shape[0] // x.shape[0]
    return x[plan.order // active]


def _dispatch_forward(x, plan):
    return dispatch(x, plan), (plan, x.shape[0])


def _dispatch_backward(residuals, g):
    plan, tokens = residuals
    g = g[plan.inverse].reshape(tokens, -1, g.shape[-1])
    return g.astype(jnp.float32).sum(axis=1).astype(g.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def _unsort(rows: Array, plan: DispatchPlan) -> Array:
    return rows[plan.inverse]


_unsort.defvjp(
    lambda rows, plan: (rows[plan.inverse], plan),
    lambda plan, g: (g[plan.order], None),
)


def combine(rows: Array, weights: Array, plan: DispatchPlan) -> Array:
    """Weighted sum of each token's expert outputs: rows [M A, D] (zero where not local), weights
    [M, A] to [M, D].
    """
    pairs = _unsort(rows, plan).reshape(*weights.shape, rows.shape[-1])
    return jnp.einsum("mad,ma->md", pairs, weights)
