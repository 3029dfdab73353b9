"""`python -m jaxseek.train`."""

import dataclasses
import sys

from jaxseek.cli import run_main
from jaxseek.host_memory import use_huge_pages
from jaxseek.local_gpus import size_memory_pool
from jaxseek.mesh import emulate_devices
from jaxseek.plan.auto import choose
from jaxseek.train.cli import parse_arguments


def main() -> None:
    """Check the arguments before JAX starts, then train."""
    invocation = parse_arguments(sys.argv[1:])
    if invocation.auto is not None:
        run = choose(invocation.run, fixed=invocation.auto)
        invocation = dataclasses.replace(invocation, run=run)
    size_memory_pool()
    emulate_devices(invocation.run.mesh_shape.devices)
    from jaxseek.train.run import train  # imports JAX, which must find all of it set

    train(invocation)


if __name__ == "__main__":
    use_huge_pages()
    sys.exit(run_main(main, program="jaxseek.train"))
