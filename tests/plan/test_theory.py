"""The least bytes by hand, and state bytes against XLA's account."""

import pytest

from jaxseek import model
from jaxseek.mesh import DATA_AXIS
from jaxseek.plan.choices import Choice
from jaxseek.plan.theory import minimum_wire_bytes, state_bytes
from tests.plan.models import DENSE, MLA_MOE, request
from tests.plan.models import program as program_of

P = 2 * model.parameter_count(DENSE)  # bytes in bf16
USED_ONCE = 2 * (2 * 3072 * 768 + 768)  # embedding, head and the last norm


def program(config, *, mesh, zero, tokens_per_step=None):
    asked = request(config, tokens_per_step=tokens_per_step)
    return program_of(Choice(mesh=mesh, zero=zero, remat="selective"), asked)


@pytest.mark.parametrize(
    ("zero", "micro_batches", "expected"),
    [
        (0, 1, {"all-reduce": 2 * P}),
        (0, 4, {"all-reduce": 2 * P}),
        (1, 4, {"all-gather": P, "reduce-scatter": P}),
        (2, 4, {"all-gather": P, "reduce-scatter": 4 * P}),
        (3, 1, {"all-gather": 2 * P - USED_ONCE, "reduce-scatter": P}),
        (3, 4, {"all-gather": 4 * (2 * P - USED_ONCE), "reduce-scatter": 4 * P}),
    ],
)
def test_data_parallel_sends_two_thirds_of_each_collective_on_three(zero, micro_batches, expected):
    found = minimum_wire_bytes(
        program(DENSE, mesh="3x1", zero=zero, tokens_per_step=micro_batches * 3 * 128)
    )
    assert found[DATA_AXIS] == pytest.approx({k: n * 2 / 3 for k, n in expected.items()}, abs=60)
    assert list(found) == [DATA_AXIS]


def test_tensor_parallel_reduces_activations_four_times_a_layer_and_at_both_ends():
    found = minimum_wire_bytes(program(DENSE, mesh="1x3", zero=0))
    activations = 128 * 768 * 2
    norms = 2 * (2 * 3 + 1) * 768
    sent = (4 * 3 + 2) * 2 * activations * 2 / 3 + 2 * norms * 2 / 3
    assert found == {"tensor": {"all-reduce": pytest.approx(sent, abs=60)}}


def test_on_one_device_nothing_has_to_be_sent():
    assert minimum_wire_bytes(program(DENSE, mesh="1x1", zero=0)) == {}


def test_weights_that_no_tensor_rank_splits_cross_both_axes():
    found = minimum_wire_bytes(program(MLA_MOE, mesh="2x3", zero=3))
    assert set(found) == {"data", "tensor", "data+tensor"}


@pytest.mark.parametrize("config", [DENSE, MLA_MOE], ids=["dense", "mla-moe"])
def test_the_state_is_three_float32_values_per_parameter_split_over_all_devices(config):
    whole = 12 * model.parameter_count(config)
    split = state_bytes(program(config, mesh="2x3", zero=3))
    assert split == pytest.approx(whole / 6, rel=0.01)
    assert state_bytes(program(config, mesh="3x1", zero=0)) == pytest.approx(whole, rel=1e-4)
