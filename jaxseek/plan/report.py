"""A plan as a person reads it."""

from rich.console import Console
from rich.table import Table

from jaxseek.devices import CONTEXT_GIB
from jaxseek.plan.figures import ChoicePlan, total
from jaxseek.plan.planner import Plan

# Columns of text; a narrower terminal wraps whole lines instead of cutting figures off.
TABLE_WIDTH = 150
_LEFT = ("remat", "fits", "bound by", "source")
_COLUMNS = (
    *("mesh", "ZeRO", "remat", "tokens", "acc.", "fits", "state", "temporaries", "total"),
    *("head-room", "host", "sent", "of least", "step", "tokens/s", "MFU", "bound by", "source"),
)


def print_plan(plan: Plan, *, console: Console) -> None:
    """The table, what it rests on, and one sentence of advice."""
    fleet = plan.request.fleet
    console.print(f"{plan.request.name} on {fleet.count} x {fleet.device.name}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        justify = "left" if column in _LEFT else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for choice in plan.choices:
        table.add_row(*_row(choice, plan))
    console.print(table)
    for line in assumptions(plan):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(advice(plan), highlight=False, markup=False, soft_wrap=True)


def assumptions(plan: Plan) -> list[str]:
    """What the figures rest on, a line each."""
    rates, fleet = plan.rates, plan.request.fleet
    memory = (
        "compiled rows: memory, collectives and their overlap are read from the CUDA program "
        "compiled for these GPUs"
        if plan.target == "cuda"
        else "ESTIMATE: JAX's CUDA wheels are not installed (pip install 'jaxseek[cuda12]'), so "
        "the first rows' memory and collectives are those of the step compiled for emulated CPU "
        "devices, and no communication is taken to overlap"
    )
    kept = (fleet.device.memory_mib - fleet.device.cuda_memory_mib) / 1024
    reserved = f"the driver keeps {kept:.1f} GiB; {CONTEXT_GIB} GiB for the CUDA context"
    reserved += f" and {fleet.nccl_gib} GiB for NCCL" if fleet.count > 1 else ""
    return [
        "- tokens: of a micro-batch on one GPU, the most that fit where they were left open; acc.: "
        "micro-batches of a step; state, temporaries (gradients, activations, gathered weights), "
        "total and head-room: GiB of one GPU",
        "- host: GiB of the host's memory for the copy that a checkpoint is written from, the "
        "process itself aside; sent: GB of one GPU in a step",
        f"- {memory}; modelled rows: by formula, within about 10 % where a test looks",
        f"- {fleet.usable_gib:.1f} of {fleet.device.memory_gib:.1f} GiB are usable: {reserved} are "
        "assumed; XLA's pool may take the rest (XLA_CLIENT_MEM_FRACTION, which the trainer sets)",
        f"- step time is modelled: products at {rates.compute_fraction:.0%} of "
        f"{fleet.device.bf16_tflops:g} TFLOP/s ({rates.compute_words}), {rates.wire / 1e9:.1f} "
        f"GB/s on the wire ({rates.link_words}), the optimizer at {rates.memory / 1e9:.0f} GB/s of "
        f"memory ({rates.memory_words})",
    ]


def advice(plan: Plan) -> str:
    """One sentence: what to take, or what to change first."""
    best, usable = plan.choices[0], plan.request.fleet.usable_gib
    if best.fits:
        return (
            f"Take {best.choice} with micro-batches of {best.micro_batch_tokens} tokens per GPU"
            f"{_largest(plan)}: {best.headroom_gib:.1f} GiB stay free; it is bound by "
            f"{best.bound_by}."
        )
    smallest = min(plan.choices, key=lambda choice: choice.state_gib)
    if smallest.state_gib > usable:
        return (
            f"Nothing fits: the state alone takes {smallest.state_gib:.1f} GiB a GPU at the least, "
            f"and {usable:.1f} are usable; {_smaller_state(plan)}."
        )
    if best.headroom_gib >= 0:
        return (
            f"Nothing fits: {best.choice} has room on the GPUs, but needs {best.host_gib:.1f} GiB "
            f"of the host's memory, and --ram is {plan.request.ram_gib:g} GiB."
        )
    shorter = "micro-batch" if best.micro_batch_tokens > plan.request.run.seq_len else "sequences"
    return (
        f"Nothing fits: {best.choice} comes nearest and lacks {-best.headroom_gib:.1f} GiB with "
        f"{best.micro_batch_tokens} tokens per GPU; shorten the {shorter} first."
    )


def _smaller_state(plan: Plan) -> str:
    """What to change where the state of no choice that was asked for fits."""
    pinned = [name for name in ("mesh", "zero") if name in plan.request.only]
    elsewhere = "more GPUs or a smaller model"
    if not pinned or plan.request.fleet.count == 1:
        return f"it takes {elsewhere}"
    return f"leave {' and '.join(pinned)} open first; else it takes {elsewhere}"


def _largest(plan: Plan) -> str:
    """Whether larger micro-batches than the best choice's are known not to fit."""
    best, request = plan.choices[0], plan.request
    sizes = request.micro_batches(best.choice)
    at_limit = best.micro_batch_tokens == sizes[-1] * request.run.seq_len
    return "" if at_limit or best.choice not in plan.largest else ", the largest that fit"


def _row(choice: ChoicePlan, plan: Plan) -> list[str]:
    sent = total(choice.wire_bytes)
    least, fleet = choice.wire_bytes_minimum, plan.request.fleet
    peak = fleet.device.bf16_tflops * 1e12 * fleet.count
    return [
        choice.mesh,
        str(choice.zero),
        choice.remat,
        str(choice.micro_batch_tokens),
        str(choice.accumulation),
        "yes" if choice.fits else "no",
        f"{choice.state_gib:.1f}",
        f"{choice.temporaries_gib:.1f}",
        f"{choice.total_gib:.1f}",
        f"{choice.headroom_gib:.1f}",
        f"{choice.host_gib:.0f}",
        f"{sent / 1e9:.2f}",
        f"{sent / least:.3f}" if least else "-",
        f"{choice.step_seconds:.2f} s",
        f"{choice.tokens_per_second:,.0f}",
        f"{choice.model_flops_per_step / choice.step_seconds / peak:.0%}",
        choice.bound_by,
        choice.source,
    ]
