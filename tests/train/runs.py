"""Whole training runs of a tiny model on a little text, in this process."""

import json
import os
import sys
from pathlib import Path

import numpy as np

from jaxseek.train.cli import parse_arguments
from jaxseek.train.run import train

MODEL = """
model_type: deepseek_v3
vocab_size: 320
hidden_size: 24
intermediate_size: 32
num_hidden_layers: 2
num_attention_heads: 2
num_key_value_heads: 2
max_position_embeddings: 64
initializer_range: 0.1
kv_lora_rank: 8
qk_nope_head_dim: 8
qk_rope_head_dim: 4
v_head_dim: 8
n_routed_experts: 4
n_shared_experts: 1
num_experts_per_tok: 2
moe_intermediate_size: 8
first_k_dense_replace: 1
topk_method: noaux_tc
scoring_func: sigmoid
norm_topk_prob: true
"""
STEPS = 6
SETTINGS = {
    "mesh": "3x1",
    "steps": STEPS,
    "batch": 6,
    "seq-len": 16,
    "dtype": "float32",
    "optim.learning_rate": 3e-3,
    "eval.sequences": 7,
    "data.validation_fraction": 0.3,
}


def write_text(folder: Path, *, files: int = 8) -> Path:
    """Files of Python and of prose."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    names = ("area", "width", "height", "total", "count")
    for number in range(files):
        lines = []
        for _ in range(12):
            a, b, c = rng.choice(names, 3)
            lines.append(
                f"def {a}_{b}(x, y):\n    {c} = x * {rng.integers(100)} + y\n    return {c}\n"
            )
        suffix = "py" if number % 2 else "txt"
        (folder / f"file{number}.{suffix}").write_text("\n".join(lines), encoding="utf-8")
    return folder


def arguments(base: Path, *more: str, **changes: object) -> list[str]:
    """The command line of a run on the model and text in `base`."""
    words = ["--model", str(base / "model.yaml"), "--data.source", str(base / "text")]
    for key, value in (SETTINGS | changes).items():
        words += [f"--{key}", str(value)]
    return [*words, *more]


def make_base(folder: Path) -> Path:
    """`folder` with a model and text."""
    (folder / "model.yaml").write_text(MODEL, encoding="utf-8")
    write_text(folder / "text")
    return folder


def run(*words: str) -> None:
    """The command with these words, without its `main`."""
    train(parse_arguments([str(word) for word in words]))


def metrics(folder: Path) -> list[dict]:
    """The lines of `metrics.jsonl`."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def step_lines(folder: Path) -> list[dict]:
    return [line for line in metrics(folder) if "loss" in line]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in step_lines(folder)]


def contents(folder: Path) -> dict[str, int]:
    """Every file below `folder` with its size."""
    return {
        os.path.relpath(Path(parent) / name, folder): (Path(parent) / name).stat().st_size
        for parent, _, names in os.walk(folder)
        for name in names
    }


def main_with(monkeypatch, *words: str) -> int:
    """Exit code of `python -m jaxseek.train WORDS`, in this process."""
    from jaxseek.cli import run_main
    from jaxseek.train.__main__ import main

    monkeypatch.setattr(sys, "argv", ["jaxseek.train", *map(str, words)])
    return run_main(main, program="jaxseek.train")
