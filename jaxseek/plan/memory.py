"""A formula for what a step needs beside its state, for choices that are not compiled.

It says which of them are worth compiling, and where the search for the largest micro-batch begins.
The terms are what the program keeps (Korthikanti et al., arXiv:2205.05198, for the activations);
their weights are fitted to compiled programs, and a test holds the sum against others.
"""

import math

from jaxseek.layout import LeafLayout, flatten_paths
from jaxseek.mesh import TENSOR_AXIS
from jaxseek.model import DENSE_STACK, MOE_STACK
from jaxseek.plan.theory import local_heads, local_size
from jaxseek.train.state import Program

# Layers whose weights are whole at the same time, with their gradients: the next one's are
# gathered while one computes.
_WHOLE_LAYERS = 3.0
# Arrays as large as the widest activation of a layer that its backward pass holds at once.
_WIDE_ARRAYS = 5.0


def temporaries_bytes(program: Program) -> int:
    """Gradients, gathered weights and activations on one device, in bytes."""
    return round(
        gradient_bytes(program)
        + _weight_bytes(program)
        + _saved_bytes(program)
        + _working_bytes(program)
    )


def gradient_bytes(program: Program) -> int:
    """Gradients as they are stored: float32, split like the parameters."""
    return sum(
        4 * math.prod(leaf.stored) // math.prod(program.mesh.shape[a] for a in leaf.split_axes())
        for leaf in flatten_paths(program.layout).values()
    )


def _weight_bytes(program: Program) -> float:
    """Weights in the compute dtype and their gradients before they are scattered."""
    item, ranks = program.compute_dtype.itemsize, program.mesh.shape[TENSOR_AXIS]
    outside, layer, everything = 0, 0, 0
    layouts = flatten_paths(program.layout)
    per_layer: dict[str, int] = {}
    for path, leaf in layouts.items():
        size = local_size(leaf, tensor=ranks) * item
        everything += size
        stack = path.partition(".")[0]
        if stack in (DENSE_STACK, MOE_STACK):
            per_layer[stack] = per_layer.get(stack, 0) + size // leaf.logical[0]
        elif leaf.logical != leaf.stored or _is_matrix(leaf):
            outside += size
    layer = max(per_layer.values(), default=0)
    if program.zero == 3:
        return 2 * outside + _WHOLE_LAYERS * layer
    return 2 * everything if program.zero else everything


def _saved_bytes(program: Program) -> float:
    """Activations that the forward pass keeps for the backward pass."""
    run, config = program.run, program.run.model
    item, ranks = program.compute_dtype.itemsize, program.mesh.shape[TENSOR_AXIS]
    tokens = run.sequences_per_micro_batch * run.seq_len
    heads = local_heads(config, tensor=ranks)
    widths = config.hidden_size
    if run.remat != "full":
        widths += config.hidden_size + heads * config.value_head_dim + heads * 4 / item
    elif ranks > 1:
        widths += config.hidden_size
    if run.remat == "none":
        widths += heads * (2 * config.attention_head_dim + config.value_head_dim)
        widths += 2 * _ffn_width(program)
    return tokens * item * widths * config.num_hidden_layers


def _working_bytes(program: Program) -> float:
    """What one layer's backward pass holds for a while."""
    run, config = program.run, program.run.model
    item, ranks = program.compute_dtype.itemsize, program.mesh.shape[TENSOR_AXIS]
    tokens = run.sequences_per_micro_batch * run.seq_len
    heads = local_heads(config, tensor=ranks)
    widest = max(config.hidden_size, heads * config.attention_head_dim, _ffn_width(program))
    return _WIDE_ARRAYS * tokens * item * widest


def _ffn_width(program: Program) -> int:
    """Hidden values of a token's ffn on one device."""
    config, ranks = program.run.model, program.mesh.shape[TENSOR_AXIS]
    width = -(-config.intermediate_size // ranks) if config.num_dense_layers else 0
    if config.num_moe_layers:
        active = (config.num_experts_per_tok or 0) + config.n_shared_experts
        width = max(width, -(-active * (config.moe_intermediate_size or 0) // ranks))
    return width


def _is_matrix(leaf: LeafLayout) -> bool:
    return len(leaf.logical) > 1
