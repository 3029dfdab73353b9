"""Batches for training, in an order fixed by the seed, and the fixed batches of validation.

Letters: A accumulation steps, B rows in a micro-batch over all devices, T tokens in a row.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import numpy as np

from jaxseek.data.packing import Batch, PackedRows, padding_row, stack_rows
from jaxseek.data.token_stream import TokenStream, check_token_ids
from jaxseek.errors import UserError

_SHUFFLE_STREAMS = {"documents": 0, "rows": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderState:
    """Position in the data: `rows_consumed` rows of epoch `epoch` are done.

    Rows, not batches, so that it holds for another batch size or device count.
    """

    seed: int
    epoch: int = 0
    rows_consumed: int = 0

    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LoaderState":
        """Inverse of `to_dict`. Raises `UserError` on a missing, unknown or negative value."""
        names = [field.name for field in dataclasses.fields(cls)]
        counts = [isinstance(value, int) and value >= 0 for value in values.values()]
        if sorted(values) != sorted(names) or not all(counts):
            raise UserError(
                f"the saved position in the data must hold the counts {', '.join(names)}; "
                f"found {dict(values)}."
            )
        return cls(**values)


class Loader(Iterator[Batch]):
    """Endless iterator over training batches [A, B, T], built ahead by a background thread.

    Each epoch shuffles the documents, packs them and shuffles the rows, from (seed, epoch) alone:
    every process and device count sees the same global batches, and takes its own part of them. A
    batch goes on into the next epoch where one ends. An error in the thread is raised by the `next`
    that would have returned its batch. Use it in a `with` block or call `close`.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        state: LoaderState,
        accumulation: int,
        batch: int,
        context: int,
        vocab_size: int,
        pad_id: int,
        prefetch: int = 2,
    ):
        """`context`: T; `batch`: B; `state`: where to begin; `prefetch`: batches ahead, at least 1.

        Raises `UserError` where the data is shorter than T + 1 tokens, holds no label, has a token
        id outside of [0, vocab_size), or ends before `state`.
        """
        _check_stream(stream, role="training", min_tokens=context + 1, vocab_size=vocab_size)
        self._stream = stream
        self._shape = (accumulation, batch)
        self._context = context
        self._pad_id = pad_id
        self._epoch: _Epoch | None = None
        self.rows_per_epoch = len(PackedRows(stream, context=context, pad_id=pad_id))
        if state.rows_consumed > self.rows_per_epoch:
            raise UserError(
                f"the saved position is row {state.rows_consumed} of an epoch, but this data has "
                f"{self.rows_per_epoch} rows of {context} tokens: the data, the tokenizer or the "
                "sequence length changed since the checkpoint. Restore them to resume."
            )
        self._state = self._submitted_state = state
        self._pending: collections.deque[tuple[Future[Batch], LoaderState]] = collections.deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        for _ in range(prefetch):
            self._submit()

    @property
    def state(self) -> LoaderState:
        """Position after the last batch that `next` returned, whatever was built ahead."""
        return self._state

    def __next__(self) -> Batch:
        future, state_after = self._pending.popleft()
        self._submit()
        batch = future.result()
        self._state = state_after
        return batch

    def close(self) -> None:
        """Ends the background thread; batches built ahead are dropped."""
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self) -> None:
        """Has the thread build one more batch."""
        future = self._thread.submit(self._build, self._submitted_state)
        self._submitted_state = self._advance(self._submitted_state)
        self._pending.append((future, self._submitted_state))

    def _advance(self, state: LoaderState) -> LoaderState:
        """Position one batch after `state`."""
        accumulation, batch = self._shape
        row = state.epoch * self.rows_per_epoch + state.rows_consumed + accumulation * batch
        epoch, rows_consumed = divmod(row, self.rows_per_epoch)
        return dataclasses.replace(state, epoch=epoch, rows_consumed=rows_consumed)

    def _build(self, state: LoaderState) -> Batch:
        """The batch that starts at `state`; only the background thread runs it, so no lock."""
        accumulation, batch = self._shape
        first = state.epoch * self.rows_per_epoch + state.rows_consumed
        rows = []
        for row in range(first, first + accumulation * batch):
            epoch, index = divmod(row, self.rows_per_epoch)
            if self._epoch is None or self._epoch.number != epoch:
                self._epoch = self._shuffled_epoch(state.seed, epoch)
            rows.append(self._epoch.rows.row(int(self._epoch.row_order[index])))
        return stack_rows(rows, shape=self._shape)

    def _shuffled_epoch(self, seed: int, epoch: int) -> "_Epoch":
        document_order = _permutation(
            self._stream.num_documents, seed=seed, epoch=epoch, stream="documents"
        )
        rows = PackedRows(
            self._stream, context=self._context, pad_id=self._pad_id, document_order=document_order
        )
        # Neighbouring rows come from the same documents: a batch of them would be less diverse.
        return _Epoch(
            number=epoch,
            rows=rows,
            row_order=_permutation(len(rows), seed=seed, epoch=epoch, stream="rows"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Epoch:
    number: int
    rows: PackedRows
    row_order: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ValidationSet:
    """Batches [B, T] that never change; `num_rows` counts rows of text, not of padding."""

    batches: tuple[Batch, ...]
    num_rows: int
    num_padding_rows: int
    num_label_tokens: int


def validation_batches(
    stream: TokenStream,
    *,
    batch: int,
    context: int,
    vocab_size: int,
    pad_id: int,
    max_rows: int | None = None,
) -> ValidationSet:
    """The rows of `stream` in order; with `max_rows`, that many spread evenly over it.

    `batch`: B; `context`: T. The last batch is filled up with rows without labels, so all have one
    shape. Raises `UserError` where the stream has no label or a token id outside of [0,
    vocab_size).
    """
    _check_stream(stream, role="validation", min_tokens=2, vocab_size=vocab_size)
    packed = PackedRows(stream, context=context, pad_id=pad_id)
    num_rows = len(packed) if max_rows is None else min(max_rows, len(packed))
    chosen = np.arange(num_rows) * len(packed) // num_rows
    rows = [packed.row(int(index)) for index in chosen]
    num_padding_rows = -num_rows % batch
    rows += [padding_row(context=context, pad_id=pad_id)] * num_padding_rows
    batches = tuple(
        stack_rows(rows[start : start + batch], shape=(batch,))
        for start in range(0, len(rows), batch)
    )
    return ValidationSet(
        batches=batches,
        num_rows=num_rows,
        num_padding_rows=num_padding_rows,
        num_label_tokens=sum(one.num_label_tokens for one in batches),
    )


def _check_stream(
    stream: TokenStream,
    *,
    role: Literal["training", "validation"],
    min_tokens: int,
    vocab_size: int,
) -> None:
    if stream.num_tokens < min_tokens:
        raise UserError(
            f"the {role} dataset has {stream.num_tokens} tokens, need at least {min_tokens} "
            "(context + 1): give more text or a shorter sequence length."
        )
    if stream.num_label_tokens == 0:
        raise UserError(f"the {role} dataset has no label: each document is a single token.")
    check_token_ids(stream, vocab_size=vocab_size)


def _permutation(
    size: int, *, seed: int, epoch: int, stream: Literal["documents", "rows"]
) -> np.ndarray:
    """A permutation of range(size), int64, fixed by (seed, epoch, stream).

    By sorting raw PCG64 output, which numpy keeps for ever; `Generator.permutation` may change.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch, _SHUFFLE_STREAMS[stream]]))
    return np.argsort(bits.random_raw(size), kind="stable")
