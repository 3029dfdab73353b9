"""Which step's folder a path stands for. No JAX here."""

from collections.abc import Mapping
from pathlib import Path

from convert.files.hf_folder import CONFIG_FILE
from convert.staging import unfinished
from jaxseek.checkpoint_files import MANIFEST_FILE, Manifest, incompleteness, step_of
from jaxseek.config import ModelConfig
from jaxseek.errors import UserError
from jaxseek.paths import CHECKPOINTS
from jaxseek.schema import from_values


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one of jaxseek's: a run, a converted model, their `checkpoints/` or one
    step of it, complete or not. What has a `config.json` is a Hugging Face folder.
    """
    if (path / CONFIG_FILE).exists():
        return False
    return (
        (path / MANIFEST_FILE).is_file()
        or (path / CHECKPOINTS).is_dir()
        or (path.is_dir() and any(step_of(folder) is not None for folder in path.iterdir()))
    )


def find_step(path: Path, *, step: int | None = None) -> Path:
    """The folder of the newest complete step, or of `step`, of a run folder, of a converted model
    or of their `checkpoints/`; `path` itself where it is the folder of one step.

    Raises:
        UserError: there is no such checkpoint, or it is not complete.
    """
    path = path.expanduser().absolute()
    if (path / MANIFEST_FILE).is_file():
        if step not in (None, step_of(path)):
            raise UserError(f"{path} is the checkpoint of one step; leave out --step {step}.")
        if problem := incompleteness(path):
            raise UserError(f"{path} is not a complete checkpoint: {problem}.")
        return path
    store = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    if not store.is_dir():
        raise UserError(f"{path}: there is no such folder.")
    steps = {
        number: incompleteness(folder)
        for folder in store.iterdir()
        if (number := step_of(folder)) is not None
    }
    complete = [number for number, problem in steps.items() if problem is None]
    if step is None and complete:
        return store / str(max(complete))
    if step in complete:
        return store / str(step)
    if problem := unfinished(path):
        raise UserError(problem)
    which = "no complete checkpoint" if step is None else f"no complete checkpoint {step}"
    raise UserError(f"{path} holds {which} of jaxseek. {_hint(path, steps)}")


def _hint(path: Path, steps: Mapping[int, str | None]) -> str:
    """What there is instead of a complete step; `steps` has what is wrong with each."""
    if (path / CONFIG_FILE).is_file():
        return "It looks like a Hugging Face folder; to-jax and --model take that."
    complete = sorted(number for number, problem in steps.items() if problem is None)
    hint = f"Complete steps: {', '.join(map(str, complete)) or 'none'}."
    if not complete and steps:
        hint += f" Step {max(steps)}: {steps[max(steps)]}."
    return hint


def owner_of(step: Path) -> Path | None:
    """The run folder or the converted model that a step's folder is in; `None` for a step that was
    copied elsewhere: what lies beside it there has nothing to do with it.
    """
    return step.parent.parent if step.parent.name == CHECKPOINTS else None


def model_of(step: Path, manifest: Manifest) -> ModelConfig:
    """The model of a complete step, by its manifest.

    Raises:
        UserError: its metadata do not say which.
    """
    if "model" not in manifest.metadata:
        raise UserError(f"{step} does not say which model it is; it is no run's checkpoint.")
    return from_values(ModelConfig, manifest.metadata["model"], origin=str(step))
