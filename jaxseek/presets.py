"""The models that come with jaxseek, `configs/models/NAME.yaml`, and those in users' YAML files."""

from pathlib import Path

from jaxseek.config import LATER_MODEL_TYPES, ModelConfig
from jaxseek.errors import UserError
from jaxseek.paths import configs_dir
from jaxseek.schema import Setting, Settings, build, check_keys, nearest_names
from jaxseek.yaml_file import read_yaml

DEFAULT_PRESET = "small-v3"
# How the names of releases start that have one of the types refused by name; the longer start comes
# first.
_LATER_NAMES = {
    "deepseek-v3.2": "deepseek_v32",
    "deepseek-math-v2": "deepseek_v32",
    "deepseek-v4.1": "deepseek_v41",
    "deepseek-v4": "deepseek_v4",
}


def preset_names() -> list[str]:
    """Names of the presets, sorted."""
    return sorted(path.stem for path in (configs_dir() / "models").glob("*.yaml"))


def load_preset(name: str) -> ModelConfig:
    """The model that a preset's name or the path of a YAML file stands for.

    Raises:
        UserError: when there is neither, or the file describes no possible model.
    """
    return build(ModelConfig, read_model(name))


def read_model(name: str) -> Settings:
    """The settings of a preset or a YAML file, keyed as `ModelConfig`; the values are unchecked.

    Raises:
        UserError: when there is neither a preset nor a file of that name, and for unknown keys.
    """
    settings = read_yaml(_find(name))
    check_keys(settings, ModelConfig)
    refuse_later_types(settings.get("model_type"))
    return settings


def refuse_later_types(model_type: Setting | None) -> None:
    """Refuse a `model_type` of a later model by name, where the type check would list the others.

    Raises:
        UserError: when it is such a type.
    """
    if model_type and model_type.value in LATER_MODEL_TYPES:
        name = LATER_MODEL_TYPES[model_type.value]
        raise UserError(f"{model_type.origin}: {model_type.value!r}, {name}, is not supported yet.")


def _find(name: str) -> Path:
    path = Path(name)
    if path.is_dir():
        raise UserError(
            f"model: {name} is a folder; only jaxseek.train takes one. Give a preset's name or a "
            "YAML file."
        )
    if path.suffix == ".json":
        raise UserError(
            f"model: {name} is a JSON file; give the Hugging Face folder that it is in, a preset's "
            "name or a YAML file."
        )
    if path.suffix in (".yaml", ".yml"):
        return path
    for later, model_type in _LATER_NAMES.items():
        if name.lower().startswith(later):
            refuse_later_types(Setting(value=model_type, origin=f"model: {name}"))
    names = preset_names()
    if name not in names:
        nearest = nearest_names(name, names)
        near = (
            f"the nearest preset is {' or '.join(nearest)}"
            if nearest
            else f"presets are {', '.join(names)}"
        )
        raise UserError(
            f"model: {name!r} is neither a preset nor a YAML file, and there is no such folder; "
            f"{near}."
        )
    return configs_dir() / "models" / f"{name}.yaml"
