"""The lane `-m cuda`: the real programs of RTX 4090s, compiled without one."""

import json
import os
import subprocess
import sys

import pytest

from jaxseek.devices import Fleet
from jaxseek.plan.choices import Choice, Request
from jaxseek.plan.compilation import (
    compile_step,
    has_cuda_wheels,
    planning_program,
    prepare,
)
from jaxseek.plan.figures import step_collectives, total
from jaxseek.plan.memory import temporaries_bytes
from jaxseek.plan.theory import minimum_wire_bytes
from jaxseek.presets import load_preset
from jaxseek.run_config import RunConfig
from tests.plan.test_cli import ROOT

pytestmark = pytest.mark.cuda

MODELS = {"dense": "deepseek-coder-1.3b", "mla": "deepseek-v2-lite", "moe": "deepseek-moe-16b"}


@pytest.fixture(autouse=True)
def wheels():
    assert has_cuda_wheels(), "this lane needs JAX's CUDA wheels: pip install 'jaxseek[cuda12]'"
    assert prepare(Fleet.parse("3xrtx4090")) == "cuda"


def compiled(model, mesh, *, zero, remat="selective", tokens=4096, accumulation=1):
    """The program and the step of one sequence per data device and micro-batch."""
    data, tensor = map(int, mesh.split("x"))
    fleet = Fleet.parse(f"{data * tensor}xrtx4090")
    run = RunConfig(model=load_preset(model), seq_len=tokens, batch=1)
    asked = Request(name=model, run=run, fleet=fleet, batch=data * accumulation)
    choice = Choice(mesh=mesh, zero=zero, remat=remat)
    program = planning_program(asked.run_of(choice, micro_batch=1), fleet=fleet, target="cuda")
    return program, compile_step(program, target="cuda")


def wire_ratio(program, step):
    found = step_collectives(program, step, target="cuda")
    assert "other" not in {collective.axis for collective in found}
    sent = sum(c.wire_bytes for c in found)
    wide = sum(c.wire_bytes for c in found if "bf16" not in c.dtypes)
    assert wide <= 0.01 * sent  # routers, norms and sums of scalars are float32
    return sent / total(minimum_wire_bytes(program))


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize(
    ("mesh", "zero", "remat"), [("3x1", 3, "none"), ("1x3", 0, "selective"), ("2x3", 3, "full")]
)
def test_a_step_sends_at_most_a_fiftieth_more_than_it_has_to(kind, mesh, zero, remat):
    program, step = compiled(MODELS[kind], mesh, zero=zero, remat=remat)
    assert 0.99 <= wire_ratio(program, step) <= 1.02


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("zero", [1, 2])
def test_gradients_are_scattered_once_a_step_or_once_a_micro_batch(kind, zero):
    program, step = compiled(MODELS[kind], "3x1", zero=zero, tokens=1024, accumulation=3)
    assert 0.99 <= wire_ratio(program, step) <= 1.02


def test_replicated_weights_send_two_thirds_of_all_parameters_twice():
    program, step = compiled(MODELS["dense"], "3x1", zero=0, tokens=1024)
    assert 0.99 <= wire_ratio(program, step) <= 1.02


def test_half_of_what_zero_3_sends_travels_while_products_run():
    program, step = compiled(MODELS["dense"], "3x1", zero=3)
    found = step_collectives(program, step, target="cuda")
    hidden = sum(c.wire_bytes for c in found if c.overlapped)
    assert hidden >= 0.5 * sum(c.wire_bytes for c in found)


@pytest.mark.parametrize(
    ("model", "mesh", "zero", "remat", "tokens"),
    [
        # None of them is among those that the formula was fitted to.
        ("deepseek-coder-1.3b", "3x1", 3, "selective", 8192),
        ("deepseek-coder-1.3b", "1x3", 0, "none", 8192),
        ("deepseek-coder-1.3b", "3x1", 1, "none", 2048),
        ("deepseek-llm-7b", "3x1", 3, "full", 4096),
        ("deepseek-coder-6.7b", "2x3", 3, "selective", 2048),
    ],
)
def test_the_formula_is_within_a_tenth_of_the_compiled_temporaries(
    model, mesh, zero, remat, tokens
):
    program, step = compiled(model, mesh, zero=zero, remat=remat, tokens=tokens)
    assert temporaries_bytes(program) == pytest.approx(step.temporaries_bytes, rel=0.1)


def planned(*arguments):
    """The choices of `python -m jaxseek.plan --json`."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxseek.plan", "--gpus", "3xrtx4090", "--json", *arguments],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["choices"]


def test_the_first_choice_is_compiled_and_its_micro_batch_is_the_largest_that_fits():
    options = ["--model", "deepseek-coder-1.3b", "--only", "mesh=3x1,zero=3,remat=full"]
    [best] = planned(*options)
    assert best["source"] == "compiled" and best["fits"] and best["headroom_gib"] >= 0
    [larger] = planned(*options, "--batch-per-gpu", str(best["micro_batch_tokens"] + 4096))
    assert larger["source"] == "compiled" and not larger["fits"]


def test_a_model_whose_state_is_too_large_is_planned_with_few_programs():
    choices = planned("--model", "deepseek-coder-6.7b")
    assert len(choices) == 15 and not any(choice["fits"] for choice in choices)
    sources = [choice["source"] for choice in choices]
    assert sources[0] == "compiled" and sources.count("compiled") <= 3


def test_xla_takes_the_description_of_every_gpu_of_the_table():
    code = (
        "from jax.experimental import topologies\n"
        "from jaxseek.devices import device_of_kind, devices\n"
        "from jaxseek.plan.compilation import chip_description, prepare\n"
        "from jaxseek.devices import Fleet\n"
        "prepare(Fleet.parse('2xh100'))\n"
        "for device in devices().values():\n"
        "    config = chip_description(device)\n"
        "    found = topologies.get_topology_desc(\n"
        "        platform='cuda', target_config=config, topology='1x1x2'\n"
        "    ).devices\n"
        "    assert [device_of_kind(d.device_kind) for d in found] == [device] * 2, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
