"""Measuring: by a clock of our own the rates are known; one run by the machine's clock."""

import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from jaxseek.errors import UserError
from jaxseek.plan.cli import asks_for_probe
from jaxseek.plan.measurement import Measurement
from jaxseek.plan.probe import Sizes, describe, measure, seconds_per_call
from tests.plan.test_cli import ROOT

SIZES = Sizes(
    matmuls=((8, 16, 24), (5, 7, 3)), array_bytes=4 * 1000, all_reduce_bytes=(4 * 120, 4 * 600)
)


def ticking():
    """A clock that shows a second more each time, so that every sample lasts a second."""
    return itertools.count().__next__


def test_rates_are_operations_and_bytes_of_one_device_by_time():
    found = measure(jax.devices()[:3], sizes=SIZES, clock=ticking())
    assert found.matmul == {"8x16x24": 2 * 8 * 16 * 24, "5x7x3": 2 * 5 * 7 * 3}
    assert found.matmul_flops == (2 * 8 * 16 * 24 + 2 * 5 * 7 * 3) / 2
    assert found.memory == 3 * 4 * 1000
    # A ring of three: two thirds of the operand to reduce, two thirds to gather.
    assert found.all_reduce == {"480": 2 * 480 * 2 / 3, "2400": 2 * 2400 * 2 / 3}
    assert (found.count, found.jax) == (3, jax.__version__)


def test_one_device_has_nobody_to_send_to():
    found = measure(jax.devices()[:1], sizes=SIZES, clock=ticking())
    assert found.all_reduce == {} and found.wire is None


def test_devices_of_two_kinds_are_not_measured_together():
    devices = [SimpleNamespace(device_kind=kind) for kind in ("NVIDIA H200", "NVIDIA H100 NVL")]
    with pytest.raises(UserError, match="JAX shows NVIDIA H100 NVL and NVIDIA H200; choose with"):
        measure(devices, sizes=SIZES)


@pytest.mark.parametrize("seconds", [1e-4, 3e-3, 0.5])
def test_a_call_is_timed_by_the_median_of_samples_of_many_calls(seconds):
    now, calls = 0.0, 0

    def work():
        nonlocal now, calls
        calls += 1
        now += seconds * (1000 if calls == 1 else 1)  # the first compiles
        now += 5.0 if calls == 3 else 0.0  # and somebody disturbs one
        return calls

    assert seconds_per_call(work, clock=lambda: now) == pytest.approx(seconds)
    assert calls <= 2 + 5 * 64


def test_a_person_reads_every_figure_with_its_unit():
    measured = Measurement(
        device_kind="NVIDIA H200",
        count=8,
        date="2026-01-31",
        jax="0.10.2",
        matmul={"16384x4096x4096": 700e12},
        matmul_flops=690e12,
        memory=4.1e12,
        all_reduce={"268435456": 330e9},
    )
    assert describe(measured) == [
        "8 x NVIDIA H200, JAX 0.10.2, 2026-01-31",
        "bf16 product 16384x4096x4096: 700 TFLOP/s",
        "bf16 products together: 690 TFLOP/s a device",
        "memory, read and written: 4100.0 GB/s a device",
        "all-reduce of 256 MiB: 330.00 GB/s sent by a device",
    ]


def test_a_machine_without_a_gpu_measures_its_emulated_devices_and_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxseek.plan", "--probe", "--json"],
        cwd=ROOT,
        env=os.environ
        | {
            "JAXSEEK_CACHE": str(tmp_path),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "these are figures of this machine's CPU. No plan for GPUs uses them." in done.stderr
    [kept] = (tmp_path / "probes").iterdir()
    assert kept.name == "2xcpu.json" and str(kept) in done.stderr
    measured = Measurement(**json.loads(kept.read_text()))
    assert json.loads(done.stdout) == json.loads(kept.read_text())
    assert (measured.count, len(measured.matmul), len(measured.all_reduce)) == (2, 3, 3)


def test_measuring_and_planning_are_two_commands():
    assert asks_for_probe(["--probe"]) and asks_for_probe(["--json", "--probe"])
    assert not asks_for_probe(["--model", "m"]) and not asks_for_probe(["--probe", "--help"])
    with pytest.raises(UserError, match="leave out --gpus"):
        asks_for_probe(["--probe", "--gpus", "3xrtx4090"])
