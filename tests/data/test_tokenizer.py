import hashlib
import json
import random
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from jaxseek.data import tokenizer as tokenizer_module
from jaxseek.data.documents import Document
from jaxseek.data.tokenizer import (
    ASSISTANT_TOKEN,
    BOS_TOKEN,
    EOS_TOKEN,
    EOT_TOKEN,
    FIM_BEGIN_TOKEN,
    FIM_END_TOKEN,
    FIM_HOLE_TOKEN,
    PAD_TOKEN,
    THINK_CLOSE_TOKEN,
    THINK_OPEN_TOKEN,
    USER_TOKEN,
    TextTokenizer,
    cached_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from jaxseek.errors import UserError

CONTROL_TOKENS = (
    BOS_TOKEN,
    EOS_TOKEN,
    PAD_TOKEN,
    THINK_OPEN_TOKEN,
    THINK_CLOSE_TOKEN,
    FIM_HOLE_TOKEN,
    FIM_BEGIN_TOKEN,
    FIM_END_TOKEN,
    USER_TOKEN,
    ASSISTANT_TOKEN,
    EOT_TOKEN,
)


def split(tokenizer: Tokenizer, text: str) -> list[str]:
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


# What deepseek-ai/DeepSeek-V3's own tokenizer.json splits these texts into.
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("x=12345 67", ["x", "=", "123", "45", " ", "67"]),
        ("    return  a_b", ["   ", " return", " ", " a", "_b"]),
        ("f(x):\n\n  y", ["f", "(x", "):\n\n", " ", " y"]),
        ("I'm 'ok'", ["I", "'m", " '", "ok", "'"]),
        ("\u65e5\u672c\u304b\u306a\u30ab \ud55c", ["\u65e5\u672c\u304b\u306a\u30ab", " \ud55c"]),
        ("a\r\n\tb  \n", ["a", "\r\n", "\tb", "  \n"]),
        ("caf\u00e9\u0301 \u00bd", ["caf\u00e9\u0301", " ", "\u00bd"]),
    ],
)
def test_pieces_are_those_of_deepseek_v3(tokenizer, text, pieces):
    assert split(tokenizer._full, text) == pieces


def test_control_tokens_have_deepseek_glyphs_and_places(tokenizer):
    assert BOS_TOKEN == "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    assert PAD_TOKEN == "<\uff5c\u2581pad\u2581\uff5c>"
    assert EOT_TOKEN == "<|EOT|>"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    size = tokenizer.vocab_size
    assert [tokenizer.token_id(token) for token in CONTROL_TOKENS[3:]] == list(
        range(size - 8, size)
    )


def test_vocabulary_has_the_size_asked_for(tokenizer):
    assert tokenizer.vocab_size == 310


