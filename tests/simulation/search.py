"""Beam search as a book would write it, over a made-up model; knows nothing of pages, rounds or requests."""

from __future__ import annotations

from collections.abc import Callable

from simulation.engine_device import likelihoods

from headrace.engine.events import FinishReason
from headrace.engine.params import SamplingParams

__all__ = ["best_sequences"]


def best_sequences(
    params: SamplingParams, stops: frozenset[int], limit: int, prompt: list[int], written: Callable[[int], int]
) -> list[tuple[list[int], FinishReason]]:
    """The sequences that a search finds, best first.

    Args:
        params: Its width, its rules and how many are wanted.
        stops: Tokens that end a sequence.
        limit: Tokens after which every sequence ends.
        prompt: What the cells of the prompt hold.
        written: What that of a token holds.
    """
    width = params.beam_width or 1
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int], FinishReason]] = []
    for length in range(1, limit + 1):
        ways = [
            (score + likelihood, place, token)
            for place, (score, tokens) in enumerate(beams)
            for token, likelihood in likelihoods([*prompt, *map(written, tokens)])
        ]
        ways.sort(key=lambda way: (-way[0], way[1], way[2]))
        going: list[tuple[float, list[int]]] = []
        for rank, (score, place, token) in enumerate(ways[: max(2, 1 + len(stops)) * width]):
            tokens = [*beams[place][1], token]
            if token in stops or length == limit:
                if rank < width:
                    ended.append(
                        (score / length**params.length_penalty, tokens, "stop" if token in stops else "length")
                    )
            elif len(going) < width:
                going.append((score, tokens))
        ended = sorted(ended, key=lambda each: -each[0])[:width]
        beams = going
        settled = (
            len(ended) == width
            and bool(beams)
            and (params.early_stopping is True or beams[0][0] / length**params.length_penalty <= ended[-1][0])
        )
        if settled or not beams:
            break
    return [(tokens, reason) for _, tokens, reason in ended[: params.n]]
