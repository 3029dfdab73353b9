"""Model FLOPs against the count by hand, and the peak they are measured against."""

import types

import pytest

from jaxseek import model
from jaxseek.flops import model_flops_per_token, peak_flops
from tests.tiny import TINY

LENGTH = 64


def flops(family: str) -> float:
    config = TINY[family]
    return model_flops_per_token(config, model.split(config)[1], seq_len=LENGTH)


def test_a_dense_model_costs_six_per_weight_plus_causal_attention():
    # q, k, v, o 40 x 40; three of 40 x 44; the head 40 x 131; 5 heads of 8.
    weights = 2 * (4 * 40 * 40 + 3 * 40 * 44) + 40 * 131
    attention = 3 * LENGTH * 2 * 5 * (8 + 8)
    assert flops("llama") == pytest.approx(6 * weights + attention)


def test_of_the_routed_experts_only_the_chosen_ones_count():
    # As above, but the second layer has a router, 3 of 8 experts of 12 and a shared one of 24.
    attention_weights, dense = 4 * 40 * 40, 3 * 40 * 44
    moe = 40 * 8 + 3 * 3 * 40 * 12 + 3 * 40 * 24
    weights = 2 * attention_weights + dense + moe + 40 * 131
    assert flops("moe-16b") == pytest.approx(6 * weights + 3 * LENGTH * 2 * 5 * (8 + 8))


def test_the_peak_is_that_of_the_device_table_and_unknown_elsewhere():
    gpu = types.SimpleNamespace(device_kind="NVIDIA GeForce RTX 4090")
    assert peak_flops(gpu) == pytest.approx(165.2e12)
    assert peak_flops(types.SimpleNamespace(device_kind="cpu")) is None
