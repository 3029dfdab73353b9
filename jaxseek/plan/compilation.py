"""The project's own train step, compiled for GPUs that are not here.

With JAX's CUDA wheels the program is the one that the GPUs would run: XLA compiles for a described
chip and needs no driver. Without them the same step is compiled for emulated CPU devices, which
says about as much about memory as an estimate does. Either way no array is made.
"""

import dataclasses
import importlib.util
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from jaxseek.devices import Device, Fleet
from jaxseek.mesh import DATA_AXIS, TENSOR_AXIS, MeshShape, emulate_devices, make_mesh
from jaxseek.run_config import RunConfig

if TYPE_CHECKING:
    import jax

    from jaxseek.train.state import Program

Target = Literal["cuda", "cpu"]
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# Autotuning runs kernels, which takes a GPU. And since no kernel will run, none need be fast: what
# they compute and where their results lie is settled before LLVM and ptxas see them.
_WITHOUT_GPU: Mapping[str, str | bool | int] = {
    "xla_gpu_autotune_level": 0,
    "xla_backend_optimization_level": 0,
    "xla_gpu_disable_gpuasm_optimizations": True,
}
# Where the state alone is too large, no product done again would make the step fit.
_HOPELESS: Mapping[str, str | bool | int] = {"xla_disable_hlo_passes": "rematerialization"}
# JAX 0.12 lowers Pallas kernels for a described GPU only if its name contains one that it knows
# (jax/_src/pallas/triton/gpu_info.py), and of the name it wants nothing but the capability.
_NAMES_OF_CAPABILITY = {8.6: "NVIDIA A10", 8.9: "NVIDIA L4", 12.0: "NVIDIA RTX PRO 6000"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A compiled train step and XLA's own account of one device's memory.

    Attributes:
        state_bytes: arguments: parameters, optimizer state and the batch.
        temporaries_bytes: gradients, activations, gathered weights.
        unaliased_bytes: results that are not written over arguments.
        text: the scheduled HLO.
        seconds: of lowering and compiling.
    """

    state_bytes: int
    temporaries_bytes: int
    unaliased_bytes: int
    text: str
    seconds: float

    @property
    def total_bytes(self) -> int:
        """What one device holds at the worst moment."""
        return self.state_bytes + self.temporaries_bytes + self.unaliased_bytes


def prepare(fleet: Fleet) -> Target:
    """Set up the process to compile for `fleet`, before JAX is imported; what it can compile for.

    Raises:
        UserError: when JAX runs already and shows too few devices to emulate the fleet.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU of this machine stays free
    # XLA reports a program that does not fit as an error of its own; here it is a result.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if has_cuda_wheels():
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        return "cuda"
    emulate_devices(fleet.count)
    return "cpu"


def has_cuda_wheels() -> bool:
    """Whether JAX's CUDA plugin is installed."""
    return any(importlib.util.find_spec(name) is not None for name in _CUDA_PLUGINS)


def planning_mesh(shape: MeshShape, *, fleet: Fleet, target: Target) -> "jax.sharding.Mesh":
    """A mesh of `fleet`'s GPUs to compile for, or of emulated CPU devices."""
    if target == "cpu":
        return make_mesh(shape)
    import jax
    import numpy as np
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=chip_description(fleet.device),
        topology=f"1x1x{shape.devices}",
    )
    return jax.sharding.Mesh(
        np.array(topology.devices).reshape(shape.data, shape.tensor),
        (DATA_AXIS, TENSOR_AXIS),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )


def planning_program(run: RunConfig, *, fleet: Fleet, target: Target) -> "Program":
    """The program of a run on GPUs that need not be here."""
    from jaxseek.train.state import make_program

    return make_program(run, planning_mesh(run.mesh_shape, fleet=fleet, target=target))


def compile_step(
    program: "Program", *, target: Target, usable_bytes: float | None = None
) -> CompiledStep:
    """Compile the train step of `program` from abstract arrays.

    Args:
        usable_bytes: of one GPU; a state that is larger spares XLA the search for memory to save.
    """
    from jaxseek.plan.theory import state_bytes
    from jaxseek.train.compiled import compile_train_step

    started = time.perf_counter()
    options: Mapping[str, str | bool | int] = {}
    if target == "cuda":
        hopeless = usable_bytes is not None and state_bytes(program) > usable_bytes
        options = {**_WITHOUT_GPU, **(_HOPELESS if hopeless else {})}
    compiled = compile_train_step(program, options=options)
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    assert memory is not None
    return CompiledStep(
        state_bytes=memory.argument_size_in_bytes,
        temporaries_bytes=memory.temp_size_in_bytes,
        unaliased_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        text=compiled.as_text() or "",
        seconds=seconds,
    )


def chip_description(device: Device) -> str:
    """A GPU as XLA's `GpuTargetConfigProto`, in text form: what XLA reads off a real one."""
    major, minor = divmod(round(device.compute_capability * 10), 10)
    # On a GPU XLA compiles for the chip's own instruction set from Hopper on, sm_90a.
    extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_core": device.shared_kib * 1024,
        "shared_memory_per_block_optin": (device.shared_kib - 1) * 1024,
        "threads_per_core_limit": device.threads,
        "core_count": device.multiprocessors,
        "fpus_per_core": 64 if (major, minor) == (8, 0) else 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": round(device.memory_gb_s * 1e9),
        "l2_cache_size": device.l2_mib * 2**20,
        "clock_rate_ghz": device.clock_ghz,
        "device_memory_size": device.cuda_memory_mib * 2**20,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
    }
    fields = " ".join(f"{key}: {value}" for key, value in info.items())
    known = _NAMES_OF_CAPABILITY.get(device.compute_capability)
    name = f"{device.name} [{known}]" if known else device.name
    return (
        f"gpu_device_info {{ {fields} "
        f"cuda_compute_capability {{ major: {major} minor: {minor} "
        f"feature_extension: {extension} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 2 } '
        f'device_description_str: "{name}"'
    )
