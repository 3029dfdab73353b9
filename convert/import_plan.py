"""What becomes of each tensor of a Hugging Face folder, settled before any value is read.

Every tensor is a parameter, the scale of one, an MTP layer's (kept for the way back), a buffer that
no model needs, or a problem; every parameter is filled exactly once. All problems are reported
together.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from convert.files import dtypes
from convert.files.dequant import dequantise
from convert.files.fp8_tensors import FP8, RELEASED_BLOCK, SCALE_SUFFIX, check_scales, find_scales
from convert.files.hf_folder import HFFolder
from convert.files.tensor_info import TensorInfo
from convert.hf_config import model_config_from_hf
from convert.names import (
    HFTensor,
    expert_layout,
    hf_tensors,
    is_buffer,
    is_mtp,
    problems,
    refuse,
)
from jaxseek.config import ModelConfig
from jaxseek.errors import UserError

DtypeChoice = Literal["keep", "bfloat16", "float32"]
_CHOSEN = {"bfloat16": "BF16", "float32": "F32"}

CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"
_ROUTING = ("mlp.gate.weight", CORRECTION_BIAS)
_COMPARED_BYTES = 1 << 24  # at a time
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def chosen_dtype(name: str, source: str, choice: DtypeChoice) -> str:
    """The dtype in which a tensor is written where its values come as `source`.

    A router decides by small differences and its correction bias by smaller ones: no choice makes
    either narrower than it is.
    """
    if name.endswith(_ROUTING):
        return source if choice == "keep" else dtypes.widest([source, _CHOSEN[choice]])
    return source if choice == "keep" else _CHOSEN[choice]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportPlan:
    """A folder, and what to do with each of its tensors.

    Attributes:
        tensors: those of parameters, in the order in which the files hold them.
        kept: those of MTP layers, in the same order.
        dropped: rotary frequencies, and a head that repeats the embedding it is tied to.
        dtypes: in what dtype each tensor of `tensors` and `kept` is stored.
        scales: of each FP8 tensor the name of its block scales.
        block: rows and columns that share a scale; `None` without FP8.
        notes: lines for the person who converts.
    """

    folder: HFFolder
    config: ModelConfig
    tensors: Mapping[str, HFTensor]
    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    dtypes: Mapping[str, str]
    scales: Mapping[str, str]
    block: tuple[int, int] | None
    notes: tuple[str, ...]

    @functools.cached_property
    def leaf_dtypes(self) -> dict[str, str]:
        """dtype of each (stacked) parameter: the least that holds all its tensors exactly."""
        found: dict[str, set[str]] = collections.defaultdict(set)
        for name, tensor in self.tensors.items():
            for path in tensor.paths:
                found[path].add(self.dtypes[name])
        return {path: dtypes.widest(names) for path, names in found.items()}

    def stored_dtype(self, name: str) -> str:
        """In what dtype a checkpoint holds a tensor: that of its whole parameter."""
        if name in self.tensors:
            return self.leaf_dtypes[self.tensors[name].paths[0]]
        return self.dtypes[name]

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor in a checkpoint."""
        dtype = dtypes.NUMPY[self.stored_dtype(name)]
        return self.folder.tensors[name].size * dtype.itemsize

    @property
    def source(self) -> dict[str, Any]:
        """What an export needs to know of the folder; JSON can hold it."""
        return {
            "config": dict(self.folder.config),
            "main_dtype": _main_dtype(self.folder),
            "dtypes": compact_dtypes(self._exported_dtypes()),
        }

    def _exported_dtypes(self) -> dict[str, str]:
        """dtype of each tensor as an export names them: experts apart, fused or not here."""
        found = {
            (path, tensor.index): self.dtypes[name]
            for name, tensor in self.tensors.items()
            for path in tensor.paths
        }
        return {
            name: found.get((t.paths[0], t.index)) or found[t.paths[0], t.index[:-1]]
            for name, t in hf_tensors(self.config).items()
        }

    def source_bytes(self, name: str) -> int:
        """Bytes of a tensor in its file."""
        return self.folder.tensors[name].nbytes

    def read(self, name: str, *, dtype: str, region: tuple[slice, ...] | None = None) -> np.ndarray:
        """A tensor's values, or those of a region of it, in its own layout; a view of the mapped
        file wherever nothing has to be computed.

        Raises:
            UserError: a value is beyond the range of `dtype`.
        """
        whole = self.folder.view(name)
        values = whole if region is None else whole[region]
        if name in self.scales:
            assert self.block is not None
            rows, columns = region or (slice(0, None), slice(0, None))
            values = dequantise(
                values,
                self.folder.view(self.scales[name]),
                block=self.block,
                origin=(rows.start or 0, columns.start or 0),
                dtype=self.dtypes[name],
            )
        return dtypes.cast_in_range(values, dtype, name=name)

    def forget(self, name: str) -> None:
        """`release`, and let go of the file's pages too: nobody reads the tensor again."""
        self.folder.forget(name)

    def release(self, name: str) -> None:
        """Let go of the memory that reading a tensor has mapped."""
        self.folder.release(name)


