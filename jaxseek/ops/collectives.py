"""Every collective a model layer may use, written out: what crosses the tensor axis and where.

The train step runs inside one `jax.shard_map`, manual over the mesh axes, with `check_vma=True`:
JAX tracks over which axes a value differs from device to device ("varying"). The functions here
move values between those types, and their transposes are the collectives of the backward pass:

=====================  =========================  ==========================
function               forward                    backward
=====================  =========================  ==========================
`enter_tensor`         nothing                    all-reduce over tensor
`reduce_tensor`        all-reduce over tensor     nothing
=====================  =========================  ==========================

(Megatron-LM's f and g, arXiv:1909.08053 section 3.) With no tensor axis each of them is the
identity.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """Names of the mesh axes that have more than one device, as a layer sees them from inside the
    shard_map.

    `None` stands for "not split": a model built with `Parallel()` runs anywhere, on whole arrays,
    without a collective. `wire_dtype` is the dtype in which 16-bit values are summed over devices:
    `None` means their own; XLA's CPU compiler aborts on bf16 reductions inside shard_map, so on CPU
    it is float32.
    """

    data_axis: str | None = None
    tensor_axis: str | None = None
    wire_dtype: DTypeLike | None = None

    def tensor_index(self) -> Array | int:
        """Index of this device on the tensor axis."""
        return 0 if self.tensor_axis is None else jax.lax.axis_index(self.tensor_axis)

    def tensor_size(self) -> int:
        """Number of devices on the tensor axis."""
        return 1 if self.tensor_axis is None else jax.lax.axis_size(self.tensor_axis)

    def to_wire(self, x: Array) -> Array:
        """`x` in the dtype in which it is summed over devices."""
        if self.wire_dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(jnp.promote_types(x.dtype, self.wire_dtype))


def varying_axes(*values: Array) -> frozenset[str]:
    """Mesh axes over which any of `values` (arrays or pytrees) differs; empty outside of a
    shard_map.
    """
    leaves = jax.tree.leaves(values)
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))


def vary(x, axes):
    """The pytree `x` with every leaf marked as varying over `axes` too. Forward free; backward a
    psum over the added axes.
    """

    def cast(leaf):
        missing = tuple(sorted(frozenset(axes) - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, x)


def vary_like(x, *refs):
    """`x` marked as varying over every axis over which one of `refs` varies: what a loop carry that
    starts as a constant needs.
    """
    return vary(x, varying_axes(*refs))


def enter_tensor(x: Array, parallel: Parallel) -> Array:
    """Where an activation that all tensor ranks share meets weights that they split. Backward: one
    all-reduce.
    """
    if parallel.tensor_axis is None:
        return x
    return vary(parallel.to_wire(x), (parallel.tensor_axis,)).astype(x.dtype)


def reduce_tensor(x: Array, parallel: Parallel) -> Array:
    """Sum of the tensor ranks' partial results. Forward: one all-reduce."""
    if parallel.tensor_axis is None:
        return x
    return jax.lax.psum(parallel.to_wire(x), parallel.tensor_axis).astype(x.dtype)
