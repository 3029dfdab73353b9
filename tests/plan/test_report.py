"""What a person reads."""

import dataclasses
import io

import pytest
from rich.console import Console

from jaxseek.devices import Fleet
from jaxseek.plan.figures import ChoicePlan
from jaxseek.plan.planner import Plan
from jaxseek.plan.report import TABLE_WIDTH, advice, print_plan
from jaxseek.plan.timing import machine_rates
from tests.plan.models import DENSE, request

FLEET = Fleet.parse("3xrtx4090")
CHOICE = ChoicePlan(
    mesh="3x1",
    zero=3,
    state="float32",
    remat="selective",
    offload="none",
    micro_batch_tokens=4096,
    accumulation=1,
    fits=True,
    state_gib=5.0,
    temporaries_gib=4.25,
    total_gib=9.25,
    headroom_gib=13.75,
    host_gib=15.0,
    wire_bytes={"data": {"all-gather": 2_000_000_000, "reduce-scatter": 1_000_000_000}},
    wire_bytes_minimum=2_970_000_000,
    flops_per_step=2e14,
    model_flops_per_step=1e14,
    step_seconds=0.5,
    tokens_per_second=24576.0,
    bound_by="compute",
    source="compiled",
)


def plan(*choices, target="cuda", **asked):
    return Plan(
        request=request(DENSE, gpus=str(FLEET), **asked),
        choices=choices,
        collectives={choice.choice: () for choice in choices},
        largest=frozenset(choice.choice for choice in choices),
        rates=machine_rates(FLEET, compute_fraction=0.5, wire_gb_s=None),
        target=target,
    )


def printed(made):
    out = io.StringIO()
    print_plan(made, console=Console(file=out, width=TABLE_WIDTH))
    return out.getvalue()


def test_the_table_shows_a_choice_on_one_line_with_nothing_cut_off():
    [row] = [line for line in printed(plan(CHOICE)).splitlines() if "3x1" in line][:1]
    assert " ".join(row.split()) == (
        "3x1 3 selective 4096 1 yes 5.0 4.2 9.2 13.8 15 3.00 1.010 0.50 s 24,576 40% compute "
        "compiled"
    )


def test_the_assumptions_stand_below_the_table():
    text = " ".join(printed(plan(CHOICE)).split())
    assert "products at 50% of 165.2 TFLOP/s (as given)" in text
    assert "40% of PCIe 4.0 x16 through host memory's 31.5 GB/s" in text
    assert (
        "22.6 of 24.0 GiB are usable: the driver keeps 0.4 GiB; 0.6 GiB for the CUDA context and "
        "0.4 GiB for NCCL are assumed"
    ) in text


def test_an_estimate_says_that_it_is_one_and_what_to_install():
    text = " ".join(printed(plan(CHOICE, target="cpu")).split())
    assert "ESTIMATE: JAX's CUDA wheels are not installed (pip install 'jaxseek[cuda12]')" in text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {},
            "Take mesh 3x1, ZeRO 3, remat selective with micro-batches of 4096 tokens per GPU, the "
            "largest that fit: 13.8 GiB stay free; it is bound by compute.",
        ),
        (
            {"fits": False, "total_gib": 25.0, "headroom_gib": -2.4},
            "Nothing fits: mesh 3x1, ZeRO 3, remat selective comes nearest and lacks 2.4 GiB with "
            "4096 tokens per GPU; shorten the micro-batch first.",
        ),
        (
            {"fits": False, "headroom_gib": -2.4, "micro_batch_tokens": 128},
            "Nothing fits: mesh 3x1, ZeRO 3, remat selective comes nearest and lacks 2.4 GiB with "
            "128 tokens per GPU; shorten the sequences first.",
        ),
        (
            {"fits": False, "state_gib": 30.0, "total_gib": 35.0},
            "Nothing fits: the state alone takes 30.0 GiB a GPU at the least, and 22.6 are usable",
        ),
    ],
)
def test_the_advice_names_the_first_choice_or_what_is_too_large(change, sentence):
    assert advice(plan(dataclasses.replace(CHOICE, **change))).startswith(sentence)


def test_what_the_user_has_fixed_is_to_be_changed_before_the_machine():
    large = dataclasses.replace(CHOICE, fits=False, state_gib=30.0, total_gib=35.0)
    assert advice(plan(large)).endswith("; it takes more GPUs or a smaller model.")
    pinned = plan(large, only={"zero": "0", "remat": "full"})
    assert "; leave zero open first; else it takes more GPUs" in advice(pinned)


def test_a_name_in_brackets_is_printed_as_it_is():
    made = plan(CHOICE)
    named = dataclasses.replace(made.request, name="[red]/models/[/x]")
    assert printed(dataclasses.replace(made, request=named)).startswith("[red]/models/[/x] on 3 x")
