"""`python -m jaxseek.plan`."""

import functools
import json
import os
import sys

from rich.console import Console

from jaxseek.cli import run_main
from jaxseek.local_gpus import local_gpus
from jaxseek.plan.cli import asks_for_probe, parse_arguments
from jaxseek.plan.compilation import has_cuda_wheels, prepare
from jaxseek.plan.measurement import load_measurement


def main() -> None:
    """Check the arguments before JAX starts, then compile and print; or measure this machine."""
    if asks_for_probe(sys.argv[1:]):
        if has_cuda_wheels() and not local_gpus():
            os.environ.setdefault("JAX_PLATFORMS", "cpu")  # else JAX complains at length
        from jaxseek.plan.probe import probe_machine

        return probe_machine(as_json="--json" in sys.argv)
    arguments = parse_arguments(sys.argv[1:])
    fleet = arguments.request.fleet
    measured = load_measurement(fleet.device.name, count=fleet.count)
    target = prepare(fleet)
    from jaxseek.plan.explain import print_bill
    from jaxseek.plan.planner import make_plan  # imports JAX, which must find what was prepared
    from jaxseek.plan.report import TABLE_WIDTH, advice, assumptions, print_plan
    from jaxseek.plan.timing import machine_rates

    progress = functools.partial(print, file=sys.stderr)
    rates = machine_rates(
        fleet,
        compute_fraction=arguments.efficiency,
        wire_gb_s=arguments.bandwidth,
        measured=measured,
    )
    plan = make_plan(
        arguments.request,
        rates=rates,
        target=target,
        report=progress,
        most_compiled=1 if arguments.explain else arguments.most_compiled,
    )
    if arguments.json:
        for line in assumptions(plan):
            progress(line)
        progress(advice(plan))
        print(json.dumps(plan.to_json(), indent=2))
        return
    console = Console(width=max(Console().width, TABLE_WIDTH))
    if arguments.explain:
        print_bill(plan, console=console)
    else:
        print_plan(plan, console=console)


if __name__ == "__main__":
    sys.exit(run_main(main, program="jaxseek.plan"))
