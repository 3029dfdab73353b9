"""Small Hugging Face folders of any model of the family, written without torch."""

import contextlib
import dataclasses
import json
import math
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import pytest

from convert.__main__ import main
from convert.files.dtypes import NUMPY, name_of
from convert.files.safetensors_file import SafetensorsWriter
from convert.hf_config_export import hf_config
from convert.names import hf_tensors
from jaxseek.cli import run_main
from jaxseek.config import ModelConfig
from jaxseek.data.tokenizer import TextTokenizer, train_tokenizer

INDEX = "model.safetensors.index.json"
FP8_BLOCK = (16, 24)  # of rows and columns; divides next to nothing of the tiny models
_LARGEST_FP8 = 448.0
_CORRECTION_BIAS = "e_score_correction_bias"
_TEXTS = ["def area(width, height):\n    return width * height\n", "The area of 12 by 34 is 408.\n"]


def write_folder(
    path: Path,
    config: ModelConfig,
    *,
    dtype: str | Literal["mixed"] = "BF16",
    shards: int = 1,
    fp8: bool = False,
    mtp: bool = False,
    fused: bool = False,
    seed: int = 0,
    tokenizer: bool = False,
) -> dict[str, np.ndarray]:
    """Make the folder `path`: `config.json` and random weights far from their initial values.

    Args:
        dtype: of all tensors, but for the router's correction biases, always F32 as in the
            releases. `mixed` is BF16 with norms, biases and routers in F32, the embedding in F16.
        shards: number of weight files; several have an index.
        fp8: matrices within layers, but for routers, are FP8 with block scales, as V3 has them;
            with several shards each scale is in another file than its matrix.
        mtp: the tensors of the `num_nextn_predict_layers` MTP layers are there too.
        fused: the experts of a layer in one tensor.
        tokenizer: a byte-level BPE of DeepSeek's kind, smaller than the model's vocabulary, which
            must have 300 rows or more.

    Returns:
        what the files hold, by name, FP8 scales among it.
    """
    assert not (fp8 and fused), "block scales are of matrices"
    path.mkdir(parents=True, exist_ok=True)
    shapes = tensor_shapes(config, fused=fused, mtp=mtp)
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        values = _random(name, shape, rng)
        if fp8 and _is_quantised(name, shape):
            tensors[name], tensors[f"{name}_scale_inv"] = quantise(values, block=FP8_BLOCK)
        else:
            tensors[name] = values.astype(NUMPY[_stored_as(name, dtype)])
    write_weights(path, tensors, shards=shards)
    content = hf_config(config, source=None, dtype="BF16" if dtype == "mixed" else dtype)
    if fp8:
        content["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": list(FP8_BLOCK),
            "activation_scheme": "dynamic",
        }
    (path / "config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    if tokenizer:
        assert config.vocab_size >= 300, f"vocab_size {config.vocab_size} is below 300"
        TextTokenizer(train_tokenizer(_TEXTS, vocab_size=300)).save(path)
    return tensors


def write_weights(path: Path, tensors: Mapping[str, np.ndarray], *, shards: int = 1) -> None:
    """The weight files of the folder `path`, in place of those that are there."""
    for old in (*path.glob("*.safetensors"), *path.glob(INDEX)):
        old.unlink()
    names = list(tensors)
    # Neighbours apart: a scale stands in another file than its matrix.
    groups = [names[i::shards] for i in range(shards)]
    if shards > 1:
        files = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
        weight_map = {
            name: file for file, group in zip(files, groups, strict=True) for name in group
        }
        size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index), encoding="utf-8")
    else:
        files = ["model.safetensors"]
    for file, group in zip(files, groups, strict=True):
        declared = {name: (name_of(tensors[name].dtype), tensors[name].shape) for name in group}
        with SafetensorsWriter(path / file, declared) as writer:
            for name in group:
                writer.write(name, np.ascontiguousarray(tensors[name]))


def tensor_shapes(
    config: ModelConfig, *, fused: bool = False, mtp: bool = False
) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of the model by name, MTP layers' included where `mtp` says so."""
    wanted = hf_tensors(config, experts="fused" if fused else "separate")
    shapes = {name: tensor.shape for name, tensor in wanted.items()}
    if not mtp:
        return shapes
    assert config.num_nextn_predict_layers, "the config has no MTP layers"
    width, vocabulary = config.hidden_size, config.vocab_size
    # An MTP layer is a layer like the last one, and what joins it to the model.
    last = f"model.layers.{config.num_hidden_layers - 1}."
    layer = {name.removeprefix(last): s for name, s in shapes.items() if name.startswith(last)}
    layer |= {
        "enorm.weight": (width,),
        "hnorm.weight": (width,),
        "eh_proj.weight": (width, 2 * width),
        "embed_tokens.weight": (vocabulary, width),
        "shared_head.norm.weight": (width,),
        "shared_head.head.weight": (vocabulary, width),
    }
    for i in range(config.num_nextn_predict_layers):
        number = config.num_hidden_layers + i
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def with_vocabulary(config: ModelConfig, size: int = 320) -> ModelConfig:
    """The same model with as many rows as a tokenizer needs."""
    return dataclasses.replace(config, vocab_size=size)


def main_with(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Exit code of `python -m convert WORDS`, in this process."""
    with monkeypatch.context() as patch, kept_signal_handlers():
        patch.setattr(sys, "argv", ["convert", *map(str, words)])
        return run_main(main, program="convert")


@contextlib.contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Undoes what a block makes of the signals that end a process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def quantise(values: np.ndarray, *, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """A float32 matrix in FP8, and the float32 scale of each block that gives it back."""
    counts = [math.ceil(n / b) for n, b in zip(values.shape, block, strict=True)]
    scale = np.zeros(counts, np.float32)
    quantised = np.zeros(values.shape, ml_dtypes.float8_e4m3fn)
    for i, j in np.ndindex(*counts):
        part = tuple(slice(k * b, (k + 1) * b) for k, b in zip((i, j), block, strict=True))
        scale[i, j] = np.abs(values[part]).max() / _LARGEST_FP8
        quantised[part] = (values[part] / scale[i, j]).astype(quantised.dtype)
    return quantised, scale


def _is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    kept = ("mlp.gate.weight", "embed_tokens.weight", "head.weight", "eh_proj.weight")
    return len(shape) == 2 and not name.endswith(kept)


def _stored_as(name: str, dtype: str) -> str:
    if name.endswith(_CORRECTION_BIAS):
        return "F32"
    if dtype != "mixed":
        return dtype
    if name.endswith(("norm.weight", ".bias", "mlp.gate.weight")):
        return "F32"
    return "F16" if name.endswith("model.embed_tokens.weight") else "BF16"


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """float32 values that hide no part of the model behind a zero, a one or a small number."""
    noise = rng.standard_normal(shape, np.float32)
    if name.endswith(_CORRECTION_BIAS):
        return 0.1 * noise
    if name.endswith(".bias"):
        return 0.5 * noise
    return 1.0 + 0.1 * noise if len(shape) == 1 else 0.15 * noise