def test_training_does_not_depend_on_document_order_or_run(documents):
    texts = [document.text for document in documents] * 3
    first = train_tokenizer(texts, vocab_size=330).to_str()
    random.Random(0).shuffle(texts)
    assert train_tokenizer(texts, vocab_size=330).to_str() == first
    program = (
        "import sys, hashlib; from jaxseek.data.tokenizer import train_tokenizer;"
        "text = sys.stdin.buffer.read().decode();"
        "print(hashlib.sha256(train_tokenizer(text.split('\\0'), vocab_size=330).to_str().encode())"
        ".hexdigest())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        input="\0".join(texts).encode(),
        capture_output=True,
        check=True,
    )
    assert run.stdout.decode().strip() == hashlib.sha256(first.encode()).hexdigest()


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\n",
        "  a  b ",
        "\u4f60\u597d \U0001f600\u200d",
        "e\u0301 \ufb01 \u212b",
        "\x00\x7f",
    ],
)
def test_every_text_survives_a_round_trip_unnormalised(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("token", CONTROL_TOKENS)
def test_spelled_control_tokens_stay_plain_text(tokenizer, token):
    ids = tokenizer.encode(f"a{token}b")
    assert tokenizer.token_id(token) not in ids
    assert tokenizer.decode(ids) == f"a{token}b"


def test_batch_equals_single_encoding(tokenizer, documents):
    texts = [document.text for document in documents]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_decode_skips_special_tokens_unless_asked(tokenizer):
    ids = [tokenizer.bos_id, *tokenizer.encode("x = 1"), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "x = 1"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{BOS_TOKEN}x = 1{EOS_TOKEN}"


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(UserError, match="266 tokens was asked for: 267"):
        train_tokenizer(["a"], vocab_size=266)


def test_cache_is_used_by_content_and_rebuilt_when_damaged(tmp_path, documents, monkeypatch):
    calls = []

    def counted(texts, *, vocab_size):
        calls.append(vocab_size)
        return train_tokenizer(texts, vocab_size=vocab_size)

    monkeypatch.setattr(tokenizer_module, "train_tokenizer", counted)
    first = cached_tokenizer(documents, vocab_size=300, cache=tmp_path)
    assert (
        cached_tokenizer(documents, vocab_size=300, cache=tmp_path).fingerprint == first.fingerprint
    )
    assert calls == [300]
    changed = (*documents[:-1], Document(documents[-1].name, "other text"))
    cached_tokenizer(changed, vocab_size=300, cache=tmp_path)
    cached_tokenizer(documents, vocab_size=301, cache=tmp_path)
    assert calls == [300, 300, 301]

    files = sorted(tmp_path.rglob("*/*"))
    assert len(files) == 3
    assert not [file for file in files if file.name.startswith(".")], "a temporary file was left"
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2] + b"?" + content[len(content) // 2 + 1 :])
    assert (
        cached_tokenizer(documents, vocab_size=300, cache=tmp_path).fingerprint == first.fingerprint
    )
    files[0].write_bytes(b"\xff")
    for file in files[1:]:
        file.write_bytes(b"")
    assert (
        cached_tokenizer(documents, vocab_size=300, cache=tmp_path).fingerprint == first.fingerprint
    )
    assert calls == [300, 300, 301, 300, 300]


def test_unwritable_cache_says_what_to_set(tmp_path, documents):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Set JAXSEEK_CACHE"):
        cached_tokenizer(documents, vocab_size=300, cache=tmp_path / "file")


def test_saved_tokenizer_loads_from_folder_and_file(tmp_path, tokenizer):
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.pad_id == tokenizer.pad_id


def test_real_pad_token_wins_over_a_config_that_pads_with_the_end_token(tmp_path, tokenizer):
    tokenizer.save(tmp_path)
    config = {"bos_token": {"content": BOS_TOKEN}, "eos_token": EOS_TOKEN, "pad_token": EOS_TOKEN}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eos_id, loaded.pad_id) == (1, 2)


def foreign_tokenizer(tokenizer: TextTokenizer) -> Tokenizer:
    """The same BPE with begin and end tokens of another name and no pad token."""
    state = json.loads(tokenizer._full.to_str())
    state["added_tokens"] = []
    names = {BOS_TOKEN: "<s>", EOS_TOKEN: "</s>", PAD_TOKEN: "<unused>"}
    vocab = {names.get(token, token): i for token, i in state["model"]["vocab"].items()}
    state["model"]["vocab"] = vocab
    foreign = Tokenizer.from_str(json.dumps(state))
    foreign.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return foreign


def test_tokenizer_without_pad_token_pads_with_the_end_token(tmp_path, tokenizer):
    foreign = foreign_tokenizer(tokenizer)
    foreign.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_id, loaded.eos_id, loaded.pad_id) == (0, 1, 1)


def test_missing_begin_token_is_refused_with_the_way_to_name_it(tmp_path, tokenizer):
    foreign_tokenizer(tokenizer).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizer\.json: .*name its own as bos_token"):
        load_tokenizer(tmp_path)


def test_truncation_and_templates_of_a_file_do_not_touch_data(tokenizer):
    full = Tokenizer.from_str(tokenizer._full.to_str())
    full.enable_truncation(max_length=3)
    full.enable_padding(length=64)
    full.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS_TOKEN} $A", special_tokens=[(BOS_TOKEN, 0)]
    )
    text = "def area(width, height):"
    assert TextTokenizer(full).encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("damage", ["metaspace", "lowercase"])
def test_tokenizer_that_changes_text_is_refused_with_versions(tokenizer, damage):
    full = Tokenizer.from_str(tokenizer._full.to_str())
    if damage == "metaspace":
        full.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        full.normalizer = normalizers.Lowercase()
    with pytest.raises(UserError, match=rf"tokenizers {tokenizers.__version__}, transformers "):
        TextTokenizer(full)


@pytest.mark.parametrize("content", [None, "", "{}", '{"version": "1.0"'])
def test_missing_or_damaged_tokenizer_file_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_damaged_tokenizer_config_is_named(tmp_path, tokenizer):
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(tmp_path)
