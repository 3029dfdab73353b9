"""`--mesh auto`: the trainer takes the plan's first choice.

The plan compiles for GPUs from a process that uses none, so it runs in one of its own. Nothing here
imports JAX.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxseek.devices import Fleet
from jaxseek.errors import UserError
from jaxseek.local_gpus import jax_may_use_gpus, local_fleet
from jaxseek.mesh import emulated_devices
from jaxseek.run_config import RunConfig
from jaxseek.run_file import dump_config

AUTO = "auto"
# What the plan decides where the user does not.
OPEN = ("mesh", "zero", "remat", "accumulation")
_STAND_IN = "generic-24gb"


def choose(run: RunConfig, *, fixed: Mapping[str, Any]) -> RunConfig:
    """`run` as the plan for this machine's GPUs would run it; the plan tells why on stderr.

    Where JAX uses no GPU the emulated devices that `XLA_FLAGS` asks for, or one, are planned for as
    if they were small GPUs.

    Args:
        fixed: settings of `OPEN` that the user has made.

    Raises:
        UserError: when nothing fits, and what the plan refuses.
    """
    fleet = _local_fleet()
    gpus = []
    if fleet is None:
        fleet = Fleet.parse(f"{emulated_devices()}x{_STAND_IN}")
        gpus = ["--gpus", str(fleet)]  # else the plan looks for itself, at their memory too
        print(f"--mesh auto: no GPU is used here; planning for {fleet}", file=sys.stderr)
    best = _plan(run, gpus=gpus, fixed=fixed)
    if not best["fits"]:
        raise UserError(
            f"--mesh auto: nothing fits on {fleet}; see python -m jaxseek.plan for what would."
        )
    return dataclasses.replace(run, **{name: best[name] for name in OPEN})


def _local_fleet() -> Fleet | None:
    if not jax_may_use_gpus():
        return None
    try:
        return local_fleet()
    except UserError as error:  # it names --gpus, which the trainer does not have
        raise UserError(
            f"--mesh auto cannot plan for this machine's GPUs; give --mesh AxB. The reason: {error}"
        ) from error


def _plan(run: RunConfig, *, gpus: Sequence[str], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's first choice, as `--json` prints it."""
    command = [sys.executable, "-m", "jaxseek.plan", *gpus, "--json"]
    for name in OPEN:
        if name in fixed and name != "mesh":
            command += [f"--{name}", str(fixed[name])]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(dump_config(run))
        done = subprocess.run([*command, "--config", str(file)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(
            "--mesh auto: no plan could be made, for the reason above; give --mesh AxB."
        )
    return json.loads(done.stdout)["choices"][0]
