"""`token_table`: computes the bytes of every id of a tokenizer by the rules of its decoder; never encodes.

Next to read: token_table.py, which is the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.engine.errors import ModelRejected
from headrace.engine.tokens.bounds import fewest_tokens_rule
from headrace.engine.tokens.gguf import byte_level_piece
from headrace.engine.tokens.limits import check_token_size
from headrace.engine.tokens.steps import steps_of
from headrace.engine.tokens.token_table import TokenTable

__all__ = ["token_table"]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Steps on each token, then byte fallback, then steps on the joined text; no table can express another order.
_PIECE_DECODER = re.compile(r"(?:(?:Replace|Metaspace) )*(?:ByteFallback )?(?:Fuse (?:Strip )?)?")


def token_table(core: Any, vocabulary: Mapping[str, int], special_ids: frozenset[int], is_exact: bool) -> TokenTable:
    """Return the table of the bytes of every id, by the rules of the tokenizer's decoder.

    Args:
        core: A `tokenizers.Tokenizer`.
        vocabulary: Id of each of its tokens, added ones included.
        special_ids: Ids of control tokens.
        is_exact: Whether ids must give their exact text.

    Raises:
        ModelRejected: No table can express the decoder, or a token is too long once decoded.
    """
    table = _of_decoder(core, _tokens(core, vocabulary), special_ids, is_exact)
    one, several = (core.encode(text, add_special_tokens=False).ids for text in ("a b", "a \n\t\r b"))
    table.joins_space = one == several
    table.fewest_tokens = fewest_tokens_rule(core, vocabulary)
    return table


def _of_decoder(core: Any, tokens: Sequence[str], special_ids: frozenset[int], is_exact: bool) -> TokenTable:
    steps = steps_of(core, "decoder")
    kinds = [step["type"] for step in steps]
    if [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]:
        return TokenTable([byte_level_piece(token) for token in tokens], special_ids)
    if kinds == ["WordPiece"] and not is_exact:
        return TokenTable([_word_piece(token, steps[0]["prefix"]) for token in tokens], special_ids)
    if not kinds or not _PIECE_DECODER.fullmatch("".join(f"{kind} " for kind in kinds)):
        raise ModelRejected(
            f"tokenizer: its decoder ({', '.join(kinds) or 'none'}) cannot be followed token by token; byte-level and "
            "SentencePiece decoders can",
            field="tokenizer.decoder",
            value=kinds,
        )
    byte_ids = {index for index, token in enumerate(tokens) if _BYTE_PIECE.fullmatch(token)}
    byte_ids = byte_ids if "ByteFallback" in kinds else set()
    replacements = [_replacement(step) for step in steps if step["type"] in ("Replace", "Metaspace")]
    pieces = []
    for index, token in enumerate(tokens):
        if index in byte_ids:
            pieces.append(bytes.fromhex(token[3:5]))
            continue
        for old, new in replacements:
            check_token_size(token := token.replace(old, new), "tokenizer.decoder")
        pieces.append(token.encode())
    return TokenTable(pieces, special_ids, byte_ids)


def _tokens(core: Any, vocabulary: Mapping[str, int]) -> list[str]:
    """Return the token of each id; "" if the vocabulary has no such id."""
    size = max(vocabulary.values(), default=-1) + 1
    tokens = [""] * size
    for token, index in vocabulary.items():
        tokens[index] = token
    if len(vocabulary) == size and all(tokens):
        return tokens
    # Ids are missing, or several tokens share one: the library knows which token each id stands for.
    return [core.id_to_token(index) or "" for index in range(size)]


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if "String" not in step["pattern"]:
        raise ModelRejected("tokenizer: its decoder replaces by regular expression", field="tokenizer.decoder")
    return step["pattern"]["String"], step["content"]


def _word_piece(token: str, prefix: str) -> bytes:
    """Return the bytes of a WordPiece token, which continues a word if it has the prefix and else begins one."""
    return (token.removeprefix(prefix) if token.startswith(prefix) else f" {token}").encode()
