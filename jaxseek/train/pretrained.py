"""First weights from a folder: a Hugging Face folder, a converted model or another run.

`open_pretrained` checks everything that can be wrong with them and reads none; `Pretrained.load`
puts them on the devices, each device's part only.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

from convert.checkpoint_folder import is_checkpoint
from convert.checkpoint_source import CheckpointSource, open_checkpoint
from convert.files.hf_folder import open_hf_folder
from convert.import_plan import ImportPlan, plan_import
from convert.load import load_params
from convert.names import HFTensor, expert_layout, hf_tensors, is_mtp, problems, refuse
from convert.progress import human_bytes
from jaxseek.checkpoint import CheckpointStore
from jaxseek.config import ModelConfig
from jaxseek.errors import UserError
from jaxseek.model import Params
from jaxseek.run_config import RunConfig
from jaxseek.schema import to_values
from jaxseek.train.model_folder import TOKENIZER_FILE, find_tokenizer
from jaxseek.train.state import Program, attach_bias, detach_bias

# Files of a folder that mean nothing with another tokenizer.
_TOKENIZER_FILES = {
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
}
_TEMPLATE = "chat_template"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Weights on disk that fit a run's model.

    Attributes:
        folder: the one that was named.
        summary: their files and bytes in words.
        notes: lines for the person who trains.
        source: what an export needs to know of the Hugging Face folder that they came from; JSON
            can hold it. `None` where they came from none.
        carried_files: what belongs to the model besides config and weights.
        load: reads them: float32 parameters as the program stores them, without the router bias,
            and the bias or `None`. Raises `UserError` where files are damaged.
    """

    folder: Path
    summary: str
    notes: tuple[str, ...]
    source: dict[str, Any] | None
    carried_files: tuple[Path, ...]
    load: Callable[[Program], tuple[Params, Array | None]]

    def files_for(self, tokenizer: str | None) -> list[Path]:
        """Those of `carried_files` that still belong to a model trained with this tokenizer."""
        own = find_tokenizer(self.folder)
        if own and tokenizer and _is_same(own, Path(tokenizer).expanduser()):
            return list(self.carried_files)
        return [
            file
            for file in self.carried_files
            if file.name not in _TOKENIZER_FILES and not file.name.startswith(_TEMPLATE)
        ]


def open_pretrained(run: RunConfig) -> Pretrained:
    """The weights of `run.init_from`, checked against the run's model.

    Raises:
        UserError: there are none, they are damaged, or they are another model's; all tensors that
            do not fit are named.
    """
    assert run.init_from is not None
    folder = Path(run.init_from)
    opened = _open_checkpoint if is_checkpoint(folder) else _open_hf
    return opened(folder, run.model)


def _open_hf(folder: Path, model: ModelConfig) -> Pretrained:
    hf_folder = open_hf_folder(folder)
    plan = plan_import(hf_folder)
    wanted = hf_tensors(model, experts=expert_layout(plan.tensors))
    _check_fit(folder, model, wanted=wanted, config=plan.config, tensors=plan.tensors)
    notes = [*hf_folder.notes, *_changes(folder, plan.config, model)]
    if plan.scales:
        notes.append(
            f"{len(plan.scales)} FP8 tensors are dequantised: values of bfloat16, trained as "
            "float32."
        )
    if plan.kept:
        notes.append(_mtp_note(f"{len(plan.kept)} tensors"))
    nbytes = sum(plan.source_bytes(name) for name in (*plan.tensors, *plan.scales.values()))
    return Pretrained(
        folder=folder,
        summary=f"{_count(len(hf_folder.files), 'file')}, {human_bytes(nbytes)}",
        notes=tuple(notes),
        source=plan.source,
        carried_files=tuple(hf_folder.carried_files()),
        load=lambda program: _load_hf(plan, program),
    )


