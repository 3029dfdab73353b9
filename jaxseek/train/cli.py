"""The command line of `python -m jaxseek.train`: flags over a run's file over the defaults.

Nothing here imports JAX, so that help and every mistake in the settings come before JAX starts.
"""

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jaxseek.errors import UserError
from jaxseek.plan.auto import AUTO, OPEN
from jaxseek.presets import DEFAULT_PRESET, preset_names
from jaxseek.run_config import RunConfig
from jaxseek.run_file import expand_model, load_config, overlay, with_model
from jaxseek.schema import (
    Leaf,
    Setting,
    Settings,
    build,
    check_keys,
    leaves,
    section_class,
    suggestion,
    to_settings,
)
from jaxseek.train.model_folder import named_model_or_folder, with_first_weights
from jaxseek.yaml_file import read_yaml

CONFIG_FILE = "config.yaml"
_FILE_OPTIONS = ("config", "resume", "out")
# 256 bytes and the special tokens of the byte-level BPE that is trained when no tokenizer is given.
_SMALLEST_VOCABULARY = 300
_DESCRIPTION = (
    "Train a DeepSeek model. Without arguments a small one learns the standard library's sources."
)
_EPILOG = """Settings may also stand in a YAML file, nested by section, given with --config FILE;
flags override the file. Dashes and underscores in the name of a flag are the same.
Presets: {presets}."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Invocation:
    """What a command line asks for.

    Attributes:
        run: the run, checked.
        out: the run folder of `--out`; `None` leaves the choice to the trainer.
        resume: the run folder of `--resume`, whose `config.yaml` was the base of `run`.
        resumed: the run that stands there, before flags.
        auto: with `--mesh auto`, the settings that the plan must not touch; else `None`.
    """

    run: RunConfig
    out: Path | None = None
    resume: Path | None = None
    resumed: RunConfig | None = None
    auto: dict[str, Any] | None = None

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """What is not as in the resumed run, by dotted key: (value there, value now)."""
        return {} if self.resumed is None else _changes(self.resumed, self.run)


def parse_arguments(argv: Sequence[str]) -> Invocation:
    """What `argv`, without the program's name, asks for. `--help` prints and exits with code 0.

    Raises:
        UserError: for every mistake in the flags, in the files they name and in the run they
            describe together.
    """
    files, flags = _read_flags(argv)
    if "config" in files and "resume" in files:
        raise UserError(
            "--config and --resume are both given; a resumed run has its own config. Give one."
        )
    resumed = _resumed_run(Path(files["resume"])) if "resume" in files else None
    if resumed:
        base = to_settings(resumed)
    else:
        base = read_yaml(Path(files["config"])) if "config" in files else {}
    settings = _layered(base, flags, fresh=resumed is None)
    auto = "mesh" in settings and settings["mesh"].value == AUTO
    if auto:
        settings = {key: setting for key, setting in settings.items() if key != "mesh"}
    run = build(RunConfig, settings)
    _check_vocabulary(run)
    return Invocation(
        run=run,
        out=Path(files["out"]) if "out" in files else None,
        resume=Path(files["resume"]) if "resume" in files else None,
        resumed=resumed,
        # A resumed run's file holds every setting, chosen or not; only flags are wishes there.
        auto=_made(flags if resumed else settings, run) if auto else None,
    )


def _layered(base: Settings, flags: Settings, *, fresh: bool) -> Settings:
    """`flags` over `base`, with a whole model and, for a fresh run, its weights' tokenizer."""
    if "model" in flags:
        # The flag replaces the base's model: not even a key that it leaves at its default lingers.
        base = {k: s for k, s in base.items() if k != "model" and not k.startswith("model.")}
        check_keys(base, RunConfig)
    else:
        base = with_model(base, named=named_model_or_folder)
    settings = overlay(base, expand_model(flags, named=named_model_or_folder))
    return with_first_weights(settings) if fresh else settings


def _made(settings: Settings, run: RunConfig) -> dict[str, Any]:
    """What of `OPEN` is set in `settings`; null, a default that depends on the mesh, is not."""
    made = {key: getattr(run, key) for key in OPEN if key in settings and key != "mesh"}
    return {key: value for key, value in made.items() if value is not None}


def _check_vocabulary(run: RunConfig) -> None:
    if run.data.tokenizer is None and run.model.vocab_size < _SMALLEST_VOCABULARY:
        raise UserError(
            f"model.vocab_size {run.model.vocab_size} is too small for the byte-level BPE that is "
            f"trained where no data.tokenizer is given; it needs {_SMALLEST_VOCABULARY}."
        )


