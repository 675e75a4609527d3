"""Builds a tokenizer from the metadata of a GGUF file; never opens the file and never touches tensors.

GGUF states the vocabulary, merges or scores, token types and the *name* of the pre-tokenizer. The table here gives the
meaning of each name; other names are refused, since a wrong split gives wrong ids without any other sign.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from headrace.engine.errors import ModelRejected
from headrace.engine.tokens.limits import check_added, check_merging, check_token_sizes
from headrace.engine.tokens.panics import typed

__all__ = [
    "BYTE_OF_CHAR",
    "PRE_TOKENIZERS",
    "SPLITS",
    "GgufBackend",
    "build_gguf_tokenizer",
    "byte_level_piece",
    "gguf_eos_ids",
]

_PREFIX: Final = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_GEMMA4: Final = "gemma4"
_GEMMA4_ENDS: Final = ("<eos>", "<turn|>", "<|tool_response>")
"""Tokens that end a completion of Gemma 4, whose files name one of them; llama.cpp knows them by their text, too."""

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_O200K: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_SEED: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_NUMBERS: Final = r"\p{N}{1,3}"
_HAN_AND_KANA: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_WORDS_AND_SIGNS: Final = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


class _Pre(NamedTuple):
    """The steps by which a byte-level vocabulary splits text before merging."""

    split: str | None = None
    """Regular expression of the parts; None for GPT-2's."""
    before: tuple[str, ...] = ()
    """Regular expressions of parts that are cut out before `split`, one after the other."""
    digits: bool = False
    """Whether each digit is cut out first."""
    nfc: bool = False
    """Whether characters are composed first (NFC)."""
    whole_words: bool = False
    """Whether a part that is itself a token is taken as it is, without merges."""
    bos: bool = False
    """Whether BOS is added unless the file says otherwise."""


_LLAMA3: Final = _Pre(split=_WORDS % r"\p{N}{1,3}", whole_words=True, bos=True)
_CL100K: Final = _Pre(split=_WORDS % r"\p{N}{1,3}")
_DIGITS: Final = _Pre(digits=True)
_QWEN2: Final = _Pre(split=_WORDS % r"\p{N}", nfc=True)
PRE_TOKENIZERS: Final[Mapping[str, _Pre]] = {
    "default": _Pre(),
    "gpt-2": _Pre(),
    "olmo": _Pre(),
    "exaone4": _Pre(),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Pre(split=_CASED_WORDS, whole_words=True, bos=True),
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "chatglm-bpe": _CL100K,
    "glm4": _CL100K,
    "gpt-4o": _Pre(split=_O200K),
    "seed-coder": _Pre(split=_SEED),
    "hunyuan-dense": _Pre(before=(_NUMBERS, _HAN_AND_KANA), split=_WORDS_AND_SIGNS),
}
"""Ways to split text, by their names in a header; the regular expressions are those of the models' tokenizer.json."""
SPLITS: Final = frozenset(
    pattern for pre in PRE_TOKENIZERS.values() for pattern in (*pre.before, pre.split) if pattern is not None
)
"""Regular expressions by which published models split text; all of them take linear time."""


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable spelling of bytes: visible characters of Latin-1 as they are, the others from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


BYTE_OF_CHAR: Final[Mapping[str, int]] = _byte_alphabet()
"""Byte that each character of a byte-level token stands for."""
_BYTES: Final = {ord(char): byte for char, byte in BYTE_OF_CHAR.items()}


def byte_level_piece(token: str) -> bytes:
    """Return the bytes that a byte-level token spells in 256 printable characters; any other token spells itself."""
    try:
        return codecs.charmap_encode(token, "strict", _BYTES)[0]
    except UnicodeEncodeError:
        return token.encode()


class _Vocabulary(NamedTuple):
    tokens: list[str]
    types: list[int]
    """Token type per id (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte)."""
    ids: dict[str, int]


@dataclass(frozen=True)
class GgufBackend:
    """The part of a `transformers.PreTrainedTokenizerFast` that `Tokenizer` uses, without that slow import."""

    backend_tokenizer: Any
    """A `tokenizers.Tokenizer`."""
    chat_template: str | None
    special_tokens_map: Mapping[str, str]
    """Text of the file's special tokens by their names, such as `bos_token`."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end of a sequence; None if the file names none."""
        token = self.special_tokens_map.get("eos_token")
        return None if token is None else self.backend_tokenizer.token_to_id(token)


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> GgufBackend:
    """Return the tokenizer for GGUF metadata given as plain values.

    Raises:
        ModelRejected: A field is missing, damaged, out of range, or names an unknown kind.
    """
    kind = metadata.get(_PREFIX + "model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, _GEMMA4: _gemma4}
    if not isinstance(kind, str) or kind not in builders:
        raise _rejected("model", f"must be one of {', '.join(builders)}", kind)
    vocabulary = _read_vocabulary(metadata)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelRejected("tokenizer.chat_template: must be a string", field="tokenizer.chat_template")
    roles = {
        f"{role}_token": vocabulary.tokens[index]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := _id(metadata, f"{key}_token_id", len(vocabulary.tokens))) is not None
    }
    with typed(_not_built):  # tokenizers raises bare Exception for a vocabulary that contradicts its merges
        core = builders[kind](metadata, vocabulary)
        _add_special_tokens(core, vocabulary, roles.values())
    return GgufBackend(core, template, roles)


