"""The least that a train step has to send, and what its state takes: by layout alone, without
compiling.

N devices on an axis, P bytes of parameters in the compute dtype (ZeRO, arXiv:1910.02054):

* ZeRO 0: an all-reduce of the gradients, 2 P (N-1)/N a step;
* ZeRO 1: reduce-scatter and all-gather, 2 P (N-1)/N a step; ZeRO 2 scatters per micro-batch;
* ZeRO 3: layers gather twice (forward, backward) and scatter once per micro-batch, 3 P (N-1)/N;
  what is used in one place only (embedding, head, last norm) gathers once, and so does a layer that
  is its stack's only one, because XLA merges the two gathers;
* tensor parallel (Megatron-LM, arXiv:1909.08053): per layer and micro-batch two all-reduces of the
  activations forward and two backward, and one each for the embedding and the head.

A tensor dim counts as the most loaded device has it: three devices share 64 experts as 22, 22 and
20, and no smaller share is possible. ZeRO dims count without padding.
"""

import math

import jax

from jaxseek.config import ModelConfig
from jaxseek.layout import LeafLayout, flatten_paths, tensor_dims
from jaxseek.mesh import DATA_AXIS, TENSOR_AXIS
from jaxseek.model import DENSE_STACK, MOE_STACK
from jaxseek.train.state import Program

WireBytes = dict[str, dict[str, int]]


def minimum_wire_bytes(program: Program) -> WireBytes:
    """`{axis: {kind: bytes}}` that one GPU has to send in a step; axes joined by `+`."""
    total: WireBytes = {}
    item = program.compute_dtype.itemsize
    for path, leaf in flatten_paths(program.layout).items():
        axes = _reduced_axes(leaf, zero=program.zero)
        ways = math.prod(program.mesh.shape[axis] for axis in axes)
        if ways == 1:
            continue
        share = local_size(leaf, tensor=program.mesh.shape[TENSOR_AXIS]) * item * (ways - 1) / ways
        gathers = 2 if _in_deep_stack(path, leaf) else 1
        for kind, times in _transfers(program, gathers=gathers).items():
            _add(total, "+".join(axes), kind, share * times)
    ranks = program.mesh.shape[TENSOR_AXIS]
    if ranks > 1:
        config, run = program.run.model, program.run
        tokens = run.sequences_per_micro_batch * run.seq_len
        activations = tokens * config.hidden_size * item
        times = (4 * config.num_hidden_layers + 2) * run.accumulation
        _add(total, TENSOR_AXIS, "all-reduce", 2 * activations * (ranks - 1) / ranks * times)
    return total


def state_bytes(program: Program) -> int:
    """Bytes of parameters and optimizer state on one device, padding included."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(program.abstract_state)
    )


def local_size(leaf: LeafLayout, *, tensor: int) -> int:
    """Values of a parameter that the most loaded tensor rank computes with, whole in the ZeRO
    dim.
    """
    shape = list(leaf.logical)
    if leaf.tensor_dim is not None:
        shape[leaf.tensor_dim] = math.ceil(shape[leaf.tensor_dim] / tensor)
    return math.prod(shape)


def local_heads(config: ModelConfig, *, tensor: int) -> int:
    """Query heads that the most loaded tensor rank computes with: three ranks share two kv heads of
    six query heads each as 6, 6 and 0.
    """
    if config.is_mla:
        return math.ceil(config.num_attention_heads / tensor)
    kv_heads = config.num_key_value_heads
    group = config.num_attention_heads // kv_heads
    if "kv_heads" in tensor_dims(config, tensor):
        return math.ceil(kv_heads / tensor) * group
    return kv_heads * math.ceil(group / tensor)


def _reduced_axes(leaf: LeafLayout, *, zero: int) -> tuple[str, ...]:
    """The axes over which a gradient has to be summed."""
    if zero:
        return leaf.zero_axes
    split = leaf.split_axes()
    return tuple(
        axis for axis in (DATA_AXIS, TENSOR_AXIS) if axis in leaf.model_axes and axis not in split
    )


def _transfers(program: Program, *, gathers: int) -> dict[str, int]:
    """How often a step gathers a parameter and reduces its gradient, by kind of collective.

    Args:
        gathers: of one micro-batch under ZeRO 3.
    """
    zero, accumulation = program.zero, program.run.accumulation
    if zero == 0:
        return {"all-reduce": 2}  # each is a scatter and a gather
    if zero < 3:
        return {"all-gather": 1, "reduce-scatter": 1 if zero == 1 else accumulation}
    return {"all-gather": gathers * accumulation, "reduce-scatter": accumulation}


def _in_deep_stack(path: str, leaf: LeafLayout) -> bool:
    return path.partition(".")[0] in (DENSE_STACK, MOE_STACK) and leaf.logical[0] > 1


def _add(total: WireBytes, axis: str, kind: str, amount: float) -> None:
    kinds = total.setdefault(axis, {})
    kinds[kind] = kinds.get(kind, 0) + round(amount)
