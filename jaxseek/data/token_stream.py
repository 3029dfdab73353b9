"""Documents as one flat run of token ids with their offsets, kept on disk and memory-mapped."""

import dataclasses
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxseek.data.cache import atomic_write, digest, documents_digest
from jaxseek.data.documents import Document
from jaxseek.data.tokenizer import TextTokenizer
from jaxseek.errors import UserError
from jaxseek.paths import cache_dir

# Part of the cache key: raise it when the same documents and tokenizer would give another stream.
_RULES_VERSION = 1
_DOCUMENTS_PER_CALL = 256
_TOKENS_PER_CHECK = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenStream:
    """Tokens of all documents, one document behind the other, each as begin, text, end.

    `tokens`: int32 [tokens], possibly memory-mapped; `offsets`: int64 [documents + 1], document i
    is `tokens[offsets[i]:offsets[i + 1]]`, at least one token; `names`: the documents' names.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    names: tuple[str, ...]

    def __post_init__(self):
        assert self.offsets[0] == 0
        assert self.offsets[-1] == len(self.tokens), "offsets must span the tokens"
        assert np.all(np.diff(self.offsets) > 0), "a document has no token"
        assert len(self.names) == len(self.offsets) - 1, "one name per document"

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.names)

    @property
    def num_label_tokens(self) -> int:
        """Tokens that some earlier token of the same document predicts."""
        return self.num_tokens - self.num_documents


def encode_documents(documents: Sequence[Document], *, tokenizer: TextTokenizer) -> TokenStream:
    """Every document as begin of sentence, its text, end of sentence.

    Each marker stands exactly once, even where the text spells it.
    """
    pieces, lengths = [np.empty(0, np.int32)], [0]
    for start in range(0, len(documents), _DOCUMENTS_PER_CALL):
        texts = [document.text for document in documents[start : start + _DOCUMENTS_PER_CALL]]
        for ids in tokenizer.encode_batch(texts):
            pieces.append(np.array([tokenizer.bos_id, *ids, tokenizer.eos_id], np.int32))
            lengths.append(len(pieces[-1]))
    return TokenStream(
        tokens=np.concatenate(pieces),
        offsets=np.cumsum(lengths, dtype=np.int64),
        names=tuple(document.name for document in documents),
    )


def cached_token_stream(
    documents: Sequence[Document], *, tokenizer: TextTokenizer, cache: Path | None = None
) -> TokenStream:
    """`encode_documents`, kept in `cache` (default `cache_dir()`) and memory-mapped from there.

    The key is the tokenizer and the names and texts of the documents. Damaged files are made anew.
    """
    key = digest([str(_RULES_VERSION), tokenizer.fingerprint, documents_digest(documents)])
    folder = (cache or cache_dir()) / "tokens"
    tokens_path, index_path = folder / f"{key[:32]}.npy", folder / f"{key[:32]}.index.npy"
    names = tuple(document.name for document in documents)
    stored = _read_checked(tokens_path, index_path, names=names)
    if stored is not None:
        return stored
    stream = encode_documents(documents, tokenizer=tokenizer)
    with atomic_write(tokens_path) as temporary, temporary.open("wb") as file:
        np.save(file, stream.tokens)
    with atomic_write(index_path) as temporary, temporary.open("wb") as file:
        checksums = [zlib.crc32(stream.tokens.data), zlib.crc32(stream.offsets.data)]
        np.save(file, np.concatenate([stream.offsets, np.array(checksums, np.int64)]))
    return dataclasses.replace(stream, tokens=np.load(tokens_path, mmap_mode="r"))


def check_token_ids(stream: TokenStream, *, vocab_size: int) -> None:
    """Raises `UserError` with document and position where an id is outside [0, vocab_size).

    An embedding would read another row or NaN for such an id without a word.
    """
    for start in range(0, stream.num_tokens, _TOKENS_PER_CHECK):
        chunk = stream.tokens[start : start + _TOKENS_PER_CHECK]
        if chunk.min() >= 0 and chunk.max() < vocab_size:
            continue
        index = start + int(np.argmax((chunk < 0) | (chunk >= vocab_size)))
        document = int(np.searchsorted(stream.offsets, index, side="right")) - 1
        raise UserError(
            f"token {index - int(stream.offsets[document])} of document {stream.names[document]} "
            f"has the id {int(stream.tokens[index])}, outside the model's vocabulary of "
            f"{vocab_size}: give a larger vocab_size or the tokenizer that belongs to the model."
        )


def _read_checked(
    tokens_path: Path, index_path: Path, *, names: tuple[str, ...]
) -> TokenStream | None:
    """The stream stored at the two paths; None where a file is missing or damaged."""
    try:
        index, tokens = np.load(index_path), np.load(tokens_path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    if (index.dtype, tokens.dtype, index.ndim, tokens.ndim) != (np.int64, np.int32, 1, 1):
        return None
    offsets, checksums = index[:-2], index[-2:]
    if [zlib.crc32(tokens.data), zlib.crc32(offsets.data)] != checksums.tolist():
        return None
    return TokenStream(tokens=tokens, offsets=offsets, names=names)
