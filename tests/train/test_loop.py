"""The loop around made-up steps: what it reads when, what it saves, when it gives up."""

import dataclasses
import io
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from jaxseek.data.packing import Batch
from jaxseek.errors import UserError
from jaxseek.train.loop import Training, run_steps
from jaxseek.train.step import EvalSums, StepMetrics
from tests.train.programs import LENGTH, stepper


class Recorder:
    """A training whose every event is written down in order."""

    def __init__(
        self,
        *,
        bad: tuple[int, ...] = (),
        empty: tuple[int, ...] = (),
        full: tuple[int, ...] = (),
        optim: dict | None = None,
        **run,
    ):
        program = stepper("llama").program
        settings = program.run
        settings = dataclasses.replace(
            settings, optim=dataclasses.replace(settings.optim, **(optim or {})), **run
        )
        self.events: list[str] = []
        self.lines: list[dict] = []
        self.bad, self.empty, self.full = bad, empty, full
        self.training = Training(
            program=dataclasses.replace(program, run=settings),
            step=self.step,
            evaluate=self.evaluate,
            loader=self,
            validation=SimpleNamespace(batches=[self.batch()]),
            text_fingerprint="text",
            source=None,
            folder=SimpleNamespace(log=self.log, path="folder"),
            store=SimpleNamespace(save=self.save, missing_room=self.missing_room),
            flops_per_token=1.0,
            peak_flops=None,
        )  # pyright: ignore[reportArgumentType]
        self.state = SimpleNamespace(to_dict=dict)

    def __next__(self) -> Batch:
        return self.batch()

    def batch(self) -> Batch:
        zeros = np.zeros((1, 12, LENGTH), np.int32)
        return Batch(tokens=zeros, labels=zeros, segment_ids=zeros, positions=zeros)

    def step(self, state, batch):
        number = state.step + 1
        self.events.append(f"dispatch {number}")
        one = np.float32(1)
        applied = np.bool_(number not in self.bad + self.empty)
        tokens = np.int32(0 if number in self.empty else 5)
        metrics = StepMetrics(one, one, tokens, one, one, applied, one)
        return SimpleNamespace(step=number), metrics

    def evaluate(self, state, batch) -> EvalSums:
        return EvalSums(np.float32(6), np.int32(4))

    def log(self, line):
        self.lines.append(line)
        self.events.append(f"{'log' if 'loss' in line else 'validate'} {line['step']}")

    def save(self, step, state, **_):
        assert state.step == step
        self.events.append(f"save {step}")

    def missing_room(self, state, *, saves) -> str | None:
        assert saves == 1
        return "the disk is full" if state.step in self.full else None

    def run(self, *, first: int = 0) -> str:
        """What it prints."""
        out = io.StringIO()
        run_steps(self.training, SimpleNamespace(step=first), console=Console(file=out, width=200))
        return out.getvalue()


def test_a_step_is_read_after_the_next_one_is_dispatched():
    recorder = Recorder(steps=3)
    recorder.run()
    assert recorder.events == [
        "dispatch 1", "dispatch 2", "log 1", "dispatch 3", "log 2", "log 3", "save 3",
    ]  # fmt: skip


def test_checkpoints_and_validations_come_every_so_many_steps_and_after_the_lines_of_theirs():
    run = stepper("llama").program.run
    recorder = Recorder(
        steps=5,
        checkpoint=dataclasses.replace(run.checkpoint, every=2),
        eval=dataclasses.replace(run.eval, every=2),
    )
    recorder.run()
    assert [e for e in recorder.events if not e.startswith("dispatch")] == [
        "log 1", "log 2", "save 2", "validate 2", "log 3", "log 4", "save 4", "validate 4",
        "log 5", "save 5",
    ]  # fmt: skip


def test_the_last_step_is_saved_once_where_two_rules_ask_for_it():
    run = stepper("llama").program.run
    recorder = Recorder(steps=4, checkpoint=dataclasses.replace(run.checkpoint, every=2))
    recorder.run()
    assert [e for e in recorder.events if e.startswith("save")] == ["save 2", "save 4"]


def test_a_checkpoint_for_which_there_is_no_room_is_left_out_with_a_word_but_the_last_is_tried():
    run = stepper("llama").program.run
    recorder = Recorder(
        steps=4, full=(2, 4), checkpoint=dataclasses.replace(run.checkpoint, every=1)
    )
    printed = recorder.run()
    assert [e for e in recorder.events if e.startswith("save")] == ["save 1", "save 3", "save 4"]
    said = [line for line in printed.splitlines() if "saved" in line]
    assert said == ["step 2 is not saved: the disk is full"]


def test_stop_after_ends_early_with_a_checkpoint_and_says_how_to_go_on():
    recorder = Recorder(steps=6, stop_after=2)
    printed = recorder.run()
    assert recorder.events[-1] == "save 2"
    assert "stopped after step 2 of 6" in printed and "--resume folder" in printed


def test_a_resumed_loop_counts_on():
    recorder = Recorder(steps=5)
    recorder.run(first=3)
    assert [line["step"] for line in recorder.lines] == [4, 5]


def test_steps_that_are_not_applied_are_logged_and_a_good_one_resets_the_count():
    recorder = Recorder(steps=6, bad=(1, 2, 4, 5), optim={"max_bad_steps": 3})
    recorder.run()
    assert [line["applied"] for line in recorder.lines] == [False, False, True] * 2


def test_steps_without_labels_are_neither_good_nor_bad():
    recorder = Recorder(steps=6, bad=(1, 5), empty=(2, 3, 4), optim={"max_bad_steps": 3})
    recorder.run()
    assert len(recorder.lines) == 6
    recorder = Recorder(steps=6, bad=(1, 3), empty=(2,), optim={"max_bad_steps": 2})
    with pytest.raises(UserError, match="step 3: 2 steps in a row"):
        recorder.run()


def test_too_many_bad_steps_in_a_row_end_the_run_with_a_checkpoint_to_go_on_from():
    """Step 6 runs already when step 5 is read; it may be a good one, and is in the checkpoint."""
    for bad in ((3, 4, 5, 6, 7, 8, 9), (3, 4, 5)):
        recorder = Recorder(steps=9, bad=bad, optim={"max_bad_steps": 3})
        with pytest.raises(
            UserError, match=r"step 5: 3 steps in a row .* from step 6, .* --resume folder"
        ):
            recorder.run()
        assert recorder.events[-3:] == ["log 5", "log 6", "save 6"]


def test_bad_steps_that_end_at_a_checkpoint_are_saved_once():
    run = stepper("llama").program.run
    recorder = Recorder(
        steps=9,
        bad=(3, 4),
        optim={"max_bad_steps": 2},
        checkpoint=dataclasses.replace(run.checkpoint, every=4),
    )
    with pytest.raises(UserError, match="from step 4"):
        recorder.run()
    assert recorder.events[-2:] == ["log 4", "save 4"]
