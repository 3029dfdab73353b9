"""Whole plans, compiled here for emulated CPU devices: bytes against the theory, memory against
XLA's account, the order, and the object that `--json` prints.
"""

import dataclasses
import json

import pytest

from jaxseek.plan.choices import Choice
from jaxseek.plan.compilation import compile_step, planning_program
from jaxseek.plan.planner import make_plan, step_collectives
from jaxseek.plan.report import advice
from jaxseek.plan.theory import minimum_wire_bytes, state_bytes
from jaxseek.plan.timing import machine_rates
from tests.plan.models import DENSE, MLA_MOE, request

FIELDS = [
    *("mesh", "zero", "state", "remat", "offload", "micro_batch_tokens", "accumulation", "fits"),
    *("state_gib", "temporaries_gib", "total_gib", "headroom_gib", "host_gib", "wire_bytes"),
    *("wire_bytes_minimum", "flops_per_step", "model_flops_per_step", "step_seconds"),
    *("tokens_per_second", "bound_by", "source"),
]


def plan(model, **rest):
    asked = request(model, **rest)
    rates = machine_rates(asked.fleet, compute_fraction=0.5, wire_gb_s=None)
    return make_plan(asked, rates=rates, target="cpu", report=lambda line: None)


@pytest.mark.parametrize(
    ("config", "mesh", "zero", "micro_batches"),
    [
        (DENSE, "3x1", 1, 2),
        (DENSE, "3x1", 2, 2),
        (DENSE, "3x1", 3, 1),
        (DENSE, "1x3", 0, 1),
        (MLA_MOE, "2x3", 3, 1),
    ],
    ids=lambda value: value.model_type if value in (DENSE, MLA_MOE) else str(value),
)
def test_the_step_sends_what_it_has_to_and_no_more(config, mesh, zero, micro_batches):
    asked = request(config, tokens_per_step=micro_batches * int(mesh[0]) * 128)
    run = asked.run(Choice(mesh=mesh, zero=zero, remat="selective"))
    program = planning_program(run, fleet=asked.fleet, target="cpu")
    step = compile_step(program, target="cpu")
    sent = sum(c.wire_bytes for c in step_collectives(program, step, target="cpu"))
    least = sum(sum(kinds.values()) for kinds in minimum_wire_bytes(program).values())
    # The norms and routers that stay float32 and the loss's statistics are what is on top; here
    # they weigh more than in a large model.
    assert 0.995 * least <= sent <= 1.02 * least
    batch = 4 * 4 * asked.resolved_micro_batch * micro_batches
    assert step.state_bytes == pytest.approx(state_bytes(program) + batch, abs=64)


@pytest.fixture(scope="module")
def small_plan():
    return plan(DENSE, only={"mesh": "3x1", "zero": "3"})


def test_the_fastest_choice_that_fits_comes_first(small_plan):
    rates = [choice.tokens_per_second for choice in small_plan.choices]
    assert len(rates) == 3 and rates == sorted(rates, reverse=True)
    assert all(choice.fits for choice in small_plan.choices)
    assert f"Take mesh 3x1, ZeRO 3, remat {small_plan.choices[0].remat}: " in advice(small_plan)


def test_the_json_object_has_the_documented_fields_in_order(small_plan):
    found = json.loads(json.dumps(small_plan.to_json()))
    assert list(found) == ["model", "gpus", "choices"]
    assert (found["model"], found["gpus"]) == ("model", "3xrtx4090")
    assert all(list(choice) == FIELDS for choice in found["choices"])


def test_the_figures_of_a_choice_agree_with_each_other(small_plan):
    for choice in small_plan.choices:
        parts = choice.state_gib + choice.temporaries_gib
        assert choice.total_gib == pytest.approx(parts)
        assert choice.headroom_gib == pytest.approx(small_plan.usable_gib - choice.total_gib)
        assert choice.tokens_per_second == pytest.approx(3 * 128 / choice.step_seconds)
        assert choice.flops_per_step >= 0.99 * choice.model_flops_per_step
        assert (choice.offload, choice.host_gib, choice.state) == ("none", 0.0, "float32")


def test_what_is_compiled_for_cpu_is_called_modelled(small_plan):
    assert {choice.source for choice in small_plan.choices} == {"modelled"}


def test_remat_trades_flops_for_memory(small_plan):
    by_remat = {choice.remat: choice for choice in small_plan.choices}
    none, selective, full = (by_remat[name] for name in ("none", "selective", "full"))
    assert none.flops_per_step < selective.flops_per_step < full.flops_per_step
    assert full.temporaries_gib < none.temporaries_gib


def test_where_no_state_fits_only_the_smallest_is_compiled_and_the_advice_says_so():
    # 16 layers of 12288 on a 24 GB card: 1.3 x 10^11 bytes of state on each of three.
    wide = {"hidden_size": 12288, "intermediate_size": 36864, "num_hidden_layers": 16}
    found = plan(dataclasses.replace(DENSE, **wide), seq_len=64)
    compiled = [choice for choice in found.choices if choice.total_gib is not None]
    assert [(c.mesh, c.zero, c.remat) for c in compiled] == [("3x1", 3, "full")]
    assert found.choices[0] == compiled[0] and not compiled[0].fits
    others = found.choices[1:]
    assert all(not c.fits and c.source == "modelled" for c in others)
    assert all(sum(map(sum, (k.values() for k in c.wire_bytes.values()))) for c in others)
    assert "Nothing fits: the state alone takes" in advice(found)
