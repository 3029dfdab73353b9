import dataclasses
import itertools

import numpy as np
import pytest

from jaxseek.data.loader import Loader, LoaderState, validation_batches
from jaxseek.data.packing import IGNORE_LABEL, PackedRows
from jaxseek.errors import UserError

LENGTHS = (5, 9, 2, 14, 3, 7, 6, 11, 4, 8)  # 69 tokens: 17 full rows of 4


@pytest.fixture
def stream(make_stream):
    return make_stream(LENGTHS)


def loader(stream, *, batch=3, accumulation=1, context=4, seed=0, state=None, vocab_size=1000):
    return Loader(
        stream,
        state=state or LoaderState(seed=seed),
        accumulation=accumulation,
        batch=batch,
        context=context,
        vocab_size=vocab_size,
        pad_id=2,
    )


def take(stream, count, **options):
    """`count` batches and the state after them."""
    with loader(stream, **options) as batches:
        taken = list(itertools.islice(batches, count))
        return taken, batches.state


def rows_of(batches):
    """All rows in order, as one array [rows, 4, T] of tokens, labels, segment ids and positions."""
    arrays = [np.stack(list(vars(batch).values())) for batch in batches]
    flat = [array.reshape(4, -1, array.shape[-1]) for array in arrays]
    return np.concatenate(flat, axis=1).swapaxes(0, 1)


def test_batches_have_the_global_shape(stream):
    (batch,), _ = take(stream, 1, batch=3, accumulation=2)
    assert {array.shape for array in vars(batch).values()} == {(2, 3, 4)}
    assert {array.dtype for array in vars(batch).values()} == {np.dtype(np.int32)}


def test_ten_steps_equal_five_and_resume_and_five(stream):
    whole, whole_state = take(stream, 10)
    first, state = take(stream, 5)
    state = LoaderState.from_dict(state.to_dict())
    second, second_state = take(stream, 5, state=state)
    np.testing.assert_array_equal(rows_of(first + second), rows_of(whole))
    assert second_state == whole_state
    assert whole_state.epoch == 1, "the test must cross the border of an epoch"


@pytest.mark.parametrize("steps", range(1, 13))
def test_resume_at_any_step_repeats_and_skips_nothing(stream, steps):
    whole = rows_of(take(stream, 14)[0])
    _, state = take(stream, steps)
    rest, _ = take(stream, 14 - steps, state=state)
    np.testing.assert_array_equal(rows_of(rest), whole[3 * steps :])


def test_another_batch_size_continues_the_same_sequence_of_rows(stream):
    whole = rows_of(take(stream, 11, batch=6)[0])
    first, state = take(stream, 3, batch=6)
    second, _ = take(stream, 12, batch=2, accumulation=2, state=state)
    np.testing.assert_array_equal(rows_of(first + second), whole)


def test_an_epoch_holds_each_label_once(stream):
    with loader(stream, batch=1) as batches:
        epoch = rows_of(itertools.islice(batches, batches.rows_per_epoch))
        assert batches.state == LoaderState(seed=0, epoch=1)
    labels = epoch[:, 1][epoch[:, 1] != IGNORE_LABEL]
    firsts = stream.tokens[stream.offsets[:-1]]
    assert sorted(labels) == sorted(set(stream.tokens.tolist()) - set(firsts.tolist()))


def test_epochs_and_seeds_differ_and_reruns_agree(stream):
    first = rows_of(take(stream, 17, batch=2)[0])
    again = rows_of(take(stream, 17, batch=2)[0])
    other_seed = rows_of(take(stream, 17, batch=2, seed=1)[0])
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[:17], first[17:])
    assert not np.array_equal(first, other_seed)


def test_order_is_the_same_on_every_machine(stream):
    (batch,), _ = take(stream, 1)
    assert batch.tokens.tolist() == [[[63, 43, 44, 45], [16, 60, 61, 62], [42, 64, 65, 66]]]


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_devices_cover_the_rows_disjointly(stream, devices):
    (batch,), _ = take(stream, 1, batch=6)
    parts = np.split(batch.tokens, devices, axis=1)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), batch.tokens)
    assert len({tuple(row) for row in batch.tokens[0].tolist()}) == 6


