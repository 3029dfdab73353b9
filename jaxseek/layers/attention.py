"""Self-attention of the Llama-shaped families: multi-head, grouped-query and multi-query in one.

Letters: B batch, T length, D model, K kv heads, G query heads per kv head, H head dim. N = K G
query heads; the query head of kv head k and group member g is HF's head number k G + g.
"""

from flax import nnx
from jax import Array

from jaxseek.config import ModelConfig
from jaxseek.layers.linear import Linear, RMSNorm
from jaxseek.ops.attention import attention
from jaxseek.ops.rope import apply_rope, softmax_scale


class Attention(nnx.Module):
    """HF `LlamaAttention`, `Qwen2Attention` (q, k, v biases) and `Qwen3Attention` (q and k norms
    per head).
    """

    def __init__(self, config: ModelConfig):
        head = config.attention_head_dim
        group = config.num_attention_heads // config.num_key_value_heads
        model = {"embed": config.hidden_size}
        kv = {"kv_heads": config.num_key_value_heads, "head_dim": head}
        heads = {"kv_heads": config.num_key_value_heads, "q_per_kv": group, "head_dim": head}
        self.q_proj = Linear(model, heads, bias=config.has_qkv_bias)
        self.k_proj = Linear(model, kv, bias=config.has_qkv_bias)
        self.v_proj = Linear(model, kv, bias=config.has_qkv_bias)
        self.o_proj = Linear(heads, model)
        norm = config.has_qk_norm
        self.q_norm = RMSNorm(head, eps=config.rms_norm_eps, dim="head_dim") if norm else None
        self.k_norm = RMSNorm(head, eps=config.rms_norm_eps, dim="head_dim") if norm else None
        self.scale = softmax_scale(config)

    def __call__(self, x: Array, *, rope: tuple[Array, Array], segment_ids: Array | None) -> Array:
        """x [B, T, D] to [B, T, D]: this device's heads only, so a partial sum where heads are
        split.
        """
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = apply_rope(q, rope, pairing="half")
        k = apply_rope(k, rope, pairing="half")
        return self.o_proj(attention(q, k, v, scale=self.scale, segment_ids=segment_ids))
