import numpy as np
import pytest

from jaxseek.data.packing import (
    IGNORE_LABEL,
    PADDING_SEGMENT,
    PackedRows,
    padding_row,
    stack_rows,
)

PAD_ID = 2


def packed(stream, *, context, document_order=None):
    return PackedRows(stream, context=context, pad_id=PAD_ID, document_order=document_order)


def test_rows_of_three_and_five_token_documents(make_stream):
    rows = packed(make_stream([3, 5]), context=4)
    assert len(rows) == 2
    first, second = rows.row(0), rows.row(1)
    assert first.tokens.tolist() == [3, 4, 5, 6]
    assert first.labels.tolist() == [4, 5, IGNORE_LABEL, 7]
    assert first.segment_ids.tolist() == [1, 1, 1, 2]
    assert first.positions.tolist() == [0, 1, 2, 0]
    assert second.tokens.tolist() == [7, 8, 9, 10]
    assert second.labels.tolist() == [8, 9, 10, IGNORE_LABEL]
    assert second.segment_ids.tolist() == [1, 1, 1, 1]
    assert second.positions.tolist() == [0, 1, 2, 3]
    assert {array.dtype for array in vars(first).values()} == {np.dtype(np.int32)}


def test_last_row_is_padded_without_labels(make_stream):
    rows = packed(make_stream([3, 3]), context=4)
    last = rows.row(len(rows) - 1)
    assert last.tokens.tolist() == [7, 8, PAD_ID, PAD_ID]
    assert last.labels.tolist() == [8] + [IGNORE_LABEL] * 3
    assert last.segment_ids.tolist() == [1, 1, PADDING_SEGMENT, PADDING_SEGMENT]
    assert last.positions.tolist() == [0, 1, 0, 0]


def test_padding_is_told_by_length_not_by_id(make_stream):
    stream = make_stream([3, 4])
    stream.tokens[:] = PAD_ID
    rows = packed(stream, context=16)
    assert rows.row(0).num_label_tokens == stream.num_label_tokens == 5


@pytest.mark.parametrize("context", [1, 2, 3, 7, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_follows_from_the_documents(make_stream, context, seed):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 9, size=generator.integers(1, 9)).tolist()
    stream = make_stream([*lengths, 2])
    order = generator.permutation(stream.num_documents)
    documents = [stream.tokens[stream.offsets[d] : stream.offsets[d + 1]] for d in order]
    text = np.concatenate(documents).tolist()
    owner = np.repeat(np.arange(len(documents)), [len(d) for d in documents]).tolist()

    rows = packed(stream, context=context, document_order=order)
    labels = []
    for index in range(len(rows)):
        row = rows.row(index)
        start = index * context
        previous = None
        for t in range(context):
            i = start + t
            if i >= len(text):
                assert row.segment_ids[t] == PADDING_SEGMENT
                assert row.labels[t] == IGNORE_LABEL
                continue
            same = i + 1 < len(text) and owner[i + 1] == owner[i]
            continues = previous is not None and owner[i - 1] == owner[i]
            assert row.tokens[t] == text[i]
            assert row.labels[t] == (text[i + 1] if same else IGNORE_LABEL)
            assert row.positions[t] == (previous[1] + 1 if continues else 0)
            expected_segment = previous[0] + (not continues) if previous else 1
            assert row.segment_ids[t] == expected_segment
            previous = (row.segment_ids[t], row.positions[t])
        labels += row.labels[row.labels != IGNORE_LABEL].tolist()

    firsts = {document[0] for document in documents}
    assert sorted(labels) == sorted(set(text) - firsts), "each token is a label exactly once"


def test_padding_row_weighs_nothing():
    row = padding_row(context=5, pad_id=PAD_ID)
    assert row.num_label_tokens == 0
    assert row.tokens.tolist() == [PAD_ID] * 5
    assert row.segment_ids.tolist() == [PADDING_SEGMENT] * 5
    assert {array.dtype for array in vars(row).values()} == {np.dtype(np.int32)}


def test_stacking_keeps_the_order_of_rows(make_stream):
    rows = packed(make_stream([25]), context=4)
    batch = stack_rows([rows.row(i) for i in range(6)], shape=(2, 3))
    assert batch.tokens.shape == batch.labels.shape == (2, 3, 4)
    np.testing.assert_array_equal(batch.tokens[1, 0], rows.row(3).tokens)
    assert batch.num_label_tokens == 24
