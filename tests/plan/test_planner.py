"""Whole plans, compiled here for emulated CPU devices: bytes against the theory, memory against
XLA's account, the order, the search for the largest micro-batch, the object that `--json` prints.
"""

import dataclasses
import json

import pytest

from jaxseek.devices import Fleet
from jaxseek.plan import planner
from jaxseek.plan.choices import Choice
from jaxseek.plan.compilation import CompiledStep, compile_step
from jaxseek.plan.figures import step_collectives, total
from jaxseek.plan.memory import temporaries_bytes
from jaxseek.plan.planner import make_plan
from jaxseek.plan.report import advice
from jaxseek.plan.theory import minimum_wire_bytes, state_bytes
from jaxseek.plan.timing import machine_rates
from tests.plan.models import DENSE, MLA_MOE, program, request

FIELDS = [
    *("mesh", "zero", "state", "remat", "offload", "micro_batch_tokens", "accumulation", "fits"),
    *("state_gib", "temporaries_gib", "total_gib", "headroom_gib", "host_gib", "wire_bytes"),
    *("wire_bytes_minimum", "flops_per_step", "model_flops_per_step", "step_seconds"),
    *("tokens_per_second", "bound_by", "source"),
]


def plan(model, *, most_compiled=3, **rest):
    asked = request(model, **rest)
    rates = machine_rates(asked.fleet, compute_fraction=0.5, wire_gb_s=None)
    return make_plan(
        asked, rates=rates, target="cpu", report=lambda line: None, most_compiled=most_compiled
    )


@pytest.mark.parametrize(
    ("config", "mesh", "zero", "remat", "micro_batches"),
    [
        (DENSE, "3x1", 1, "selective", 2),
        (DENSE, "3x1", 2, "selective", 2),
        (DENSE, "3x1", 3, "none", 1),
        (DENSE, "1x3", 0, "full", 1),
        (MLA_MOE, "2x3", 3, "full", 1),
    ],
    ids=lambda value: value.model_type if value in (DENSE, MLA_MOE) else str(value),
)
def test_the_step_sends_what_it_has_to_and_no_more(config, mesh, zero, remat, micro_batches):
    asked = request(config, tokens_per_step=micro_batches * int(mesh[0]) * 128)
    compiled = program(Choice(mesh=mesh, zero=zero, remat=remat), asked)
    step = compile_step(compiled, target="cpu")
    sent = sum(c.wire_bytes for c in step_collectives(compiled, step, target="cpu"))
    least = total(minimum_wire_bytes(compiled))
    # The norms and routers that stay float32 and the loss's statistics are what is on top; here
    # they weigh more than in a large model.
    assert 0.995 * least <= sent <= 1.02 * least
    batch = 4 * 4 * 128 * micro_batches
    assert step.state_bytes == pytest.approx(state_bytes(compiled) + batch, abs=64)


@pytest.fixture(scope="module")
def small_plan():
    return plan(DENSE, only={"mesh": "3x1", "zero": "3"}, micro_batch_tokens=128)


def test_the_fastest_choice_that_fits_comes_first(small_plan):
    rates = [choice.tokens_per_second for choice in small_plan.choices]
    assert len(rates) == 3 and rates == sorted(rates, reverse=True)
    assert all(choice.fits for choice in small_plan.choices)
    assert f"Take mesh 3x1, ZeRO 3, remat {small_plan.choices[0].remat} " in advice(small_plan)


def test_the_json_object_has_the_documented_fields_in_order(small_plan):
    found = json.loads(json.dumps(small_plan.to_json()))
    assert list(found) == ["model", "gpus", "choices"]
    assert (found["model"], found["gpus"]) == ("model", "3xrtx4090")
    assert all(list(choice) == FIELDS for choice in found["choices"])


def test_the_figures_of_a_choice_agree_with_each_other(small_plan):
    usable = small_plan.request.fleet.usable_gib
    for choice in small_plan.choices:
        parts = choice.state_gib + choice.temporaries_gib
        assert choice.total_gib == pytest.approx(parts)
        assert choice.headroom_gib == pytest.approx(usable - choice.total_gib)
        assert choice.tokens_per_second == pytest.approx(3 * 128 / choice.step_seconds)
        assert choice.flops_per_step >= 0.99 * choice.model_flops_per_step
        assert (choice.offload, choice.state) == ("none", "float32")


def test_a_checkpoint_is_written_from_a_copy_of_the_whole_state(small_plan):
    for choice in small_plan.choices:  # every array is split over the three, in equal parts
        assert choice.host_gib == pytest.approx(3 * choice.state_gib, rel=1e-3)


def test_what_is_compiled_for_cpu_is_called_modelled(small_plan):
    assert {choice.source for choice in small_plan.choices} == {"modelled"}


def test_remat_trades_flops_for_memory(small_plan):
    by_remat = {choice.remat: choice for choice in small_plan.choices}
    none, selective, full = (by_remat[name] for name in ("none", "selective", "full"))
    assert none.flops_per_step < selective.flops_per_step < full.flops_per_step
    assert full.temporaries_gib < none.temporaries_gib


