"""A plan as a person reads it."""

from rich.console import Console
from rich.table import Table

from jaxseek.devices import CONTEXT_GIB, Fleet
from jaxseek.plan.planner import ChoicePlan, Plan

# Columns of text; a narrower terminal wraps whole lines instead of cutting figures off.
TABLE_WIDTH = 130
_COLUMNS = (
    "mesh",
    "ZeRO",
    "remat",
    "fits",
    "state",
    "temporaries",
    "total",
    "head-room",
    "sent",
    "of least",
    "step",
    "tokens/s",
    "MFU",
    "bound by",
    "source",
)


def print_plan(plan: Plan, *, fleet: Fleet, console: Console) -> None:
    """The table, what it rests on, and one sentence of advice."""
    console.print(f"{plan.model} on {fleet.count} x {fleet.device.name}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        right = column not in ("remat", "fits", "bound by", "source")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    for choice in plan.choices:
        table.add_row(*_row(choice, fleet=fleet))
    console.print(table)
    console.print("GiB and bytes are those of one GPU; sent: GB in one step.")
    for line in assumptions(plan, fleet=fleet):
        console.print(line, highlight=False, markup=False)
    console.print(advice(plan), highlight=False)


def assumptions(plan: Plan, *, fleet: Fleet) -> list[str]:
    """What the figures rest on, a line each."""
    rates = plan.rates
    memory = (
        "memory, collectives and their overlap: read from the CUDA program compiled for these GPUs"
        if plan.target == "cuda"
        else "ESTIMATE: JAX's CUDA wheels are not installed (pip install 'jaxseek[cuda12]'), so "
        "memory and collectives are those of the step compiled for emulated CPU devices, and no "
        "communication is taken to overlap"
    )
    kept = (fleet.device.memory_mib - fleet.device.cuda_memory_mib) / 1024
    reserved = f"the driver keeps {kept:.1f} GiB; {CONTEXT_GIB} GiB for the CUDA context"
    reserved += f" and {fleet.nccl_gib} GiB for NCCL" if fleet.count > 1 else ""
    return [
        f"- {memory}; modelled rows have a state that is too large by itself and were not compiled",
        f"- {plan.usable_gib:.1f} of {fleet.device.memory_gib:.1f} GiB are usable: {reserved} are "
        "assumed; XLA's pool may take the rest (XLA_CLIENT_MEM_FRACTION, which the trainer sets)",
        f"- step time is modelled: products at {rates.compute_fraction:.0%} of "
        f"{fleet.device.bf16_tflops:g} TFLOP/s ({rates.compute_words}), {rates.wire / 1e9:.1f} "
        f"GB/s on the wire ({rates.link_words}), the optimizer at {rates.memory / 1e9:.0f} GB/s of "
        f"memory ({rates.memory_words})",
    ]


def advice(plan: Plan) -> str:
    """One sentence: what to take, or what to change first."""
    best = plan.choices[0]
    name = f"mesh {best.mesh}, ZeRO {best.zero}, remat {best.remat}"
    if best.fits:
        return (
            f"Take {name}: {best.headroom_gib:.1f} GiB stay free; it is bound by {best.bound_by}."
        )
    if best.state_gib > plan.usable_gib:
        return (
            f"Nothing fits: the state alone takes {best.state_gib:.1f} GiB a GPU at the least, "
            f"and {plan.usable_gib:.1f} are usable; it takes more GPUs or a smaller model."
        )
    assert best.total_gib is not None
    return (
        f"Nothing fits: {name} comes nearest and lacks {best.total_gib - plan.usable_gib:.1f} GiB; "
        "shorten the sequences or the micro-batch first."
    )


def _row(choice: ChoicePlan, *, fleet: Fleet) -> list[str]:
    sent = sum(sum(kinds.values()) for kinds in choice.wire_bytes.values())
    least = choice.wire_bytes_minimum
    peak = fleet.device.bf16_tflops * 1e12 * fleet.count
    return [
        choice.mesh,
        str(choice.zero),
        choice.remat,
        "yes" if choice.fits else "no",
        f"{choice.state_gib:.1f}",
        *(
            "-" if size is None else f"{size:.1f}"
            for size in (choice.temporaries_gib, choice.total_gib, choice.headroom_gib)
        ),
        f"{sent / 1e9:.2f}",
        f"{sent / least:.3f}" if least else "-",
        f"{choice.step_seconds:.2f} s",
        f"{choice.tokens_per_second:,.0f}",
        f"{choice.model_flops_per_step / choice.step_seconds / peak:.0%}",
        choice.bound_by,
        choice.source,
    ]
