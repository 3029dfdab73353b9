import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from jaxseek.data import token_stream as token_stream_module
from jaxseek.data.documents import Document
from jaxseek.data.token_stream import cached_token_stream, check_token_ids, encode_documents
from jaxseek.data.tokenizer import BOS_TOKEN, EOS_TOKEN, TextTokenizer, train_tokenizer
from jaxseek.errors import UserError


def test_each_document_is_begin_text_end(tokenizer, documents):
    stream = encode_documents(documents, tokenizer=tokenizer)
    assert stream.tokens.dtype == np.int32
    for index, (name, text) in enumerate(documents):
        ids = stream.tokens[stream.offsets[index] : stream.offsets[index + 1]].tolist()
        assert stream.names[index] == name
        assert ids == [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]


def test_markers_stand_once_even_where_the_text_spells_them(tokenizer):
    text = f"{BOS_TOKEN}x{EOS_TOKEN}"
    tokens = encode_documents([Document("a", text)], tokenizer=tokenizer).tokens.tolist()
    assert tokens.count(tokenizer.bos_id) == tokens.count(tokenizer.eos_id) == 1
    assert tokenizer.decode(tokens) == text


def test_many_documents_are_encoded_in_several_calls(tokenizer, documents, monkeypatch):
    whole = encode_documents(documents, tokenizer=tokenizer)
    monkeypatch.setattr(token_stream_module, "_DOCUMENTS_PER_CALL", 3)
    np.testing.assert_array_equal(
        encode_documents(documents, tokenizer=tokenizer).tokens, whole.tokens
    )


def test_label_tokens_are_all_but_the_first_of_each_document(make_stream):
    assert make_stream([4, 1, 3]).num_label_tokens == 3 + 0 + 2


@pytest.fixture
def counted_encoding(monkeypatch):
    calls = []

    def encode(documents, *, tokenizer):
        calls.append(len(documents))
        return encode_documents(documents, tokenizer=tokenizer)

    monkeypatch.setattr(token_stream_module, "encode_documents", encode)
    return calls


def test_cache_returns_the_same_stream_memory_mapped(
    tmp_path, tokenizer, documents, counted_encoding
):
    whole = encode_documents(documents, tokenizer=tokenizer)
    for _ in range(2):
        stream = cached_token_stream(documents, tokenizer=tokenizer, cache=tmp_path)
        assert isinstance(stream.tokens, np.memmap)
        assert stream.names == whole.names
        np.testing.assert_array_equal(stream.tokens, whole.tokens)
        np.testing.assert_array_equal(stream.offsets, whole.offsets)
    assert counted_encoding == [4]


def test_cache_key_holds_tokenizer_names_and_texts(
    tmp_path, tokenizer, documents, counted_encoding
):
    other_tokenizer = TextTokenizer(train_tokenizer(["abab abab"], vocab_size=270))
    renamed = (Document("other name", documents[0].text), *documents[1:])
    changed = (Document(documents[0].name, "other text"), *documents[1:])
    cached_token_stream(documents, tokenizer=tokenizer, cache=tmp_path)
    cached_token_stream(documents, tokenizer=other_tokenizer, cache=tmp_path)
    for variant in (renamed, changed, documents[::-1]):
        cached_token_stream(variant, tokenizer=tokenizer, cache=tmp_path)
    assert counted_encoding == [4] * 5


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "empty"])
@pytest.mark.parametrize("kind", ["tokens", "index"])
def test_damaged_cache_is_rebuilt(tmp_path, tokenizer, documents, counted_encoding, damage, kind):
    whole = cached_token_stream(documents, tokenizer=tokenizer, cache=tmp_path)
    expected = np.array(whole.tokens)
    (index_path,) = tmp_path.rglob("*.index.npy")
    (tokens_path,) = set(tmp_path.rglob("*.npy")) - {index_path}
    path = index_path if kind == "index" else tokens_path
    content = bytearray(path.read_bytes())
    path.unlink()  # the mapped file of `whole` must not change
    if damage == "truncate":
        path.write_bytes(content[:-7])
    elif damage == "flip":
        content[-1] ^= 1
        path.write_bytes(content)
    elif damage == "empty":
        path.write_bytes(b"")
    stream = cached_token_stream(documents, tokenizer=tokenizer, cache=tmp_path)
    np.testing.assert_array_equal(stream.tokens, expected)
    assert counted_encoding == [4, 4]
    assert not list(tmp_path.rglob("*.tmp"))


def test_ids_outside_the_vocabulary_are_refused_with_document_and_token(make_stream, monkeypatch):
    monkeypatch.setattr(token_stream_module, "_TOKENS_PER_CHECK", 2)
    stream = make_stream([3, 4])
    check_token_ids(stream, vocab_size=10)
    with pytest.raises(UserError, match=r"token 3 of document document1 has the id 9, .* of 9:"):
        check_token_ids(stream, vocab_size=9)
    negative = dataclasses.replace(stream, tokens=stream.tokens - 4)
    with pytest.raises(UserError, match="token 0 of document document0 has the id -1"):
        check_token_ids(negative, vocab_size=9)


def test_data_modules_do_not_import_jax():
    modules = "loader, packing, sources, text_files, token_stream, tokenizer"
    program = f"import sys; from jaxseek.data import {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
