"""The least bytes by hand, and state bytes against XLA's account."""

import dataclasses

import pytest

from jaxseek import layout, model
from jaxseek.mesh import DATA_AXIS, MeshShape
from jaxseek.plan.choices import Choice
from jaxseek.plan.theory import local_heads, minimum_wire_bytes, state_bytes
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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "most"),
    [
        (12, 2, 3, 6),  # Qwen-1.5B: two kv heads on three ranks leave one with nothing
        (28, 4, 3, 14),  # Qwen-7B
        (32, 8, 3, 12),  # Llama-8B
        (12, 1, 3, 4),  # the query heads of the only kv head are shared out
        (14, 2, 8, 2),
        (6, 6, 3, 2),
    ],
)
def test_the_most_loaded_rank_has_as_many_query_heads_as_the_stored_weights(
    heads, kv_heads, ranks, most
):
    grouped = dataclasses.replace(
        DENSE, hidden_size=32 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    stored = planned_shape(grouped, ranks)
    assert local_heads(grouped, tensor=ranks) == stored[2] * stored[3] // ranks == most


def planned_shape(config, ranks):
    """Stored shape [L, D, K, G, H] of the query projection on so many tensor ranks."""
    made = layout.plan_layout(
        model.split(config)[1], config=config, shape=MeshShape(data=1, tensor=ranks), zero=0
    )
    return made["dense_layers"]["self_attn"]["q_proj"]["kernel"].stored


def test_latent_attention_shares_out_its_heads():
    # The config's number of kv heads says nothing there.
    latent = dataclasses.replace(MLA_MOE, num_attention_heads=8, num_key_value_heads=2)
    assert local_heads(latent, tensor=3) == 3
