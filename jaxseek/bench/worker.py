"""One process of the step-time benchmark: warm up, time some steps of one engine, print JSON."""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from jaxseek.config import ModelConfig
from jaxseek.host_memory import use_huge_pages
from jaxseek.presets import load_preset


def main() -> None:
    """Time `--steps` optimizer steps after `--warmup` ones, each to its end."""
    parser = argparse.ArgumentParser(prog="python -m jaxseek.bench.worker")
    parser.add_argument("engine", choices=("jaxseek", "pytorch"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, default=2)
    arguments = parser.parse_args()
    config = load_preset(arguments.model)
    shape = (arguments.batch, arguments.seq_len + 1)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)
    started = time.perf_counter()
    if arguments.engine == "jaxseek":
        use_huge_pages()  # as jaxseek.train does
        step = _jaxseek_step(config, tokens)
    else:
        from jaxseek.bench.pytorch_reference import make_step

        step = make_step(config, tokens)
    losses = [step() for _ in range(arguments.warmup)]
    setup = time.perf_counter() - started
    seconds = []
    for _ in range(arguments.steps):
        started = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - started)
    rate = arguments.batch * arguments.seq_len / statistics.median(seconds)
    print(json.dumps({"tokens_per_second": rate, "setup_seconds": setup, "losses": losses}))


def _jaxseek_step(config: ModelConfig, tokens: np.ndarray) -> Callable[[], float]:
    """jaxseek's own train step on one device, float32, without rematerialisation."""

    import jax

    from jaxseek.mesh import make_mesh
    from jaxseek.run_config import OptimConfig, RunConfig
    from jaxseek.train.state import init_state, make_program
    from jaxseek.train.step import StepBatch, make_train_step

    batch, length = tokens.shape[0], tokens.shape[1] - 1
    optim = OptimConfig(learning_rate=1e-4, warmup_steps=0, schedule="constant")
    run = RunConfig(
        model=config, dtype="float32", batch=batch, seq_len=length, remat="none", optim=optim
    )
    program = make_program(run, make_mesh(run.mesh_shape))
    state = init_state(program)
    train_step = make_train_step(program)
    ones = np.ones((batch, length), np.int32)
    arrays = tokens[:, :-1], tokens[:, 1:], ones, np.cumsum(ones, axis=1, dtype=np.int32) - 1
    rows = StepBatch(
        *(jax.device_put(np.ascontiguousarray(x)[None], program.batch_sharding) for x in arrays)
    )

    def step() -> float:
        nonlocal state
        state, metrics = train_step(state, rows)
        jax.block_until_ready(state)
        return float(metrics.loss)

    return step


if __name__ == "__main__":
    main()
