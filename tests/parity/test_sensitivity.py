"""The parity tests can fail: each known mistake of other implementations makes them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from convert.names import params_from_hf
from jaxseek.config import ModelConfig
from jaxseek.layers import attention, mla, moe
from jaxseek.ops import rope, router
from tests.parity.comparison import check_expert_ids, check_gradients, check_logits, run
from tests.parity.oracle import oracle

Patch = pytest.MonkeyPatch
# How a mistake is made: in the source, in the config or in the weights.
Mistake = Callable[[Patch, ModelConfig, dict[str, Any]], tuple[ModelConfig, dict[str, Any]]]


def in_config(**changes: Any) -> Mistake:
    return lambda patch, config, params: (dataclasses.replace(config, **changes), params)


def in_weights(path: str, change: Callable[[np.ndarray], np.ndarray]) -> Mistake:
    """`change` every parameter whose path ends with `path`."""

    def make(patch: Patch, config: ModelConfig, params: dict[str, Any]):
        def changed(key_path, leaf):
            name = ".".join(key.key for key in key_path)
            return change(leaf) if name.endswith(path) else leaf

        return config, jax.tree_util.tree_map_with_path(changed, params)

    return make


def in_source(module: Any, name: str, wrong: Callable[..., Any]) -> Mistake:
    """Call `wrong(original, ...)` for the function `name` of a module."""

    def make(patch: Patch, config: ModelConfig, params: dict[str, Any]):
        original = getattr(module, name)
        patch.setattr(module, name, lambda *args, **kw: wrong(original, *args, **kw))
        return config, params

    return make


def rotate_interleaved(apply_rope, x, tables, *, pairing):
    return apply_rope(x, tables, pairing="interleaved")


def scale_without_mscale(softmax_scale, config):
    return config.attention_head_dim**-0.5


def scale_of_absorbed_width(softmax_scale, config):
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return softmax_scale(config) * (config.attention_head_dim / width) ** 0.5


def amplitude_without_all_dim(rope_amplitude, config):
    return rope.yarn_magnitude(config.rope_scaling.factor, config.rope_scaling.mscale)


def weigh_with_bias(route, logits, bias, *, config):
    routing = route(logits, bias, config=config)
    weights = routing.weights + bias[routing.expert_ids]
    return routing._replace(weights=weights)


def choose_without_bias(route, logits, bias, *, config):
    return route(logits, None, config=config)


def mask_groups_with_zero(limit_to_groups, choice, *, config):
    limited = limit_to_groups(choice, config=config)
    return jax.numpy.where(limited == -jax.numpy.inf, 0.0, limited)


def rank_by_two_best(limit_to_groups, choice, *, config):
    return limit_to_groups(choice, config=dataclasses.replace(config, topk_method="noaux_tc"))


def weigh_without_gradient(route, logits, bias, *, config):
    routing = route(logits, bias, config=config)
    return routing._replace(weights=jax.lax.stop_gradient(routing.weights))


MISTAKES: dict[str, tuple[str, Mistake]] = {
    "rope of Llama on neighbouring dims": (
        "llama",
        in_source(attention, "apply_rope", rotate_interleaved),
    ),
    "rope of MLA on the halves": ("v3", in_config(rope_interleave=False)),
    "linear scaling dropped": ("coder", in_config(rope_scaling=None)),
    "llama3 scaling dropped": ("llama-distill", in_config(rope_scaling=None)),
    "yarn dropped": ("qwen3-distill", in_config(rope_scaling=None)),
    "mscale not in the softmax scale": (
        "v2-lite",
        in_source(mla, "softmax_scale", scale_without_mscale),
    ),
    "softmax scale of the absorbed width": (
        "v3",
        in_source(mla, "softmax_scale", scale_of_absorbed_width),
    ),
    "amplitude of mscale alone": (
        "v2-lite-unequal-mscale",
        in_source(rope, "rope_amplitude", amplitude_without_all_dim),
    ),
    "query heads in group-major order": (
        "coder",
        in_weights("q_proj.kernel", lambda w: w.swapaxes(2, 3)),
    ),
    "square matrix not transposed": (
        "llama",
        in_weights("q_proj.kernel", lambda w: w.reshape(3, 64, 64).mT.reshape(w.shape)),
    ),
    "q, k, v biases dropped": ("qwen2-distill", in_weights("_proj.bias", np.zeros_like)),
    "q norm without its weight": ("qwen3-distill", in_weights("q_norm.scale", np.ones_like)),
    "latent norm without its weight": ("v2", in_weights("kv_a_layernorm.scale", np.ones_like)),
    "shared experts dropped": (
        "moe-16b",
        in_weights("shared_experts.down_proj.kernel", np.zeros_like),
    ),
    "weights normalised where they are not": ("moe-16b", in_config(norm_topk_prob=True)),
    "weights not normalised": ("v3", in_config(norm_topk_prob=False)),
    "routed_scaling_factor dropped": ("v2", in_config(routed_scaling_factor=1.0)),
    "softmax for sigmoid": ("v3", in_config(scoring_func="softmax")),
    "bias in the weights": ("v3", in_source(moe, "route", weigh_with_bias)),
}
WRONG_CHOICES: dict[str, tuple[str, Mistake]] = {
    "groups not limited": ("v2", in_config(topk_method="greedy")),
    "groups counted by their two best": (
        "v2",
        in_source(router, "_limit_to_groups", rank_by_two_best),
    ),
    "bias not used": ("v3", in_source(moe, "route", choose_without_bias)),
    "other groups at zero": (
        "v3-negative-biases",
        in_source(router, "_limit_to_groups", mask_groups_with_zero),
    ),
}


def run_with(patch: Patch, name: str, mistake: Mistake, *, gradients: bool = False):
    reference = oracle(name)
    params = params_from_hf(reference.config, reference.tensors)
    config, params = mistake(patch, reference.config, params)
    return run(reference, config=config, params=params, gradients=gradients), reference


@pytest.mark.parametrize("mistake", [*MISTAKES, *WRONG_CHOICES])
def test_logits_differ_with(mistake, monkeypatch):
    result, reference = run_with(monkeypatch, *(MISTAKES | WRONG_CHOICES)[mistake])
    with pytest.raises(AssertionError, match="standard deviations apart"):
        check_logits(result, reference)
    if mistake in WRONG_CHOICES:
        with pytest.raises(AssertionError, match="differ"):
            check_expert_ids(result, reference)


def test_gradients_differ_where_the_router_gets_none(monkeypatch):
    mistake = in_source(moe, "route", weigh_without_gradient)
    result, reference = run_with(monkeypatch, "v2-lite", mistake, gradients=True)
    check_logits(result, reference)
    check_expert_ids(result, reference)
    with pytest.raises(AssertionError, match=r"gate\.kernel"):
        check_gradients(result, reference)
