"""Sampling with logits that are made up: where it begins, what it may say, where it ends."""

import dataclasses

import numpy as np
import pytest

from jaxseek.data.tokenizer import TextTokenizer, train_tokenizer
from jaxseek.train import sample
from tests.tiny import TINY
from tests.train.programs import stepper

TEXT = "def area(width, height):\n    return width * height\n"
MODEL_ROWS = 400  # more than the tokenizer has ids


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(train_tokenizer([TEXT], vocab_size=310))


def sampled(tokenizer, monkeypatch, logits, *, prompt="def ", num_tokens=8, seq_len=16):
    """Text, and the positions after which a token was asked for. `logits(position)` is a row."""
    asked = []

    def make_logits(program):
        def next_logits(state, tokens, index):
            assert tokens.max() < tokenizer.vocab_size
            asked.append(int(index))
            return logits(int(index))[None]

        return next_logits

    monkeypatch.setattr(sample, "make_logits", make_logits)
    model = dataclasses.replace(TINY["llama"], vocab_size=MODEL_ROWS)
    program = stepper(model, seq_len=seq_len).program
    text = sample.sample_text(
        program, None, tokenizer=tokenizer, prompt=prompt, num_tokens=num_tokens
    )  # pyright: ignore[reportArgumentType]
    return text, asked


def only(token: int) -> np.ndarray:
    """Logits that leave one choice."""
    row = np.full(MODEL_ROWS, -1e9, np.float32)
    row[token] = 0
    return row


def test_the_text_is_the_prompt_and_what_the_logits_say(tokenizer, monkeypatch):
    (letter,) = tokenizer.encode("x")
    text, asked = sampled(tokenizer, monkeypatch, lambda _: only(letter))
    first = len(tokenizer.encode("def "))  # behind the begin of sentence
    assert text == "def " + "x" * 8
    assert asked == list(range(first, first + 8))


def test_it_ends_at_the_end_of_sentence_which_is_not_shown(tokenizer, monkeypatch):
    (letter,) = tokenizer.encode("x")
    stop = len(tokenizer.encode("def ")) + 2
    text, _ = sampled(
        tokenizer, monkeypatch, lambda i: only(tokenizer.eos_id if i == stop else letter)
    )
    assert text == "def xx"


def test_rows_that_the_tokenizer_does_not_have_are_never_sampled(tokenizer, monkeypatch):
    (letter,) = tokenizer.encode("x")
    row = only(letter)
    row[tokenizer.vocab_size :] = 50
    text, _ = sampled(tokenizer, monkeypatch, lambda _: row)
    assert text == "def " + "x" * 8


@pytest.mark.parametrize("seq_len", [1, 2, 3, 6])
def test_it_keeps_within_the_sequence_length(tokenizer, monkeypatch, seq_len):
    (letter,) = tokenizer.encode("x")
    _, asked = sampled(tokenizer, monkeypatch, lambda _: only(letter), seq_len=seq_len)
    assert all(position < seq_len - 1 for position in asked)
