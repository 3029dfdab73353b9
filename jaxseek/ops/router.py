"""DeepSeekMoE routing and load balance. Letters: B batch, T length, M tokens, E experts, A active
experts per token, G groups.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxseek.config import ModelConfig


class Routing(NamedTuple):
    """For each of M tokens: which experts, with which weight, and every expert's score.

    Attributes:
        expert_ids: int32 [M, A].
        weights: float32 [M, A]; an expert's output is multiplied by its weight.
        scores: float32 [M, E], before bias and group limit.
    """

    expert_ids: Array
    weights: Array
    scores: Array


def route(logits: Array, bias: Array | None, *, config: ModelConfig) -> Routing:
    """Choose experts from router logits.

    V3 chooses by sigmoid score plus `bias` within the best groups (a group counts the sum of its
    two best) and weighs by the score alone; V2 chooses by softmax score, where asked within the
    groups of the best single score; MoE-16B takes the best softmax scores as they are. (HF
    `DeepseekV3TopkRouter`, `DeepseekV2TopkRouter`; the norm of V2 as in DeepSeek's own code.)

    Args:
        logits: float32 [M, E].
        bias: float32 [E] (`e_score_correction_bias`), with topk_method `noaux_tc` only.
    """
    scores = (
        jax.nn.sigmoid(logits)
        if config.scoring_func == "sigmoid"
        else jax.nn.softmax(logits, axis=-1)
    )
    choice = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    if config.topk_method != "greedy":
        choice = _limit_to_groups(choice, config=config)
    assert config.num_experts_per_tok is not None
    _, expert_ids = jax.lax.top_k(choice, config.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, expert_ids, axis=-1)
    if config.norm_topk_prob and config.num_experts_per_tok > 1:
        weights = _normalised(weights)
        if (
            config.scoring_func == "softmax"
        ):  # DeepSeek-V2 either normalises or scales, V3 does both
            return Routing(expert_ids, weights, scores)
    return Routing(expert_ids, weights * config.routed_scaling_factor, scores)


def _normalised(scores: Array) -> Array:
    """`scores / (sum + 1e-20)` along the last dim, as HF has it.

    Divided by their largest first: the square of a sum of tiny sigmoid scores, by which the
    gradient divides, would underflow to 0 and the gradient be NaN.
    """
    largest = jnp.maximum(scores.max(axis=-1, keepdims=True), 1e-20)
    largest = jax.lax.stop_gradient(largest)  # it cancels out of the value
    scaled = scores / largest
    return scaled / (scaled.sum(axis=-1, keepdims=True) + 1e-20 / largest)


def _limit_to_groups(choice: Array, *, config: ModelConfig) -> Array:
    """Choice scores [M, E] with -inf outside of the `topk_group` best groups. (-inf and not 0:
    biased scores can be negative.)
    """
    grouped = choice.reshape(choice.shape[0], config.n_group, -1)
    best = 2 if config.topk_method == "noaux_tc" else 1
    best = min(best, grouped.shape[-1])
    group_scores = jax.lax.top_k(grouped, best)[0].sum(axis=-1)
    _, groups = jax.lax.top_k(group_scores, config.topk_group)
    kept = (groups[:, :, None] == jnp.arange(config.n_group)).any(axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def expert_counts(expert_ids: Array, *, num_experts: int) -> Array:
    """How many tokens chose each expert: expert_ids [..., M, A] to int32 [..., E]."""
    chosen = expert_ids[..., None] == jnp.arange(num_experts)
    return chosen.sum(axis=(-3, -2), dtype=jnp.int32)


def balance_loss(routing: Routing, *, batch: int, config: ModelConfig) -> Array:
    """Sum over sequences of sum_i f_i P_i (DeepSeek-V3, arXiv:2412.19437 equations 17 to 20; V2's
    expert-level loss).

    f_i = E / (A T) * how often expert i was chosen, P_i = mean score of expert i, for sigmoid
    scores normalised over all experts first.

    Returns: float32 scalar; to be divided by the number of sequences of the whole step and
        multiplied by alpha.
    """
    tokens, experts = routing.scores.shape
    scores = routing.scores
    if config.scoring_func == "sigmoid":
        scores = _normalised(scores)
    length = tokens // batch
    ids = routing.expert_ids.reshape(batch, length, -1)
    frequency = expert_counts(ids, num_experts=experts) * (experts / (ids.shape[-1] * length))
    probability = scores.reshape(batch, length, experts).mean(axis=1)
    return (frequency * probability).sum()