def plan_import(
    folder: HFFolder, *, dtype: DtypeChoice = "keep", read_values: bool = True
) -> ImportPlan:
    """The plan for a folder.

    FP8 comes out as float32 under `float32`, else as bfloat16.

    Args:
        read_values: look at the few values that can make a model wrong, as whoever is about to use
            them must. Without, headers are all that is read.

    Raises:
        UserError: a config that is not supported; all tensors that are missing, unknown, or of a
            wrong shape or dtype; FP8 without scales. By `read_values` too: a correction bias that
            is not finite, a head that is not the embedding it is tied to.
    """
    with _named(folder):
        config = model_config_from_hf(folder.config)
    infos = {name: info for name, info in folder.tensors.items() if not is_buffer(name)}
    scales = find_scales(infos)
    with _named(folder):
        block, found = check_scales(infos, scales, folder.config.get("quantization_config"))
    wanted = hf_tensors(config, experts=expert_layout(infos))
    weights = {name: info for name, info in infos.items() if not name.endswith(SCALE_SUFFIX)}
    repeated_head = config.tie_word_embeddings and _HEAD in weights
    if repeated_head:
        info = weights.pop(_HEAD)
        if read_values and _EMBEDDING in weights and not _equal(folder, _EMBEDDING, info.name):
            found.append(
                f"{_HEAD}: differs from {_EMBEDDING}, though config.json says "
                "tie_word_embeddings: true; say false there to keep both"
            )
    found += problems(config, wanted, {name: info.shape for name, info in weights.items()})
    found += _dtype_problems(weights)
    if _HEAD in wanted and _HEAD not in weights:
        found.append(
            f"{_HEAD}: a model that has none because its head is the embedding says "
            "tie_word_embeddings: true in config.json"
        )
    with _named(folder):
        refuse(config, found)
    ordered = sorted(weights, key=lambda name: (str(infos[name].file), infos[name].offset))
    kept = tuple(name for name in ordered if is_mtp(config, name))
    buffers = tuple(name for name in folder.tensors if is_buffer(name))
    plan = ImportPlan(
        folder=folder,
        config=config,
        tensors={name: wanted[name] for name in ordered if name in wanted},
        kept=kept,
        dropped=buffers + ((_HEAD,) if repeated_head else ()),
        dtypes={
            name: chosen_dtype(name, _value_dtype(infos[name], dtype), dtype) for name in ordered
        },
        scales=scales,
        block=block,
        notes=(*folder.notes, *_notes(folder, config, kept=kept, buffers=buffers, scales=scales)),
    )
    if read_values:
        _check_correction_biases(plan)
    return plan


def compact_dtypes(names: Mapping[str, str]) -> dict[str, Any]:
    """`{tensor: dtype}` as the most frequent dtype and the tensors of another."""
    default = collections.Counter(names.values()).most_common(1)[0][0]
    exceptions = {name: dtype for name, dtype in names.items() if dtype != default}
    return {"default": default, "exceptions": exceptions}


def _main_dtype(folder: HFFolder) -> str:
    """dtype of most values of a folder; that of what FP8 becomes."""
    sizes: collections.Counter[str] = collections.Counter()
    for info in folder.tensors.values():
        sizes[_value_dtype(info, "keep")] += info.size
    return sizes.most_common(1)[0][0]


def _dtype_problems(weights: Mapping[str, TensorInfo]) -> list[str]:
    return [
        f"{name}: dtype {info.dtype}; parameters are {', '.join((*dtypes.FLOATS, FP8))}"
        for name, info in weights.items()
        if info.dtype not in (*dtypes.FLOATS, FP8)
    ]


@contextlib.contextmanager
def _named(folder: HFFolder) -> Iterator[None]:
    """Lets errors of what knows no folder begin with it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{folder.path}: {error}") from None


def _value_dtype(info: TensorInfo, choice: DtypeChoice) -> str:
    """dtype of a tensor's values once they are dequantised."""
    if info.dtype != FP8:
        return info.dtype
    return "F32" if choice == "float32" else "BF16"


def _notes(
    folder: HFFolder,
    config: ModelConfig,
    *,
    kept: tuple[str, ...],
    buffers: tuple[str, ...],
    scales: Mapping[str, str],
) -> list[str]:
    notes = []
    if kept:
        notes.append(
            f"{len(kept)} tensors of MTP layers (from layer {config.num_hidden_layers} on) are "
            "kept for the way back and not trained."
        )
    elif config.num_nextn_predict_layers:
        notes.append(
            f"MTP layers: config.json names {config.num_nextn_predict_layers}, the files hold "
            "none; nothing is missing for training."
        )
    if buffers:
        notes.append(f"{len(buffers)} rotary_emb.inv_freq buffers are left out; config.json rules.")
    quantised = folder.config.get("quantization_config")
    if scales:
        known = "" if quantised else f"; config.json does not say so, blocks of {RELEASED_BLOCK}"
        notes.append(f"{len(scales)} FP8 tensors are dequantised with their block scales{known}.")
    elif quantised:
        notes.append("config.json says quantised, but no tensor is FP8; the tensors are believed.")
    return notes


def _check_correction_biases(plan: ImportPlan) -> None:
    """Refuse biases that are not finite: a public tiny checkpoint has uninitialised memory there,
    and routes at random.
    """
    bad = [
        f"{name}: has values that are not finite"
        for name in plan.tensors
        if name.endswith(CORRECTION_BIAS) and not np.isfinite(plan.read(name, dtype="F32")).all()
    ]
    with _named(plan.folder):
        refuse(plan.config, bad)


def _equal(folder: HFFolder, first: str, second: str) -> bool:
    """Whether two tensors are the same bit for bit; reads a few rows at a time."""
    a, b = folder.tensors[first], folder.tensors[second]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    rows = max(1, _COMPARED_BYTES * a.shape[0] // max(1, a.nbytes)) if a.shape else 1
    one, other = np.atleast_1d(folder.view(first)), np.atleast_1d(folder.view(second))
    equal = all(
        one[start : start + rows].tobytes() == other[start : start + rows].tobytes()
        for start in range(0, len(one), rows)
    )
    folder.release(first)
    folder.release(second)
    return equal
