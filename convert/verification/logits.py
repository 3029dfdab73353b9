"""The logits of jaxseek against those of transformers, in float32 on the CPU.

Letters: B sequences, T tokens of each, V vocabulary.
"""

import gc
import importlib.util
import math
import os
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from convert.files import dtypes
from convert.names import hf_tensors
from convert.progress import human_bytes
from convert.verification.weight_sources import FolderWeights, WeightSource

TOLERANCE = 1e-4  # largest difference, in standard deviations of the logits; as in tests/parity
# Long enough for mistakes in rotary positions; several sequences, see `_verdict`.
_SEQUENCES, _LENGTH = 8, 80
_MOST_MOE_SEQUENCES = _SEQUENCES // 4
# One model at a time, but each is there almost twice while it is loaded; libraries and the like.
_MEMORY_FACTOR, _MEMORY_REST = 2, 1 << 30
_READ_BY_TRANSFORMERS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def check_logits(folder: FolderWeights, ours: WeightSource) -> bool:
    """Compare jaxseek on the weights `ours` with transformers on those of `folder`, and print it.

    Returns:
        whether they agree; `True` also where they cannot be compared, for a reason that is printed.
    """
    if reason := _reason_to_skip(folder):
        print(f"logits: not compared: {reason}")
        return True
    tokens = _tokens(folder)
    try:
        theirs = _transformers_logits(folder, tokens)
    except Exception as error:  # whatever its loader raises is what a user of the folder would see
        first = (str(error).splitlines() or [""])[0]
        print(f"logits: transformers cannot load {folder.path}: {type(error).__name__}: {first}")
        return False
    gc.collect()  # the model is gone before ours comes
    return _verdict(_jaxseek_logits(ours, tokens), theirs, moe=folder.config.is_moe)


def _reason_to_skip(folder: FolderWeights) -> str | None:
    if folder.plan.scales:
        return (
            "transformers runs FP8 weights on a GPU only. Export them with to-jax and to-hf, and "
            "verify the bfloat16 folder."
        )
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed."
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = folder.plan.folder.config["model_type"]
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return (
            f"transformers has no class for model_type {model_type!r}, and code that comes with "
            "weights is never run."
        )
    if not any((folder.path / name).is_file() for name in _READ_BY_TRANSFORMERS):
        return f"transformers looks for {_READ_BY_TRANSFORMERS[0]} or an index, and has neither."
    if (needed := _needed_memory(folder)) > (there := total_memory()):
        return (
            f"in float32 this needs {human_bytes(needed)} of memory, this machine has "
            f"{human_bytes(there)}."
        )
    return None


def total_memory() -> int:
    """Bytes of memory of this machine, in use or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _needed_memory(folder: FolderWeights) -> int:
    parameters = sum(math.prod(tensor.shape) for tensor in folder.plan.tensors.values())
    logits = _SEQUENCES * _LENGTH * folder.config.vocab_size  # of both, and their distance
    return 4 * (_MEMORY_FACTOR * parameters + 3 * logits) + _MEMORY_REST


def _tokens(folder: FolderWeights) -> np.ndarray:
    """Always the same ids, int32 [B, T]."""
    length = min(_LENGTH, folder.config.max_position_embeddings)
    ids = np.random.default_rng(0).integers(0, folder.config.vocab_size, (_SEQUENCES, length))
    return ids.astype(np.int32)


def _transformers_logits(folder: FolderWeights, tokens: np.ndarray) -> np.ndarray:
    """float32 [B, T, V]."""
    import torch
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # Without shared experts it has some of size 0 all the same.
            warnings.filterwarnings("ignore", "Initializing zero-element tensors is a no-op")
            model = _load(folder.path)
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
    with torch.inference_mode():
        return model(torch.from_numpy(tokens).long()).logits.float().numpy()


def _load(path: Path) -> Any:
    """The model of transformers, on the CPU."""
    import torch
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the tensors are not quantised, whatever it says
    loader: Any = transformers.AutoModelForCausalLM
    model, loaded = loader.from_pretrained(
        path,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    empty = {name for name, value in model.named_parameters() if not value.numel()}
    wrong = [*(set(loaded["missing_keys"]) - empty), *loaded["mismatched_keys"]]
    if wrong:  # it would go on with random values there
        raise ValueError(f"it finds no values for {', '.join(sorted(map(str, wrong))[:3])}")
    return model.eval()


def _jaxseek_logits(weights: WeightSource, tokens: np.ndarray) -> np.ndarray:
    """float32 [B, T, V]."""
    import jax
    from flax import nnx

    from jaxseek.layout import unflatten_paths
    from jaxseek.model import split

    graphdef, _ = split(weights.config)
    forward = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu), jax.default_matmul_precision("highest"):
        params = unflatten_paths(_params(weights))
        return np.asarray(forward(params, tokens))


def _params(weights: WeightSource) -> dict[str, Any]:
    """float32 arrays by path, made one after the other."""
    import jax

    from jaxseek.layout import flatten_paths
    from jaxseek.model import split

    sources = defaultdict(list)
    for name, tensor in hf_tensors(weights.config).items():
        sources[tensor.paths[0]].append((name, tensor))
    params = {}
    for path, spec in flatten_paths(split(weights.config)[1]).items():
        leaf = np.empty(spec.shape, np.float32)
        for name, tensor in sources[path]:
            [part] = tensor.to_parts(_whole(weights, name))
            dtypes.cast(part, "F32", out=leaf[tensor.index])
        params[path] = jax.device_put(leaf)
    return params


def _whole(weights: WeightSource, name: str) -> np.ndarray:
    """A tensor in float32."""
    shape = weights.shapes[name]
    values = np.empty(math.prod(shape), np.float32)
    for start, block in weights.blocks(name):
        flat = np.ascontiguousarray(block).reshape(-1)
        dtypes.cast(flat, "F32", out=values[start : start + flat.size])
    weights.release(name)
    return values.reshape(shape)


def _verdict(ours: np.ndarray, theirs: np.ndarray, *, moe: bool) -> bool:
    """Print how far the logits [B, T, V] are apart; whether that is rounding.

    A token that is nearly undecided between two experts may get another one by rounding, and then
    its logits and those of all later tokens of its sequence differ. So a few sequences of a mixture
    of experts may; a mistake would show in all.
    """
    deviation = float(theirs.std())
    distance = np.abs(ours - theirs) / deviation
    worst = distance.max(axis=-1)
    beyond = ~(worst <= TOLERANCE)  # NaN is beyond
    at = np.unravel_index(np.argmax(np.where(np.isnan(distance), np.inf, distance)), ours.shape)
    print(
        f"logits: {worst.shape[0]} sequences of {worst.shape[1]} tokens: largest difference "
        f"{float(distance[at]):.1e} standard deviations (tolerance {TOLERANCE:.0e}), in sequence "
        f"{at[0]} at position {at[1]}, token {at[2]}: jaxseek {float(ours[at]):.6g}, transformers "
        f"{float(theirs[at]):.6g}."
    )
    if not beyond.any():
        return True
    sequences = int(beyond.any(axis=-1).sum())
    print(
        f"logits: beyond the tolerance: {beyond.mean():.1%} of the positions, in {sequences} of "
        f"{len(beyond)} sequences, from position {int(np.argmax(beyond.any(axis=0)))} on."
    )
    if moe and sequences <= _MOST_MOE_SEQUENCES:
        print(
            "logits: accepted, as single tokens of a mixture of experts that are nearly undecided "
            "between two experts may get either by rounding."
        )
        return True
    return False
