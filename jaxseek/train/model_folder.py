"""`--model DIR`: the model, the first weights and the tokenizer of a folder, as settings of a run.

DIR is a Hugging Face folder, a model that convert made of one, or another run. Nothing here imports
JAX; convert is imported where it is needed, so that help stays quick.
"""

from pathlib import Path

from jaxseek.config import ModelConfig
from jaxseek.errors import UserError
from jaxseek.paths import HF_FILES, TOKENIZER
from jaxseek.presets import preset_names
from jaxseek.run_file import named_model
from jaxseek.schema import Setting, Settings, to_values, typed_value

TOKENIZER_FILE = "tokenizer.json"
_YAML = (".yaml", ".yml")


def named_model_or_folder(name: str) -> Settings:
    """What `model: NAME` stands for: as `named_model`, or for a folder its model and weights.

    Raises:
        UserError: there is nothing of that name, or no model can be read there.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if name in preset_names():
            raise UserError(
                f"model: {name} is a preset and a folder too; write ./{name} for the folder, or "
                "run this elsewhere for the preset."
            )
        return _folder_model(path)
    if path.suffix not in (*_YAML, ".json"):
        if path.exists():
            raise UserError(
                f"model: {name} is a file; needed is a preset's name, a YAML file, or the folder "
                "of a model."
            )
        if len(path.parts) > 1:
            raise UserError(
                f"model: {name}: there is no such folder. Models are not downloaded here; give "
                "the folder that holds one."
            )
    return named_model(name)


def with_first_weights(settings: Settings) -> Settings:
    """`settings` with `init_from`, if there is one, as an absolute path, and with the tokenizer
    that belongs to it where none is given.

    Raises:
        UserError: there is no such folder, or it has no tokenizer and none is given.
    """
    if "init_from" not in settings:
        return settings
    given = settings["init_from"]
    name = typed_value(given, str | None)
    if name is None:
        return settings
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"{given.origin}: {folder} is no folder; give that of a model.")
    settings = settings | {"init_from": Setting(value=str(folder), origin=given.origin)}
    tokenizer = settings.get("data.tokenizer")
    if tokenizer is not None and typed_value(tokenizer, str | None) is not None:
        return settings
    found = find_tokenizer(folder)
    if found is None:
        raise UserError(
            f"{folder} has no {TOKENIZER_FILE}, and the ids of another tokenizer mean nothing to "
            "its weights; give the model's own with --data.tokenizer."
        )
    return settings | {"data.tokenizer": Setting(value=str(found), origin=given.origin)}


def find_tokenizer(folder: Path) -> Path | None:
    """The folder of the `tokenizer.json` that belongs to the weights of a folder; `None` without.

    Raises:
        UserError: it holds checkpoints of jaxseek, and no complete one.
    """
    from convert.checkpoint_folder import find_step, is_checkpoint, owner_of  # numpy

    candidates = [folder]
    if is_checkpoint(folder):
        owner = owner_of(find_step(folder))
        candidates = [owner / HF_FILES, owner / TOKENIZER] if owner else []
    return next((path for path in candidates if (path / TOKENIZER_FILE).is_file()), None)


def _folder_model(path: Path) -> Settings:
    """Settings of the model in a folder; what it was trained with besides is not taken."""
    from convert.checkpoint_folder import find_step, is_checkpoint, model_of  # numpy
    from jaxseek.checkpoint_files import read_manifest

    if is_checkpoint(path):
        step = find_step(path)
        config = model_of(step, read_manifest(step))
    else:
        config = _hf_config(path)
    settings = {
        f"model.{key}": Setting(value=value, origin=f"{path}: {key}")
        for key, value in to_values(config).items()
    }
    return settings | {"init_from": Setting(value=str(path.absolute()), origin=f"model: {path}")}


def _hf_config(path: Path) -> ModelConfig:
    from convert.files.hf_folder import open_hf_folder
    from convert.hf_config import model_config_from_hf

    with open_hf_folder(path) as folder:  # damaged weights are found now, before JAX starts
        try:
            return model_config_from_hf(folder.config)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
