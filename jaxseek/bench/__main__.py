"""`python -m jaxseek.bench`: whole optimizer steps against transformers + PyTorch, in turn.

Prints for each model a line per round and the ratio of the medians. Run it on a quiet machine: the
two engines take turns (A B A B), each in its own process, so a slow spell hits both.
"""

import argparse
import json
import statistics
import subprocess
import sys

from jaxseek.cli import run_main
from jaxseek.errors import UserError

_MODELS = ("bench-dense-58m", "bench-v2-167m", "bench-v3-164m")
_ENGINES = ("jaxseek", "pytorch")


def main() -> None:
    """Compare on every model given."""
    parser = argparse.ArgumentParser(prog="python -m jaxseek.bench", description=__doc__)
    parser.add_argument("--models", nargs="+", default=_MODELS, metavar="PRESET")
    parser.add_argument("--rounds", type=int, default=2, help="times each engine runs (default 2)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps a round (default 4)")
    parser.add_argument("--batch", type=int, default=3, help="sequences (default 3)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens each (default 512)")
    arguments = parser.parse_args()
    for model in arguments.models:
        rates: dict[str, list[float]] = {engine: [] for engine in _ENGINES}
        for number in range(1, arguments.rounds + 1):
            for engine in _ENGINES:
                result = _run(engine, model, arguments)
                rates[engine].append(result["tokens_per_second"])
                rate, setup = result["tokens_per_second"], result["setup_seconds"]
                print(
                    f"{model}  round {number}  {engine:8} {rate:8.0f} tokens/s  "
                    f"(first steps and compilation {setup:.1f} s)",
                    flush=True,
                )
        ratio = statistics.median(rates["jaxseek"]) / statistics.median(rates["pytorch"])
        print(f"{model}  jaxseek / pytorch = {ratio:.2f}", flush=True)


def _run(engine: str, model: str, arguments: argparse.Namespace) -> dict:
    command = [
        sys.executable, "-m", "jaxseek.bench.worker", engine, "--model", model,
        "--batch", str(arguments.batch), "--seq-len", str(arguments.seq_len),
        "--steps", str(arguments.steps),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the {engine} worker failed on {model}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(run_main(main, program="jaxseek.bench"))
