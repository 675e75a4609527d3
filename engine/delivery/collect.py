"""`collect`: reads a stream to its end into a `Completion`, ranked if more was generated than is returned.

Uses the public stream alone; never knows an engine or a device.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from headrace.engine.events import Choice, Completion, Token
from headrace.engine.params import SamplingParams
from headrace.engine.stream import TokenStream

__all__ = ["collect", "streamed_params"]


def streamed_params(params: SamplingParams) -> SamplingParams:
    """Return the parameters of the stream that `collect` turns into an answer to `params`."""
    if not isinstance(params, SamplingParams) or params.best_of is None:  # `Engine.stream` refuses anything else
        return params
    logprobs = 0 if params.logprobs is None else params.logprobs
    return params.replace(n=params.best_of, best_of=None, logprobs=logprobs)


async def collect(stream: TokenStream, params: SamplingParams) -> Completion:
    """Read all of `stream`, which was started with `streamed_params(params)`.

    Raises:
        HeadraceError: The stream raised it.
    """
    tokens: list[list[Token]] = [[] for _ in range(params.best_of or params.n)]
    async with stream:
        async for chunk in stream.chunks():
            for token in chunk.tokens:
                tokens[token.index].append(token)
    choices = [
        Choice(
            index=index,
            text="".join(token.text for token in tokens[index]),
            token_ids=[token.id for token in tokens[index] if token.id is not None],
            finish_reason=reason or "cancelled",
            logprobs=None if params.logprobs is None else [token.logprobs for token in tokens[index] if token.logprobs],
            mean_logprob=_mean([token.logprob for token in tokens[index] if token.logprob is not None]),
            score=tokens[index][-1].score if tokens[index] else None,
            described=None if params.response_format is None else params.response_format.described,
        )
        for index, reason in enumerate(stream.finish_reasons)
    ]
    if params.best_of is not None:
        choices = _best(choices, params.n)
    return Completion(
        prompt_token_ids=stream.prompt_token_ids,
        choices=choices,
        usage=stream.usage,
        prompt_logprobs=stream.prompt_logprobs,
    )


def _mean(logprobs: list[float]) -> float | None:
    return sum(logprobs) / len(logprobs) if logprobs else None


def _best(choices: list[Choice], count: int) -> list[Choice]:
    """Return the `count` choices of the highest mean log-probability, equals in their order, numbered anew."""
    ranked = sorted(
        choices, key=lambda choice: -inf if choice.mean_logprob is None else choice.mean_logprob, reverse=True
    )
    return [replace(choice, index=index) for index, choice in enumerate(ranked[:count])]
