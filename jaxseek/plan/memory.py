"""A formula for what a step needs beside its state, for choices that are not compiled.

It says which of them are worth compiling, and where the search for the largest micro-batch begins.
The terms are what the program keeps (Korthikanti et al., arXiv:2205.05198, for the activations);
their weights are fitted to compiled programs, and a test holds the sum against others.
"""

import math

from jaxseek.layout import flatten_paths
from jaxseek.mesh import DATA_AXIS, TENSOR_AXIS
from jaxseek.model import DENSE_STACK, MOE_STACK
from jaxseek.plan.theory import local_heads, local_size
from jaxseek.train.state import Program

# All fitted to programs for RTX 4090s (jax 0.10.2). Where ZeRO 3 gathers one layer after the other,
# in one layer's whole weights: those that are whole at once, their gradients, and the copies that
# the update makes.
_WHOLE_LAYERS = 14
# Where all weights are whole: they and their gradients.
_WHOLE_MODELS = 2
# Arrays as wide as a token's ffn that a layer's backward pass holds at once.
_GATHERED_WIDE, _WHOLE_WIDE = 12, 9
# What accumulation adds, in copies of the gradients as they are stored (2, 3) or whole in float32.
_SUMMED_COPIES = {0: 1, 1: 1, 2: 1, 3: 3}


def temporaries_bytes(program: Program) -> int:
    """Gradients, gathered weights and activations on one device, in bytes.

    Within a tenth of the compiled figure for dense models; for V2-Lite under ZeRO 3 it is a sixth
    too low.
    """
    weights, layer = _weight_bytes(program)
    wide = _token_bytes(program) * _ffn_width(program)
    zero = program.zero if program.mesh.shape[DATA_AXIS] > 1 else 0
    if zero == 3:
        held = gradient_bytes(program) + _WHOLE_LAYERS * layer + _GATHERED_WIDE * wide
    else:
        held = _WHOLE_MODELS * weights + _WHOLE_WIDE * wide
    if program.run.accumulation > 1:
        whole = weights * 4 // program.compute_dtype.itemsize
        held += _SUMMED_COPIES[zero] * (gradient_bytes(program) if zero >= 2 else whole)
    return round(held + _saved_bytes(program))


def gradient_bytes(program: Program) -> int:
    """Gradients as they are stored: float32, split like the parameters."""
    return sum(
        4 * math.prod(leaf.stored) // math.prod(program.mesh.shape[a] for a in leaf.split_axes())
        for leaf in flatten_paths(program.layout).values()
    )


def _weight_bytes(program: Program) -> tuple[int, int]:
    """All weights of one device in the compute dtype, whole in their ZeRO dims; those of one layer
    of the stack with the larger ones.
    """
    everything, layers = 0, dict.fromkeys((DENSE_STACK, MOE_STACK), 0)
    for path, leaf in flatten_paths(program.layout).items():
        size = local_size(leaf, tensor=program.mesh.shape[TENSOR_AXIS])
        everything += size
        stack = path.partition(".")[0]
        if stack in layers:
            layers[stack] += size // leaf.logical[0]
    item = program.compute_dtype.itemsize
    return everything * item, max(layers.values()) * item


def _saved_bytes(program: Program) -> float:
    """Activations that the forward pass keeps for the backward pass."""
    run, config = program.run, program.run.model
    item, ranks = program.compute_dtype.itemsize, program.mesh.shape[TENSOR_AXIS]
    heads = local_heads(config, tensor=ranks)
    widths = config.hidden_size
    if run.remat != "full":
        widths += config.hidden_size + heads * config.value_head_dim + heads * 4 / item
    elif ranks > 1:
        widths += config.hidden_size
    if run.remat == "none":
        widths += heads * (2 * config.attention_head_dim + config.value_head_dim)
        widths += 2 * _ffn_width(program)
    return _token_bytes(program) * widths * config.num_hidden_layers


def _token_bytes(program: Program) -> int:
    """Bytes of one value for each token of a micro-batch on one device."""
    run = program.run
    return run.sequences_per_micro_batch * run.seq_len * program.compute_dtype.itemsize


def _ffn_width(program: Program) -> int:
    """Hidden values of a token's ffn on one device."""
    config, ranks = program.run.model, program.mesh.shape[TENSOR_AXIS]
    width = -(-config.intermediate_size // ranks) if config.num_dense_layers else 0
    if config.num_moe_layers:
        active = (config.num_experts_per_tok or 0) + config.n_shared_experts
        width = max(width, -(-active * (config.moe_intermediate_size or 0) // ranks))
    return width
