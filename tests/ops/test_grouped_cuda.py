"""The lane `-m cuda`: the experts of DeepSeek-V2-Lite for 8192 tokens, forward and backward,
compiled for GPUs that are not here.
"""

import functools
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxseek import devices as known
from jaxseek.mesh import DATA_AXIS, MeshShape
from jaxseek.ops.dispatch import combine, dispatch, dispatch_weights, plan_dispatch
from jaxseek.ops.grouped_matmul import expert_mlp
from jaxseek.ops.grouped_program import (
    down_backward_kernel,
    gate_up_kernel,
    rows_kernel,
    weight_gradients_kernel,
)
from jaxseek.plan.compilation import has_cuda_wheels, planning_mesh

pytestmark = pytest.mark.cuda

TOKENS, ACTIVE, EXPERTS, DIM, FFN = 8192, 6, 64, 2048, 1408
MIB = 2**20
OPTIONS = {"xla_gpu_autotune_level": 0}  # tuning runs kernels
KERNELS = gate_up_kernel, rows_kernel, down_backward_kernel, weight_gradients_kernel
# Of a block, by the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SHARED_BYTES = {"a100-80gb": 163 * 1024, "rtx4090": 99 * 1024, "h100": 227 * 1024}


@pytest.fixture(autouse=True)
def wheels(monkeypatch):
    assert has_cuda_wheels(), "this lane needs JAX's CUDA wheels: pip install 'jaxseek[cuda12]'"
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def moe_layer(x, weights, expert_ids, gate_w, up_w, down_w):
    """The routed experts as `jaxseek.layers.moe.MoE` computes them."""
    plan = plan_dispatch(expert_ids, first=0, count=EXPERTS)
    row_weights = dispatch_weights(weights, plan)
    rows = expert_mlp(
        dispatch(x, plan), gate_w, up_w, down_w, plan.group_sizes, row_weights=row_weights
    )
    return combine(rows, plan)


def step(x, d_out, weights, expert_ids, *expert_weights):
    def run(x, weights, *expert_weights):
        return moe_layer(x, weights, expert_ids, *expert_weights)

    out, pullback = jax.vjp(run, x, weights, *expert_weights)
    return out, pullback(d_out)


def lower(gpu, *, dtype=jnp.bfloat16, devices=1, tokens=TOKENS):
    """The step on `devices` GPUs that split the tokens, inside a shard_map that checks types."""
    mesh = planning_mesh(
        MeshShape(data=devices, tensor=1),
        fleet=known.Fleet.parse(f"{devices}x{gpu}"),
        target="cuda",
    )
    split, whole = PartitionSpec(DATA_AXIS), PartitionSpec()

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    tokens = tokens * devices
    arguments = (
        *[array((tokens, DIM), dtype, split)] * 2,
        array((tokens, ACTIVE), jnp.float32, split),
        array((tokens, ACTIVE), jnp.int32, split),
        *[array((EXPERTS, DIM, FFN), dtype, whole)] * 2,
        array((EXPERTS, FFN, DIM), dtype, whole),
    )
    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(split, split, split, split, whole, whole, whole),
        out_specs=(split, (split, split, whole, whole, whole)),
    )
    return jax.jit(sharded).lower(*arguments)


@functools.cache
def compiled_layer(gpu, dtype, tokens):
    """Bytes of temporaries, and of the shared memory of every kernel's block by the kernel."""
    jax.config.update("jax_enable_compilation_cache", False)  # a program from there is not dumped
    with tempfile.TemporaryDirectory() as dump:
        program = lower(gpu, dtype=dtype, tokens=tokens).compile(
            compiler_options={**OPTIONS, "xla_dump_to": dump, "xla_dump_hlo_as_text": True}
        )
        [thunks] = Path(dump).glob("*thunk_sequence.txt")
        sizes = re.findall(r" (\w+_kernel)\w* .*shared_memory: (\d+) bytes", thunks.read_text())
    jax.config.update("jax_enable_compilation_cache", True)
    shared = {kernel: max(int(n) for k, n in sizes if k == kernel) for kernel, _ in sizes}
    return program.memory_analysis().temp_size_in_bytes, shared


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("gpu", list(SHARED_BYTES))
def test_the_kernels_fit_the_shared_memory_of_a_block(gpu, dtype):
    _, shared = compiled_layer(gpu, dtype, TOKENS)
    assert set(shared) == {kernel.__name__ for kernel in KERNELS}
    assert max(shared.values()) <= SHARED_BYTES[gpu]


@pytest.mark.parametrize("gpu", list(SHARED_BYTES))
def test_a_layer_takes_three_quarters_of_a_gibibyte_of_temporaries(gpu):
    """The rows of x and of d_out [M, D], gate, up and hidden [M, F], and little else."""
    temporaries, _ = compiled_layer(gpu, jnp.bfloat16, TOKENS)
    rows = TOKENS * ACTIVE
    assert temporaries < 2 * (2 * rows * DIM + 3 * rows * FFN) < 800 * MIB


def test_half_the_tokens_take_half_the_temporaries():
    half, whole = (
        compiled_layer("rtx4090", jnp.bfloat16, tokens)[0] for tokens in (TOKENS // 2, TOKENS)
    )
    assert 0.48 * whole < half < 0.52 * whole


def test_the_weights_gradients_of_split_tokens_are_summed_over_the_gpus():
    text = lower("rtx4090", devices=3, tokens=256).compile(compiler_options=OPTIONS).as_text()
    assert "all-reduce" in text and text.count("__gpu$xla.gpu.triton") == 6


@pytest.mark.parametrize("gpu", list(known.devices()))
def test_every_known_gpu_gets_the_kernels(gpu):
    text = lower(gpu, tokens=256).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 6
