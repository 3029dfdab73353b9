"""Byte-level BPE tokenizers: trained with DeepSeek-V3's rules, or loaded from tokenizer.json."""

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from jaxseek.data.cache import atomic_write, digest, documents_digest
from jaxseek.data.documents import Document
from jaxseek.errors import UserError
from jaxseek.paths import cache_dir

# U+FF5C and U+2581, written as escapes because they look like the ASCII "|" and "_".
_BAR, _SPACE = "\uff5c", "\u2581"

BOS_TOKEN = f"<{_BAR}begin{_SPACE}of{_SPACE}sentence{_BAR}>"
EOS_TOKEN = f"<{_BAR}end{_SPACE}of{_SPACE}sentence{_BAR}>"
PAD_TOKEN = f"<{_BAR}{_SPACE}pad{_SPACE}{_BAR}>"
THINK_OPEN_TOKEN, THINK_CLOSE_TOKEN = "<think>", "</think>"
FIM_HOLE_TOKEN = f"<{_BAR}fim{_SPACE}hole{_BAR}>"
FIM_BEGIN_TOKEN = f"<{_BAR}fim{_SPACE}begin{_BAR}>"
FIM_END_TOKEN = f"<{_BAR}fim{_SPACE}end{_BAR}>"
USER_TOKEN, ASSISTANT_TOKEN = f"<{_BAR}User{_BAR}>", f"<{_BAR}Assistant{_BAR}>"
EOT_TOKEN = "<|EOT|>"

_FIRST_TOKENS = (BOS_TOKEN, EOS_TOKEN, PAD_TOKEN)
# In the order of V3's file, where these are added tokens of which only EOT is flagged special.
_LAST_TOKENS = (
    THINK_OPEN_TOKEN,
    THINK_CLOSE_TOKEN,
    FIM_HOLE_TOKEN,
    FIM_BEGIN_TOKEN,
    FIM_END_TOKEN,
    USER_TOKEN,
    ASSISTANT_TOKEN,
    EOT_TOKEN,
)
MIN_VOCAB_SIZE = len(_FIRST_TOKENS) + 256 + len(_LAST_TOKENS)

# The Split rules of DeepSeek-V3's tokenizer.json, applied one after the other.
_SPLIT_PATTERNS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[" + "\r\n]*"
    r"|\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+",
)

# Part of the cache key: raise it whenever training would give another tokenizer for the same text.
_RULES_VERSION = 1
_MIN_PAIR_COUNT = 2

# Capitals, indentation, digits, Chinese, Japanese, an accent and an emoji.
_PROBE = (
    "def F(x):\n    return  x + 1234  # \u4f60\u597d\u3001\u30c6\u30b9\n\n\tcaf\u00e9 \U0001f600\n"
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Byte-level BPE over `texts` with DeepSeek-V3's split rules and control tokens.

    Deterministic. Ids 0, 1, 2 are begin of sentence, end of sentence and pad; bytes and merges
    follow; think, fill-in-the-middle, role and end-of-turn tokens come last. Short texts yield
    fewer than `vocab_size` ids. Raises `UserError` below `MIN_VOCAB_SIZE`.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"a tokenizer of {vocab_size} tokens was asked for: {MIN_VOCAB_SIZE} are the least "
            f"(256 bytes and {MIN_VOCAB_SIZE - 256} control tokens)."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLIT_PATTERNS]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_LAST_TOKENS),
        min_frequency=_MIN_PAIR_COUNT,
        show_progress=False,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in _FIRST_TOKENS
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    for token in _LAST_TOKENS:
        tokenizer.add_tokens([AddedToken(token, special=token == EOT_TOKEN)])
    return tokenizer


def cached_tokenizer(
    documents: Sequence[Document], *, vocab_size: int, cache: Path | None = None
) -> "TextTokenizer":
    """`train_tokenizer` on `documents`, or what it gave before for the same ones.

    Kept in `cache`, by default `cache_dir()`, by a hash of the rules, the vocabulary
    size and the names and texts of the documents. A damaged file is made anew.
    """
    key = digest([str(_RULES_VERSION), str(vocab_size), documents_digest(documents)])
    path = (cache or cache_dir()) / "tokenizers" / key[:32]
    stored = _read_checked(path)
    if stored is not None:
        return TextTokenizer(Tokenizer.from_str(stored))
    tokenizer = train_tokenizer((document.text for document in documents), vocab_size=vocab_size)
    content = tokenizer.to_str()
    with atomic_write(path) as temporary:
        temporary.write_text(f"{_checksum(content)}\n{content}", encoding="utf-8")
    return TextTokenizer(tokenizer)


