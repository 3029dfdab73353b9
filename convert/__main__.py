"""`python -m convert`."""

import signal
import sys

from convert.cli import Arguments, parse_arguments
from jaxseek.cli import run_main


def main() -> int:
    """Do what the command line asks for; 1 where `verify` found a difference."""
    arguments = parse_arguments(sys.argv[1:])
    # So that a conversion that is asked to end removes what it has written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return _run(arguments)


def _run(arguments: Arguments) -> int:
    source, other = arguments.source, arguments.other
    match arguments.command:
        case "inspect":
            from convert.inspection import inspect

            inspect(source)
        case "to-jax":
            from convert.to_jax import to_jax

            assert other is not None
            to_jax(source, other, dtype=arguments.dtype).print()
        case "to-hf":
            from convert.to_hf import parse_size, to_hf

            assert other is not None
            summary = to_hf(
                source,
                other,
                dtype=arguments.dtype,
                shard_size=parse_size(arguments.shard_size),
                compat=arguments.hf_compat,
                step=arguments.step,
            )
            summary.print()
        case "verify":
            from convert.verify import verify

            return 0 if verify(source, other, logits=arguments.logits) else 1
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main, program="convert"))
