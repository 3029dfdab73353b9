"""Which step's folder a path stands for. No JAX here."""

from pathlib import Path

from jaxseek.checkpoint_files import MANIFEST_FILE, incompleteness, step_of
from jaxseek.errors import UserError
from jaxseek.paths import CHECKPOINTS


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one of jaxseek's: a run, a converted model, their `checkpoints/` or one
    step of it, complete or not. What has a `config.json` is a Hugging Face folder.
    """
    if (path / "config.json").exists():
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
    complete = [
        number
        for folder in store.iterdir()
        if (number := step_of(folder)) is not None and incompleteness(folder) is None
    ]
    if step is None and complete:
        return store / str(max(complete))
    if step in complete:
        return store / str(step)
    if (path / "config.json").is_file():
        hint = "It looks like a Hugging Face folder; to-jax and --model take that."
    else:
        hint = f"Complete steps: {', '.join(map(str, sorted(complete))) or 'none'}."
    which = "no complete checkpoint" if step is None else f"no complete checkpoint {step}"
    raise UserError(f"{path} holds {which} of jaxseek. {hint}")
