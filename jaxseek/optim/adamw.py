"""AdamW over a device's slices of the parameters, and the global norm that spans all of them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxseek.layout import LeafLayout, ParamSpec
from jaxseek.run_config import OptimConfig

_DECAYED_ROLES = ("matrix", "embedding", "router")


def decay_mask(specs: Any) -> Any:
    """Which parameters decay: matrices do, norm scales and biases do not."""
    return jax.tree.map(lambda spec: spec.role in _DECAYED_ROLES, specs, is_leaf=_is_spec)


def make_adamw(optim: OptimConfig, specs: Any) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101) without the learning rate, which the train step multiplies in;
    moments are float32.

    Every part is elementwise, so it runs on a device's slices as it would on the whole. The norm is
    not: see `global_norm`.
    """
    return optax.chain(
        optax.scale_by_adam(b1=optim.beta1, b2=optim.beta2, eps=optim.eps, mu_dtype=jnp.float32),
        optax.add_decayed_weights(optim.weight_decay, mask=decay_mask(specs)),
    )


def global_norm(grads: Any, layout: Any) -> Array:
    """Euclidean norm of the whole gradient, of which every device holds the slices that `layout`
    gives it; float32 scalar.

    Runs inside the shard_map: squares are summed over exactly those axes over which a leaf is
    split.
    """
    sums: dict[tuple[str, ...], Array] = {}
    leaves = jax.tree.leaves(layout, is_leaf=lambda x: isinstance(x, LeafLayout))
    for grad, leaf in zip(jax.tree.leaves(grads), leaves, strict=True):
        axes = tuple(sorted(leaf.split_axes()))
        square = jnp.square(grad.astype(jnp.float32)).sum()
        sums[axes] = sums[axes] + square if axes in sums else square
    total = jnp.zeros((), jnp.float32)
    for axes, square in sums.items():
        total = total + (jax.lax.psum(square, axes) if axes else square)
    return jnp.sqrt(total)


def _is_spec(x: Any) -> bool:
    return isinstance(x, ParamSpec)
