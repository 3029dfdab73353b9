"""The command line of `python -m jaxseek.plan`. Nothing here imports JAX."""

import argparse
import dataclasses
import math
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from jaxseek.config import ModelConfig
from jaxseek.devices import GIB, Fleet, devices
from jaxseek.errors import UserError
from jaxseek.local_gpus import local_fleet
from jaxseek.plan.auto import AUTO
from jaxseek.plan.choices import Remat, Request, find_choices, parse_only
from jaxseek.run_config import RunConfig
from jaxseek.run_file import with_model
from jaxseek.schema import Setting, Settings, build, to_values
from jaxseek.train.model_folder import named_model_or_folder
from jaxseek.yaml_file import read_yaml

CONFIG_FILE = "config.json"
DEFAULT_SEQ_LEN = 4096
DEFAULT_COMPILED = 3
_PINNED = ("mesh", "explain", "zero", "remat")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a command line asks for.

    Attributes:
        most_compiled: how many choices are compiled.
        explain: whether the bill of the first choice is wanted.
        bandwidth: 10^9 bytes a second that one GPU sends, in place of the assumed.
        efficiency: fraction of the chip's peak that products reach; `None` is the assumed.
    """

    request: Request
    json: bool
    explain: bool
    most_compiled: int
    bandwidth: float | None
    efficiency: float | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{message}. See {self.prog} --help.")


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """What `argv`, without the program's name, asks for. `--help` prints and exits with code 0.

    Raises:
        UserError: for every mistake in the arguments, and when no way to run is possible.
    """
    values = vars(_make_parser().parse_args(argv))
    if values["explain"] is not None and values["json"]:
        raise UserError("--explain prints a table and --json an object; give one of them.")
    request = _request(values)
    for choice in find_choices(request):
        # Impossible runs are refused before JAX starts.
        request.run_of(choice, micro_batch=request.micro_batches(choice)[0])
    for key, largest in (("bandwidth", float("inf")), ("efficiency", 1.0)):
        given = values[key]
        if given is not None and not (0 < given <= largest and math.isfinite(given)):
            limit = " and at most 1" if largest == 1 else " and finite"
            raise UserError(f"--{key} must be above 0{limit}, got {given:g}.")
    if values["compile"] < 1:
        raise UserError(f"--compile must be at least 1, got {values['compile']}.")
    return Arguments(
        request=request,
        json=values["json"],
        explain=values["explain"] is not None,
        most_compiled=values["compile"],
        bandwidth=values["bandwidth"],
        efficiency=values["efficiency"],
    )


def _request(values: dict[str, Any]) -> Request:
    only = parse_only(values["only"]) if values["only"] else {}
    for flag in _PINNED:
        key = "mesh" if flag == "explain" else flag
        if (value := values[flag]) is not None:
            if only.get(key, value) != value:
                raise UserError(f"--{flag} {value} and {key}={only[key]} disagree.")
            only[key] = value
    name, run = _run(values)
    batch = None
    if values["config"] is not None and values["tokens_per_step"] is None:
        batch = run.sequences_per_step
    return Request(
        name=name,
        run=run,
        fleet=_fleet(values["gpus"]),
        micro_batch_tokens=values["batch_per_gpu"],
        tokens_per_step=values["tokens_per_step"],
        batch=batch,
        accumulation=values["accumulation"],
        ram_gib=None if values["ram"] is None else parse_memory(values["ram"]),
        only=only,
    )


def _run(values: dict[str, Any]) -> tuple[str, RunConfig]:
    """The model's name and a run of it; only what no choice is about matters."""
    if (values["model"] is None) == (values["config"] is None):
        raise UserError("give the model with --model, or a run's YAML file with --config.")
    length = {} if values["seq_len"] is None else {"seq_len": values["seq_len"]}
    if values["config"] is not None:
        run = _read_run(Path(values["config"]).expanduser())
        return values["config"], dataclasses.replace(run, **length)
    model = read_model_config(values["model"])
    length = length or {"seq_len": min(DEFAULT_SEQ_LEN, model.max_position_embeddings)}
    return values["model"], RunConfig(model=model, batch=1, **length)


def _read_run(path: Path) -> RunConfig:
    """The run of a file as the trainer takes it: its mesh may be `auto`, its model a folder."""
    settings = read_yaml(path)
    if "mesh" in settings and settings["mesh"].value == AUTO:
        del settings["mesh"]
    return build(RunConfig, with_model(settings, named=_named_model))