def gguf_eos_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a completion: end of sequence, of turn and of message."""
    tokens = metadata[_PREFIX + "tokens"]
    found = [index for key in _END_KEYS if (index := _id(metadata, key, len(tokens))) is not None]
    ends = _GEMMA4_ENDS if metadata.get(_PREFIX + "model") == _GEMMA4 else ()
    return [*found, *(tokens.index(end) for end in ends if end in tokens)]


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get(_PREFIX + "pre", "default")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise _rejected("pre", f"unknown pre-tokenizer; known are {', '.join(PRE_TOKENIZERS)}", name)
    merges = _merges(metadata)
    core = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.whole_words))
    if pre.nfc:
        core.normalizer = normalizers.NFC()
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    patterns = [*pre.before] if pre.split is None else [*pre.before, pre.split]
    parts += (pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns)
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    core.pre_tokenizer = pre_tokenizers.Sequence(parts)
    core.decoder = decoders.ByteLevel()
    core.post_processor = _frame(metadata, vocabulary, bos=pre.bos)
    return core


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = _strings(metadata, "merges")
    if not all(" " in merge for merge in merges):
        raise _rejected("merges", "each must be two tokens with a space between", None)
    return [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]


def _gemma4(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Any:
    """Return the tokenizer of Gemma 4: pieces of SentencePiece that are merged by the merges of the file."""
    return _of_pieces(metadata, vocabulary, _merges(metadata), prefix=False)


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Any:
    from transformers.tokenization_utils_base import generate_merges

    scores = metadata.get(_PREFIX + "scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise _rejected("scores", f"must be a list of {len(vocabulary.tokens)} numbers", type(scores).__name__)
    check_merging(vocabulary.tokens, _PREFIX + "tokens")
    # Control, byte and unused tokens are never spelled out of pieces, or text could forge them.
    closed = {
        token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
    }
    merges = generate_merges(
        vocabulary.ids, dict(zip(vocabulary.tokens, map(float, scores), strict=True)), skip_tokens=closed
    )
    return _of_pieces(metadata, vocabulary, merges, prefix=True)


def _of_pieces(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary, merges: list[tuple[str, str]], *, prefix: bool
) -> Any:
    """Return a tokenizer in whose tokens "▁" stands for a space, and which spells out bytes that no token has.

    Args:
        metadata: The file's metadata.
        vocabulary: Its tokens.
        merges: Pairs of tokens that become one, in order.
        prefix: Whether a space is put before a text unless the file says otherwise.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = _id(metadata, "unknown_token_id", len(vocabulary.tokens))
    core = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = _flag(metadata, "add_space_prefix", default=prefix)
    spaces: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    core.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip],
    )
    core.post_processor = _frame(metadata, vocabulary, bos=True)
    return core


def _frame(metadata: Mapping[str, Any], vocabulary: _Vocabulary, *, bos: bool) -> Any:
    """Return the post-processor that puts BOS before and EOS after a text, if the file asks for them."""
    from tokenizers import processors

    frame, tokens = ["$A"], []
    for role, default in (("bos", bos), ("eos", False)):
        index = _id(metadata, f"{role}_token_id", len(vocabulary.tokens))
        if _flag(metadata, f"add_{role}_token", default=default) and index is not None:
            # Use names of our own: one of the file's, such as `$B` or `a:1`, would be read as an instruction.
            tokens.append({"id": role, "ids": [index], "tokens": [vocabulary.tokens[index]]})
            frame = [role, *frame] if role == "bos" else [*frame, role]
    return processors.TemplateProcessing(single=frame, special_tokens=tokens)


def _add_special_tokens(core: Any, vocabulary: _Vocabulary, roles: Iterable[str]) -> None:
    """Register control tokens, the user's tokens and those with a role, each to be read whole wherever it occurs."""
    from tokenizers import AddedToken

    added: set[str] = set()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        tokens = [
            AddedToken(token, normalized=False, special=special)
            for token, its_kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if its_kind == kind and token
        ]
        (core.add_special_tokens if special else core.add_tokens)(tokens)
        added.update(token.content for token in tokens)
    core.add_special_tokens(
        [AddedToken(token, special=True) for token in dict.fromkeys(roles) if token and token not in added]
    )


def _read_vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = _strings(metadata, "tokens")
    check_token_sizes(tokens, _PREFIX + "tokens")
    types = metadata.get(_PREFIX + "token_type")
    types = [1] * len(tokens) if types is None else types
    if not isinstance(types, list) or len(types) != len(tokens):
        raise _rejected("token_type", f"must be a list of {len(tokens)} numbers", type(types).__name__)
    control = types.count(_CONTROL)
    check_added(control + types.count(_USER_DEFINED), control, _PREFIX + "token_type")
    # A token that occurs twice can only be reached by its first id, so that one is set last.
    ids = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))
    return _Vocabulary(tokens, types, ids)


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(_PREFIX + key)
    if not isinstance(values, list) or not values or set(map(type, values)) != {str}:
        raise _rejected(key, "must be a list of at least one string", type(values).__name__)
    return values


def _id(metadata: Mapping[str, Any], key: str, size: int) -> int | None:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < size:
        raise _rejected(key, f"must be an id below {size}", value)
    return value


def _flag(metadata: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = metadata.get(_PREFIX + key, default)
    if type(value) is not bool:
        raise _rejected(key, "must be true or false", value)
    return value


def _rejected(key: str, problem: str, value: object) -> ModelRejected:
    return ModelRejected(f"{_PREFIX}{key}: {problem}, got {value!r}", field=_PREFIX + key, value=value)


def _not_built(problem: str) -> ModelRejected:
    return ModelRejected(f"{_PREFIX}*: no tokenizer could be built: {problem}", field=_PREFIX + "tokens")
