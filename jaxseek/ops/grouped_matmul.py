"""Rows times the matrix of the group they belong to: what the experts of a MoE layer compute.

Letters: M rows, D model, F ffn, E experts. Rows are sorted by expert: a group is a run of rows.

The cost grows with the routed rows and with nothing else, and no array of size E x M exists, in
each of these forms:

- `kernel`: Pallas kernels for NVIDIA GPUs (`jaxseek/ops/grouped_kernel.py`).
- `loop`: loops over blocks of rows (`jaxseek/ops/grouped_loop.py`).
- `ragged_dot`: `jax.lax.ragged_dot`, on TPU. On CPU and CUDA it compiles to a dense masked product
  over all experts.

Which of them "auto" is depends on what the program is traced for, so that a process without a GPU
compiles the program that a GPU runs.
"""

import functools
from typing import TYPE_CHECKING, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

from jaxseek.ops.collectives import vary_like
from jaxseek.ops.grouped_loop import ExpertArrays, GroupedLoop
from jaxseek.ops.platform import target_platform
from jaxseek.ops.swiglu import swiglu

if TYPE_CHECKING:
    from jaxseek.ops.grouped_kernel import GroupedKernel

    GroupedProducts = GroupedLoop | GroupedKernel

Implementation = Literal["auto", "kernel", "kernel_interpreted", "loop", "ragged_dot"]

_AUTO_IMPLEMENTATION: dict[str, Implementation] = {
    "gpu": "kernel",
    "cuda": "kernel",
    "tpu": "ragged_dot",
}


def grouped_matmul(
    lhs: Array, rhs: Array, group_sizes: Array, *, implementation: Implementation = "auto"
) -> Array:
    """Each row of `lhs` times the matrix of its group.

    Args:
        lhs: [M, D] rows, those of group 0 first, then those of group 1 and so on.
        rhs: [E, D, F] one matrix per group.
        group_sizes: [E] int32 number of rows of each group. Their sum may be less than M (the rows
            past it give zeros and cost nothing); it must not be more.
        implementation: "kernel", "loop", "ragged_dot", or "auto" for the platform's best.
            "kernel_interpreted" is the kernel in Pallas' interpreter, which tests run on CPU.

    Returns:
        [M, F] in the dtype of `lhs`, accumulated in float32. Gradients flow to `lhs` and `rhs`;
        rows past the sum and groups without rows get zeros.

    Raises:
        ValueError: `implementation` is unknown.
    """
    assert lhs.shape[1] == rhs.shape[1] and group_sizes.shape == rhs.shape[:1]
    products = _products(implementation)
    if products is None:
        return _ragged_dot(lhs, rhs, group_sizes)
    return _matmul(products, *_same_axes(lhs, rhs, group_sizes))


def expert_mlp(
    x: Array,
    gate_w: Array,
    up_w: Array,
    down_w: Array,
    group_sizes: Array,
    *,
    row_weights: Array | None = None,
    implementation: Implementation = "auto",
) -> Array:
    """The experts of a MoE layer: w down(silu(gate x) * up x), each row through its own expert.

    The weight w of a row multiplies the F hidden values and not the D outputs: the same number, and
    less to keep for the backward pass.

    Source: DeepSeekMoE (arXiv:2401.06066, section 3); `DeepseekV3NaiveMoe` in transformers.

    Args:
        x: [M, D] rows sorted by expert.
        gate_w: [E, D, F].
        up_w: [E, D, F].
        down_w: [E, F, D].
        group_sizes: [E] int32 rows of each expert, as in `grouped_matmul`.
        row_weights: [M] float32; None is a weight of one.
        implementation: as in `grouped_matmul`.

    Returns:
        [M, D] in the dtype of `x`; products accumulate, and the activation is taken, in float32.

    Raises:
        ValueError: `implementation` is unknown.
    """
    assert gate_w.shape == up_w.shape and down_w.shape == (*gate_w.shape[:1], *gate_w.shape[:0:-1])
    assert x.shape[1] == gate_w.shape[1] and group_sizes.shape == gate_w.shape[:1]
    if row_weights is None:
        row_weights = jnp.ones(x.shape[:1], jnp.float32)
    products = _products(implementation)
    if products is None:
        hidden = swiglu(_ragged_dot(x, gate_w, group_sizes), _ragged_dot(x, up_w, group_sizes))
        hidden = (hidden * row_weights[:, None]).astype(x.dtype)
        return _ragged_dot(hidden, down_w, group_sizes)
    *arrays, group_sizes = _same_axes(x, gate_w, up_w, down_w, row_weights, group_sizes)
    return _expert_mlp(products, ExpertArrays(*arrays), group_sizes)


def _products(implementation: Implementation) -> "GroupedProducts | None":
    """What computes `implementation`; None is `jax.lax.ragged_dot`, which JAX differentiates."""
    if implementation == "auto":
        implementation = _AUTO_IMPLEMENTATION.get(target_platform(), "loop")
    match implementation:
        case "kernel" | "kernel_interpreted":
            # Only here: JAX 0.12 announces that Pallas' Triton backend will be removed, and that
            # shall not stop a program that has no use for it.
            from jaxseek.ops.grouped_kernel import GroupedKernel

            return GroupedKernel(interpret=implementation == "kernel_interpreted")
        case "loop":
            return GroupedLoop()
        case "ragged_dot":
            return None
    known = ", ".join(get_args(Implementation))
    raise ValueError(f"implementation {implementation!r} is none of {known}")


def _ragged_dot(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    product = jax.lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=jnp.float32)
    return product.astype(lhs.dtype)


def _same_axes(*values: Array) -> list[Array]:
    """The values, all varying over the same mesh axes, as loop carries inside a shard_map must."""
    return [vary_like(value, values) for value in values]


# The backward passes are written out: JAX differentiates neither a Pallas kernel that loops nor a
# loop of as many steps as the routing asks for.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(products: "GroupedProducts", lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    return products.matmul(lhs, rhs, group_sizes)


def _matmul_fwd(products: "GroupedProducts", *inputs: Array):
    return products.matmul(*inputs), inputs


def _matmul_bwd(products: "GroupedProducts", inputs: tuple[Array, ...], d_out: Array):
    lhs, rhs, group_sizes = inputs
    d_lhs = products.matmul_transposed(d_out, rhs, group_sizes)
    return d_lhs, products.weight_gradient(lhs, d_out, group_sizes), None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_mlp(products: "GroupedProducts", arrays: ExpertArrays, group_sizes: Array) -> Array:
    return products.mlp_forward(arrays, group_sizes)[0]


def _expert_mlp_fwd(products: "GroupedProducts", arrays: ExpertArrays, group_sizes: Array):
    out, gate, up = products.mlp_forward(arrays, group_sizes)
    return out, (arrays, group_sizes, gate, up)


def _expert_mlp_bwd(
    products: "GroupedProducts", saved: tuple[ExpertArrays, Array, Array, Array], d_out: Array
):
    arrays, group_sizes, gate, up = saved
    return products.mlp_backward(arrays, group_sizes, gate=gate, up=up, d_out=d_out), None


_expert_mlp.defvjp(_expert_mlp_fwd, _expert_mlp_bwd)
