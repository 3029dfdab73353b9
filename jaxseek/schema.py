"""A tree of config dataclasses as dotted keys: what keys there are, and a tree from settings.

`RunConfig` has the keys `steps`, `optim.learning_rate`, `model.rope_scaling.factor` and so on. A
YAML file and the command line both give `Settings`, a flat mapping of such keys; merging two layers
is then merging two dicts.
"""

import argparse
import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import docstring_parser
from jsonargparse import ArgumentParser

from jaxseek.errors import UserError

# `num_layers` is 0.74 like num_hidden_layers; `epochs` is 0.67 like eps, which helps nobody.
_NEAR_ENOUGH = 0.7
_EQUALLY_NEAR = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A value that somebody gave, and where: `origin` is `run.yaml, line 3: optim.eps`, say."""

    value: Any
    origin: str


Settings = dict[str, Setting]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """A key that holds a value; `default` is `dataclasses.MISSING` where there is none."""

    type: Any
    default: Any
    description: str


@functools.cache
def leaves(cls: type) -> dict[str, Leaf]:
    """Every key below the dataclass `cls` that holds a value, by dotted name, in field order."""
    hints = typing.get_type_hints(cls)
    described = {
        p.arg_name: p.description or "" for p in docstring_parser.parse(cls.__doc__ or "").params
    }
    found = {}
    for field in dataclasses.fields(cls):
        section = section_class(hints[field.name])
        if section:
            found |= {f"{field.name}.{key}": leaf for key, leaf in leaves(section).items()}
        else:
            text = " ".join(described.get(field.name, "").split())
            found[field.name] = Leaf(
                type=hints[field.name], default=field.default, description=text
            )
    return found


def section_class(annotation: Any) -> type | None:
    """The dataclass in an annotation `Section` or `Section | None`; `None` for any other."""
    for option in _options(annotation):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return option
    return None


def check_keys(settings: Settings, cls: type) -> None:
    """Refuse what is no key of `cls`, naming the nearest key there is.

    Raises:
        UserError: for the first unknown key; also for a section that is given a value instead of
            keys.
    """
    known = leaves(cls)
    for key, setting in settings.items():
        if key in known or (setting.value is None and _is_optional_section(key, cls)):
            continue
        raise UserError(f"{setting.origin} is no key that holds a value; {suggestion(key, known)}")


def suggestion(key: str, known: Iterable[str]) -> str:
    """Half a sentence on an unknown `key`: the nearest of the `known`, or that it is a section."""
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        return f"it is a section, with keys such as {inside[0]}."
    nearest = nearest_names(key, known)
    return f"the nearest is {' or '.join(nearest)}." if nearest else "--help lists them."


def nearest_names(key: str, known: Iterable[str]) -> list[str]:
    """Up to three of the `known` names that are nearest to `key`; none when nothing is near."""
    scores = {name: _likeness(_plain(key), _plain(name)) for name in known}
    least = max(_NEAR_ENOUGH, max(scores.values(), default=0.0) - _EQUALLY_NEAR)
    return [name for name, score in scores.items() if score >= least][:3]


def build(cls: type, settings: Settings, *, prefix: str = "") -> Any:
    """A `cls` from the settings whose key starts with `prefix`; other fields keep their default.

    Raises:
        UserError: for a value of another type, for a missing key, and what `cls` itself raises.
    """
    hints = typing.get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):
        key = prefix + field.name
        section = section_class(hints[field.name])
        if key in settings:
            values[field.name] = None if section else typed_value(settings[key], hints[field.name])
        elif section and any(name.startswith(f"{key}.") for name in settings):
            values[field.name] = build(section, settings, prefix=f"{key}.")
        elif field.default is dataclasses.MISSING:
            raise UserError(f"{key} is needed and not given.")
    try:
        return cls(**values)
    except UserError as error:
        named = not prefix or str(error).startswith(prefix)
        raise (error if named else UserError(f"{prefix.split('.')[0]}: {error}")) from None


def typed_value(setting: Setting, annotation: Any) -> Any:
    """`setting.value` as the annotated type; text, unless text is wanted, is read as YAML.

    Raises:
        UserError: when it is not of that type; the message says what is expected.
    """
    mistake = UserError(f"{setting.origin}: {setting.value!r} is not {describe_type(annotation)}.")
    try:
        value = _reader(annotation).parse_object({"value": setting.value}).value
    except argparse.ArgumentError:
        raise mistake from None
    # These pass there and are mistakes here: null where none may be, true for 1, nan and inf.
    options = _options(annotation)
    null = value is None and types.NoneType not in options
    flag = isinstance(value, bool) and bool not in options
    infinite = isinstance(value, float) and not math.isfinite(value)
    if null or flag or infinite:
        raise mistake
    return value


def describe_type(annotation: Any) -> str:
    """What an annotated type accepts, in words: `a whole number or null`."""
    if typing.get_origin(annotation) is Literal:
        return f"one of {', '.join(str(choice) for choice in typing.get_args(annotation))}"
    if typing.get_origin(annotation) is tuple:
        return f"a list of {len(typing.get_args(annotation))} numbers"
    options = _options(annotation)
    if len(options) > 1:
        return " or ".join(describe_type(option) for option in options)
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
    }
    return words[annotation]


def to_settings(config: Any, *, prefix: str = "") -> Settings:
    """The inverse of `build`: every value of a config tree, by dotted key."""
    settings = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        key = prefix + field.name
        if dataclasses.is_dataclass(value):
            settings |= to_settings(value, prefix=f"{key}.")
        else:
            settings[key] = Setting(value=value, origin=key)
    return settings


def to_values(config: Any) -> dict[str, Any]:
    """The values of a config tree by dotted key, without nulls, for JSON."""
    settings = to_settings(config)
    return {key: setting.value for key, setting in settings.items() if setting.value is not None}


def from_values(cls: type, values: Mapping[str, Any], *, origin: str) -> Any:
    """The inverse of `to_values`; raises as `build`, with the `origin` of the values."""
    settings = {k: Setting(value=v, origin=f"{origin}: {k}") for k, v in values.items()}
    return build(cls, settings)


def _options(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _is_optional_section(key: str, cls: type) -> bool:
    for name in key.split("."):
        annotation = typing.get_type_hints(cls).get(name)
        section = section_class(annotation)
        if section is None:
            return False
        cls = section
    return types.NoneType in _options(annotation)


def _plain(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _likeness(key: str, name: str) -> float:
    """How near two names are, 0 to 1: by the whole, by the last part, or by initials (lr)."""
    given, last = key.rpartition(".")[2], name.rpartition(".")[2]
    if given == "".join(word[0] for word in last.split("_")):
        return 0.9
    whole = difflib.SequenceMatcher(None, key, name).ratio()
    part = difflib.SequenceMatcher(None, given, last).ratio()
    # Among equal last parts the one whose section is nearer wins.
    return max(whole, part - 0.05 + 0.04 * whole)


@functools.cache
def _reader(annotation: Any) -> ArgumentParser:
    reader = ArgumentParser(exit_on_error=False, allow_abbrev=False, add_help=False)
    reader.add_argument("--value", type=annotation)
    return reader
