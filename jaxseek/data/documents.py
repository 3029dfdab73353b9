"""Documents: named texts, and their split into training and validation."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from jaxseek.errors import UserError

_CUT_SEARCH = 1000  # characters in which the end of a line is looked for


class Document(NamedTuple):
    """One text and its name, the same on every machine.

    `name`: path relative to the source, "/" between folders; ":LINE" follows for a .jsonl record.
    """

    name: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """What a source holds, sorted by path, then line; `skipped`: what was left out and why."""

    documents: tuple[Document, ...]
    skipped: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Documents to train on and documents to measure on: no document is in both."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]


def split_by_name(documents: Sequence[Document], *, validation_fraction: float) -> Split:
    """Splits by a hash of each document's name: the same on every machine and in any order.

    About `validation_fraction` (in [0, 1); 0 means none) of the documents are for validation, and
    at least one is on each side; of a single document the last part is cut off, behind a line where
    one ends nearby.
    """
    if not 0 <= validation_fraction < 1:
        raise UserError(
            f"data.validation_fraction is {validation_fraction}: it must be at least 0 and below 1."
        )
    if validation_fraction == 0 or not documents:
        return Split(train=tuple(documents), validation=())
    if len(documents) == 1:
        return _cut_document(documents[0], validation_fraction)
    places = [_place_of_name(document.name) for document in documents]
    threshold = min(max(validation_fraction, min(places)), sorted(places)[-2])
    return Split(
        train=tuple(d for d, x in zip(documents, places, strict=True) if x > threshold),
        validation=tuple(d for d, x in zip(documents, places, strict=True) if x <= threshold),
    )


def _place_of_name(name: str) -> float:
    """A fixed pseudo-random place in [0, 1) for a name."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _cut_document(document: Document, validation_fraction: float) -> Split:
    name, text = document
    middle = min(max(round(len(text) * (1 - validation_fraction)), 1), len(text))
    cut = text.rfind("\n", max(middle - _CUT_SEARCH, 0), middle) + 1 or middle
    rest = (Document(f"{name}:end", text[cut:]),) if text[cut:] else ()
    return Split(train=(Document(name, text[:cut]),), validation=rest)
