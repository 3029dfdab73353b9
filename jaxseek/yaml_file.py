"""Strict YAML: keys and values as flat `Settings` that remember their line; doubt is refused."""

import re
from pathlib import Path
from typing import Any

import yaml

from jaxseek.errors import UserError
from jaxseek.schema import Setting, Settings

# YAML 1.1, which PyYAML reads, takes 3e-4 for text because it has no dot; nobody who writes a
# learning rate means that.
_FLOAT = re.compile(r"^[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def read_yaml(path: Path) -> Settings:
    """The settings of a YAML file by dotted key: `optim: {eps: 1}` and `optim.eps: 1` are the same.

    Raises:
        UserError: when the file is missing, unreadable, empty, not YAML, no mapping, or gives a key
            twice; with the line.
    """
    text = _read_text(path)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise UserError(f"{path} is empty; keys and values such as 'steps: 100' are needed.")
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "text"
            raise UserError(
                f"{path} holds {kind}; keys and values such as 'steps: 100' are needed."
            )
        settings: Settings = {}
        _flatten(loader, node, prefix="", path=path, settings=settings)
        return settings
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        hint = " (YAML is indented with spaces)" if "'\\t'" in str(error.problem) else ""
        raise UserError(f"{path}{line}: {error.problem}{hint}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error


def dump_yaml(settings: Settings) -> str:
    """Settings as YAML text, nested by section; `read_yaml` reads the same values back."""
    tree: dict[str, Any] = {}
    for key, setting in settings.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = list(setting.value) if isinstance(setting.value, tuple) else setting.value
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def _flatten(
    loader: _Loader, node: yaml.MappingNode, *, prefix: str, path: Path, settings: Settings
) -> None:
    for key_node, value_node in node.value:
        key = prefix + str(loader.construct_object(key_node, deep=True))
        origin = f"{path}, line {key_node.start_mark.line + 1}: {key}"
        if isinstance(value_node, yaml.MappingNode):
            _flatten(loader, value_node, prefix=f"{key}.", path=path, settings=settings)
        elif key in settings:
            raise UserError(f"{origin} is given a second time.")
        else:
            value = loader.construct_object(value_node, deep=True)
            settings[key] = Setting(value=value, origin=origin)