def _named_model(name: str) -> Settings:
    return {
        f"model.{key}": Setting(value=value, origin=f"{name}: {key}")
        for key, value in to_values(read_model_config(name)).items()
    }


def _fleet(text: str | None) -> Fleet:
    if text is not None:
        return Fleet.parse(text)
    fleet = local_fleet()
    if fleet is None:
        raise UserError(
            f"there is no NVIDIA GPU here; name some with --gpus, for example 3xrtx4090. Known "
            f"are {', '.join(devices())}."
        )
    return fleet


def parse_memory(text: str) -> float:
    """`"64GiB"`, `"64GB"` or `"64"` (GiB) in GiB.

    Raises:
        UserError: for another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GiB|GB)?", text.strip(), re.IGNORECASE)
    if not match:
        raise UserError(f"--ram: {text!r} is not a size, for example 64GiB.")
    return float(match[1]) * (1e9 / GIB if (match[2] or "").lower() == "gb" else 1.0)


def asks_for_probe(argv: Sequence[str]) -> bool:
    """Whether `argv` asks to measure this machine instead of planning.

    Raises:
        UserError: when it asks for both.
    """
    if "--probe" not in argv or "--help" in argv or "-h" in argv:
        return False
    others = [word for word in argv if word not in ("--probe", "--json")]
    if others:
        raise UserError(
            f"--probe measures this machine and plans nothing: leave out {others[0]}, or plan in a "
            "second command."
        )
    return True


def read_model_config(name: str) -> ModelConfig:
    """The model of a preset, a YAML file or a folder; of a Hugging Face folder `config.json` is
    enough, so that one can plan before the download.

    Raises:
        UserError: when there is nothing of that name, or it describes no possible model.
    """
    path = Path(name).expanduser()
    if (path / CONFIG_FILE).is_file():
        from convert.files.strict_json import loads
        from convert.hf_config import model_config_from_hf

        try:
            return model_config_from_hf(loads((path / CONFIG_FILE).read_bytes()))
        except (UserError, ValueError, OSError) as error:
            raise UserError(f"{path / CONFIG_FILE}: {error}") from error
    return build(ModelConfig, named_model_or_folder(name), prefix="model.")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m jaxseek.plan",
        description="What a training run needs and costs, from the program compiled for GPUs that "
        "need not be here. No weights are read.",
        epilog=f"Known GPUs: {', '.join(devices())}.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help="a preset, a YAML file or a model's folder")
    add(
        "--config",
        metavar="FILE",
        help="a run's YAML file instead: its model, length, batch, dtype and optimizer",
    )
    add("--gpus", metavar="NxGPU", help="for example 3xrtx4090 (default: those of this machine)")
    add("--mesh", metavar="AxB", help="data x tensor devices (default: all that are possible)")
    add("--zero", choices=("0", "1", "2", "3"), help="ZeRO level (default: all)")
    add("--remat", choices=get_args(Remat), help="(default: all)")
    add("--only", metavar="K=V,...", help="plan these choices only, for example mesh=3x1,zero=3")
    add(
        "--seq-len",
        metavar="N",
        type=int,
        help=f"(default: {DEFAULT_SEQ_LEN}, or as many as the model takes)",
    )
    add(
        "--batch-per-gpu",
        metavar="TOKENS",
        type=int,
        help="of a micro-batch on one data device (default: the most that fit)",
    )
    add("--tokens-per-step", metavar="N", type=int, help="at least; gradients are accumulated")
    add("--accumulation", metavar="N", type=int, help="micro-batches of a step")
    add("--ram", metavar="SIZE", help="the host's memory, for example 64GiB (default: no limit)")
    add("--bandwidth", metavar="GB/s", type=float, help="that one GPU sends in a ring")
    add("--efficiency", metavar="X", type=float, help="fraction of peak that products reach")
    add(
        "--compile",
        metavar="N",
        type=int,
        default=DEFAULT_COMPILED,
        help=f"how many choices are compiled, the best ones (default: {DEFAULT_COMPILED})",
    )
    add(
        "--explain", metavar="AxB", help="the bill of the best choice on this mesh: all collectives"
    )
    add("--json", action="store_true", help="print one JSON object")
    add(
        "--probe",
        action="store_true",
        help="by itself: measure this machine's devices, and keep the rates for later plans",
    )
    return parser
