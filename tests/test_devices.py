"""The table of GPUs."""

import pytest

from jaxseek.devices import Fleet, device_of_kind, devices
from jaxseek.errors import UserError

NEEDED = {
    "rtx3090",
    "rtx4090",
    "rtx5090",
    "a6000",
    "l40s",
    "a100-40gb",
    "a100-80gb",
    "h100",
    "h200",
    "generic-24gb",
}


def test_the_table_has_every_gpu_with_the_source_of_its_figures():
    assert devices().keys() >= NEEDED
    for key, device in devices().items():
        assert device.source, key
        assert 50 < device.bf16_tflops < 2000 and 500 < device.memory_gb_s < 10000, key
        assert 20 < device.memory_gib < 200 and 8.0 <= device.compute_capability <= 12.0, key
        assert (device.nvlink_gb_s is None) == (device.nvlink_gpus == 0), key


def test_the_4090_is_as_its_maker_states():
    device = devices()["rtx4090"]
    assert (device.bf16_tflops, device.memory_gb_s, device.compute_capability) == (165.2, 1008, 8.9)
    assert device.memory_mib == 24564
    assert device.nvlink_gb_s is None and not device.peer_access
    assert device.pcie_gb_s == pytest.approx(31.5, abs=0.01)


# Dense bf16 operations of a multiprocessor in a clock, float32 sums. GeForce cards have half the
# rate of the professional cards with the same chip.
PER_CLOCK = {
    **dict.fromkeys(("rtx3090", "generic-24gb", "rtx4090", "rtx5090"), 512),
    **dict.fromkeys(("a6000", "l40s"), 1024),
    **dict.fromkeys(("a100-40gb", "a100-80gb"), 2048),
    **dict.fromkeys(("h100", "h200"), 4096),
}
TENSOR_CLOCK_GHZ = {"h100": 1.8295, "h200": 1.8295, "l40s": 2.49}


@pytest.mark.parametrize("key", list(PER_CLOCK))
def test_the_peak_is_multiprocessors_times_clock_times_operations_per_clock(key):
    device = devices()[key]
    clock = TENSOR_CLOCK_GHZ.get(key, device.clock_ghz)
    peak = device.multiprocessors * clock * PER_CLOCK[key] / 1e3
    assert device.bf16_tflops == pytest.approx(peak, rel=0.0025)
    assert devices().keys() == PER_CLOCK.keys()


def test_the_driver_keeps_a_part_of_the_memory():
    for key, device in devices().items():
        kept = device.memory_mib - device.cuda_memory_mib
        assert 0.004 < kept / device.memory_mib < 0.02, key


def test_nccl_takes_more_where_nvlink_joins_the_gpus():
    taken = {gpus: Fleet.parse(gpus).nccl_gib for gpus in ("h100", "3xrtx4090", "8xh100")}
    assert taken["h100"] == 0 < taken["3xrtx4090"] < taken["8xh100"]
    assert Fleet.parse("2xrtx3090").over_nvlink and not Fleet.parse("3xrtx3090").over_nvlink
    assert not Fleet.parse("2xrtx4090").over_nvlink


def test_a_fleet_is_a_number_and_a_name():
    fleet = Fleet.parse(" 3xRTX4090 ")
    assert (fleet.count, fleet.key, str(fleet)) == (3, "rtx4090", "3xrtx4090")
    assert Fleet.parse("a100-80gb").count == 1


def test_a_part_of_the_memory_is_not_the_programs():
    one, three = Fleet.parse("rtx4090"), Fleet.parse("3xrtx4090")
    assert three.usable_gib < one.usable_gib < one.device.memory_gib
    assert 22.5 < three.usable_gib < 23.5


@pytest.mark.parametrize(
    "text", ["", "3", "0xrtx4090", "3x", "3 rtx4090", "-1xrtx4090", "3*rtx4090"]
)
def test_anything_else_is_refused_with_the_form_and_the_known_names(text):
    with pytest.raises(UserError, match="NxGPU, for example 3xrtx4090; known GPUs are rtx3090"):
        Fleet.parse(text)


@pytest.mark.parametrize("text", ["3xrtx4080", "gtx1080", "2xtpu"])
def test_an_unknown_gpu_is_refused_with_all_that_are_known(text):
    with pytest.raises(UserError, match="is not known") as caught:
        Fleet.parse(text)
    assert all(key in str(caught.value) for key in NEEDED)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200", "h200"),
        ("cpu", None),
        ("TPU v5e", None),
    ],
)
def test_jaxs_name_of_a_device_finds_it(kind, key):
    assert device_of_kind(kind) == (devices()[key] if key else None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nvlink_gbs: 900", "h100.nvlink_gbs is no key.*nearest is nvlink_gb_s"),
        ("pcie_generation: 6", "h100.*pcie_generation 6 is not known; known are 3, 4, 5"),
        ("memory_gb_s: 0", "h100.*memory_gb_s must be positive, got 0"),
        ("cuda_memory_mib: 99999", "h100.*cuda_memory_mib 99999 is more than memory_mib 81559"),
        ("l2_mib: large", "line .*h100.l2_mib: 'large' is not a whole number"),
    ],
)
def test_a_mistake_in_the_table_is_named(line, message, tmp_path, monkeypatch):
    key, _, value = line.partition(": ")
    fields = vars(devices()["h100"]) | {"source": "a test", key: value}
    text = "".join(f"  {name}: {value}\n" for name, value in fields.items())
    (tmp_path / "devices.yaml").write_text(f"h100:\n{text}")
    monkeypatch.setattr("jaxseek.devices.configs_dir", lambda: tmp_path)
    with pytest.raises(UserError, match=message):
        devices.__wrapped__()


def test_more_gpus_than_can_be_planned_for_are_refused_at_once():
    with pytest.raises(UserError, match="10000000000xrtx4090 are more than the 1024"):
        Fleet.parse("10000000000xrtx4090")
