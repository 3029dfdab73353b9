"""Run configs as YAML (`configs/runs/*.yaml`, a run folder's `config.yaml`): read, overlay, write.

A run's file may name its model (`model: small-v3`), describe it key by key, or both: then the keys
override the named one's.
"""

from collections.abc import Callable
from pathlib import Path

from jaxseek.errors import UserError
from jaxseek.presets import DEFAULT_PRESET, read_model, refuse_later_types
from jaxseek.run_config import RunConfig
from jaxseek.schema import Setting, Settings, build, check_keys, to_settings
from jaxseek.yaml_file import dump_yaml, read_yaml

NamedModel = Callable[[str], Settings]


def load_config(path: Path) -> RunConfig:
    """The run that a YAML file describes, such as the `config.yaml` of a run folder.

    Raises:
        UserError: when the file is unreadable, has unknown keys, or describes no possible run.
    """
    return build(RunConfig, with_model(read_yaml(path)))


def dump_config(run: RunConfig) -> str:
    """The run as YAML with its whole model; `load_config` reads an equal `RunConfig` back."""
    return dump_yaml(
        {key: setting for key, setting in to_settings(run).items() if setting.value is not None}
    )


def named_model(name: str) -> Settings:
    """The settings that `model: NAME` stands for, keyed as `RunConfig`: those of a preset or a YAML
    file.

    Raises:
        UserError: as `read_model`.
    """
    return {f"model.{key}": setting for key, setting in read_model(name).items()}


def with_model(settings: Settings, *, named: NamedModel = named_model) -> Settings:
    """`settings` with a whole model: the one they name or describe, else the default preset.

    Raises:
        UserError: for unknown keys and unknown models.
    """
    if "model" not in settings and "model.model_type" not in settings:
        settings = settings | {"model": Setting(value=DEFAULT_PRESET, origin="model")}
    return expand_model(settings, named=named)


def expand_model(settings: Settings, *, named: NamedModel = named_model) -> Settings:
    """Replace the setting `model: NAME` by the model's; what else is set overrides those.

    Args:
        named: what a name stands for; the trainer's takes folders too.

    Raises:
        UserError: for unknown keys and unknown models.
    """
    rest = {key: setting for key, setting in settings.items() if key != "model"}
    check_keys(rest, RunConfig)
    refuse_later_types(rest.get("model.model_type"))
    if "model" not in settings:
        return rest
    name = settings["model"].value
    if not isinstance(name, str):
        raise UserError(
            f"{settings['model'].origin}: {name!r} is not a model's name; "
            f"give that, or keys and values."
        )
    return overlay(named(name), rest)


def overlay(base: Settings, layer: Settings) -> Settings:
    """`base` with the settings of `layer` over it.

    A batch given in one unit replaces one given in the other; a section set to null replaces its
    keys, and the reverse.
    """
    kept = dict(base)
    if "batch" in layer or "batch_tokens" in layer:
        kept = {
            key: setting for key, setting in kept.items() if key not in ("batch", "batch_tokens")
        }
    for key in layer:
        kept = {
            old: s
            for old, s in kept.items()
            if not old.startswith(f"{key}.") and not key.startswith(f"{old}.")
        }
    return kept | layer