def test_batch_may_span_several_epochs(make_stream):
    (batch,), state = take(make_stream([9]), 1, batch=7)
    assert state == LoaderState(seed=0, epoch=3, rows_consumed=1)
    for epoch in range(3):
        pair = batch.tokens[0, 2 * epoch : 2 * epoch + 2]
        assert sorted(pair[:, 0].tolist()) == [3, 7]


def test_state_does_not_count_prefetched_batches(stream):
    with loader(stream) as batches:
        assert batches.state == LoaderState(seed=0)
        next(batches)
        assert batches.state == LoaderState(seed=0, rows_consumed=3)


def test_error_in_the_thread_reaches_the_consumer(stream, monkeypatch):
    row = PackedRows.row

    def broken(self, index):
        if index == 11:
            raise OSError("disk is gone")
        return row(self, index)

    monkeypatch.setattr(PackedRows, "row", broken)
    with loader(stream, batch=1) as batches, pytest.raises(OSError, match="disk is gone"):
        list(itertools.islice(batches, 17))


def test_too_little_text_is_refused(make_stream):
    with pytest.raises(UserError, match="has 5 tokens, need at least 9"):
        loader(make_stream([5]), context=8)
    assert take(make_stream([9]), 1, context=8)


def test_text_without_a_label_is_refused(make_stream):
    with pytest.raises(UserError, match="no label"):
        loader(make_stream([1] * 20))


def test_token_id_outside_the_vocabulary_is_refused(stream):
    with pytest.raises(UserError, match="document9 has the id 71, outside"):
        loader(stream, vocab_size=71)


def test_saved_position_behind_the_data_is_refused(stream):
    with pytest.raises(UserError, match="row 18 of an epoch, but this data has 17 rows"):
        loader(stream, state=LoaderState(seed=0, rows_consumed=18))


@pytest.mark.parametrize(
    "values",
    [
        {"seed": 0, "epoch": 0},
        {"seed": 0, "epoch": 0, "rows_consumed": -1},
        {"seed": 0, "epoch": "0", "rows_consumed": 1},
        {"seed": 0, "epoch": 0, "rows_consumed": 1, "batches": 3},
    ],
)
def test_damaged_saved_position_is_refused(values):
    with pytest.raises(UserError, match="seed, epoch, rows_consumed"):
        LoaderState.from_dict(values)


def validation(stream, *, batch, context=4, **options):
    return validation_batches(
        stream, batch=batch, context=context, vocab_size=1000, pad_id=2, **options
    )


@pytest.mark.parametrize("batch", [1, 3, 4, 17, 20])
def test_validation_holds_each_label_once_for_any_batch_size(stream, batch):
    result = validation(stream, batch=batch)
    assert result.num_rows == 17
    assert result.num_padding_rows == -17 % batch
    assert {one.tokens.shape for one in result.batches} == {(batch, 4)}
    rows = rows_of(result.batches)
    labels = rows[:, 1][rows[:, 1] != IGNORE_LABEL]
    assert len(labels) == result.num_label_tokens == stream.num_label_tokens
    np.testing.assert_array_equal(rows[:17], rows_of(validation(stream, batch=17).batches))
    assert (rows[17:, 1] == IGNORE_LABEL).all()


def test_validation_limit_spreads_rows_over_the_data(stream):
    result = validation(stream, batch=2, max_rows=5)
    assert (result.num_rows, result.num_padding_rows) == (5, 1)
    starts = rows_of(result.batches)[:5, 0, 0] - 3
    assert starts.tolist() == [4 * row for row in (0, 3, 6, 10, 13)]
    assert validation(stream, batch=2, max_rows=100).num_rows == 17


def test_validation_may_be_shorter_than_the_context(make_stream):
    result = validation(make_stream([3]), batch=2, context=8)
    assert (result.num_rows, result.num_padding_rows, result.num_label_tokens) == (1, 1, 2)


def test_validation_data_is_checked(make_stream, stream):
    with pytest.raises(UserError, match="validation dataset has 0 tokens"):
        validation(make_stream([]), batch=2)
    bad = dataclasses.replace(stream, tokens=stream.tokens - 5)
    with pytest.raises(UserError, match="document0 has the id -2"):
        validation(bad, batch=2)
