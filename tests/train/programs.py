"""Small compiled runs for the tests of the train step, made once per process."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxseek import layout as layouts
from jaxseek.config import ModelConfig
from jaxseek.mesh import make_mesh
from jaxseek.run_config import OptimConfig, RouterConfig, RunConfig
from jaxseek.train.state import Program, TrainState, init_state, logical_params, make_program
from jaxseek.train.step import StepBatch, StepMetrics, make_train_step
from tests.tiny import TINY

BATCH, LENGTH = 12, 16
ALPHA, GAMMA = 0.01, 0.02
BALANCE = RouterConfig(balance_alpha=ALPHA, bias_update_speed=GAMMA)
OPTIM = OptimConfig(learning_rate=1e-2, warmup_steps=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stepper:
    """A program with its compiled step."""

    program: Program
    step: Callable[[TrainState, StepBatch], tuple[TrainState, StepMetrics]]

    def init(self) -> TrainState:
        return init_state(self.program)

    def batch(self, tokens: np.ndarray, labels: np.ndarray) -> StepBatch:
        """Whole rows [batch, T], each one document, as the micro-batches of a step."""
        ones = np.ones_like(tokens)
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        shape = (self.program.run.accumulation, -1, tokens.shape[1])
        return StepBatch(
            *(
                jax.device_put(np.ascontiguousarray(x.reshape(shape)), self.program.batch_sharding)
                for x in (tokens, labels, ones, positions)
            )
        )

    def run(self, state: TrainState, *batches: StepBatch) -> tuple[TrainState, list[StepMetrics]]:
        """One step per batch; metrics on the host."""
        metrics = []
        for batch in batches:
            state, out = self.step(state, batch)
            metrics.append(jax.device_get(out))
        return state, metrics


@functools.cache
def stepper(
    model: str | ModelConfig,
    *,
    optim: OptimConfig = OPTIM,
    router: RouterConfig = BALANCE,
    **run: Any,
) -> Stepper:
    """A tiny model, by its name in `TINY` or its config, in float32 on one device unless `run` says
    otherwise.
    """
    settings = {"dtype": "float32", "remat": "none", "steps": 8, "batch": BATCH, "seq_len": LENGTH}
    config = RunConfig(
        model=TINY[model] if isinstance(model, str) else model,
        optim=optim,
        router=router,
        **(settings | run),
    )
    program = make_program(config, make_mesh(config.mesh_shape))
    return Stepper(program=program, step=make_train_step(program))


def rows(*, batch: int = BATCH, vocab: int = 131, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and labels [batch, T]; row i has no label at its first i positions."""
    tokens = np.random.default_rng(seed).integers(0, vocab, (batch, LENGTH + 1)).astype(np.int32)
    labels = tokens[:, 1:].copy()
    for row in range(batch):
        labels[row, :row] = -100
    return np.ascontiguousarray(tokens[:, :-1]), labels


def params_of(stepper: Stepper, state: TrainState) -> dict[str, np.ndarray]:
    """Logical parameters on the host, by path."""
    return layouts.flatten_paths(logical_params(stepper.program, state))


def moments_of(stepper: Stepper, state: TrainState) -> dict[str, np.ndarray]:
    """Adam's logical first moments on the host, by path."""
    unpadded = jax.tree.map(
        lambda x, leaf: leaf.unpad(np.array(x)), state.opt_state[0].mu, stepper.program.layout
    )
    return layouts.flatten_paths(unpadded)
