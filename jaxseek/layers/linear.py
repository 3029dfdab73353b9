"""The parameter-holding modules every layer is made of.

A module declares its parameters abstractly: a `ShapeDtypeStruct` of the logical shape, a name for
each dim and a role. The layout reads these declarations; arrays of any local size come in by
`nnx.merge`, and the code reads sizes off the arrays.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxseek.layout import ParamSpec, Role
from jaxseek.ops.norm import rms_norm


def declare(shape: tuple[int, ...], dims: tuple[str, ...], *, role: Role) -> nnx.Param:
    """An abstract float32 parameter that carries its `ParamSpec` as metadata."""
    assert len(shape) == len(dims)
    spec = ParamSpec(shape=shape, dims=dims, role=role)
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), spec=spec)


class Linear(nnx.Module):
    """A contraction of `x` with a kernel by an einsum equation, plus a bias over the output dims
    where asked for.
    """

    def __init__(
        self,
        equation: str,
        dims: dict[str, int],
        *,
        outputs: tuple[str, ...] = (),
        bias: bool = False,
        role: Role = "matrix",
    ):
        """`dims` names and sizes the kernel's dims in order; `outputs` are those of them that the
        bias has.
        """
        self.equation = equation
        self.kernel = declare(tuple(dims.values()), tuple(dims), role=role)
        self.bias = declare(tuple(dims[n] for n in outputs), outputs, role="bias") if bias else None

    def __call__(self, x: Array) -> Array:
        kernel = self.kernel[...]
        y = jnp.einsum(self.equation, x, kernel.astype(x.dtype))
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class RMSNorm(nnx.Module):
    """RMSNorm over a last dim of size D."""

    def __init__(self, size: int, *, eps: float, dim: str = "embed"):
        self.eps = eps
        self.scale = declare((size,), (dim,), role="norm")

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.scale[...], eps=self.eps)
