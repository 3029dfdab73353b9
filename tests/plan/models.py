"""Models of which almost all bytes are in matrices that 2, 3 and 6 divide, so that a compiled step
can be held against the theory closely.
"""

from jaxseek.config import ModelConfig
from jaxseek.devices import Fleet
from jaxseek.plan.choices import Choice, Request
from jaxseek.plan.compilation import planning_program
from jaxseek.run_config import RunConfig
from jaxseek.train.state import Program

_COMMON = {
    "vocab_size": 3072,
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 512,
}
_MOE = {
    "moe_intermediate_size": 768,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
DENSE = ModelConfig(model_type="llama", **_COMMON)
MLA_MOE = ModelConfig(
    model_type="deepseek_v2",
    kv_lora_rank=96,
    qk_nope_head_dim=128,
    qk_rope_head_dim=32,
    v_head_dim=128,
    **_COMMON,
    **_MOE,
)


def request(model: ModelConfig, *, gpus: str = "3xrtx4090", seq_len: int = 128, **rest) -> Request:
    """A request for `model` on sequences of 128 tokens."""
    run = RunConfig(model=model, seq_len=seq_len, batch=1)
    return Request(name="model", run=run, fleet=Fleet.parse(gpus), **rest)


def program(choice: Choice, asked: Request, *, micro_batch: int = 1) -> Program:
    """What `choice` compiles, for emulated CPU devices."""
    run = asked.run_of(choice, micro_batch=micro_batch)
    return planning_program(run, fleet=asked.fleet, target="cpu")
