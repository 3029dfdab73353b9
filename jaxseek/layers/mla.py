"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 section 2.1; V3 alike).

Letters: B batch, T length, D model, Q q rank, R kv rank, P rope dim, N heads, H nope + rope dims, V
value dim.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxseek.config import ModelConfig
from jaxseek.layers.linear import Linear, RMSNorm
from jaxseek.ops.attention import attention
from jaxseek.ops.rope import Pairing, apply_rope, softmax_scale

_LATENT_EPS = 1e-6  # HF builds both latent norms with its default, whatever rms_norm_eps is


class LatentAttention(nnx.Module):
    """HF `DeepseekV2Attention` and `DeepseekV3Attention`: queries and keys/values from low-rank
    latents, one shared rope key.
    """

    def __init__(self, config: ModelConfig):
        assert config.kv_lora_rank and config.qk_nope_head_dim and config.qk_rope_head_dim
        rank, value = config.kv_lora_rank, config.value_head_dim
        self.nope, self.rank = config.qk_nope_head_dim, rank
        self.pairing: Pairing = "interleaved" if config.rope_interleave else "half"
        model = {"embed": config.hidden_size}
        q = {"heads": config.num_attention_heads, "head_dim": config.attention_head_dim}
        if config.q_lora_rank is None:
            self.q_proj = Linear(model, q)
        else:
            q_rank = {"q_rank": config.q_lora_rank}
            self.q_a_proj = Linear(model, q_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=_LATENT_EPS, dim="q_rank")
            self.q_b_proj = Linear(q_rank, q)
        latent = {"kv_rank_and_rope": rank + config.qk_rope_head_dim}
        self.kv_a_proj_with_mqa = Linear(model, latent)
        self.kv_a_layernorm = RMSNorm(rank, eps=_LATENT_EPS, dim="kv_rank")
        kv = {"heads": config.num_attention_heads, "nope_and_value": self.nope + value}
        self.kv_b_proj = Linear({"kv_rank": rank}, kv)
        self.o_proj = Linear({"heads": config.num_attention_heads, "value_dim": value}, model)
        self.scale = softmax_scale(config)
        self.has_q_rank = config.q_lora_rank is not None

    def __call__(self, x: Array, *, rope: tuple[Array, Array], segment_ids: Array | None) -> Array:
        """x [B, T, D] to [B, T, D]: this device's heads only, so a partial sum where heads are
        split.
        """
        q = (
            self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
            if self.has_q_rank
            else self.q_proj(x)
        )
        latent, k_rope = jnp.split(self.kv_a_proj_with_mqa(x), [self.rank], axis=-1)
        k_nope, v = jnp.split(self.kv_b_proj(self.kv_a_layernorm(latent)), [self.nope], axis=-1)
        q_nope, q_rope = jnp.split(q, [self.nope], axis=-1)
        q_rope = apply_rope(q_rope, rope, pairing=self.pairing)
        k_rope = apply_rope(k_rope[:, :, None, :], rope, pairing=self.pairing)
        k_rope = jnp.broadcast_to(k_rope, (*k_nope.shape[:-1], k_rope.shape[-1]))
        q = jnp.concatenate([q_nope, q_rope], axis=-1)[:, :, :, None, :]
        k = jnp.concatenate([k_nope, k_rope], axis=-1)
        out = attention(q, k, v, scale=self.scale, segment_ids=segment_ids)
        return self.o_proj(out[:, :, :, 0, :])
