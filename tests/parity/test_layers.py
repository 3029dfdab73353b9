"""Attention and MoE modules, layer by layer, on the activations of transformers and torch."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from convert.names import params_from_hf
from jaxseek.config import ModelConfig
from jaxseek.layers.attention import Attention
from jaxseek.layers.mla import LatentAttention
from jaxseek.layers.moe import MoE
from jaxseek.ops.collectives import Parallel
from jaxseek.ops.rope import rope_tables
from tests.parity.comparison import LAYER_TOLERANCE, check_close
from tests.parity.oracle import FAMILIES, MOE_FAMILIES, oracle


def layer_params(params: dict, config: ModelConfig, layer: int) -> dict:
    """The parameters of one layer, taken from its stack."""
    dense = config.num_dense_layers
    stack, index = ("dense_layers", layer) if layer < dense else ("moe_layers", layer - dense)
    return jax.tree.map(lambda leaf: leaf[index], params[stack])


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_of_each_layer_equals_that_of_transformers(family):
    reference = oracle(family)
    config = reference.config
    params = params_from_hf(config, reference.tensors)
    graphdef, _ = nnx.split(LatentAttention(config) if config.is_mla else Attention(config))
    rope = rope_tables(jnp.arange(reference.tokens.shape[1])[None], config)

    @jax.jit
    def attend(params, x):
        return nnx.merge(graphdef, params)(x, rope=rope, segment_ids=None)

    assert len(reference.attention) == config.num_hidden_layers
    for layer, sublayer in enumerate(reference.attention):
        ours = attend(layer_params(params, config, layer)["self_attn"], sublayer.inputs)
        check_close(ours, sublayer.outputs, tolerance=LAYER_TOLERANCE)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_moe_of_each_layer_equals_that_of_transformers(family):
    reference = oracle(family)
    config = reference.config
    params = params_from_hf(config, reference.tensors)
    graphdef, _ = nnx.split(MoE(config))
    mix = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x, parallel=Parallel())[0])
    assert len(reference.moe) == config.num_moe_layers
    for layer, sublayer in enumerate(reference.moe, start=config.num_dense_layers):
        ours = mix(layer_params(params, config, layer)["mlp"], sublayer.inputs)
        check_close(ours, sublayer.outputs, tolerance=LAYER_TOLERANCE)
