"""Measured rates as a file, and what plans make of them."""

import dataclasses
import json

import pytest

from jaxseek.devices import Fleet
from jaxseek.errors import UserError
from jaxseek.plan.measurement import (
    Measurement,
    load_measurement,
    measurement_path,
    save_measurement,
)
from jaxseek.plan.timing import machine_rates

KIND = "NVIDIA GeForce RTX 4090"
MEASURED = Measurement(
    device_kind=KIND,
    count=3,
    date="2026-01-31",
    jax="0.10.2",
    matmul={"16384x4096x4096": 150e12},
    matmul_flops=150e12,
    memory=920e9,
    all_reduce={"1048576": 2e9, "268435456": 11e9, "16777216": 9e9},
)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSEEK_CACHE", str(tmp_path))


def rates(gpus, **given):
    fleet = Fleet.parse(gpus)
    found = load_measurement(fleet.device.name, count=fleet.count)
    return machine_rates(
        fleet, **{"compute_fraction": None, "wire_gb_s": None, **given}, measured=found
    )


def test_a_measurement_comes_back_as_it_was_kept_with_nothing_beside_it(tmp_path):
    path = save_measurement(MEASURED)
    assert load_measurement(KIND, count=3) == MEASURED
    save_measurement(dataclasses.replace(MEASURED, date="2026-02-01"))
    found = load_measurement(KIND, count=3)
    assert found is not None and found.date == "2026-02-01"
    assert list(path.parent.iterdir()) == [path]


def test_the_rate_of_the_wire_is_that_of_the_largest_transfer():
    assert MEASURED.wire == 11e9
    assert dataclasses.replace(MEASURED, count=1, all_reduce={}).wire is None


def test_plans_for_the_measured_gpus_use_the_measured_rates():
    assumed = rates("3xrtx4090")
    save_measurement(MEASURED)
    found = rates("3xrtx4090")
    assert (found.wire, found.memory) == (11e9, 920e9)
    assert found.flops == pytest.approx(0.7 * 150e12)
    assert found.compute_fraction == pytest.approx(0.7 * 150 / 165.2)
    for words in (found.link_words, found.memory_words, found.compute_words):
        assert "measured on this machine on 2026-01-31" in words
    for words in (assumed.link_words, assumed.memory_words, assumed.compute_words):
        assert "measured" not in words


@pytest.mark.parametrize("gpus", ["rtx4090", "2xrtx4090", "3xrtx3090"])
def test_plans_for_other_gpus_do_not(gpus):
    assumed = rates(gpus)
    save_measurement(MEASURED)
    assert rates(gpus) == assumed


def test_what_the_user_gives_wins():
    save_measurement(MEASURED)
    found = rates("3xrtx4090", compute_fraction=0.4, wire_gb_s=20.0)
    assert (found.flops, found.wire) == (pytest.approx(0.4 * 165.2e12), 20e9)
    assert (found.compute_words, found.link_words) == ("as given", "as given")
    assert found.memory == 920e9


def changed(**fields):
    return json.dumps(dataclasses.asdict(MEASURED) | fields)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "\x00\xff",
        changed(memory=0),
        changed(memory=float("nan")),
        changed(memory="920"),
        changed(matmul={"16384x4096x4096": None}),
        changed(all_reduce={}),
        changed(all_reduce={"1 MiB": 2e9}),
        changed(all_reduce=[2e9]),
        changed(count=True),
        changed(date=20260131),
        changed(count=2),
        changed(more=1),
    ],
)
def test_a_damaged_file_is_named_and_to_be_deleted(text):
    path = save_measurement(MEASURED)
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"is damaged .* Delete it") as caught:
        load_measurement(KIND, count=3)
    assert str(path) in str(caught.value)


def test_a_folder_that_cannot_be_written_is_a_message(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSEEK_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="Set JAXSEEK_CACHE to a folder that can be written"):
        save_measurement(MEASURED)


def test_kinds_and_counts_have_files_of_their_own():
    paths = {
        measurement_path(kind, count=count)
        for kind in (KIND, "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "cpu")
        for count in (1, 11)
    }
    assert len(paths) == 8
