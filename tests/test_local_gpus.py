"""The GPUs of this machine, with a stand-in for nvidia-smi."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxseek.devices import Fleet, find_device
from jaxseek.errors import UserError
from jaxseek.local_gpus import local_fleet, local_gpus, size_memory_pool

ROOT = Path(__file__).parents[1]
FRACTION = "XLA_CLIENT_MEM_FRACTION"


def row(name="NVIDIA GeForce RTX 4090", *, uuid="GPU-aa11", total="24564", free="24210"):
    return f"{uuid}, {name}, {total}, {free}, 560.35.03"


THREE = [row(uuid=f"GPU-{letter}a11") for letter in "abc"]
MIXED = [row(uuid="GPU-a1"), row("NVIDIA GeForce RTX 3090", uuid="GPU-b2", total="24576")]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in (FRACTION, "XLA_PYTHON_CLIENT_MEM_FRACTION", "JAX_PLATFORMS", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def nvidia_smi(tmp_path):
    """Put an nvidia-smi on the path that answers the one question it is asked."""

    def install(rows, *, code=0):
        query = "--query-gpu=uuid,name,memory.total,memory.free,driver_version"
        lines = "".join(f"echo '{line}'\n" for line in rows)
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f"#!/bin/sh\n[ \"$*\" = '{query} --format=csv,noheader,nounits' ] || exit 2\n"
            f"{lines}exit {code}\n"
        )
        program.chmod(0o755)

    return install


def test_three_cards_of_the_table_are_the_fleet_that_their_name_means(nvidia_smi):
    nvidia_smi(THREE)
    assert local_fleet() == Fleet.parse("3xrtx4090")
    assert [(gpu.uuid, gpu.free_mib, gpu.driver) for gpu in local_gpus()] == [
        (f"GPU-{letter}a11", 24210, "560.35.03") for letter in "abc"
    ]


def test_a_machine_without_nvidia_smi_or_without_its_driver_has_no_gpus(nvidia_smi):
    assert local_fleet() is None
    nvidia_smi(["NVIDIA-SMI has failed because it couldn't communicate with the driver."], code=9)
    assert local_fleet() is None


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ("2", "c"),
        ("0,2", "ac"),
        ("GPU-b", "b"),
        ("1, GPU-ca11", "bc"),
        ("", ""),
        ("-1", ""),
        ("0,7,1", "a"),
        ("GPU-", ""),
        ("NoDevFiles", ""),
    ],
)
def test_the_cards_are_those_that_cuda_shows(nvidia_smi, monkeypatch, chosen, found):
    nvidia_smi(THREE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [gpu.uuid for gpu in local_gpus()] == [f"GPU-{letter}a11" for letter in found]


def test_cards_of_two_kinds_are_refused_until_one_kind_is_chosen(nvidia_smi, monkeypatch):
    nvidia_smi(MIXED)
    with pytest.raises(UserError, match="1 x NVIDIA GeForce RTX 4090 and 1 x NVIDIA GeForce RTX 3"):
        local_fleet()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert str(local_fleet()) == "1xrtx3090"


def test_numbers_on_a_mixed_machine_need_the_order_of_the_bus(nvidia_smi, monkeypatch):
    nvidia_smi(MIXED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(UserError, match="Set CUDA_DEVICE_ORDER=PCI_BUS_ID too"):
        local_fleet()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert str(local_fleet()) == "1xrtx3090"


def test_a_slice_of_a_gpu_is_refused(nvidia_smi, monkeypatch):
    nvidia_smi(THREE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0a1b")
    with pytest.raises(UserError, match="names a MIG slice"):
        local_fleet()


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4080", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 PCIe"]
)
def test_a_card_that_is_not_in_the_table_is_named_with_the_known_and_what_to_do(nvidia_smi, name):
    nvidia_smi([row(name)] * 2)
    with pytest.raises(UserError) as caught:
        local_fleet()
    for words in (repr(name), "rtx3090, rtx4090", "--gpus 2xgeneric-24gb", "--bandwidth"):
        assert words in str(caught.value)


def test_the_memory_of_the_machine_counts_and_the_driver_keeps_its_part(nvidia_smi):
    nvidia_smi([row("NVIDIA RTX A6000", total="46068", free="45600")])
    listed, found = find_device("a6000"), local_fleet()
    assert found is not None and found.device.memory_mib == 46068
    assert found.usable_gib == pytest.approx(
        Fleet.parse("a6000").usable_gib - (listed.memory_mib - 46068) / 1024
    )


def test_the_pool_gets_what_the_plan_calls_usable(nvidia_smi):
    nvidia_smi(THREE)
    share = size_memory_pool()
    assert share is not None and os.environ[FRACTION] == str(share)
    fleet = Fleet.parse("3xrtx4090")
    pool = share * fleet.device.cuda_memory_mib / 1024
    assert fleet.usable_gib - 0.025 < pool <= fleet.usable_gib


def test_what_another_program_holds_is_taken_off_the_pool(nvidia_smi):
    nvidia_smi([*THREE[:2], row(uuid="GPU-c", free="14336")])
    share = size_memory_pool()
    total = find_device("rtx4090").cuda_memory_mib / 1024
    assert share is not None and share * total == pytest.approx(14 - 0.6 - 0.4, abs=0.025)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (FRACTION, "0.5"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5"),
        ("JAX_PLATFORMS", "cpu"),
        ("CUDA_VISIBLE_DEVICES", "-1"),
    ],
)
def test_the_users_own_settings_stay(nvidia_smi, monkeypatch, name, value):
    nvidia_smi(THREE)
    monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert size_memory_pool() is None and dict(os.environ) == before


@pytest.mark.parametrize("rows", [MIXED, [row("NVIDIA B200")], [row(free="500")]])
def test_the_pool_is_left_to_jax_where_its_size_is_not_known(nvidia_smi, rows):
    nvidia_smi(rows)
    assert size_memory_pool() is None and os.environ[FRACTION] == ""


def test_the_trainer_sizes_the_pool_before_jax_is_there(nvidia_smi):
    nvidia_smi(THREE)
    code = (
        "import os, sys, jaxseek.train.__main__ as program\n"
        f"program.emulate_devices = lambda n: sys.exit(os.environ['{FRACTION}'] + str('jax' in "
        "sys.modules))\n"
        "program.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip().endswith("False") and done.stderr.startswith("0.9")
