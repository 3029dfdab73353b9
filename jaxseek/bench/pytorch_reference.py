"""The same training step in transformers + PyTorch, to measure against. Needs the test extra."""

import warnings
from collections.abc import Callable

import numpy as np

from jaxseek.config import ModelConfig
from jaxseek.errors import UserError


def make_step(config: ModelConfig, tokens: np.ndarray) -> Callable[[], float]:
    """A function that runs one float32 optimizer step on tokens [B, T + 1] and returns the loss.

    Forward, backward, clipping by global norm and AdamW, as jaxseek's step does; transformers'
    default attention and experts, torch's fused AdamW, no gradient checkpointing.
    """
    import torch
    import transformers

    warnings.filterwarnings("ignore", module="transformers")
    torch.manual_seed(0)
    name, hf_config = _hf_config(config)
    model = getattr(transformers, name)(hf_config)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    inputs = torch.from_numpy(tokens[:, :-1].astype(np.int64))
    labels = torch.from_numpy(tokens[:, 1:].astype(np.int64))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def _hf_config(config: ModelConfig):
    """Class name and config of the transformers model of the same shape."""
    import transformers

    shared = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
    )  # fmt: skip
    mla = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    moe = (
        "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
        "first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
    )  # fmt: skip
    names = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", shared),
        "deepseek_v2": (
            "DeepseekV2Config", "DeepseekV2ForCausalLM", (*shared, *mla, *moe, "topk_method"),
        ),
        "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", (*shared, *mla, *moe)),
    }  # fmt: skip
    if config.model_type not in names or config.rope_scaling is not None:
        raise UserError(
            f"the benchmark against PyTorch knows {', '.join(names)} without rope scaling; "
            f"this model is {config.model_type}."
        )
    config_name, model_name, fields = names[config.model_type]
    arguments = {field: getattr(config, field) for field in fields}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    hf_config = getattr(transformers, config_name)(
        **arguments, rope_parameters=rope, tie_word_embeddings=False
    )
    return model_name, hf_config
