"""The SiLU-gated MLP of every family. Letters: B batch, T length, D model, F ffn."""

from flax import nnx
from jax import Array

from jaxseek.layers.linear import Linear
from jaxseek.ops.swiglu import swiglu


class MLP(nnx.Module):
    """down(silu(gate x) * up x) (HF `LlamaMLP`)."""

    def __init__(self, model: int, ffn: int):
        self.gate_proj = Linear({"embed": model}, {"mlp": ffn})
        self.up_proj = Linear({"embed": model}, {"mlp": ffn})
        self.down_proj = Linear({"mlp": ffn}, {"embed": model})

    def __call__(self, x: Array) -> Array:
        """x [B, T, D] to [B, T, D]: this device's share of F only, so a partial sum where F is
        split.
        """
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
