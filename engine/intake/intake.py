"""`Intake`: takes each request from its prompt to the scheduler's queue; never reads a stream and never plans a step.

`_take_in` is the whole way, from top to bottom. A short prompt without a response format goes it within the call, so
that requests are queued in the order of the calls. Next to read: prompts.py and requests.py for the stages, loop.py for
what follows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headrace.adapters.slots import AdapterVersion
from headrace.engine.concurrency.called import Called, run_inline
from headrace.engine.config import EngineConfig
from headrace.engine.delivery.beams import BeamGeneration
from headrace.engine.delivery.delivered import TokenMaker
from headrace.engine.delivery.generation import Generation
from headrace.engine.delivery.stops import StopWatch, stop_texts
from headrace.engine.errors import as_headrace
from headrace.engine.grammar.compiled import CompiledGrammar
from headrace.engine.intake.asking import Asking, check_abilities, check_generates, check_hooks, check_streamed
from headrace.engine.intake.prompts import Prompt, check_token_ids, to_token_ids
from headrace.engine.intake.requests import begin_search, make_requests
from headrace.engine.intake.tokenizing import Tokenizing
from headrace.engine.life.generation_defaults import with_defaults
from headrace.engine.life.serving import Parts, Serving

__all__ = ["Intake", "Turn", "check_prompt"]

_NO_ADAPTERS: Mapping[str, AdapterVersion] = {}


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

    def begin(self, asking: Asking, prompt: Prompt) -> Turn:
        """Begin the first turn of a stream.

        Raises:
            InvalidParams: The parameters do not fit a stream.
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
        """
        parts = self.serving.parts()
        return self.start(asking, prompt, partial(to_token_ids, prompt, parts.opened.tokenizer), parts)

    def start(self, asking: Asking, prompt: Any, encode: Callable[[], list[int]], parts: Parts, known: int = 0) -> Turn:
        """Begin a turn with the ids that `encode` makes of `prompt`: at once if that is quick, else in a thread.

        The first `known` ids are not made from `prompt`. Raises as `begin` does.
        """
        check_streamed(asking.params)
        if defaults := parts.opened.info.generation_defaults:
            asking = replace(asking, params=with_defaults(asking.params, defaults))
        turn = self.make_turn(asking, parts)
        parts.loop.expect(turn.generation)
        run_inline(self._take_in(turn, prompt, encode, parts, known))
        return turn

    def make_turn(self, asking: Asking, parts: Parts) -> Turn:
        """Return a turn whose request nobody has taken in."""
        params, tokenizer, config = asking.params, parts.opened.tokenizer, self._config
        stop_ids = asking.stop_ids(tokenizer.eos_ids)
        maker = TokenMaker(tokenizer.table, params, stop_ids)
        if params.beam_width is not None:
            beams = BeamGeneration(parts.loop, begin_search(asking, tokenizer), params.n)
            return Turn(asking, beams, maker)
        stops = stop_texts(tokenizer.table, params, stop_ids) if params.stop else ()
        watch = None if asking.stop_when is None else StopWatch(asking.stop_when, maker, config.hook_seconds)
        return Turn(asking, Generation(parts.loop, params.n, config.max_unread_tokens, stops, watch), maker)

    async def _take_in(
        self, turn: Turn, prompt: Any, encode: Callable[[], list[int]], parts: Parts, known: int
    ) -> None:
        """Tokenise a prompt, compile its format, make its requests and submit them; an error ends the stream.

        Nothing waits unless it has to. After a wait the stream may have ended, which ends the work for it, and the
        engine may have closed or crashed, which is looked at again.
        """
        generation, asking, opened = turn.generation, turn.asking, parts.opened
        params, tokenizer, vocab_size = asking.params, opened.tokenizer, opened.info.vocab_size
        tenant, charge = asking.tenant, asking.charge
        try:
            text = Tokenizing.of_prompt(
                prompt,
                opened,
                lambda: [] if generation.finished else encode(),
                tenant=tenant,
                charge=charge,
                known=known,
            )
            ids: list[int] = await Called(partial(text.submit, parts.helper), "the tokenizer failed")
            if generation.finished:
                return
            self.serving.parts(draining=True)
            check_generates(opened)
            check_abilities(params, opened.abilities)
            check_hooks(asking, opened.abilities)
            check_prompt(ids, parts)
            grammar: CompiledGrammar | None = None
            if (wanted := params.response_format) is not None:
                compiling = partial(
                    parts.grammars.compile,
                    wanted,
                    opened,
                    lambda: not generation.finished,
                    tenant=tenant,
                    charge=charge,
                )
                grammar = await Called(compiling, "the grammar's compiler failed")
                if generation.finished:
                    return
                self.serving.parts(draining=True)
            adapters = _NO_ADAPTERS if asking.adapter is None else parts.adapters.known_to(asking.adapter)
            requests = make_requests(ids, asking, tokenizer, vocab_size, self.random, grammar, adapters)
            parts.loop.submit(generation, ids, requests)
            if self.submitted is not None:
                self.submitted(turn, ids, grammar)
        except Exception as error:  # raised further, it would reach nobody and the stream would wait for ever
            generation.abandon(as_headrace(error, "the request could not be taken in").with_traceback(None))


def check_prompt(ids: Sequence[int], parts: Parts, room: int = 1) -> None:
    """Refuse ids that the model does not know, or so many that they leave no room for `room` tokens more.

    Raises:
        InvalidParams: An id is not one of the vocabulary.
        PromptTooLong: There are too many ids.
    """
    parts.loop.scheduler.capacity.check_length(len(ids), room)  # before a look at each of perhaps millions
    check_token_ids(ids, parts.opened.info.vocab_size)
