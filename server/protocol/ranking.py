"""`BestOf`: an answer of which more choices are generated than are returned; ranks them and never streams."""

from __future__ import annotations

from math import inf

from headrace.engine import Usage
from headrace.server.errors import ApiError
from headrace.server.protocol.answers import Answer, Piece

__all__ = ["BestOf"]


class BestOf:
    """Keeps what is generated, and gives the choices of the highest mean log-probability to the answer itself."""

    def __init__(self, answer: Answer, prompts: int, generated: int, returned: int) -> None:
        """Start empty.

        Args:
            answer: Of `prompts` times `returned` choices.
            prompts: How many there are.
            generated: Choices of each prompt, with log-probabilities.
            returned: How many of them are answered.
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
        """Take a piece in, for `whole`."""
        self._pieces[piece.choice].append(piece)

    def whole(self, usage: Usage) -> bytes:
        """The best choices, the first of equals first; usage counts the others as well."""
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