def test_a_plan_leaves_what_is_compiled_to_be_explained(small_plan):
    assert set(small_plan.collectives) == {choice.choice for choice in small_plan.choices}
    for choice in small_plan.choices:
        sent = sum(c.wire_bytes for c in small_plan.collectives[choice.choice])
        assert sent == total(choice.wire_bytes)


def test_too_little_memory_of_the_host_is_no_fit():
    found = plan(DENSE, only={"mesh": "3x1", "zero": "3", "remat": "full"}, ram_gib=0.01)
    assert not found.choices[0].fits and found.choices[0].headroom_gib > 0
    assert "needs 0.3 GiB of the host's memory, and --ram is 0.01 GiB" in advice(found)


def compile_by_rule(monkeypatch, temporaries):
    """Let steps compile at once, to what `temporaries(program)` says; the programs in order."""
    compiled = []

    def step(made, *, target, usable_bytes):
        compiled.append(made)
        return CompiledStep(
            state_bytes=state_bytes(made),
            temporaries_bytes=round(temporaries(made)),
            unaliased_bytes=0,
            text="ENTRY %main () -> f32[] {\n}\n",
            seconds=0.0,
        )

    monkeypatch.setattr(planner, "compile_step", step)
    return compiled


def small_gpus():
    """The DENSE model's only choice of interest on three GPUs of 1.5 GiB, and their rates."""
    gpus = Fleet.parse("3xrtx4090")
    small = dataclasses.replace(gpus.device, memory_mib=1536, cuda_memory_mib=1536)
    only = {"mesh": "3x1", "zero": "3", "remat": "full"}
    asked = dataclasses.replace(
        request(DENSE, only=only), fleet=dataclasses.replace(gpus, device=small)
    )
    return asked, machine_rates(gpus, compute_fraction=0.5, wire_gb_s=None)


def plan_small(asked, rates):
    return make_plan(asked, rates=rates, target="cpu", report=lambda line: None, most_compiled=1)


@pytest.mark.parametrize("error", [0.7, 0.95, 1.0, 1.05, 1.4])
def test_the_micro_batch_is_the_largest_that_fits_even_where_the_formula_errs(error, monkeypatch):
    compiled = compile_by_rule(monkeypatch, lambda made: error * temporaries_bytes(made))
    asked, rates = small_gpus()
    made = plan_small(asked, rates)
    [best] = made.choices
    assert best.fits and ", the largest that fit: " in advice(made)
    size = best.micro_batch_tokens // 128
    larger = asked.run_of(best.choice, micro_batch=size + 1)
    needed = error * temporaries_bytes(dataclasses.replace(compiled[0], run=larger))
    assert needed + state_bytes(compiled[0]) > asked.fleet.usable_gib * 2**30
    assert 1 < size < 512 and len(compiled) <= 3


def test_something_that_fits_is_found_even_where_the_formula_misses_most_of_the_memory(monkeypatch):
    asked, rates = small_gpus()
    usable = asked.fleet.usable_gib * 2**30
    # Of the GPU 50 MB are left for micro-batches; 71 sequences take them, the formula says 142.
    compiled = compile_by_rule(
        monkeypatch,
        lambda made: (
            usable - state_bytes(made) - 50e6 + 3e5 * made.run.sequences_per_micro_batch**1.2
        ),
    )
    made = plan_small(asked, rates)
    assert made.choices[0].fits and len(compiled) <= 3
    assert "the largest" not in advice(made)


def test_memory_of_the_host_is_no_reason_for_smaller_micro_batches(monkeypatch):
    compiled = compile_by_rule(monkeypatch, temporaries_bytes)
    asked, rates = small_gpus()
    [enough] = plan_small(asked, rates).choices
    programs = len(compiled)
    [too_little] = plan_small(dataclasses.replace(asked, ram_gib=0.01), rates).choices
    assert enough.fits and not too_little.fits
    assert too_little.micro_batch_tokens == enough.micro_batch_tokens
    assert len(compiled) == 2 * programs


def test_the_best_are_compiled_and_the_first_of_all_is_among_them(monkeypatch):
    compiled = compile_by_rule(monkeypatch, temporaries_bytes)
    found = plan(DENSE, most_compiled=2, micro_batch_tokens=128)
    assert len(found.choices) == 15 and len(compiled) == 2
    assert set(found.collectives) == {choice.choice for choice in found.choices[:2]}


def test_where_no_state_fits_only_the_smallest_is_compiled_and_the_advice_says_so(monkeypatch):
    compiled = compile_by_rule(monkeypatch, temporaries_bytes)
    # 16 layers of 12288 on a 24 GB card: 1.3 x 10^11 bytes of state on each of three.
    wide = {"hidden_size": 12288, "intermediate_size": 36864, "num_hidden_layers": 16}
    found = plan(dataclasses.replace(DENSE, **wide), seq_len=64)
    [only] = compiled
    assert only.zero == 3 and only.run.remat == "full"
    assert not any(choice.fits for choice in found.choices)
    assert all(total(choice.wire_bytes) for choice in found.choices[1:])
    assert "Nothing fits: the state alone takes" in advice(found)
