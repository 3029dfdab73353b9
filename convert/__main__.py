"""`python -m convert`."""

import functools
import sys
from collections.abc import Callable

from convert import interruption
from convert.cli import Arguments, parse_arguments
from jaxseek.cli import run_main


def main() -> int:
    """Do what the command line asks for; 1 where `verify` found a difference."""
    arguments = parse_arguments(sys.argv[1:])
    interruption.end_at_once()
    command = _import_command(arguments)
    interruption.end_by_exception()
    return 1 if command() is False else 0


def _import_command(arguments: Arguments) -> Callable[[], bool | None]:
    """What is to be done; `False` is what `verify` returns where it found a difference."""
    source, other = arguments.source, arguments.other
    match arguments.command:
        case "inspect":
            from convert.inspection import inspect

            return functools.partial(inspect, source)
        case "to-jax":
            from convert.to_jax import to_jax

            assert other is not None
            return lambda: to_jax(source, other, dtype=arguments.dtype).print()
        case "to-hf":
            from convert.to_hf import parse_size, to_hf

            assert other is not None
            export = functools.partial(
                to_hf,
                source,
                other,
                dtype=arguments.dtype,
                shard_size=parse_size(arguments.shard_size),
                compat=arguments.hf_compat,
                step=arguments.step,
            )
            return lambda: export().print()
        case "verify":
            from convert.verify import verify

            return functools.partial(verify, source, other, logits=arguments.logits)


if __name__ == "__main__":
    sys.exit(run_main(main, program="convert"))
