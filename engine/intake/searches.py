"""Makes a beam search, and the request that begins it, from a caller's arguments; never drives the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.adapters.slots import AdapterVersion
from headrace.engine.errors import InvalidParams
from headrace.engine.intake.adapter_names import with_virtual_tokens
from headrace.engine.intake.requests import Asking, check_asking
from headrace.engine.scheduling.options.beams import BeamSearch
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.shaping import Reporting
from headrace.engine.tokens.interface import TokenizerLike

__all__ = ["begin_search", "first_beam"]


def begin_search(asking: Asking, tokenizer: TokenizerLike) -> BeamSearch:
    """Return a beam search that has just begun."""
    params = asking.params
    return BeamSearch(
        width=params.beam_width or 1,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        stop_ids=asking.stop_ids(tokenizer.eos_ids),
        limit=asking.max_tokens,
    )


def first_beam(
    ids: Sequence[int],
    asking: Asking,
    tokenizer: TokenizerLike,
    vocab_size: int,
    adapters: Mapping[str, AdapterVersion],
) -> Request:
    """Return the request whose likeliest tokens begin a beam search; arguments and errors are those of `make_requests`.

    Raises:
        InvalidParams: The vocabulary has fewer tokens than the search has candidates.
    """
    check_asking(asking, vocab_size)
    version, ids = with_virtual_tokens(asking.adapter, ids, asking.params, adapters)
    search = begin_search(asking, tokenizer)
    if search.candidates > vocab_size:
        raise InvalidParams(
            f"beam_width: {search.width} beams look at {search.candidates} tokens of a vocabulary of {vocab_size}",
            field="beam_width",
            value=search.width,
            limit=vocab_size,
        )
    reporting = Reporting(completion=search.candidates)
    return Request(asking.asked(version, len(ids) + 1, reporting=reporting, holds=True), list(ids))
