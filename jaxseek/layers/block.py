"""One decoder layer. Letters: B batch, T length, D model."""

import jax
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxseek.config import ModelConfig
from jaxseek.layers.attention import Attention
from jaxseek.layers.linear import RMSNorm
from jaxseek.layers.mla import LatentAttention
from jaxseek.layers.mlp import MLP
from jaxseek.layers.moe import MoE, RouterStats
from jaxseek.ops.collectives import Parallel, enter_tensor, reduce_tensor


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (HF `LlamaDecoderLayer`,
    `DeepseekV3DecoderLayer`).

    The two sublayers are where the tensor axis is crossed: each begins with `enter_tensor` and ends
    with `reduce_tensor`, one all-reduce of [B, T, D] forward and one backward.
    """

    def __init__(self, config: ModelConfig, *, mlp: MLP | MoE):
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LatentAttention(config) if config.is_mla else Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = mlp

    def __call__(
        self, x: Array, *, rope: tuple[Array, Array], segment_ids: Array | None, parallel: Parallel
    ) -> tuple[Array, RouterStats | None]:
        """x [B, T, D] to [B, T, D]; a MoE layer's router statistics, or None."""
        with jax.named_scope("self_attn"):
            h = self.input_layernorm(enter_tensor(x, parallel))
            h = reduce_tensor(self.self_attn(h, rope=rope, segment_ids=segment_ids), parallel)
            x = x + checkpoint_name(h, "attn_proj")
        with jax.named_scope("mlp"):
            h = self.post_attention_layernorm(enter_tensor(x, parallel))
            h, stats = (
                self.mlp(h, parallel=parallel) if isinstance(self.mlp, MoE) else (self.mlp(h), None)
            )
            return x + reduce_tensor(h, parallel), stats
