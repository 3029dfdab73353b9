"""From a run's `data` section to tokenizer, training loader and validation set."""

import dataclasses
import functools
import zlib
from pathlib import Path

from jaxseek.data.cache import digest
from jaxseek.data.documents import split_by_name
from jaxseek.data.loader import ValidationSet, validation_batches
from jaxseek.data.sources import load_corpus
from jaxseek.data.token_stream import TokenStream, cached_token_stream
from jaxseek.data.tokenizer import TextTokenizer, cached_tokenizer, load_tokenizer
from jaxseek.errors import UserError
from jaxseek.run_config import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingText:
    """What a run reads.

    Attributes:
        skipped: files of the source that were left out, and why.
    """

    tokenizer: TextTokenizer
    train: TokenStream
    validation: ValidationSet
    skipped: tuple[str, ...]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest that changes with the tokenizer and with any token or document boundary of
        the training stream.
        """
        checksums = (zlib.crc32(self.train.tokens.data), zlib.crc32(self.train.offsets.data))
        return digest([self.tokenizer.fingerprint, *map(str, checksums)])


def prepare_text(run: RunConfig, *, saved_tokenizer: Path | None = None) -> TrainingText:
    """Read, split and encode the run's source; cached, so the second run starts at once.

    Args:
        saved_tokenizer: the folder of a resumed run's tokenizer, which stands for the one that was
            given to it: that may be gone.

    Raises:
        UserError: for a source that cannot be read or is too small, and a tokenizer that does not
            belong to the model.
    """
    corpus = load_corpus(run.data.source)
    split = split_by_name(corpus.documents, validation_fraction=run.data.validation_fraction)
    vocab_size = run.model.vocab_size
    if run.data.tokenizer is None:
        tokenizer = cached_tokenizer(split.train, vocab_size=vocab_size)
    else:
        tokenizer = load_tokenizer(saved_tokenizer or run.data.tokenizer)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"data.tokenizer {run.data.tokenizer} has ids up to {tokenizer.vocab_size - 1}, but "
            "model.vocab_size is "
            f"{vocab_size}: give the model's own tokenizer, or a model of at least "
            f"{tokenizer.vocab_size}."
        )
    validation = validation_batches(
        cached_token_stream(split.validation, tokenizer=tokenizer),
        batch=run.sequences_per_step // run.accumulation,
        context=run.seq_len,
        vocab_size=vocab_size,
        pad_id=tokenizer.pad_id,
        max_rows=run.eval.sequences,
    )
    train = cached_token_stream(split.train, tokenizer=tokenizer)
    return TrainingText(
        tokenizer=tokenizer, train=train, validation=validation, skipped=corpus.skipped
    )
