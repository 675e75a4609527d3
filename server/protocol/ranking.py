"""`BestOf`: an answer for which more choices are generated than returned; ranks them and never streams."""

from __future__ import annotations

from math import inf

from headrace.engine import Usage
from headrace.server.errors import ApiError
from headrace.server.protocol.answers import Answer, Piece

__all__ = ["BestOf"]


class BestOf:
    """An answer that keeps all generated choices, and returns those of the highest mean log-probability."""

    def __init__(self, answer: Answer, prompts: int, generated: int, returned: int) -> None:
        """Start empty.

        Args:
            answer: Answer of `prompts` times `returned` choices.
            prompts: Number of prompts.
            generated: Choices generated for each prompt, with log-probabilities.
            returned: Choices returned for each prompt.
        """
        self._answer = answer
        self._generated = generated
        self._returned = returned
        self._pieces: list[list[Piece]] = [[] for _ in range(prompts * generated)]

    def opening(self) -> bytes:
        """Return nothing, as a ranking is sent whole."""
        return b""

    def feed(self, piece: Piece) -> bytes:
        """Refuse to stream, which a ranking cannot do."""
        raise NotImplementedError

    def closing(self, usage: Usage) -> bytes:
        """Return nothing, as a ranking is sent whole."""
        return b""

    def failing(self, error: ApiError) -> bytes:
        """Return the body of an error."""
        return self._answer.failing(error)

    def keep(self, piece: Piece) -> None:
        """Add a piece for `whole`."""
        self._pieces[piece.choice].append(piece)

    def whole(self, usage: Usage) -> bytes:
        """Return the answer with the best choices, the first of equals first; usage counts the others as well."""
        place = 0
        for first in range(0, len(self._pieces), self._generated):
            group = self._pieces[first : first + self._generated]
            for choice in sorted(group, key=_mean, reverse=True)[: self._returned]:
                for piece in choice:
                    self._answer.keep(piece._replace(choice=place))
                place += 1
        return self._answer.whole(usage)


def _mean(choice: list[Piece]) -> float:
    found = [token.logprob for piece in choice for token in piece.tokens if token.logprob is not None]
    return sum(found) / len(found) if found else -inf
