"""Attention and MoE modules, layer by layer, on the activations of transformers and torch."""

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
from tests.parity.comparison import COMPILE_QUICKLY, LAYER_TOLERANCE, check_close
from tests.parity.oracle import FAMILIES, MOE_MODELS, VARIANTS, oracle


def layer_params(params: dict, config: ModelConfig, layer: int) -> dict:
    """The parameters of one layer, taken from its stack."""
    dense = config.num_dense_layers
    stack, index = ("dense_layers", layer) if layer < dense else ("moe_layers", layer - dense)
    return jax.tree.map(lambda leaf: leaf[index], params[stack])


@pytest.mark.parametrize("name", FAMILIES + VARIANTS)
def test_attention_of_each_layer_equals_that_of_transformers(name):
    reference = oracle(name)
    config = reference.config
    params = params_from_hf(config, reference.tensors)
    graphdef, _ = nnx.split(LatentAttention(config) if config.is_mla else Attention(config))
    rope = rope_tables(jnp.arange(reference.tokens.shape[1])[None], config)

    def attention(params, x):
        return nnx.merge(graphdef, params)(x, rope=rope, segment_ids=None)

    attention = jax.jit(attention, compiler_options=COMPILE_QUICKLY)
    assert len(reference.attention) == config.num_hidden_layers
    for layer, sublayer in enumerate(reference.attention):
        ours = attention(layer_params(params, config, layer)["self_attn"], sublayer.inputs)
        check_close(ours, sublayer.outputs, tolerance=LAYER_TOLERANCE)


@pytest.mark.parametrize("name", MOE_MODELS)
def test_moe_of_each_layer_equals_that_of_transformers(name):
    reference = oracle(name)
    config = reference.config
    params = params_from_hf(config, reference.tensors)
    graphdef, _ = nnx.split(MoE(config))

    def moe(params, x):
        return nnx.merge(graphdef, params)(x, parallel=Parallel())[0]

    moe = jax.jit(moe, compiler_options=COMPILE_QUICKLY)
    assert len(reference.moe) == config.num_moe_layers
    for layer, sublayer in enumerate(reference.moe, start=config.num_dense_layers):
        ours = moe(layer_params(params, config, layer)["mlp"], sublayer.inputs)
        check_close(ours, sublayer.outputs, tolerance=LAYER_TOLERANCE)
