"""The model of a step's time, by hand."""

import dataclasses

import pytest

from jaxseek import model
from jaxseek.devices import Fleet
from jaxseek.flops import model_flops_per_token
from jaxseek.plan.choices import Choice
from jaxseek.plan.timing import StepTime, device_flops, machine_rates
from tests.plan.models import DENSE, MLA_MOE, program, request


def flops(config, *, mesh="3x1", remat="none"):
    return device_flops(program(Choice(mesh=mesh, zero=3, remat=remat), request(config)))


def test_a_step_waits_for_what_is_exposed_and_hides_the_rest_behind_the_products():
    parts = {"exposed": 0.5, "optimizer": 0.1, "link": "PCIe"}
    assert StepTime(compute=2.0, overlapped=1.0, **parts).seconds == pytest.approx(2.6)
    assert StepTime(compute=2.0, overlapped=3.0, **parts).seconds == pytest.approx(3.6)


def test_a_step_is_bound_by_its_longest_part():
    def bound(compute, overlapped, exposed, optimizer):
        return StepTime(
            compute=compute,
            overlapped=overlapped,
            exposed=exposed,
            optimizer=optimizer,
            link="PCIe",
        ).bound_by

    assert bound(2.0, 1.0, 0.5, 0.1) == "compute"
    assert bound(1.0, 0.8, 0.5, 0.1) == "PCIe"
    assert bound(0.1, 0.1, 0.1, 0.3) == "memory"


def test_a_4090_sends_over_pcie_and_what_nvlink_joins_over_nvlink():
    def rates(gpus, wire=None):
        return machine_rates(Fleet.parse(gpus), compute_fraction=0.5, wire_gb_s=wire)

    assert rates("3xrtx4090").wire == pytest.approx(0.4 * 16 * 1.969e9)
    assert rates("3xrtx4090").flops == pytest.approx(82.6e12)
    assert (rates("2xrtx3090").link, rates("3xrtx3090").link) == ("NVLink", "PCIe")
    assert rates("8xh100").wire == pytest.approx(0.75 * 450e9)
    assert rates("3xrtx4090", 20.0).wire == 20e9


@pytest.mark.parametrize("config", [DENSE, MLA_MOE], ids=["dense", "mla-moe"])
def test_without_recomputation_a_device_executes_the_models_flops_of_its_tokens(config):
    own = model_flops_per_token(config, model.split(config)[1], seq_len=128) * 128
    # Blockwise attention computes the scores once more: a seventh product to the model's six.
    assert own < flops(config) < 1.03 * own


def test_full_recomputation_adds_a_forward_pass_of_the_layers():
    # But for the last product of a layer, of which no gradient needs the result.
    layers = 3 * (4 * 768 * 768 + 2 * 768 * 1536)
    attention = 2 * 128 * 3 * 6 * 128
    added = flops(DENSE, remat="full") - flops(DENSE)
    assert added == pytest.approx((2 * layers + attention) * 128)
    kept = 3 * 2 * 768 * 768 * 128 / 3  # o_proj, whose all-reduced result is saved
    split = flops(DENSE, mesh="1x3", remat="full") - flops(DENSE, mesh="1x3")
    assert split == pytest.approx(added / 3 - kept)


def test_three_tensor_ranks_share_a_step_of_one_batch():
    assert flops(DENSE, mesh="1x3") == pytest.approx(flops(DENSE) / 3)


def test_ranks_that_share_few_kv_heads_unevenly_wait_for_the_one_with_most():
    # Two kv heads on three ranks: one has half of the attention, not a third.
    grouped = dataclasses.replace(DENSE, num_key_value_heads=2)
    longer = dataclasses.replace(grouped, max_position_embeddings=1024)

    def attention(mesh):
        """FLOPs of a token that grow with the length of its sequence."""
        choice = Choice(mesh=mesh, zero=0, remat="none")
        short, long = (
            device_flops(program(choice, request(config, seq_len=length))) / length
            for config, length in ((grouped, 128), (longer, 1024))
        )
        return long - short

    assert attention("1x3") == pytest.approx(attention("3x1") / 2)
