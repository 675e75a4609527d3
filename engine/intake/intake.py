"""`Intake`: takes each request from its prompt to the scheduler's queue; never reads a stream and never plans a step.

`Intake.start` is the whole way. A short prompt without a response format goes it within the call, so that requests are
queued in the order of the calls; those that have to wait go on in preparing.py. Next to read: prompts.py and
requests.py for the stages, steps/loop.py for what follows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headrace.engine.config import EngineConfig
from headrace.engine.delivery.beams import BeamGeneration
from headrace.engine.delivery.generation import Generation, TokenMaker
from headrace.engine.delivery.stops import StopWatch, WatchedGeneration, stop_texts
from headrace.engine.errors import as_headrace
from headrace.engine.grammar.compiled import CompiledGrammar
from headrace.engine.intake.abilities import ABILITIES, check_abilities, check_hooks
from headrace.engine.intake.preparing import Preparing
from headrace.engine.intake.prompts import Tokenizing, check_token_ids, is_short, to_token_ids
from headrace.engine.intake.requests import NO_ADAPTERS, Asking, check_generates, check_streamed, make_requests
from headrace.engine.intake.searches import begin_search, first_beam
from headrace.engine.life.generation_defaults import with_defaults
from headrace.engine.life.serving import Parts, Serving

__all__ = ["Intake", "Turn", "check_prompt"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation of a stream."""

    asking: Asking
    generation: Generation
    maker: TokenMaker


class Intake:
    """The intake of one engine."""

    def __init__(self, serving: Serving, config: EngineConfig) -> None:
        """Take in requests while `serving` serves."""
        self.serving = serving
        self.random = random.Random(config.seed)
        """Source of seeds where the caller gives none."""
        self.submitted: Callable[[Turn, list[int], CompiledGrammar | None], None] | None = None
        """Function that is told of each request that the scheduler has taken, with its ids and its grammar."""
        self._config = config

    def start(
        self,
        asking: Asking,
        prompt: Any,
        parts: Parts,
        encode: Callable[[], list[int]] | None = None,
        known: int = 0,
    ) -> Turn:
        """Begin a turn: tokenise its prompt, check it, make its requests and submit them; an error ends the stream.

        Args:
            asking: What is asked besides the prompt.
            prompt: What the first turn of a stream begins with, or what a later one adds.
            parts: The parts of the engine.
            encode: Returns the ids of all tokens up to the answer; None makes them of `prompt` alone.
            known: Number of leading ids that are not made from `prompt`.

        Raises:
            InvalidParams: The parameters do not fit a stream.
        """
        check_streamed(asking.params)
        if defaults := parts.opened.info.generation_defaults:
            asking = replace(asking, params=with_defaults(asking.params, defaults))
        turn = self.make_turn(asking, parts)
        parts.loop.expect(turn.generation)
        try:
            encode = encode or partial(to_token_ids, prompt, parts.opened.tokenizer)
            text = Tokenizing.of_prompt(prompt, parts.opened, encode, asking.charge, known)
            if asking.params.response_format is None and is_short(prompt, parts.opened.tokenizer.table):
                ids = text.run()
                self._check(turn, parts, ids)
                self._submit(turn, parts, ids)
            else:
                check, submit = partial(self._check, turn, parts), partial(self._submit, turn, parts)
                Preparing(self.serving, parts, asking, turn.generation).begin(prompt, text, check, submit)
        except Exception as error:  # the caller has a stream, whose first read raises it
            turn.generation.abandon(as_headrace(error, "the request could not be taken in").with_traceback(None))
        return turn

    def make_turn(self, asking: Asking, parts: Parts) -> Turn:
        """Return a turn whose request nobody has taken in."""
        params, tokenizer, window = asking.params, parts.opened.tokenizer, self._config.max_unread_tokens
        stop_ids = asking.stop_ids(tokenizer.eos_ids)
        maker = TokenMaker(tokenizer.table, params, stop_ids)
        if params.beam_width is not None:
            return Turn(asking, BeamGeneration(parts.loop, begin_search(asking, tokenizer), params.n), maker)
        if params.stop or asking.stop_when is not None:
            stops = stop_texts(tokenizer.table, params, stop_ids)
            seconds = self._config.hook_seconds
            watch = None if asking.stop_when is None else StopWatch(asking.stop_when, maker, seconds)
            return Turn(asking, WatchedGeneration(parts.loop, params.n, window, stops, watch), maker)
        return Turn(asking, Generation(parts.loop, params.n, window), maker)

    def _check(self, turn: Turn, parts: Parts, ids: list[int]) -> None:
        """Refuse what the model or its device cannot serve; raises as `check_asking` does."""
        opened = parts.opened
        check_generates(opened)
        if opened.abilities != ABILITIES:
            check_abilities(turn.asking.params, opened.abilities)
            check_hooks(turn.asking, opened.abilities)
        check_prompt(ids, parts)

    def _submit(self, turn: Turn, parts: Parts, ids: list[int], grammar: CompiledGrammar | None = None) -> None:
        """Make the requests of a turn, and queue them; raises as `make_requests` and `StepLoop.submit` do."""
        asking, tokenizer, vocab_size = turn.asking, parts.opened.tokenizer, parts.opened.info.vocab_size
        adapters = NO_ADAPTERS if asking.adapter is None else parts.adapters.known_to(asking.adapter)
        if asking.params.beam_width is not None:
            requests = [first_beam(ids, asking, tokenizer, vocab_size, adapters)]
        else:
            speculates = self._config.speculation is not None
            requests = make_requests(
                ids, asking, tokenizer, vocab_size, self.random, grammar, adapters, speculates=speculates
            )
        parts.loop.submit(turn.generation, ids, requests)
        if self.submitted is not None:
            self.submitted(turn, ids, grammar)


def check_prompt(ids: Sequence[int], parts: Parts, room: int = 1) -> None:
    """Refuse ids that the model does not know, or so many that they leave no room for `room` tokens more.

    Raises:
        InvalidParams: An id is not one of the vocabulary.
        PromptTooLong: There are too many ids.
    """
    parts.loop.scheduler.capacity.check_length(len(ids), room)  # before a look at each of perhaps millions
    check_token_ids(ids, parts.opened.info.vocab_size)
