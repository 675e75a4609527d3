"""`Turns`: begins the generations of a stream - its first, messages sent after it, branches; never reads one.

A turn continues after all tokens of the one before, unchanged, so that the earlier turn's pages hold its start. Next to
read: stream.py, whose user calls these methods.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from headrace.engine.concurrency.fair_worker import FairWorker
from headrace.engine.config import EngineConfig
from headrace.engine.delivery.delivered import TokenMaker
from headrace.engine.delivery.generation import Generation, as_headrace
from headrace.engine.errors import InvalidParams
from headrace.engine.intake.asking import Asking, check_streamed
from headrace.engine.intake.messages import Message
from headrace.engine.intake.prompts import more_token_ids, to_token_ids
from headrace.engine.intake.requests import make_generation
from headrace.engine.intake.tokenizing import Tokenizing
from headrace.engine.life.generation_defaults import with_defaults
from headrace.engine.life.opened import Opened
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.request import branch
from headrace.engine.steps.loop import StepLoop

__all__ = ["Prompt", "Turn", "Turns"]

Prompt: TypeAlias = str | Sequence[int | Message]
"""A prompt: raw text, token ids, or a chat of `{"role", "content"}` messages; ids and messages together are refused.

The type is one sequence of either, since mypy infers the type of a list literal in a call from one alternative only.
"""

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation of a stream."""

    asking: Asking
    generation: Generation
    maker: TokenMaker


class Turns:
    """The operations that a stream may ask of its engine."""

    def __init__(
        self,
        serving: Callable[[], tuple[StepLoop, Opened]],
        admit: Callable[[Generation, Asking, list[int]], None],
        helper: FairWorker,
        config: EngineConfig,
        random_seeds: random.Random,
    ) -> None:
        """Keep the arguments; begin nothing yet.

        Args:
            serving: Returns the open engine's parts, or raises its typed refusal.
            admit: Takes in a tokenised prompt.
            helper: The thread for long prompts.
            config: The engine's configuration.
            random_seeds: Source of seeds where the caller gives none.
        """
        self._serving, self._admit, self._helper = serving, admit, helper
        self._config, self._random = config, random_seeds

    def first(self, asking: Asking, prompt: Prompt) -> Turn:
        """Begin with `prompt`.

        Raises:
            InvalidParams: The parameters do not fit a stream.
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
        """
        return self._begin(asking, prompt, lambda opened: to_token_ids(prompt, opened.tokenizer))

    def following(
        self, turn: Turn, added: Prompt, params: SamplingParams | None, deadline: float | None, priority: int | None
    ) -> Turn:
        """Begin a turn with `added` after `turn`, which has ended; None keeps the value of `turn`. Raises as `first`
        does."""
        before = turn.generation.requests[0]
        known = before.tokens[before.virtual_tokens :]
        params = _again(turn.asking.params) if params is None else params
        asking = replace(
            turn.asking,
            params=params,
            deadline=turn.asking.deadline if deadline is None else deadline,
            priority=turn.asking.priority if priority is None else priority,
            before=before,
            since=self._serving()[0].now,
        )
        return self._begin(
            asking, added, lambda opened: known + more_token_ids(added, opened.tokenizer, known), len(known)
        )

    def check_branch(self, seed: int | None) -> None:
        """Refuse a branch that cannot begin; raises as `first` does."""
        if seed is not None and type(seed) is not int:
            raise InvalidParams(f"seed: must be an int, got {seed!r}", field="seed", value=seed)
        self._serving()

    def branch(self, turn: Turn, read: int, seed: int | None) -> Turn:
        """Begin another course of `turn`, which was admitted, after its first `read` tokens; raises as `first` does."""
        loop, opened = self._serving()
        parent = turn.generation.requests[0]
        chosen = self._random.getrandbits(63) if seed is None else seed & _MASK
        virtual = parent.virtual_tokens
        request = branch(parent, virtual + len(turn.generation.prompt) + read, chosen)
        made = self._turn(replace(turn.asking, params=_again(turn.asking.params)), loop, opened)
        own = request.tokens[request.prompt_len :]
        made.maker.skip(own)
        made.generation.skip(own)
        loop.submit(made.generation, request.tokens[virtual:], [request])
        return made

    def _turn(self, asking: Asking, loop: StepLoop, opened: Opened) -> Turn:
        tokenizer = opened.tokenizer
        maker = TokenMaker(tokenizer.table, asking.params, asking.stop_ids(tokenizer.eos_ids))
        return Turn(asking, make_generation(asking, loop, tokenizer, maker, self._config), maker)

    def _begin(self, asking: Asking, text: Any, encode: Callable[[Opened], list[int]], known: int = 0) -> Turn:
        """Begin with the ids that `encode` makes of `text`: at once if that is quick, else in the helper's thread.

        The first `known` ids are not made from `text`.
        """
        loop, opened = self._serving()
        check_streamed(asking.params)
        asking = replace(asking, params=with_defaults(asking.params, opened.info.generation_defaults))
        turn = self._turn(asking, loop, opened)
        generation = turn.generation
        loop.expect(generation)

        def tokenize() -> list[int]:  # no ids if nobody wants them any more
            return [] if generation.finished else encode(opened)

        def tokenized(ids: list[int] | None, error: BaseException | None) -> None:
            if ids is not None:
                self._admit(generation, asking, ids)
            else:
                generation.abandon(as_headrace(error, "the tokenizer failed"))

        try:
            work = Tokenizing.of_prompt(text, opened, tokenize, tenant=asking.tenant, charge=asking.charge, known=known)
            work.submit(self._helper, tokenized)
        except Exception as error:
            tokenized(None, error)
        return turn


def _again(params: SamplingParams) -> SamplingParams:
    """Return `params` without log-probabilities of the prompt, which would have to be computed again."""
    return params if params.prompt_logprobs is None else params.replace(prompt_logprobs=None)
