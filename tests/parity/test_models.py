"""Whole models against transformers and torch, in float32, for every family."""

import pytest

from tests.parity.comparison import Result, check_expert_ids, check_gradients, check_logits, run
from tests.parity.oracle import FAMILIES, LENGTH, ORIGINAL_LENGTH, VARIANTS, Oracle, oracle


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request) -> tuple[Result, Oracle]:
    """What jaxseek and the reference compute with the same weights on the same tokens."""
    reference = oracle(request.param)
    return run(reference), reference


def test_logits_equal_those_of_transformers(pair):
    assert pair[1].logits.shape[1] == LENGTH > max(128, ORIGINAL_LENGTH)
    check_logits(*pair)


def test_loss_gradients_of_every_parameter_equal_those_of_torch(pair):
    check_gradients(*pair)


def test_every_token_chooses_the_same_experts(pair):
    check_expert_ids(*pair)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_transformers(variant):
    reference = oracle(variant)
    result = run(reference, gradients=False)
    check_logits(result, reference)
    check_expert_ids(result, reference)


def test_balance_biases_of_both_signs_were_compared():
    bias = oracle("v3").tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.min() < -0.05
    assert bias.max() > 0.05
