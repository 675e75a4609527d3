"""`is_quick`: tells whether a tokenizer is sure to take about a millisecond for a short text; never encodes.

A regular expression of a stranger's model may try each character of a text in very many ways, and no probe finds the
text for which it does. So only expressions of published models, listed here, are quick; all others need a thread.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.engine.tokens.gguf import SPLITS
from headrace.engine.tokens.steps import steps_of

__all__ = ["is_quick"]

_GROWTH: Final = 512
_WORD_CHARS: Final = 128
_TOKEN_CHARS: Final = 256
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_KNOWN: Final = SPLITS | {_GPT2, r"\p{N}"}


def is_quick(core: Any, growth: int) -> bool:
    """Return whether no character of a text can cost much more than a microsecond.

    Args:
        core: A `tokenizers.Tokenizer`.
        growth: Most bytes into which normalising and splitting may turn one byte of text.
    """
    steps = [*steps_of(core, "normalizer"), *steps_of(core, "pre_tokenizer")]
    patterns = [step["pattern"]["Regex"] for step in steps if "Regex" in (step.get("pattern") or ())]
    if growth > _GROWTH or not _KNOWN.issuperset(patterns):
        return False
    if type(core.model).__name__ == "Unigram":  # at each place it tries every token that may begin there
        return max(map(len, core.get_vocab(with_added_tokens=False)), default=0) <= _TOKEN_CHARS
    return getattr(core.model, "max_input_chars_per_word", 0) <= _WORD_CHARS