def _resumed_run(folder: Path) -> RunConfig:
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(
            f"--resume {folder}: there is no {CONFIG_FILE} in it, so it is not a run folder."
        )
    # Where the run stopped before is no reason to stop there again.
    return dataclasses.replace(load_config(folder / CONFIG_FILE), stop_after=None)


def _changes(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    before, after = ({key: s.value for key, s in to_settings(run).items()} for run in (old, new))
    keys = before | after
    return {
        key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)
    }


def _read_flags(argv: Sequence[str]) -> tuple[dict[str, str], Settings]:
    """The files that `argv` names, by option, and its settings, `model` among them, as text."""
    parser = _make_parser()
    spelled = {
        _flag(key).replace("_", "-"): _flag(key)
        for key in ("model", *_FILE_OPTIONS, *leaves(RunConfig))
    }
    words = [_respell(word, spelled) for word in argv]
    try:
        given, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}.") from None
    if rest:
        raise UserError(f"{rest[0]!r} is not expected; settings are given as --KEY VALUE.")
    values = vars(given)
    files = {name: values.pop(name) for name in _FILE_OPTIONS if name in values}
    return files, {key: Setting(value=value, origin=_flag(key)) for key, value in values.items()}


def _respell(word: str, spelled: dict[str, str]) -> str:
    """A flag in the one spelling that the parser knows; words that are no flags as they are."""
    name, equals, value = word.partition("=")
    if not name.startswith("--") or name == "--help":
        return word
    known = spelled.get(name.replace("_", "-"))
    if known is None:
        raise UserError(f"{name} is not a known flag; {suggestion(name, spelled.values())}")
    return known + equals + value


def _flag(key: str) -> str:
    """`--seq-len` for `seq_len`; below a section as in a file, `--optim.weight_decay`."""
    return f"--{key}" if "." in key else f"--{key.replace('_', '-')}"


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxseek.train",
        usage="%(prog)s [--mesh AxB] [--model NAME] [--config FILE] [--KEY VALUE ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(presets=", ".join(preset_names())),
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    _add_files(parser.add_argument_group("files and model"))
    keys = leaves(RunConfig)
    model_keys = [key for key in keys if key.startswith("model.")]
    listed = ", ".join(key.removeprefix("model.") for key in model_keys)
    group = parser.add_argument_group("model", f"Its keys, as --model.hidden_size 96: {listed}.")
    for key in model_keys:
        group.add_argument(_flag(key), dest=key, help=argparse.SUPPRESS)
    top = {key: leaf for key, leaf in keys.items() if "." not in key}
    _add_settings(parser.add_argument_group("run"), top)
    for name, annotation in typing.get_type_hints(RunConfig).items():
        section = section_class(annotation)
        if section and name != "model":
            group = parser.add_argument_group(name, (section.__doc__ or "").partition("\n")[0])
            _add_settings(group, {k: leaf for k, leaf in keys.items() if k.startswith(f"{name}.")})
    return parser


def _add_files(group: Any) -> None:
    group.add_argument("--config", metavar="FILE", help="a run's YAML file")
    group.add_argument("--resume", metavar="DIR", help="go on with the run in this run folder")
    group.add_argument("--out", metavar="DIR", help="the run folder (default: new under runs/)")
    model = (
        "a preset, a YAML file, or a folder whose weights are trained further: a Hugging Face "
        f"folder, a converted model or another run (default: {DEFAULT_PRESET})"
    )
    group.add_argument("--model", metavar="NAME", help=model)


def _add_settings(group: Any, keys: dict[str, Leaf]) -> None:
    for key, leaf in keys.items():
        text = leaf.description.replace("`", "").replace("%", "%%").rstrip(".")
        value = list(leaf.default) if isinstance(leaf.default, tuple) else leaf.default
        default = "" if value is None else f" (default: {value})"
        group.add_argument(_flag(key), dest=key, metavar=_metavar(leaf.type), help=text + default)


def _metavar(annotation: Any) -> str:
    if typing.get_origin(annotation) is tuple:
        return "[X,X]"
    for option in (annotation, *typing.get_args(annotation)):
        if typing.get_origin(option) is Literal:
            return "|".join(str(choice) for choice in typing.get_args(option))
        if option in (int, float, str):
            return {int: "N", float: "X", str: "TEXT"}[option]
    return "VALUE"
