"""`ModelConfig`: one frozen description for every model of the family, with the field names of
`config.json`.
"""

import dataclasses
from typing import Literal

from jaxseek.errors import UserError

ModelType = Literal["llama", "qwen2", "qwen3", "deepseek", "deepseek_v2", "deepseek_v3"]
LATER_MODEL_TYPES = {
    "deepseek_v32": "DeepSeek-V3.2 (lightning indexer)",
    "deepseek_v4": "DeepSeek-V4",
    "deepseek_v41": "DeepSeek-V4.1",
}
# Token ids and counts of things that a model can do without; every other whole number is a size.
_MAY_BE_ZERO = {
    "bos_token_id",
    "eos_token_id",
    "n_shared_experts",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context; the fields of `rope_scaling`
    in `config.json`.

    `linear` divides every frequency by `factor` (Coder v1), `llama3` is the three-band rule of
    Llama 3.1, `yarn` is arXiv:2309.00071 with DeepSeek's two magnitudes: cos and sin are multiplied
    by m(mscale) / m(mscale_all_dim), the softmax scale of MLA by m(mscale_all_dim)^2, where m(s) =
    0.1 s ln(factor) + 1.
    """

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None

    def __post_init__(self):
        needed = {
            "linear": (),
            "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
            "yarn": ("original_max_position_embeddings",),
        }
        if self.rope_type not in needed:
            raise UserError(
                f"rope_scaling.rope_type: {self.rope_type!r} is not supported; known are "
                f"{', '.join(needed)}."
            )
        for name in needed[self.rope_type]:
            if getattr(self, name) is None:
                raise UserError(f"rope_scaling.{name} is needed by rope_type {self.rope_type!r}.")
        if self.factor < 1:
            raise UserError(f"rope_scaling.factor must be at least 1, got {self.factor}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that fixes the mathematics of a model. Names and meanings are those of the HF
    `config.json`.

    Fields that a family does not have stay `None` (or at their neutral default). `q_lora_rank`,
    `kv_lora_rank` and the three head dims belong to multi-head latent attention; `n_routed_experts`
    and what follows to DeepSeekMoE.

    Raises:
        UserError: when a value is impossible; the message starts with the name of the key.
    """

    model_type: ModelType
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    # The papers' standard deviation; the 0.02 that stands in the released config.json files was
    # never used to train.
    initializer_range: float = 0.006

    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_interleave: bool = True

    n_routed_experts: int | None = None
    n_shared_experts: int = 0
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    first_k_dense_replace: int = 0
    n_group: int = 1
    topk_group: int = 1
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "greedy"
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    aux_loss_alpha: float = 0.001
    seq_aux: bool = True
    num_nextn_predict_layers: int = 0

    def __post_init__(self):
        self._check_sizes()
        self._check_attention()
        self._check_experts()

    @property
    def is_mla(self) -> bool:
        """Whether attention is multi-head latent attention (DeepSeek-V2 and V3)."""
        return self.kv_lora_rank is not None

    @property
    def is_moe(self) -> bool:
        """Whether layers from `first_k_dense_replace` on are mixtures of experts."""
        return self.n_routed_experts is not None

    @property
    def num_dense_layers(self) -> int:
        """Layers with a dense MLP; they come first."""
        return (
            min(self.first_k_dense_replace, self.num_hidden_layers)
            if self.is_moe
            else self.num_hidden_layers
        )

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts; they come after the dense ones."""
        return self.num_hidden_layers - self.num_dense_layers

    @property
    def attention_head_dim(self) -> int:
        """Size of a query head: `head_dim`, or nope + rope dims under MLA."""
        if self.is_mla:
            return _present(self.qk_nope_head_dim) + _present(self.qk_rope_head_dim)
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def value_head_dim(self) -> int:
        """Size of a value head."""
        return _present(self.v_head_dim) if self.is_mla else self.attention_head_dim

    @property
    def rope_dim(self) -> int:
        """How many dims of a head are rotated."""
        return _present(self.qk_rope_head_dim) if self.is_mla else self.attention_head_dim

    @property
    def has_qkv_bias(self) -> bool:
        """Whether q, k and v projections add a bias (Qwen2; its config.json does not say so)."""
        return self.model_type == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        """Whether each query and key head is normalised before the rotation (Qwen3)."""
        return self.model_type == "qwen3"

    @property
    def uses_router_bias(self) -> bool:
        """Whether the router has the loss-free balance bias `e_score_correction_bias` (V3)."""
        return self.is_moe and self.topk_method == "noaux_tc"

    def _check_sizes(self):
        if self.model_type in LATER_MODEL_TYPES:
            name = LATER_MODEL_TYPES[self.model_type]
            raise UserError(f"model_type: {self.model_type!r}, {name}, is not supported yet.")
        known = ModelType.__args__
        if self.model_type not in known:
            raise UserError(
                f"model_type: {self.model_type!r} is unknown; known are {', '.join(known)}."
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in _MAY_BE_ZERO else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise UserError(f"{field.name} must be at least {least}, got {value}.")
        for name in ("rms_norm_eps", "initializer_range", "rope_theta", "routed_scaling_factor"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name} must be positive, got {getattr(self, name)}.")
        if self.aux_loss_alpha < 0:
            raise UserError(f"aux_loss_alpha must not be negative, got {self.aux_loss_alpha}.")

    def _check_attention(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}."
            )
        if self.model_type in ("deepseek_v2", "deepseek_v3") and not self.is_mla:
            raise UserError(f"kv_lora_rank is needed by model_type {self.model_type!r}.")
        if self.is_mla:
            for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
                if getattr(self, name) is None:
                    raise UserError(f"{name} is needed where kv_lora_rank is given.")
        elif self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}; give head_dim."
            )
        if self.rope_dim % 2:
            raise UserError(
                f"rotary dims come in pairs; the rotated size of a head is {self.rope_dim}."
            )

    def _check_experts(self):
        if self.model_type in ("deepseek", "deepseek_v3") and not self.is_moe:
            raise UserError(f"n_routed_experts is needed by model_type {self.model_type!r}.")
        if not self.is_moe:
            return
        for name in ("num_experts_per_tok", "moe_intermediate_size"):
            if not getattr(self, name):
                raise UserError(f"{name} is needed where n_routed_experts is given.")
        if not self.seq_aux:
            raise UserError(
                "seq_aux must be true: the balance loss is taken over each sequence, as in every "
                "released model; over a whole micro-batch it would depend on the mesh."
            )
        experts, active = _present(self.n_routed_experts), _present(self.num_experts_per_tok)
        if active > experts:
            raise UserError(
                f"num_experts_per_tok {active} is larger than n_routed_experts {experts}."
            )
        if self.topk_method == "greedy":
            return
        if experts % self.n_group:
            raise UserError(f"n_group {self.n_group} does not divide n_routed_experts {experts}.")
        if not 1 <= self.topk_group <= self.n_group:
            raise UserError(
                f"topk_group {self.topk_group} must be between 1 and n_group {self.n_group}."
            )
        if active > self.topk_group * (experts // self.n_group):
            raise UserError(
                f"num_experts_per_tok {active} is larger than the "
                f"{self.topk_group * (experts // self.n_group)} "
                f"experts of topk_group {self.topk_group} groups."
            )


def _present(value: int | None) -> int:
    assert value is not None
    return value
