"""How fast the converter is beside `cp`, and how much memory it takes.

    python -m jaxseek.bench.conversion [--model deepseek-v2-lite] [--layers 4] [--rounds 3]

Makes a checkpoint of the preset's shapes with so many layers, in a folder that is deleted at the
end, and then in turns copies it with `cp`, converts it with `to-jax` and back with `to-hf`. Times
are those of whole processes, start-up included; memory is the largest resident size of each, less
that of an interpreter that has imported JAX.
"""

import argparse
import collections
import dataclasses
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from convert.files.dtypes import NUMPY
from convert.files.hf_folder import CONFIG_FILE, open_hf_folder
from convert.files.safetensors_file import SafetensorsWriter
from convert.hf_config_export import hf_config
from convert.import_plan import chosen_dtype
from convert.names import hf_tensors
from convert.progress import human_bytes
from convert.to_hf import plan_shards, write_index, write_json
from jaxseek.config import ModelConfig
from jaxseek.presets import load_preset

_NOISE_VALUES = 1 << 24
_SHARD_BYTES = 2 * 10**9
_WARM_BYTES = 8 * 10**9
_IMPORT_JAX = (sys.executable, "-c", "import jax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One process: wall seconds and largest resident size in bytes."""

    seconds: float
    memory: int


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m jaxseek.bench.conversion")
    parser.add_argument("--model", default="deepseek-v2-lite", help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=4, help="of it (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary one)")
    given = parser.parse_args()
    config = dataclasses.replace(load_preset(given.model), num_hidden_layers=given.layers)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        _compare(config, Path(folder), rounds=given.rounds)


def make_checkpoint(config: ModelConfig, folder: Path) -> None:
    """A Hugging Face folder of random weights in the dtypes of a release."""
    folder.mkdir()
    dtypes = {name: chosen_dtype(name, "BF16", "keep") for name in hf_tensors(config)}
    tensors = {name: (dtypes[name], t.shape) for name, t in hf_tensors(config).items()}
    shards = plan_shards(tensors, shard_size=_SHARD_BYTES)
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(_NOISE_VALUES, np.float32)
    pools = {name: noise.astype(NUMPY[name]) for name in set(dtypes.values())}
    for file, names in shards.items():
        with SafetensorsWriter(folder / file, {name: tensors[name] for name in names}) as writer:
            for name in names:
                dtype, shape = tensors[name]
                start = int(rng.integers(_NOISE_VALUES // 2))
                size = math.prod(shape)
                for done in range(0, size, _NOISE_VALUES // 2):
                    block = pools[dtype][start : start + min(size - done, _NOISE_VALUES // 2)]
                    writer.write(name, block, start=done)
    if len(shards) > 1:
        write_index(folder, shards, tensors=tensors)
    write_json(folder / CONFIG_FILE, hf_config(config, source=None, dtype="BF16"))


def _compare(config: ModelConfig, folder: Path, *, rounds: int) -> None:
    source = folder / "source"
    make_checkpoint(config, source)
    with open_hf_folder(source) as opened:
        largest = max(info.nbytes for info in opened.tensors.values())
        total = sum(info.nbytes for info in opened.tensors.values())
    print(
        f"{len(hf_tensors(config)):,} tensors, {human_bytes(total)}, the largest "
        f"{human_bytes(largest)}"
    )
    base = _run(_IMPORT_JAX)
    allowed = 600e6 + 2 * largest
    copy, jax, back = folder / "copy", folder / "jax", folder / "back"
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(rounds):
        for name, command, read in (
            ("cp", ("cp", "-r", source, copy), source),
            ("to-jax", _convert("to-jax", source, jax), source),
            ("to-hf", _convert("to-hf", jax, back), jax),
        ):
            _settle(folder, read)
            measured = _run(command)
            seconds[name].append(measured.seconds)
            print(
                f"{name:8} {measured.seconds:6.2f} s  {total / measured.seconds / 1e9:5.2f} GB/s  "
                f"memory {human_bytes(max(0, measured.memory - base.memory))} more than JAX "
                f"imported ({human_bytes(allowed)} allowed)",
                flush=True,
            )
            if name == "cp":
                shutil.rmtree(copy)
        _check_equal(source, back)
        shutil.rmtree(jax)
        shutil.rmtree(back)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name in ("to-jax", "to-hf"):
        ratio = medians["cp"] / medians[name]
        print(f"{name} runs at {ratio:.2f} of the speed of cp, medians of {rounds} rounds")


def _settle(folder: Path, read: Path) -> None:
    """The same start for each process: nothing left to be written, what it reads in the page cache
    and nothing else, and memory that a virtual machine has from its host already: it gets it page
    by page, at several times the cost of a copy.
    """
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for file in read.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.read(1 << 20):
                    pass
    subprocess.run((sys.executable, "-c", f"bytearray({_WARM_BYTES})"), check=True)


def _convert(*words: object) -> tuple[object, ...]:
    return (sys.executable, "-m", "convert", *words)


def _run(command: Sequence[object]) -> Measured:
    """Run a command to its end; its memory is what the kernel counted for it alone."""
    script = (
        "import resource, subprocess, sys; "
        "code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode; "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
    )
    words = [sys.executable, "-c", script, *map(str, command)]
    started = time.perf_counter()
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return Measured(seconds=time.perf_counter() - started, memory=int(done.stdout) * 1024)


def _check_equal(source: Path, back: Path) -> None:
    with open_hf_folder(source) as first, open_hf_folder(back) as second:
        assert first.tensors.keys() == second.tensors.keys()
        for name in first.tensors:
            one, other = (f.view(name).reshape(-1).view(np.uint8) for f in (first, second))
            assert np.array_equal(one, other), name
            first.release(name)
            second.release(name)
    print("every tensor came back bit for bit")


if __name__ == "__main__":
    main()
