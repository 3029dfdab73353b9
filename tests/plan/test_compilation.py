"""The description of a chip against those that XLA brings."""

import re

import pytest

from jaxseek.devices import find_device
from jaxseek.plan.compilation import chip_description

# xla/backends/gpu/target_config/specs in openxla/xla: a100_sxm_40, a6000 and h100_sxm.
ALL = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
}
XLA = {
    "a100-40gb": {
        "shared_memory_per_core": 167936,
        "shared_memory_per_block_optin": 166912,
        "threads_per_core_limit": 2048,
        "core_count": 108,
        "fpus_per_core": 64,
        "l2_cache_size": 41943040,
        "clock_rate_ghz": 1.41,
    },
    "a6000": {
        "shared_memory_per_core": 102400,
        "shared_memory_per_block_optin": 101376,
        "threads_per_core_limit": 1536,
        "core_count": 84,
        "fpus_per_core": 128,
        "l2_cache_size": 6291456,
        "clock_rate_ghz": 1.8,
    },
    "h100": {
        "shared_memory_per_core": 233472,
        "shared_memory_per_block_optin": 232448,
        "threads_per_core_limit": 2048,
        "core_count": 132,
        "fpus_per_core": 128,
        "l2_cache_size": 52428800,
        "clock_rate_ghz": 1.98,
    },
}
MEMORY = {
    "a100-40gb": (42298834944, 1555200000000),
    "a6000": (51041271808, 768096000000),
    "h100": (84942979072, 3352320000000),
}
CAPABILITY = {
    "a100-40gb": "major: 8 minor: 0 feature_extension: NONE",
    "a6000": "major: 8 minor: 6 feature_extension: NONE",
    "h100": "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES",
}


@pytest.mark.parametrize("key", list(XLA))
def test_a_chip_is_described_as_xlas_own_file_of_it_does(key):
    text = chip_description(find_device(key))
    fields = dict(re.findall(r"(\w+): ([\d.]+)", text))
    wanted = ALL | XLA[key]
    assert {name: float(fields[name]) for name in wanted} == wanted
    total, bandwidth = MEMORY[key]
    assert float(fields["device_memory_size"]) == pytest.approx(total, abs=2**20)
    assert float(fields["memory_bandwidth"]) == pytest.approx(bandwidth, rel=2e-4)
    assert f"cuda_compute_capability {{ {CAPABILITY[key]} }}" in text
