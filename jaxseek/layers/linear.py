"""The parameter-holding modules every layer is made of.

A module declares its parameters abstractly: a `ShapeDtypeStruct` of the logical shape, a name for
each dim and a role. The layout reads these declarations; arrays of any local size come in by
`nnx.merge`, and the code reads sizes off the arrays.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxseek.layout import ParamSpec, Role
from jaxseek.ops.linear import linear
from jaxseek.ops.norm import rms_norm


def declare(shape: tuple[int, ...], dims: tuple[str, ...], *, role: Role) -> nnx.Param:
    """An abstract float32 parameter that carries its `ParamSpec` as metadata."""
    assert len(shape) == len(dims)
    spec = ParamSpec(shape=shape, dims=dims, role=role)
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), spec=spec)


class Linear(nnx.Module):
    """A product with a kernel of one or more input and output dims, plus a bias if asked for.

    Args of the constructor: names and sizes of the dims that are summed over (the last ones of the
    input) and of those that the output has instead; the kernel is [*inputs, *outputs].
    """

    def __init__(self, inputs: dict[str, int], outputs: dict[str, int], *, bias: bool = False):
        shape = (*inputs.values(), *outputs.values())
        self.num_inputs = len(inputs)
        self.kernel = declare(shape, (*inputs, *outputs), role="matrix")
        self.bias = declare(tuple(outputs.values()), tuple(outputs), role="bias") if bias else None

    def __call__(self, x: Array) -> Array:
        """[..., *inputs] to [..., *outputs] in the dtype of `x`."""
        kernel = self.kernel[...].astype(x.dtype)
        kept, outputs = x.shape[: -self.num_inputs], kernel.shape[self.num_inputs :]
        size = math.prod(kernel.shape[: self.num_inputs])
        y = linear(x.reshape(-1, size), kernel.reshape(size, -1)).reshape(*kept, *outputs)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class RMSNorm(nnx.Module):
    """RMSNorm over a last dim of size D."""

    def __init__(self, size: int, *, eps: float, dim: str = "embed"):
        self.eps = eps
        self.scale = declare((size,), (dim,), role="norm")

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.scale[...], eps=self.eps)
