"""The run folder: `config.yaml`, `metrics.jsonl`, `loss.png`, `checkpoints/`, `tokenizer/`, and
`hf/` where the weights came from a folder that had more to it.
"""

import dataclasses
import datetime
import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from jaxseek.errors import UserError
from jaxseek.paths import HF_FILES
from jaxseek.run_config import RunConfig
from jaxseek.run_file import dump_config
from jaxseek.train.cli import CONFIG_FILE

METRICS_FILE, PLOT_FILE = "metrics.jsonl", "loss.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A folder that belongs to one run.

    Attributes:
        path: the folder.
        metrics: `metrics.jsonl`, open for appending; every line is written at once, so a crash
            leaves whole lines.
    """

    path: Path
    metrics: TextIO

    @classmethod
    def create(
        cls, run: RunConfig, *, path: Path, hf_files: Sequence[Path] | None = None
    ) -> "RunFolder":
        """A new folder with the resolved config, and copies of `hf_files` in `hf/`.

        Raises:
            UserError: when `path` holds anything already, or cannot be written.
        """
        check_new(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / CONFIG_FILE).write_text(dump_config(run), encoding="utf-8")
            if hf_files is not None:
                (path / HF_FILES).mkdir()
                for file in hf_files:
                    shutil.copyfile(file, path / HF_FILES / file.name)
            return cls(path=path, metrics=(path / METRICS_FILE).open("a", encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"--out {path} cannot be written: {error.strerror or error}."
            ) from error

    @classmethod
    def resume(cls, run: RunConfig, *, path: Path, step: int) -> "RunFolder":
        """The folder of a run that goes on after `step`. Lines of its metrics that will be written
        again, those of later steps and the validation at `step`, are dropped: none stands twice.
        """
        lines = [
            line
            for line in read_metrics(path)
            if line["step"] < step or (line["step"] == step and "loss" in line)
        ]
        replacement = path / f".{METRICS_FILE}.new"
        replacement.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        os.replace(replacement, path / METRICS_FILE)
        (path / CONFIG_FILE).write_text(dump_config(run), encoding="utf-8")
        return cls(path=path, metrics=(path / METRICS_FILE).open("a", encoding="utf-8"))

    def log(self, line: dict[str, Any]) -> None:
        """Append one line to `metrics.jsonl`; values that are not finite, which JSON cannot hold,
        become null.
        """
        line = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in line.items()
        }
        self.metrics.write(json.dumps(line, allow_nan=False) + "\n")
        self.metrics.flush()

    def plot(self) -> None:
        """Draw `loss.png` from `metrics.jsonl`."""
        from matplotlib.figure import Figure  # half a second to import, needed once

        lines = read_metrics(self.path)
        train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        validation = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(*zip(*train, strict=True), linewidth=1, label="training")
        axes.plot(*zip(*validation, strict=True), "o-", label="validation")
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self.path / PLOT_FILE, dpi=120)


def check_new(path: Path) -> None:
    """Refuse a folder that holds anything already; before the long part of a run begins.

    Raises:
        UserError: it does, or it is a file or cannot be read.
    """
    try:
        if path.exists() and any(path.iterdir()):
            raise UserError(
                f"--out {path} is not empty. Give another folder, or go on with that run by "
                f"--resume {path}."
            )
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error.strerror or error}.") from error


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's `metrics.jsonl`; one that a crash cut off is left out."""
    file = folder / METRICS_FILE
    if not file.is_file():
        return []
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            lines.append(json.loads(line))
    return lines


def default_path(run: RunConfig) -> Path:
    """A new folder under `runs/`, named by model type and time; runs of the same second are
    numbered from 2.
    """
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    first = path = Path("runs") / f"{run.model.model_type}-{stamp}"
    number = 1
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path
