"""The command line of `python -m jaxseek.plan`. Nothing here imports JAX."""

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path

from jaxseek.config import ModelConfig
from jaxseek.devices import Fleet, devices
from jaxseek.errors import UserError
from jaxseek.plan.choices import Request, find_choices, parse_only
from jaxseek.schema import build
from jaxseek.train.model_folder import named_model_or_folder

CONFIG_FILE = "config.json"
_PINNED = ("mesh", "zero", "remat")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a command line asks for.

    Attributes:
        bandwidth: 10^9 bytes a second that one GPU sends, in place of the assumed.
        efficiency: fraction of the chip's peak that products reach; `None` is the assumed.
    """

    request: Request
    json: bool
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
    only = parse_only(values["only"]) if values["only"] else {}
    for key in _PINNED:
        if values[key] is not None:
            if only.get(key, values[key]) != values[key]:
                raise UserError(f"--{key} {values[key]} and --only {key}={only[key]} disagree.")
            only[key] = values[key]
    request = Request(
        name=values["model"],
        model=read_model_config(values["model"]),
        fleet=Fleet.parse(values["gpus"]),
        seq_len=values["seq_len"],
        micro_batch_tokens=values["batch_per_gpu"],
        tokens_per_step=values["tokens_per_step"],
        only=only,
    )
    for choice in find_choices(request):
        request.run(choice)  # impossible runs are refused before JAX starts
    for key, largest in (("bandwidth", float("inf")), ("efficiency", 1.0)):
        if values[key] is not None and not 0 < values[key] <= largest:
            limit = " and at most 1" if largest == 1 else ""
            raise UserError(f"--{key} must be above 0{limit}, got {values[key]:g}.")
    return Arguments(
        request=request,
        json=values["json"],
        bandwidth=values["bandwidth"],
        efficiency=values["efficiency"],
    )


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
    add("--model", metavar="NAME", required=True, help="a preset, a YAML file or a model's folder")
    add("--gpus", metavar="NxGPU", required=True, help="for example 3xrtx4090")
    add("--mesh", metavar="AxB", help="data x tensor devices (default: all that are possible)")
    add("--zero", choices=("0", "1", "2", "3"), help="ZeRO level (default: all)")
    add("--remat", choices=("none", "selective", "full"), help="(default: all)")
    add("--only", metavar="K=V,...", help="plan these choices only, for example mesh=3x1,zero=3")
    add("--seq-len", metavar="N", type=int, default=4096, help="(default: 4096)")
    add(
        "--batch-per-gpu",
        metavar="TOKENS",
        type=int,
        help="of a micro-batch on one data device (default: one sequence)",
    )
    add("--tokens-per-step", metavar="N", type=int, help="at least; gradients are accumulated")
    add("--bandwidth", metavar="GB/s", type=float, help="that one GPU sends in a ring")
    add("--efficiency", metavar="X", type=float, help="fraction of peak that products reach")
    add("--json", action="store_true", help="print one JSON object")
    add(
        "--probe",
        action="store_true",
        help="by itself: measure this machine's devices, and keep the rates for later plans",
    )
    return parser
