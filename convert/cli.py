"""The command line of `python -m convert`. Nothing here imports JAX, so that help and mistakes
come at once.
"""

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jaxseek.errors import UserError

Command = Literal["inspect", "to-jax", "to-hf", "verify"]
COMMANDS: tuple[Command, ...] = typing.get_args(Command)
_DTYPES = ("keep", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a command line asks for; what a command does not take keeps its default."""

    command: Command
    source: Path
    other: Path | None = None
    dtype: Literal["keep", "bfloat16", "float32"] = "keep"
    shard_size: str = "5GB"
    hf_compat: Literal["4", "5", "both"] = "both"
    step: int | None = None
    logits: bool = True


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{message}. See {self.prog} --help.")


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """What `argv`, without the program's name, asks for. `--help` prints and exits with code 0.

    Raises:
        UserError: for every mistake in the arguments.
    """
    values = vars(_make_parser().parse_args(argv))
    return Arguments(**{key: value for key, value in values.items() if value is not None})


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m convert",
        description="DeepSeek weights from Hugging Face folders to jaxseek and back, bit for bit.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspect = _add(commands, "inspect", "what a folder holds and what will become of it")
    _add_folder(inspect)
    to_jax = _add(commands, "to-jax", "a Hugging Face folder to a checkpoint of jaxseek")
    _add_folder(to_jax)
    to_jax.add_argument("other", metavar="OUT", type=_path, help="the new folder")
    _add_dtype(to_jax, keep="the files' own, bfloat16 for FP8")
    to_hf = _add(commands, "to-hf", "a run or a converted model to a Hugging Face folder")
    to_hf.add_argument(
        "source", metavar="CHECKPOINT", type=_path, help="a run folder, a to-jax folder or one step"
    )
    to_hf.add_argument("other", metavar="OUT", type=_path, help="the new folder")
    _add_dtype(to_hf, keep="those of the folder the model came from, else the checkpoint's")
    to_hf.add_argument(
        "--shard-size",
        metavar="SIZE",
        help="of a weight file at most, 4GiB say (default: 5GB)",
    )
    to_hf.add_argument(
        "--hf-compat",
        choices=("4", "5", "both"),
        help="keys of config.json for transformers 4, 5, or both (default: both)",
    )
    to_hf.add_argument("--step", metavar="N", type=int, help="of a run (default: the newest)")
    verify = _add(
        commands, "verify", "compare tensor by tensor, then logits with transformers (needs torch)"
    )
    _add_folder(verify)
    verify.add_argument(
        "other",
        metavar="CHECKPOINT",
        type=_path,
        nargs="?",
        help="a run folder, a to-jax folder, one step, or another Hugging Face folder",
    )
    verify.add_argument(
        "--no-logits", dest="logits", action="store_false", help="compare tensors only"
    )
    return parser


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text}: there is no such home folder") from error


def _add(commands: typing.Any, name: Command, text: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=text, allow_abbrev=False)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="HF_DIR", type=_path, help="config.json and its weights")


def _add_dtype(parser: argparse.ArgumentParser, *, keep: str) -> None:
    parser.add_argument("--dtype", choices=_DTYPES, help=f"of the weights (default: keep, {keep})")
