"""Tiny models of every family, in sizes that almost no device count divides."""

from jaxseek.config import ModelConfig, RopeScaling

_COMMON = {
    "vocab_size": 131,
    "hidden_size": 40,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
_GQA = _COMMON | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_MHA = _COMMON | {"num_attention_heads": 5, "num_key_value_heads": 5}
_MOE = {
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
_MLA = _COMMON | {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
_LLAMA3 = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_YARN = RopeScaling(
    rope_type="yarn",
    factor=40.0,
    mscale=0.707,
    mscale_all_dim=0.707,
    original_max_position_embeddings=64,
)

TINY: dict[str, ModelConfig] = {
    "llama": ModelConfig(model_type="llama", **_MHA),
    "coder": ModelConfig(
        model_type="llama", rope_scaling=RopeScaling(rope_type="linear", factor=4.0), **_GQA
    ),
    "coder-mqa": ModelConfig(model_type="llama", **(_GQA | {"num_key_value_heads": 1})),
    "llama-distill": ModelConfig(model_type="llama", rope_scaling=_LLAMA3, **_GQA),
    "qwen2": ModelConfig(model_type="qwen2", **_GQA),
    "qwen3": ModelConfig(model_type="qwen3", **_GQA),
    "moe-16b": ModelConfig(model_type="deepseek", n_shared_experts=2, **_MHA, **_MOE),
    "v2-lite": ModelConfig(
        model_type="deepseek_v2", rope_scaling=_YARN, n_shared_experts=2, **_MLA, **_MOE
    ),
    "v2": ModelConfig(
        model_type="deepseek_v2",
        rope_scaling=_YARN,
        q_lora_rank=14,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=16.0,
        **_MLA,
        **_MOE,
    ),
    "v3": ModelConfig(
        model_type="deepseek_v3",
        rope_scaling=_YARN,
        q_lora_rank=14,
        n_shared_experts=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        **_MLA,
        **_MOE,
    ),
}
