"""A checkpoint of jaxseek to a Hugging Face folder that transformers and vLLM load."""

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.checkpoint_source import CheckpointSource, open_checkpoint
from convert.files import dtypes
from convert.files.hf_folder import CONFIG_FILE
from convert.files.safetensors_file import SafetensorsWriter
from convert.files.weight_files import SAFETENSORS_INDEX
from convert.hf_config_export import (
    Compat,
    generation_config,
    hf_config,
    not_in_transformers,
)
from convert.import_plan import DtypeChoice
from convert.pipeline import Job, run_all
from convert.progress import Progress, Summary, count_dtypes
from convert.staging import copy_files, new_folder
from jaxseek.errors import UserError

GENERATION_CONFIG = "generation_config.json"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

# dtype and shape of each tensor of a file, by name.
_Tensors = dict[str, tuple[str, tuple[int, ...]]]


def to_hf(
    checkpoint: Path,
    out: Path,
    *,
    dtype: DtypeChoice = "keep",
    shard_size: int = 5 * 10**9,
    compat: Compat = "both",
    step: int | None = None,
) -> Summary:
    """Export a run, or a converted model, into the new folder `out`.

    Args:
        dtype: of the weights; see `open_checkpoint`.
        shard_size: bytes of a weight file at most, but for a single tensor that is larger.
        compat: the generation of transformers whose keys `config.json` has.
        step: which checkpoint of a run; the newest without.

    Raises:
        UserError: before anything is written, where the checkpoint is incomplete or `out` exists;
            where a file is damaged or not readable, which a tensor's own shows when it is read;
            where writing fails or other bytes are read back than were written. Nothing is left at
            `out` then.
    """
    source = open_checkpoint(checkpoint, dtype=dtype, step=step)
    source.verify()
    tensors: _Tensors = {name: (source.dtypes[name], t.shape) for name, t in source.tensors.items()}
    tensors |= {name: (info.dtype, info.shape) for name, info in source.mtp.items()}
    written = count_dtypes((d, math.prod(s), _nbytes((d, s))) for d, s in tensors.values())
    total = sum(nbytes for _, _, nbytes in written.values())
    with (
        new_folder(out, needed_bytes=total) as partial,
        Progress("to-hf", total=total) as progress,
    ):
        shards = plan_shards(tensors, shard_size=shard_size)
        for file_name, names in shards.items():
            shard = {name: tensors[name] for name in names}
            _write_shard(partial / file_name, shard, source=source, progress=progress)
        if len(shards) > 1:
            write_index(partial, shards, tensors=tensors)
        _write_rest(partial, source, main_dtype=next(iter(written)), compat=compat)
    return Summary(
        dtypes=written,
        read=sum(map(source.stored_bytes, source.tensors.values()))
        + sum(info.nbytes for info in source.mtp.values()),
        written=total,
        seconds=progress.seconds,
        notes=tuple(_notes(source, dtype=dtype)),
    )


def parse_size(text: str) -> int:
    """`5GB` (powers of 1000) or `4GiB` (of 1024) in bytes.

    Raises:
        UserError: when it is no such size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match:
        unit, binary = match[2].upper(), match[3]
        factor = (_BINARY_UNITS if binary else _UNITS).get(unit)
        if factor and float(match[1]) * factor >= 1:
            return int(float(match[1]) * factor)
    raise UserError(f"--shard-size {text!r} is no size; give one such as 5GB, 500MB or 4GiB.")


def plan_shards(tensors: _Tensors, *, shard_size: int) -> dict[str, list[str]]:
    """File names and the tensors of each, in order; a single file has the name without numbers."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        nbytes = _nbytes(tensor)
        if groups[-1] and filled + nbytes > shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{i:05}-of-{count:05}.safetensors": g for i, g in enumerate(groups, start=1)}


def _write_shard(
    file: Path,
    tensors: _Tensors,
    *,
    source: CheckpointSource,
    progress: Progress,
) -> None:
    def write(writer: SafetensorsWriter, name: str) -> None:
        is_mtp = name in source.mtp
        for start, block in source.mtp_blocks(name) if is_mtp else source.blocks(name):
            writer.write(name, block, start=start)
        if not is_mtp:
            source.release(name)

    with SafetensorsWriter(file, tensors) as writer:
        jobs = (
            Job(run=functools.partial(write, writer, name), nbytes=_nbytes(tensor))
            for name, tensor in tensors.items()
        )
        run_all(jobs, done=progress.advance)


def _claimed_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that a `config.json` names, if it is one of weights."""
    claimed = str(config.get("dtype") or config.get("torch_dtype"))
    return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(claimed)


def write_index(folder: Path, shards: Mapping[str, list[str]], *, tensors: _Tensors) -> None:
    """The file that says which tensor stands in which of the `shards` of `plan_shards`."""
    metadata = {
        "total_parameters": sum(math.prod(shape) for _, shape in tensors.values()),
        "total_size": sum(map(_nbytes, tensors.values())),
    }
    weight_map = {name: file for file, names in shards.items() for name in names}
    write_json(folder / SAFETENSORS_INDEX, {"metadata": metadata, "weight_map": weight_map})


def write_json(path: Path, content: Any) -> None:
    """JSON as transformers writes it: two spaces, and no escapes for what is not ASCII."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_rest(folder: Path, source: CheckpointSource, *, main_dtype: str, compat: Compat) -> None:
    """Everything but the weights."""
    original, claimed = None, main_dtype
    if source.source:
        original = source.source["config"]
        if main_dtype == source.source["main_dtype"]:  # what was said of the weights still holds
            claimed = _claimed_dtype(original) or main_dtype
    copy_files(source.carried_files, folder)
    if not (folder / GENERATION_CONFIG).exists():
        write_json(folder / GENERATION_CONFIG, generation_config(source.config, source=original))
    # Last, for without it nobody takes the rest for a model.
    config = hf_config(source.config, source=original, dtype=claimed, compat=compat)
    write_json(folder / CONFIG_FILE, config)


def _notes(source: CheckpointSource, *, dtype: DtypeChoice) -> list[str]:
    notes = [f"{line}." for line in not_in_transformers(source.config)]
    layers = source.config.num_nextn_predict_layers
    if layers and not source.mtp:
        notes.append(f"MTP layers: config.json names {layers}, this checkpoint holds none.")
    if source.source is None and dtype == "keep":
        notes.append("The weights are the run's own; --dtype bfloat16 halves float32 ones.")
    if not any(file.name == "tokenizer.json" for file in source.carried_files):
        notes.append("There is no tokenizer.json beside the checkpoint; copy the model's own.")
    return notes


def _nbytes(tensor: tuple[str, tuple[int, ...]]) -> int:
    return math.prod(tensor[1]) * dtypes.NUMPY[tensor[0]].itemsize
