"""Rows of fixed length cut from a stream of documents, which stay isolated from one another.

Letters: T tokens in a row.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxseek.data.token_stream import TokenStream
from jaxseek.labels import IGNORE_LABEL

PADDING_SEGMENT = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rows for the model: int32 arrays of one shape [..., T].

    `labels`: the next token, or `IGNORE_LABEL` where that belongs to another document or is
    padding; `segment_ids`: 1, 2, ... for the documents of a row and `PADDING_SEGMENT` for padding;
    `positions`: from 0 in every segment of a row.
    """

    tokens: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray

    @property
    def num_label_tokens(self) -> int:
        """Number of places with a label: the weight of this batch in a mean over tokens."""
        return int(np.count_nonzero(self.labels != IGNORE_LABEL))


class PackedRows:
    """The rows of one pass over the documents of a stream, in a given order; built on demand.

    Row i holds tokens i T to (i + 1) T of the ordered documents, and as its last label the token
    behind them: over all rows each token with a predecessor in its document is a label exactly
    once. A document that ends a row goes on in the next one as a new segment with positions from 0.
    The last row is padded.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        context: int,
        pad_id: int,
        document_order: np.ndarray | None = None,
    ):
        """`context`: T; `document_order`: a permutation, by default the order of the stream."""
        self._stream = stream
        self._context = context
        self._pad_id = pad_id
        order = np.arange(stream.num_documents) if document_order is None else document_order
        lengths = np.diff(stream.offsets)[order]
        # Per document, by rank in the order: where it ends in the ordered text, and how far from
        # there its tokens lie in the stream.
        self._ends = np.cumsum(lengths)
        self._shifts = stream.offsets[:-1][order] - (self._ends - lengths)

    def __len__(self) -> int:
        return -(-(self._stream.num_tokens - 1) // self._context)

    def row(self, index: int) -> Batch:
        """Row `index`: arrays of shape [T]."""
        window = np.full(self._context + 1, self._pad_id, np.int32)
        segment_ids = np.full(self._context + 1, PADDING_SEGMENT, np.int32)
        positions = np.zeros(self._context + 1, np.int32)
        cursor = index * self._context
        end = min(cursor + self._context + 1, self._stream.num_tokens)
        rank = first_rank = int(np.searchsorted(self._ends, cursor, side="right"))
        filled = 0
        while cursor < end:
            count = int(min(self._ends[rank], end)) - cursor
            segment = slice(filled, filled + count)
            source = cursor + int(self._shifts[rank])
            window[segment] = self._stream.tokens[source : source + count]
            segment_ids[segment] = rank - first_rank + 1
            positions[segment] = np.arange(count)
            cursor, filled, rank = cursor + count, filled + count, rank + 1
        return Batch(
            tokens=window[:-1],
            labels=_labels(window, segment_ids),
            segment_ids=segment_ids[:-1],
            positions=positions[:-1],
        )


def padding_row(*, context: int, pad_id: int) -> Batch:
    """A row [T] without a label: it fills a batch up and weighs nothing."""
    zeros = np.zeros(context, np.int32)
    return Batch(
        tokens=np.full(context, pad_id, np.int32),
        labels=np.full(context, IGNORE_LABEL, np.int32),
        segment_ids=zeros + PADDING_SEGMENT,
        positions=zeros,
    )


def stack_rows(rows: Sequence[Batch], *, shape: tuple[int, ...]) -> Batch:
    """Rows of shape [T] as one batch [*shape, T], filled in the order of `rows`."""
    return Batch(
        **{
            field.name: np.stack([getattr(row, field.name) for row in rows]).reshape(*shape, -1)
            for field in dataclasses.fields(Batch)
        }
    )


def _labels(window: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
    same_document = (segment_ids[1:] == segment_ids[:-1]) & (segment_ids[1:] != PADDING_SEGMENT)
    return np.where(same_document, window[1:], np.int32(IGNORE_LABEL))