def _open_checkpoint(folder: Path, model: ModelConfig) -> Pretrained:
    checkpoint = open_checkpoint(folder)
    wanted = hf_tensors(model)
    _check_fit(folder, model, wanted=wanted, config=checkpoint.config, tensors=checkpoint.tensors)
    notes = _changes(folder, checkpoint.config, model)
    if checkpoint.mtp:
        notes.append(_mtp_note("The tensors"))
    leaves = checkpoint.manifest.leaves
    used = [leaf for name, leaf in leaves.items() if name.startswith(("params.", "router_bias"))]
    nbytes = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in used)
    return Pretrained(
        folder=folder,
        summary=f"step {checkpoint.manifest.step}, {human_bytes(nbytes)}",
        notes=tuple(notes),
        source=None if checkpoint.source is None else dict(checkpoint.source),
        carried_files=tuple(checkpoint.carried_files),
        load=lambda program: _load_checkpoint(checkpoint, program),
    )


def _load_hf(plan: ImportPlan, program: Program) -> tuple[Params, Array | None]:
    with plan.folder:
        layout = attach_bias(program.layout, program.bias_layout)
        return detach_bias(load_params(plan, layout, mesh=program.mesh))


def _load_checkpoint(checkpoint: CheckpointSource, program: Program) -> tuple[Params, Array | None]:
    def part(state: Any) -> dict[str, Any]:
        return {"params": state.params, "router_bias": state.router_bias}

    with CheckpointStore(checkpoint.folder.parent) as store:
        restored = store.restore(
            checkpoint.manifest.step,
            part(program.abstract_state),
            logical_shapes=part(program.logical_shapes),
            partial=True,
            cast=True,
        )
    return restored.state["params"], restored.state["router_bias"]


def _check_fit(
    folder: Path,
    model: ModelConfig,
    *,
    wanted: Mapping[str, HFTensor],
    config: ModelConfig,
    tensors: Mapping[str, HFTensor],
) -> None:
    """Refuse weights of another model: those of a folder, and what the run's model needs.

    Shapes in a file do not tell all: twice the heads of half the size have the same.
    """
    if config.model_type != model.model_type:
        raise UserError(
            f"init_from {folder}: its model_type is {config.model_type!r}, that of the run is "
            f"{model.model_type!r}; --model {folder} takes the folder's model too."
        )
    found = problems(model, wanted, {name: tensor.shape for name, tensor in tensors.items()})
    found += [  # a layer beyond the last would pass for an MTP layer of a model of fewer layers
        f"{name}: not a tensor of this model"
        for name in tensors
        if name not in wanted and is_mtp(model, name)
    ]
    found += [
        f"{name}: holds {_parts(tensor)} in the folder, {_parts(wanted[name])} are needed"
        for name, tensor in tensors.items()
        if name in wanted and tensor.shape == wanted[name].shape and tensor != wanted[name]
    ]
    try:
        refuse(model, found)
    except UserError as error:
        raise UserError(
            f"init_from {folder}: {error}\nLeave the sizes of the model as the folder has them."
        ) from None


def _changes(folder: Path, config: ModelConfig, model: ModelConfig) -> list[str]:
    """A line on what of the folder's model the run changes."""
    before, now = to_values(config), to_values(model)
    changed = [
        f"{key} {before.get(key)} -> {now.get(key)}"
        for key in sorted(before | now)
        if before.get(key) != now.get(key)
    ]
    return [f"other than in {folder}: {', '.join(changed)}"] if changed else []


def _mtp_note(what: str) -> str:
    return f"{what} of MTP layers are not trained, and no part of this run."


def _parts(tensor: HFTensor) -> str:
    return f"{' and '.join(tensor.paths)} of {tensor.part_shape}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _is_same(folder: Path, tokenizer: Path) -> bool:
    """Whether a tokenizer, a file or a folder, is that of `folder`."""
    file = tokenizer / TOKENIZER_FILE if tokenizer.is_dir() else tokenizer
    return (folder / TOKENIZER_FILE).read_bytes() == file.read_bytes()
