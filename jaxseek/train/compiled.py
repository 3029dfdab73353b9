"""The train step compiled: one way for the trainer and for the plan, so that what was planned is
what runs.
"""

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from jaxseek.train.state import Program
from jaxseek.train.step import StepBatch, make_train_step

Options = Mapping[str, str | bool | int]
# Without the latency-hiding scheduler XLA waits for every collective right where it starts it; with
# it, 14 % of the bytes of a dense ZeRO-3 step travel while products run, and 61 % where a layer's
# weights are gathered during the layer before (Coder-1.3B on 3x1, 0.2 GiB more memory). The second
# has a new name in new releases, and an unknown name is an error.
_GPU_OPTIONS: tuple[Options, ...] = tuple(
    {"xla_gpu_enable_latency_hiding_scheduler": True, **gather_ahead}
    for gather_ahead in (
        {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"},
        {"xla_gpu_enable_pipelined_all_gather": True},
    )
)


def compile_train_step(program: Program, *, options: Options = MappingProxyType({})) -> Compiled:
    """The train step of `program` for the devices of its mesh, which need not be here.

    Args:
        options: of the compiler, beside those of the platform.
    """
    lowered = make_train_step(program).lower(program.abstract_state, abstract_batch(program))
    if program.mesh.devices.flat[0].platform != "gpu":
        return lowered.compile(compiler_options=dict(options) or None)
    *newer, oldest = ({**choice, **options} for choice in _GPU_OPTIONS)
    for chosen in newer:
        try:
            return lowered.compile(compiler_options=chosen)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
    return lowered.compile(compiler_options=oldest)


def abstract_batch(program: Program) -> StepBatch:
    """Shape, dtype and sharding of the batch of one step."""
    run = program.run
    shape = (run.accumulation, run.sequences_per_step // run.accumulation, run.seq_len)
    row = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=program.batch_sharding)
    return StepBatch(row, row, row, row)