def load_tokenizer(path: str | Path) -> "TextTokenizer":
    """The tokenizer of a `tokenizer.json`, or of a folder that holds one.

    A `tokenizer_config.json` beside it names the begin and end tokens, else DeepSeek's own names
    are looked for. DeepSeek's configs give the end token as pad; its real pad token wins where the
    vocabulary has it. Raises `UserError`.
    """
    path = Path(path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"no tokenizer at {file}: give a tokenizer.json or the folder that holds one."
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no narrower class
        raise UserError(f"{file} is not a tokenizer.json that can be read: {error}.") from error
    names = _configured_tokens(file.with_name("tokenizer_config.json"))
    has_real_pad = tokenizer.token_to_id(PAD_TOKEN) is not None
    try:
        return TextTokenizer(
            tokenizer,
            bos_token=names.get("bos_token") or BOS_TOKEN,
            eos_token=names.get("eos_token") or EOS_TOKEN,
            pad_token=PAD_TOKEN if has_real_pad else names.get("pad_token"),
        )
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


class TextTokenizer:
    """Text to ids and back. Text stays text: control tokens are set by id, never by spelling.

    Attributes: `vocab_size`: the largest id plus one; `bos_id`, `eos_id`; `pad_id`: the pad token,
    or `eos_id` where there is none (nothing may recognise padding by its id).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        bos_token: str = BOS_TOKEN,
        eos_token: str = EOS_TOKEN,
        pad_token: str | None = PAD_TOKEN,
    ):
        """Raises `UserError` where a token is unknown or text is changed by a round trip."""
        self._full = tokenizer
        self._plain = _without_added_tokens(tokenizer)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id = self.token_id(bos_token)
        self.eos_id = self.token_id(eos_token)
        self.pad_id = self.eos_id if pad_token is None else self.token_id(pad_token)
        self._check_round_trip()

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of everything that decides the ids of a document."""
        return digest([self._full.to_str(), str(self.bos_id), str(self.eos_id)])

    def token_id(self, token: str) -> int:
        """Id of a control token such as `EOS_TOKEN`. Raises `UserError` where there is none."""
        identifier = self._full.token_to_id(token)
        if identifier is None:
            raise UserError(
                f"the tokenizer has no token {token!r}: name its own as bos_token, eos_token and "
                "pad_token in a tokenizer_config.json beside tokenizer.json."
            )
        return identifier

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added in front or behind."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text, on all cores."""
        encodings = self._plain.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Tokens flagged special (begin and end of sentence, pad, end of turn) are skipped by default.
        """
        return self._full.decode(ids, skip_special_tokens=skip_special_tokens)

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json for `load_tokenizer` and transformers."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        config = {key: self._full.id_to_token(identifier) for key, identifier in ids.items()}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        self._full.save(str(folder / "tokenizer.json"))
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(f"{text}\n", encoding="utf-8")

    def _check_round_trip(self) -> None:
        decoded = self.decode(self.encode(_PROBE), skip_special_tokens=False)
        if decoded != _PROBE:
            raise UserError(
                f"the tokenizer changes text: {_PROBE!r} comes back as {decoded!r}. Its "
                "normalizer, pre-tokenizer or decoder is damaged: transformers 5.0 to 5.15 did so "
                f"to DeepSeek's (installed: tokenizers {_version('tokenizers')}, transformers "
                f"{_version('transformers')}). Take tokenizer.json from the original release."
            )


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A copy in which the spelling of a control token inside a document is plain text.

    Truncation, padding and templates of the file go too: they would change data silently.
    """
    state = json.loads(tokenizer.to_str())
    state.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    return Tokenizer.from_str(json.dumps(state))


def _configured_tokens(path: Path) -> dict[str, str]:
    """bos_token, eos_token and pad_token as far as a tokenizer_config.json names them."""
    if not path.is_file():
        return {}
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from error
    entries = {key: config.get(key) for key in ("bos_token", "eos_token", "pad_token")}
    contents = {
        key: entry["content"] if isinstance(entry, dict) else entry
        for key, entry in entries.items()
    }
    return {key: content for key, content in contents.items() if content}


def _checksum(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def _read_checked(path: Path) -> str | None:
    """What `cached_tokenizer` stored at `path`; None where it is missing or damaged."""
    try:
        checksum, _, content = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return content if checksum == _checksum(content) else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
