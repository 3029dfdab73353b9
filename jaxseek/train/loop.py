"""The training loop: dispatch a step, then read the metrics of the one before, so that the devices
never wait for Python.
"""

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxseek.checkpoint import CheckpointStore
from jaxseek.data.loader import Loader, ValidationSet
from jaxseek.data.packing import Batch
from jaxseek.errors import UserError
from jaxseek.run_file import dump_config
from jaxseek.schema import to_values
from jaxseek.train.console import RunProgress
from jaxseek.train.run_folder import RunFolder
from jaxseek.train.state import Program, TrainState
from jaxseek.train.step import EvalSums, StepBatch, StepMetrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Everything the loop works with.

    Attributes:
        step, evaluate: the compiled programs.
        text_fingerprint: of what the loader reads; a resumed run must read the same.
        source: what is known of the Hugging Face folder that the weights came from, for an export;
            `None` where they came from none.
        flops_per_token: of the model, forward and backward.
        peak_flops: of all devices together, or `None` where it is not known.
    """

    program: Program
    step: Callable[[TrainState, StepBatch], tuple[TrainState, StepMetrics]]
    evaluate: Callable[[TrainState, StepBatch], EvalSums]
    loader: Loader
    validation: ValidationSet
    text_fingerprint: str
    source: dict[str, Any] | None
    folder: RunFolder
    store: CheckpointStore
    flops_per_token: float
    peak_flops: float | None


def run_steps(training: Training, state: TrainState, *, console: Console) -> TrainState:
    """Run to the last step, or to `stop_after`, or until the process is told to stop; end with a
    checkpoint.

    Raises:
        UserError: after `optim.max_bad_steps` steps in a row without a finite gradient; the
            checkpoint is saved all the same.
    """
    run = training.program.run
    first, last = int(state.step), run.stop_after or run.steps
    with RunProgress(console, first=first, steps=run.steps) as progress, _stop_signal() as stopped:
        meter = _Meter(training, progress)
        for step in range(first + 1, last + 1):
            state, metrics = training.step(
                state, device_batch(training.program, next(training.loader))
            )
            meter.read_previous()
            meter.dispatched(step, metrics)
            if stopped.is_set() or meter.gave_up_at:
                last = step
            saves, validates = _due(step, run.checkpoint.every), _due(step, run.eval.every)
            if step == last or saves or validates:
                meter.read_previous()
            if meter.gave_up_at:
                last = step
            if step == last or saves:
                problem = None if step == last else training.store.missing_room(state, saves=1)
                if problem is None:
                    save(training, state, step=step)
                else:  # Hours of work may follow, and somebody who makes room.
                    console.print(f"step {step} is not saved: {problem}")
            if step == last:
                break
            if validates:
                evaluate(training, state, step=step)
                meter.restart_clock()
    if meter.gave_up_at:
        raise UserError(
            f"step {meter.gave_up_at}: {run.optim.max_bad_steps} steps in a row had no finite "
            "gradient; all were skipped. Lower optim.learning_rate or look at the data of these "
            f"steps, then go on from step {last}, which is saved, with --resume "
            f"{training.folder.path}"
        )
    if last < run.steps:
        console.print(
            f"stopped after step {last} of {run.steps}; go on with --resume {training.folder.path}"
        )
    return state


def save(training: Training, state: TrainState, *, step: int) -> None:
    """Begin a checkpoint of everything the run needs to go on exactly: arrays, config, position in
    the data and which data.
    """
    run = training.program.run
    metadata = {
        "config": dump_config(run),
        "model": to_values(run.model),
        "source": training.source,
        "data": training.loader.state.to_dict(),
        "text": training.text_fingerprint,
    }
    training.store.save(
        step, state, logical_shapes=training.program.logical_shapes, metadata=metadata
    )


def evaluate(training: Training, state: TrainState, *, step: int) -> float:
    """Mean loss over the validation set in nats per token: sum of losses over sum of tokens,
    whatever the batch size.
    """
    loss, tokens = 0.0, 0
    for batch in training.validation.batches:
        sums = training.evaluate(state, device_batch(training.program, batch))
        loss, tokens = loss + float(sums.loss), tokens + int(sums.tokens)
    mean = loss / tokens
    training.folder.log({"step": step, "val_loss": mean, "val_tokens": tokens})
    return mean


def device_batch(program: Program, batch: Batch) -> StepBatch:
    """Host arrays [batch, T] or [accumulation, batch, T] to the devices, the batch split over the
    data axis.
    """
    arrays = (batch.tokens, batch.labels, batch.segment_ids, batch.positions)
    shaped = (x if x.ndim == 3 else x[None] for x in arrays)
    return StepBatch(
        *(jax.device_put(np.ascontiguousarray(x), program.batch_sharding) for x in shaped)
    )


class _Meter:
    """Reads the metrics of a step after the next one is dispatched, and writes them down.

    Attributes:
        gave_up_at: the step with which `optim.max_bad_steps` in a row were bad, or `None`.
    """

    def __init__(self, training: Training, progress: RunProgress):
        self._training = training
        self._progress = progress
        self._pending: tuple[int, StepMetrics] | None = None
        self._bad_steps = 0
        self.gave_up_at: int | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        """Let the next step's time begin now; what happened since the last one was not training."""
        self._last = time.perf_counter()

    def dispatched(self, step: int, metrics: StepMetrics) -> None:
        """Remember the metrics of a step that runs now."""
        self._pending = step, metrics

    def read_previous(self) -> None:
        """Wait for the remembered step, and log it."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        metrics = jax.device_get(metrics)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        line = self._line(step, metrics, seconds)
        self._training.folder.log(line)
        self._progress.update(
            step=step,
            loss=line["loss"],
            tokens_per_second=line["tokens_per_second"],
            seconds=seconds,
        )
        self._count_bad(step, metrics)

    def _line(self, step: int, metrics: StepMetrics, seconds: float) -> dict[str, Any]:
        run, peak = self._training.program.run, self._training.peak_flops
        rate = run.tokens_per_step / seconds
        return {
            "step": step,
            "loss": float(metrics.loss),
            "tokens": int(metrics.tokens),
            "tokens_per_second": rate,
            "learning_rate": float(metrics.learning_rate),
            "grad_norm": float(metrics.grad_norm),
            "step_seconds": seconds,
            "mfu": None if peak is None else rate * self._training.flops_per_token / peak,
            "balance_loss": float(metrics.balance),
            "expert_load": float(metrics.load),
            "applied": bool(metrics.applied),
        }

    def _count_bad(self, step: int, metrics: StepMetrics) -> None:
        if metrics.tokens == 0:  # skipped too, but neither good nor bad
            return
        self._bad_steps = 0 if metrics.applied else self._bad_steps + 1
        if self._bad_steps == self._training.program.run.optim.max_bad_steps:
            self.gave_up_at = step


@contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """An event that SIGTERM sets: the step in hand is finished and saved. A second signal ends the
    process at once.
    """
    stopped = threading.Event()

    def handle(number, frame):
        stopped.set()
        signal.signal(number, signal.SIG_DFL)

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGTERM, before)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
