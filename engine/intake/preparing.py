"""Prepares a request that has to wait: for a thread that tokenises its prompt, or for its response format.

A request with a short prompt and without a response format passes none of this. Next to read: intake.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.engine.concurrency.called import Called, run_inline
from headrace.engine.delivery.generation import Generation
from headrace.engine.errors import as_headrace
from headrace.engine.grammar.compiled import CompiledGrammar
from headrace.engine.intake.by_turns import submit, tokenizing_cost
from headrace.engine.intake.prompts import Tokenizing, is_short
from headrace.engine.intake.requests import Asking
from headrace.engine.life.serving import Parts, Serving
from headrace.engine.response_format import ResponseFormat

__all__ = ["Preparing"]


class Preparing:
    """The waits of one request.

    Nothing waits unless it has to. After a wait the stream may have ended, which ends the work for it, and the engine
    may have closed or crashed, which is looked at again.
    """

    def __init__(self, serving: Serving, parts: Parts, asking: Asking, generation: Generation) -> None:
        """Begin nothing yet.

        Args:
            serving: Whether the engine still serves.
            parts: The parts of the engine.
            asking: The request's arguments besides the prompt.
            generation: The request's generation, which an error ends.
        """
        self._serving = serving
        self._parts = parts
        self._asking = asking
        self._generation = generation

    def begin(
        self,
        prompt: Any,
        text: Tokenizing[list[int]],
        check: Callable[[list[int]], None],
        submit: Callable[[list[int], CompiledGrammar | None], None],
    ) -> None:
        """Prepare a request as far as that needs no wait; the rest follows where each wait ends.

        Args:
            prompt: The prompt.
            text: The tokenising of the prompt.
            check: Called with the ids, to refuse what cannot be served before a format is compiled for it.
            submit: Called last, with the ids and the grammar of the response format, if there is one.
        """
        run_inline(self._prepare(prompt, text, check, submit))

    async def _prepare(
        self,
        prompt: Any,
        text: Tokenizing[list[int]],
        check: Callable[[list[int]], None],
        submit: Callable[[list[int], CompiledGrammar | None], None],
    ) -> None:
        generation, wanted = self._generation, self._asking.params.response_format
        grammar: CompiledGrammar | None = None
        try:
            is_quick = is_short(prompt, self._parts.opened.tokenizer.table)
            ids = text.run() if is_quick else await self._token_ids(prompt, text)
            if generation.finished or ids is None:
                return
            self._serving.parts(draining=True)
            check(ids)
            if wanted is not None:
                grammar = await self._compiled(wanted)
                if generation.finished:
                    return
                self._serving.parts(draining=True)
            submit(ids, grammar)
        except Exception as error:  # raised further, it would reach nobody and the stream would wait for ever
            generation.abandon(as_headrace(error, "the request could not be taken in").with_traceback(None))

    async def _token_ids(self, prompt: Any, text: Tokenizing[list[int]]) -> list[int] | None:
        """Return the ids that a thread made in a turn of the tenant; None if the stream had ended before its turn."""
        encode = partial(_unless_finished, self._generation, text)
        tenant, cost = self._asking.tenant, tokenizing_cost(prompt)
        queue = partial(submit, text, self._parts.helper, encode, tenant=tenant, cost=cost)
        return await Called[list[int] | None](queue, "the tokenizer failed")

    async def _compiled(self, wanted: ResponseFormat) -> CompiledGrammar:
        """Return the grammar of a response format."""
        parts, asking = self._parts, self._asking
        compiling = partial(
            parts.grammars.compile,
            wanted,
            parts.opened,
            lambda: not self._generation.finished,
            tenant=asking.tenant,
            charge=asking.charge,
        )
        return await Called[CompiledGrammar](compiling, "the grammar's compiler failed")


def _unless_finished(generation: Generation, text: Tokenizing[list[int]]) -> list[int] | None:
    return None if generation.finished else text.encode()
