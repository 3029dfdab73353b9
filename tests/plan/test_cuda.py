"""The lane `-m cuda`: the real programs of RTX 4090s, compiled without one."""

import json
import os
import subprocess
import sys
import time

import pytest

from jaxseek.plan.compilation import has_cuda_wheels
from tests.plan.test_cli import ROOT

pytestmark = pytest.mark.cuda

MODELS = {"dense": "deepseek-coder-1.3b", "mla": "deepseek-v2-lite", "moe": "deepseek-moe-16b"}


@pytest.fixture(autouse=True)
def wheels():
    assert has_cuda_wheels(), "this lane needs JAX's CUDA wheels: pip install 'jaxseek[cuda12]'"


def planned(model, gpus, **only):
    """The choices of `python -m jaxseek.plan`, and the seconds it took."""
    filters = ["--only", ",".join(f"{key}={value}" for key, value in only.items())] if only else []
    started = time.perf_counter()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "jaxseek.plan",
            "--model",
            model,
            "--gpus",
            gpus,
            "--json",
            *filters,
        ],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["choices"], time.perf_counter() - started


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize(("mesh", "zero"), [("3x1", 3), ("1x3", 0), ("2x3", 3)])
def test_a_step_sends_at_most_a_fiftieth_more_than_it_has_to(kind, mesh, zero):
    count = int(mesh[0]) * int(mesh[2])
    gpus = f"{count}xrtx4090"
    [choice], _ = planned(MODELS[kind], gpus, mesh=mesh, zero=zero, remat="selective")
    sent = sum(sum(kinds.values()) for kinds in choice["wire_bytes"].values())
    assert choice["source"] == "compiled"
    assert 0.99 * choice["wire_bytes_minimum"] <= sent <= 1.02 * choice["wire_bytes_minimum"]
    assert "other" not in choice["wire_bytes"]


@pytest.mark.parametrize("zero", [0, 1])
def test_replicated_weights_send_two_thirds_of_all_parameters_twice(zero):
    [choice], _ = planned(MODELS["dense"], "3xrtx4090", mesh="3x1", zero=zero, remat="selective")
    sent = sum(sum(kinds.values()) for kinds in choice["wire_bytes"].values())
    assert sent <= 1.02 * choice["wire_bytes_minimum"]


def test_a_model_that_needs_no_more_than_three_4090s_have_is_said_to_fit():
    choices, _ = planned(MODELS["dense"], "3xrtx4090", mesh="3x1", zero=3)
    assert all(choice["fits"] and choice["total_gib"] < 23 for choice in choices)


def test_a_6_7b_plan_of_all_choices_takes_less_than_a_minute():
    choices, seconds = planned("deepseek-coder-6.7b", "3xrtx4090")
    assert len(choices) == 15 and seconds < 60


def test_xla_takes_the_description_of_every_gpu_of_the_table():
    code = (
        "from jax.experimental import topologies\n"
        "from jaxseek.devices import devices\n"
        "from jaxseek.plan.compilation import chip_description, prepare\n"
        "from jaxseek.devices import Fleet\n"
        "prepare(Fleet.parse('2xh100'))\n"
        "for device in devices().values():\n"
        "    config = chip_description(device)\n"
        "    found = topologies.get_topology_desc(\n"
        "        platform='cuda', target_config=config, topology='1x1x2'\n"
        "    ).devices\n"
        "    assert [d.device_kind for d in found] == [device.name] * 2, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
