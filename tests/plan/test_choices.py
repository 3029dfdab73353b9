"""Which choices there are, and what is said where there are none."""

import pytest

from jaxseek.errors import UserError
from jaxseek.plan.choices import Choice, find_choices, parse_only
from tests.plan.models import DENSE, request


def meshes_and_levels(**rest):
    return {(choice.mesh, choice.zero) for choice in find_choices(request(DENSE, **rest))}


def test_three_gpus_split_the_batch_or_the_layers_and_zero_2_needs_accumulation():
    assert meshes_and_levels() == {("3x1", 0), ("3x1", 1), ("3x1", 3), ("1x3", 0), ("1x3", 3)}
    assert ("3x1", 2) in meshes_and_levels(tokens_per_step=3000)


def test_zero_2_is_planned_where_it_is_asked_for():
    assert meshes_and_levels(only={"zero": "2"}) == {("3x1", 2)}


def test_six_gpus_have_four_meshes_and_one_gpu_has_one():
    six = {mesh for mesh, _ in meshes_and_levels(gpus="6xrtx4090")}
    assert six == {"6x1", "3x2", "2x3", "1x6"}
    assert meshes_and_levels(gpus="rtx4090") == {("1x1", 0)}


def test_every_choice_comes_with_every_remat_and_is_a_run():
    asked = request(DENSE, micro_batch_tokens=256, tokens_per_step=5000)
    for choice in find_choices(asked):
        assert asked.micro_batches(choice) == [2]
        run = asked.run_of(choice, micro_batch=2)
        assert (run.mesh, run.zero, run.remat) == (choice.mesh, choice.zero, choice.remat)
        assert run.sequences_per_micro_batch * run.seq_len == 256
        assert run.tokens_per_step >= 5000 > run.tokens_per_step - 256 * run.mesh_shape.data
    assert len(find_choices(asked)) % 3 == 0


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ({"mesh": "2x2"}, r"2x2 has 4 devices, not those of 3xrtx4090; possible: 3x1, 1x3\."),
        ({"mesh": "three"}, "not of the form AxB"),
        ({"mesh": "1x3", "zero": "1"}, r"zero 1 is not possible on mesh 1x3; possible: 0, 3\."),
        ({"state": "int8"}, r"state int8 is not possible; possible: float32\."),
        ({"layers": "3"}, r"'layers' is not known; known are mesh, zero, remat, state, offload\."),
    ],
)
def test_what_is_not_possible_is_refused_with_what_is(only, message):
    with pytest.raises(UserError, match=message):
        find_choices(request(DENSE, only=only))


def test_only_reads_back_and_refuses_anything_else():
    assert parse_only("mesh=3x1, zero=3") == {"mesh": "3x1", "zero": "3"}
    for text in ("mesh", "mesh=", "=3", "mesh=3x1,"):
        with pytest.raises(UserError, match="KEY=VALUE"):
            parse_only(text)
    with pytest.raises(UserError, match="zero is given a second time"):
        parse_only("zero=1,zero=3")


def test_a_micro_batch_is_whole_sequences():
    with pytest.raises(UserError, match="not a multiple of --seq-len 128; use 512"):
        request(DENSE, micro_batch_tokens=500)


def test_sequences_longer_than_the_model_takes_are_refused():
    with pytest.raises(UserError, match="max_position_embeddings"):
        request(DENSE, seq_len=1024)


CHOICE = Choice(mesh="3x1", zero=3, remat="full")


def test_micro_batches_grow_to_what_a_step_needs_and_no_further():
    assert request(DENSE).micro_batches(CHOICE) == list(range(1, 65536 // 128 + 1))
    # 1000 tokens are 7.8 sequences, 2.6 on each of three devices.
    assert request(DENSE, tokens_per_step=1000).micro_batches(CHOICE) == [1, 2, 3]


def test_an_exact_batch_is_cut_into_equal_micro_batches():
    asked = request(DENSE, batch=36)
    assert asked.micro_batches(CHOICE) == [1, 2, 3, 4, 6, 12]
    for size in asked.micro_batches(CHOICE):
        run = asked.run_of(CHOICE, micro_batch=size)
        assert (run.sequences_per_step, run.sequences_per_micro_batch) == (36, size)
    pinned = request(DENSE, batch=36, accumulation=4)
    assert pinned.micro_batches(CHOICE) == [3]
    assert pinned.run_of(CHOICE, micro_batch=3).accumulation == 4


def test_a_batch_that_three_does_not_divide_leaves_the_layers_to_be_split():
    assert {choice.mesh for choice in find_choices(request(DENSE, batch=16))} == {"1x3"}
    with pytest.raises(UserError, match="batch 16 cannot be cut for 3x1; choose another"):
        find_choices(request(DENSE, batch=16, only={"mesh": "3x1"}))
    with pytest.raises(UserError, match="any mesh of 3xrtx4090 and accumulation 7"):
        find_choices(request(DENSE, batch=16, accumulation=7))


def test_an_accumulation_and_the_tokens_of_a_step_leave_one_micro_batch():
    # 1000 tokens are 2.6 sequences on each of three devices: two micro-batches of two make them.
    asked = request(DENSE, tokens_per_step=1000, accumulation=2)
    assert asked.micro_batches(CHOICE) == [2]
    assert asked.run_of(CHOICE, micro_batch=2).tokens_per_step == 2 * 2 * 3 * 128
    # So it is above what is searched otherwise: 10^6 tokens on three devices at once.
    assert request(DENSE, tokens_per_step=10**6, accumulation=1).micro_batches(CHOICE) == [2605]
    enough = request(DENSE, tokens_per_step=1000, accumulation=2, micro_batch_tokens=384)
    assert enough.micro_batches(CHOICE) == [3]
    with pytest.raises(UserError, match="128 tokens and --accumulation 2 do not make --tokens-per"):
        find_choices(request(DENSE, tokens_per_step=1000, accumulation=2, micro_batch_tokens=128))
    with pytest.raises(UserError, match="--accumulation must be at least 1, got 0"):
        request(DENSE, tokens_per_step=1000, accumulation=0)


def test_a_batch_may_be_cut_into_larger_micro_batches_than_are_searched():
    # 65536 tokens, 512 sequences, are the most that a search looks at.
    assert request(DENSE, batch=1800, accumulation=1).micro_batches(CHOICE) == [600]
    pinned = request(DENSE, batch=1800, micro_batch_tokens=600 * 128)
    assert pinned.micro_batches(CHOICE) == [600]
    assert max(request(DENSE, batch=1800).micro_batches(CHOICE)) == 300


def test_blanks_around_a_mesh_are_no_other_mesh():
    assert {choice.mesh for choice in find_choices(request(DENSE, only={"mesh": " 1x3"}))} == {
        "1x3"
    }
