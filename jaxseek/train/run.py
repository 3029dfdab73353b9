"""A training run from arguments to run folder, top to bottom."""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxseek import compilation_cache
from jaxseek.checkpoint import CheckpointStore
from jaxseek.data.loader import Loader, LoaderState
from jaxseek.errors import UserError
from jaxseek.flops import model_flops_per_token, peak_flops
from jaxseek.layout import check_layout
from jaxseek.mesh import make_mesh
from jaxseek.model import parameter_count
from jaxseek.ops.attention import choose_implementation
from jaxseek.paths import CHECKPOINTS, TOKENIZER, cache_dir
from jaxseek.run_config import RunConfig
from jaxseek.train.cli import Invocation
from jaxseek.train.compiled import compile_train_step
from jaxseek.train.console import perplexity
from jaxseek.train.loop import Training, evaluate, run_steps
from jaxseek.train.pretrained import Pretrained, open_pretrained
from jaxseek.train.run_folder import RunFolder, check_new, default_path
from jaxseek.train.sample import sample_text
from jaxseek.train.state import (
    Program,
    TrainState,
    init_state,
    make_program,
    state_from_params,
)
from jaxseek.train.step import make_eval_step
from jaxseek.train.text import TrainingText, prepare_text

_SAMPLE_PROMPT, _SAMPLE_TOKENS = "def ", 80
# What may differ from the saved run when it is resumed; all else would make it another run.
_RESUMABLE = ("mesh", "zero", "steps", "stop_after", "accumulation", "batch", "remat", "dtype")
_RESUMABLE_SECTIONS = ("optim.", "eval.", "checkpoint.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Start:
    """What a run begins with.

    Attributes:
        position: in the data.
        source: of the weights, as `Pretrained.source`.
    """

    state: TrainState
    position: LoaderState
    source: dict[str, Any] | None


def train(invocation: Invocation) -> None:
    """Train as `invocation` says and leave a run folder behind.

    Raises:
        UserError: for everything a person can mend, before the run folder is made.
    """
    console = Console(highlight=False)
    run = invocation.run
    _check_resume(invocation)
    path = (invocation.resume or invocation.out or default_path(run)).expanduser().absolute()
    if invocation.resume is None:
        check_new(path)
    weights = open_pretrained(run) if run.init_from and invocation.resume is None else None
    program = make_program(run, make_mesh(run.mesh_shape))
    _say_devices(program, console)
    console.print(
        f"reading {run.data.source}, with tokenizer {run.data.tokenizer or 'trained on it'}"
    )
    text = prepare_text(run, saved_tokenizer=_saved_tokenizer(invocation))
    compilation_cache.enable(cache_dir() / "jax")
    with CheckpointStore(path / CHECKPOINTS, keep=run.checkpoint.keep) as store:
        _check_room(program, store)
        if weights is None:
            start = _begin(invocation, program, text, store=store, console=console)
        else:
            start = _begin_with(weights, program, console)
        state = start.state
        with _loader(run, text, start.position) as loader:
            folder = _folder(invocation, text, weights, path=path, step=int(state.step))
            training = _compile(
                program,
                text,
                loader=loader,
                folder=folder,
                store=store,
                source=start.source,
                console=console,
            )
            first = evaluate(training, state, step=int(state.step))
            console.print(f"validation loss {first:.4f} before step {int(state.step) + 1}")
            state = run_steps(training, state, console=console)
        check_layout(state, program.state_layout, mesh=program.mesh)
        final = evaluate(training, state, step=int(state.step))
        console.print(f"validation loss {final:.4f}, perplexity {perplexity(final):.1f}")
        folder.plot()
        _print_sample(program, state, text, console)
    folder.metrics.close()
    console.print(f"run folder: {path}")


def _check_resume(invocation: Invocation) -> None:
    """Refuse a resume that would silently be another run."""
    if invocation.resume is None:
        return
    if invocation.out is not None:
        raise UserError(
            "--resume and --out are both given; a resumed run goes on in its own folder. Leave out "
            "--out."
        )
    for key, (old, new) in invocation.changed.items():
        if key not in _RESUMABLE and not key.startswith(_RESUMABLE_SECTIONS):
            raise UserError(
                f"--resume {invocation.resume}: {key} was {old} and is now {new}, which makes it "
                "another run. "
                f"Leave it as it was, or start a new run."
            )


def _saved_tokenizer(invocation: Invocation) -> Path | None:
    if invocation.resume is None:
        return None
    folder = invocation.resume.expanduser().absolute() / TOKENIZER
    return folder if folder.is_dir() else None


def _check_room(program: Program, store: CheckpointStore) -> None:
    """Refuse a run whose checkpoints would fill the disk, hours from now."""
    run, done = program.run, store.latest() or 0
    every, last = run.checkpoint.every, run.stop_after or run.steps
    saves = math.ceil(last / every) - done // every if every else 1
    if problem := store.missing_room(program.abstract_state, saves=max(1, saves)):
        raise UserError(problem[0].upper() + problem[1:])


def _begin(
    invocation: Invocation,
    program: Program,
    text: TrainingText,
    *,
    store: CheckpointStore,
    console: Console,
) -> _Start:
    """A start from random weights, or from the newest complete checkpoint of the resumed run."""
    run = invocation.run
    if invocation.resume is None:
        return _Start(state=init_state(program), position=LoaderState(seed=run.seed), source=None)
    restored = store.restore(None, program.abstract_state, logical_shapes=program.logical_shapes)
    _check_text(invocation, text, saved=restored.metadata["text"])
    changes = "".join(f", {key} {old} -> {new}" for key, (old, new) in invocation.changed.items())
    console.print(f"resuming after step {restored.step}{changes}")
    end = run.stop_after or run.steps
    if restored.step >= end:
        raise UserError(
            f"--resume {invocation.resume}: step {restored.step} of {end} is done already; give "
            "more --steps."
        )
    return _Start(
        state=restored.state,
        position=LoaderState.from_dict(restored.metadata["data"]),
        source=restored.metadata.get("source"),
    )


def _begin_with(weights: Pretrained, program: Program, console: Console) -> _Start:
    """A start from the weights of a folder, with a fresh optimizer."""
    console.print(f"weights of {weights.folder}: {weights.summary}")
    for note in weights.notes:
        console.print(note)
    started = time.perf_counter()
    params, router_bias = weights.load(program)
    state = state_from_params(program, params, router_bias=router_bias)
    jax.block_until_ready(state)
    console.print(f"loaded in {time.perf_counter() - started:.1f} s")
    return _Start(state=state, position=LoaderState(seed=program.run.seed), source=weights.source)


def _check_text(invocation: Invocation, text: TrainingText, *, saved: str) -> None:
    """Refuse to go on with another text: the position in the data would mean nothing in it."""
    if text.fingerprint != saved:
        raise UserError(
            f"--resume {invocation.resume}: the training text or the tokenizer has changed since "
            f"the checkpoint (fingerprint {saved[:12]}, now {text.fingerprint[:12]}). Put "
            f"{invocation.run.data.source} and its tokenizer back as they were, or start a new run."
        )


def _loader(run: RunConfig, text: TrainingText, position: LoaderState) -> Loader:
    return Loader(
        text.train,
        state=position,
        accumulation=run.accumulation,
        batch=run.sequences_per_step // run.accumulation,
        context=run.seq_len,
        vocab_size=run.model.vocab_size,
        pad_id=text.tokenizer.pad_id,
    )


def _folder(
    invocation: Invocation,
    text: TrainingText,
    weights: Pretrained | None,
    *,
    path: Path,
    step: int,
) -> RunFolder:
    run = invocation.run
    if invocation.resume is not None:
        return RunFolder.resume(run, path=path, step=step)
    hf_files = None if weights is None else weights.files_for(run.data.tokenizer)
    folder = RunFolder.create(run, path=path, hf_files=hf_files)
    (path / TOKENIZER).mkdir()
    text.tokenizer.save(path / TOKENIZER)
    return folder


def _compile(
    program: Program,
    text: TrainingText,
    *,
    loader: Loader,
    folder: RunFolder,
    store: CheckpointStore,
    source: dict[str, Any] | None,
    console: Console,
) -> Training:
    """Compile the programs of the run; say how long it took and what one device holds."""
    run = program.run
    started = time.perf_counter()
    step = compile_train_step(program)
    memory = step.memory_analysis()
    assert memory is not None
    state_mib, temporary_mib = (
        size / 2**20 for size in (memory.argument_size_in_bytes, memory.temp_size_in_bytes)
    )
    console.print(
        f"compiled in {time.perf_counter() - started:.1f} s; one device holds {state_mib:,.0f} MiB "
        "of state "
        f"and {temporary_mib:,.0f} MiB of temporaries"
    )
    peak = peak_flops(program.mesh.devices.flat[0])
    return Training(
        program=program,
        step=step,
        evaluate=make_eval_step(program),
        loader=loader,
        validation=text.validation,
        text_fingerprint=text.fingerprint,
        source=source,
        folder=folder,
        store=store,
        flops_per_token=model_flops_per_token(run.model, program.specs, seq_len=run.seq_len),
        peak_flops=None if peak is None else peak * program.mesh.size,
    )


def _say_devices(program: Program, console: Console) -> None:
    run, device = program.run, program.mesh.devices.flat[0]
    count = program.mesh.size
    if device.platform == "cpu":
        console.print(f"no accelerator found: {count} emulated on the cores of this machine")
    else:
        console.print(f"{count} x {device.device_kind}")
    console.print(
        f"model {run.model.model_type}, {parameter_count(run.model):,} parameters; "
        f"mesh {run.mesh} (data x tensor), ZeRO {program.zero}, {run.dtype}; "
        f"{run.sequences_per_step} sequences of {run.seq_len} tokens per step"
    )
    kernel = choose_implementation(
        length=run.seq_len,
        head_dim=run.model.attention_head_dim,
        value_dim=run.model.value_head_dim,
        dtype=program.compute_dtype,
        packed=True,
        platform=device.platform,
    )
    console.print(f"attention: {kernel}")


def _print_sample(
    program: Program, state: TrainState, text: TrainingText, console: Console
) -> None:
    sample = sample_text(
        program, state, tokenizer=text.tokenizer, prompt=_SAMPLE_PROMPT, num_tokens=_SAMPLE_TOKENS
    )
    console.print("sample:")
    console.print(sample, markup=False)
