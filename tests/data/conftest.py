"""A small tokenizer and a small token stream for the tests of the data."""

import numpy as np
import pytest

from jaxseek.data.documents import Document
from jaxseek.data.token_stream import TokenStream
from jaxseek.data.tokenizer import TextTokenizer, train_tokenizer

TEXTS = (
    "def area(width, height):\n    return width * height\n\n\nprint(area(3, 1415))\n",
    "class Point:\n    def __init__(self, x, y):\n        self.x, self.y = x, y\n",
    "for number in range(10):\n    print(number, number * number)\n",
    "# \u4f60\u597d\u4e16\u754c \u3053\u306b\u3061\nvalue = 0.5\nreturn_value = value\n",
)


@pytest.fixture(scope="session")
def documents() -> tuple[Document, ...]:
    return tuple(Document(f"package/file{i}.py", text) for i, text in enumerate(TEXTS))


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(train_tokenizer(TEXTS, vocab_size=310))


@pytest.fixture(scope="session")
def make_stream():
    """Builds a stream of documents with the given lengths; its tokens are 3, 4, 5, ..."""

    def make(lengths) -> TokenStream:
        return TokenStream(
            tokens=np.arange(3, 3 + sum(lengths), dtype=np.int32),
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
            names=tuple(f"document{i}" for i in range(len(lengths))),
        )

    return make
