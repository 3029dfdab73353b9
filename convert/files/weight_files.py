"""Which files of a folder hold the weights, and what is in them. Looks at headers only."""

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convert.files import strict_json
from convert.files.safetensors_file import read_header
from convert.files.tensor_info import TensorInfo
from jaxseek.errors import UserError

SAFETENSORS_INDEX = "model.safetensors.index.json"

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{1,6})-of-(?P<total>\d{1,6})\.[a-z]+")
_SHOWN_NAMES = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Every tensor of the model, the files that hold them, and what a person should know."""

    tensors: dict[str, TensorInfo]
    files: list[Path]
    notes: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Container:
    """A kind of weight files: their names, that of their index, how the tensors are listed."""

    pattern: str
    index: str
    read: Callable[[Path], dict[str, TensorInfo]]


def _read_torch(path: Path) -> dict[str, TensorInfo]:
    from convert.files.torch_file import read_torch_file  # few folders have such files

    return read_torch_file(path)


_SAFETENSORS = _Container(pattern="*.safetensors", index=SAFETENSORS_INDEX, read=read_header)
# Not every .bin: trainers leave optimizer.bin, training_args.bin and the like beside the weights.
_TORCH = _Container(
    pattern="pytorch_model*.bin", index="pytorch_model.bin.index.json", read=_read_torch
)


def find_weights(folder: Path, *, problems: list[str]) -> Weights:
    """The weights of a Hugging Face folder.

    safetensors files are taken where there are any. The index decides which; without one there must
    be exactly one file, or one complete set `NAME-00001-of-00003`. Every file is checked.

    Args:
        problems: what is wrong is added here, a text each; the result is of use without any only.
    """
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    for container in (_SAFETENSORS, _TORCH):
        found = [name for name in names if Path(name).match(container.pattern)]
        if container.index in names:
            weights = _indexed(folder, container, found=found, problems=problems)
        elif found:
            weights = _unindexed(folder, container, found=found, problems=problems)
        else:
            continue
        if container is _SAFETENSORS:
            torch = [name for name in names if Path(name).match(_TORCH.pattern)]
            if torch:
                weights.notes.append(f"Not read, for the safetensors files: {_shown(torch)}.")
        if not weights.tensors and not problems:
            problems.append(f"{folder}: no tensor is in {_shown([p.name for p in weights.files])}.")
        return weights
    others = [name for name in names if re.search(r"\.(gguf|msgpack|h5|ckpt|pth?|npz|bin)$", name)]
    problems.append(
        f"{folder}: no weights: needed is model.safetensors, pytorch_model.bin, or several files "
        "with their index." + (f" Of no use are {_shown(others)}." if others else "")
    )
    return Weights(tensors={}, files=[], notes=[])


def _unindexed(
    folder: Path, container: _Container, *, found: list[str], problems: list[str]
) -> Weights:
    if problem := _set_problem(found):
        problems.append(f"{folder}: {problem}")
        return Weights(tensors={}, files=[], notes=[])
    files = [folder / name for name in found]
    tensors: dict[str, TensorInfo] = {}
    for file, content in _read_all(container, files, problems=problems).items():
        for name in sorted(tensors.keys() & content.keys()):
            problems.append(
                f"{file}: tensor {name!r} is in {tensors[name].file.name} too, and no "
                f"{container.index} says which counts."
            )
        tensors |= content
    return Weights(tensors=tensors, files=files, notes=[])


def _set_problem(names: list[str]) -> str | None:
    """Why files are neither one file with all of the weights nor one complete set, or `None`."""
    parts = [_PART.fullmatch(name) for name in names]
    if parts == [None]:
        return None
    first = parts[0]
    if first is None or any(
        part is None or (part["name"], part["total"]) != (first["name"], first["total"])
        for part in parts
    ):
        return (
            f"{len(names)} weight files and no index that says which belong to the model: "
            f"{_shown(names)}. Leave those of the model there, or add its index."
        )
    total = int(first["total"])
    present = {int(part["number"]) for part in parts if part}
    missing = [number for number in range(1, total + 1) if number not in present]
    if missing:
        return (
            f"of the {total} files {first['name']}-*-of-{first['total']} these are missing: "
            f"{_shown(missing)}. Copy or download them too."
        )
    if len(names) > total:
        return f"more than {total} files {first['name']}-*-of-{first['total']}: {_shown(names)}."
    return None


def _indexed(
    folder: Path, container: _Container, *, found: list[str], problems: list[str]
) -> Weights:
    index = folder / container.index
    weight_map, total_size = _read_index(index, problems=problems)
    tensors_in = Counter(weight_map.values())
    files = [folder / name for name in sorted(tensors_in)]
    there = [file for file in files if os.path.exists(file)]
    for file in sorted(set(files) - set(there)):
        problems.append(
            f"{file}: is missing; by {index.name} it holds {tensors_in[file.name]} tensors. Copy "
            "or download it too."
        )
    contents = _read_all(container, there, problems=problems)
    tensors: dict[str, TensorInfo] = {}
    for name, file_name in weight_map.items():
        content = contents.get(folder / file_name)
        if content is None:
            continue  # the file is missing or damaged, and that is among the problems
        if name in content:
            tensors[name] = content[name]
        else:
            problems.append(
                f"{folder / file_name}: lacks tensor {name!r}, which {index.name} says is there."
            )
    notes = []
    if strangers := [name for name in found if folder / name not in files]:
        notes.append(f"Not read, for {index.name} does not name them: {_shown(strangers)}.")
    mapped = {(folder / file_name, name) for name, file_name in weight_map.items()}
    unmapped = [
        name for file, content in contents.items() for name in content if (file, name) not in mapped
    ]
    if unmapped:
        notes.append(
            f"Ignored, for {index.name} does not map them to the files they are in: "
            f"{_shown(unmapped)}."
        )
    size = sum(info.nbytes for info in tensors.values())
    if total_size is not None and total_size != size:
        notes.append(f"{index.name} gives total_size {total_size}; its tensors have {size} bytes.")
    return Weights(tensors=tensors, files=files, notes=notes)


def _read_index(path: Path, *, problems: list[str]) -> tuple[dict[str, str], Any]:
    """The file of every tensor, and `metadata.total_size` if there is one."""
    try:
        index = strict_json.loads(path.read_bytes())
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("needed is a weight_map, an object with the file of every tensor")
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror or error}).")
        return {}, None
    except ValueError as error:
        problems.append(f"{path}: {error}.")
        return {}, None
    for name, file in weight_map.items():
        if not _is_file_name(file):
            problems.append(
                f"{path}: tensor {name!r}: needed is the name of a file beside it, got {file!r}."
            )
    metadata = index.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return {name: file for name, file in weight_map.items() if _is_file_name(file)}, total_size


def _is_file_name(value: Any) -> bool:
    """Whether it names a file of the same folder: an index may not lead elsewhere."""
    return (
        isinstance(value, str)
        and value not in ("", ".", "..")
        and not any(letter in value for letter in "/\\:\0")
    )


def _read_all(
    container: _Container, files: list[Path], *, problems: list[str]
) -> dict[Path, dict[str, TensorInfo]]:
    contents = {}
    for file in files:
        try:
            contents[file] = container.read(file)
        except UserError as error:
            problems.append(str(error))
    return contents


def _shown(values: list[Any]) -> str:
    """The first few of a list as text, with the number of the others."""
    more = f" and {len(values) - _SHOWN_NAMES} more" if len(values) > _SHOWN_NAMES else ""
    return ", ".join(map(str, values[:_SHOWN_NAMES])) + more
