"""Turns a device's report on a token into the log-probabilities that a caller sees; computes none."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.events import Logprob, TokenLogprobs
from headrace.engine.scheduling.shaping import Report
from headrace.engine.tokens.token_table import TokenTable

__all__ = ["token_logprobs"]


def token_logprobs(table: TokenTable, token: int, report: Report) -> TokenLogprobs:
    """Return the report on a token in the form that a caller sees."""
    piece = _piece(table, token)
    return TokenLogprobs(
        id=token,
        token=piece.decode(errors="replace"),
        bytes=piece,
        logprob=report.logprob,
        rank=report.rank,
        top_logprobs=_ranked(table, report.top),
    )


def _ranked(table: TokenTable, top: Sequence[tuple[int, float]]) -> list[Logprob]:
    """Return tokens in falling order of likelihood; equals share a rank."""
    found: list[Logprob] = []
    for place, (token, logprob) in enumerate(top):
        equal = place and logprob == top[place - 1][1]
        piece = _piece(table, token)
        rank = found[-1].rank if equal else place + 1
        found.append(Logprob(id=token, token=piece.decode(errors="replace"), bytes=piece, logprob=logprob, rank=rank))
    return found


def _piece(table: TokenTable, token: int) -> bytes:
    return table.pieces[token] if token < len(table.pieces) else b""
