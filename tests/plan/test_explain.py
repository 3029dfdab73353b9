"""The bill: what a collective is for, in words, and sums that agree with the plan."""

import io

import pytest
from rich.console import Console

from jaxseek.plan.collectives import Collective
from jaxseek.plan.explain import bill, print_bill, purpose
from jaxseek.plan.figures import total
from jaxseek.plan.planner import make_plan
from jaxseek.plan.timing import machine_rates
from tests.plan.models import MLA_MOE, request

STEP = "jit(_train_step)/shard_map/"
BODY = "while/body/closed_call/"
AGAIN = f"transpose(jvp())/{BODY}checkpoint/rematted_computation/"


@pytest.mark.parametrize(
    ("origin", "kind", "words"),
    [
        (
            f"{STEP}jvp()/{BODY}dense_layers.mlp.up_proj.kernel/all_gather",
            "all-gather",
            "weights of dense_layers, forward",
        ),
        (
            f"{STEP}{AGAIN}(dense_layers.mlp.up_proj.kernel/all_gather:"
            "dense_layers.self_attn.q_proj.kernel/all_gather)",
            "all-gather",
            "weights of dense_layers, again for the backward pass",
        ),
        (
            f"{STEP}(jvp()/{BODY}dense_layers.mlp.up_proj.kernel/all_gather:"
            f"{AGAIN}dense_layers.mlp.up_proj.kernel/all_gather)",
            "all-gather",
            "weights of dense_layers, forward and "
            "weights of dense_layers, again for the backward pass",
        ),
        (f"{STEP}jvp(lm_head.kernel)/all_gather", "all-gather", "weights of lm_head, forward"),
        (
            f"{STEP}transpose(jvp(norm.scale))/reduce_scatter",
            "reduce-scatter",
            "gradients of norm",
        ),
        (
            f"{STEP}(transpose(jvp(norm.scale))/reduce_scatter:transpose(jvp())/{BODY}checkpoint/"
            "dense_layers.input_layernorm.scale/reduce_scatter)",
            "reduce-scatter",
            "gradients of norm and gradients of dense_layers",
        ),
        (
            f"{STEP}jvp()/{BODY}dense_layers/self_attn/psum_invariant",
            "all-reduce",
            "activations of dense_layers/self_attn, forward",
        ),
        (
            f"{STEP}transpose(jvp())/{BODY}checkpoint/moe_layers/mlp/psum_invariant",
            "all-reduce",
            "activations of moe_layers/mlp, backward",
        ),
        (
            f"{STEP}jvp(cross_entropy)/{BODY}pmax",
            "all-reduce",
            "activations of cross_entropy, forward",
        ),
        (f"{STEP}psum_invariant", "all-reduce", "sums of scalars"),
        # No op_name: all gradients of ZeRO 0 may be in it.
        ("all-reduce-start.8", "all-reduce", "several, joined by the compiler"),
    ],
)
def test_a_place_in_the_trace_becomes_a_purpose(origin, kind, words):
    assert purpose(origin, kind=kind) == words


def collective(**changes):
    fields = {
        "kind": "all-gather",
        "axis": "data",
        "group": 3,
        "dtypes": ("bf16",),
        "operand_bytes": 300,
        "count": 4,
        "overlapped": False,
        "origin": f"{STEP}jvp()/{BODY}dense_layers.mlp.up_proj.kernel/all_gather",
    }
    return Collective(**fields | changes)


def test_one_purpose_is_one_line_with_the_share_that_overlaps():
    [line] = bill([collective(), collective(count=2, overlapped=True)])
    assert (line.runs, line.bytes, line.overlapped) == (6, 6 * 600, 2 * 600)
    assert len(bill([collective(), collective(dtypes=("f32",)), collective(axis="tensor")])) == 3


def test_the_bill_of_a_compiled_step_names_every_collective_and_adds_up():
    asked = request(
        MLA_MOE,
        gpus="6xrtx4090",
        micro_batch_tokens=128,
        only={"mesh": "2x3", "zero": "3", "remat": "full"},
    )
    plan = make_plan(
        asked,
        rates=machine_rates(asked.fleet, compute_fraction=None, wire_gb_s=None),
        target="cpu",
        report=lambda line: None,
        most_compiled=1,
    )
    [choice] = plan.choices
    lines = bill(plan.collectives[choice.choice])
    assert sum(line.bytes for line in lines) == total(choice.wire_bytes)
    purposes = " ".join(line.purpose for line in lines)
    for part in ("dense_layers/self_attn", "moe_layers/mlp", "weights of moe_layers, forward"):
        assert part in purposes
    assert not any(word in purposes for word in ("jvp", "while", "closed_call", "jit("))
    out = io.StringIO()
    print_bill(plan, console=Console(file=out, width=200))
    ratio = total(choice.wire_bytes) / choice.wire_bytes_minimum
    assert f"{ratio:.4f} times the least possible" in out.getvalue()
