"""`Tokenizing`: makes token ids of a prompt, on the event loop if that is quick, else in a thread by turns of tenants.

Owns the choice of the thread and the charge for the work; never knows the use of the ids. Next to read: prompts.py for
the tokenising, fair_worker.py for the turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeAlias, TypeVar

from headrace.engine.concurrency.fair_worker import FairWorker
from headrace.engine.concurrency.threads import Done
from headrace.engine.intake.prompts import check_fewest_tokens, check_text_size, is_short, is_text, tokenizing_cost
from headrace.engine.life.opened import Opened

__all__ = ["TOKENS_A_SECOND", "Charge", "Tokenizing", "charge_nobody"]

T = TypeVar("T")
Charge: TypeAlias = Callable[[int], None]
"""Function that is told, on the event loop, of work done for a request besides its steps, in tokens."""
TOKENS_A_SECOND: Final = 1000
"""Tokens that are charged for each second of work that has made no tokens."""


def charge_nobody(tokens: int) -> None:
    """Do nothing: the `Charge` of callers who name no other."""


class Tokenizing(Generic[T]):
    """One tokenising of a prompt. Its tenant is charged when it ends, even if nobody waits for it any more."""

    def __init__(
        self,
        encode: Callable[[], T],
        made: Callable[[T], int],
        *,
        check: Callable[[], None],
        here: bool,
        cost: float,
        tenant: str | None,
        charge: Charge,
    ) -> None:
        """Keep the arguments; begin nothing yet.

        Args:
            encode: Tokenises the prompt, in any thread.
            made: Returns how many tokens were made of text, given what `encode` returned.
            check: Called just before `encode`, to refuse prompts that take next to no time to refuse.
            here: Whether the prompt is quick enough for the event loop's own thread.
            cost: Roughly the characters of the prompt; the cheapest of a tenant is next.
            tenant: The tenant whose turn is taken.
            charge: Function that is told of the tokens, or of one for each millisecond if `encode` raised.
        """
        self._encode = encode
        self._made = made
        self._check = check
        self._here = here
        self._cost = cost
        self._tenant = tenant
        self._charge = charge
        self._work = 0

    @classmethod
    def of_prompt(
        cls,
        prompt: Any,
        opened: Opened,
        encode: Callable[[], list[int]],
        *,
        tenant: str | None,
        charge: Charge,
        tools: Sequence[Mapping[str, Any]] | None = None,
        known: int = 0,
    ) -> Tokenizing[list[int]]:
        """Return the tokenising of a prompt for `to_token_ids`; the other arguments are those of the constructor.

        Args:
            prompt: The prompt that `encode` turns into token ids.
            opened: The model.
            encode: Returns the ids.
            tenant: The tenant whose turn is taken.
            charge: Function that is told of the work, in tokens.
            tools: Tools that a chat offers.
            known: Number of leading ids that are not made from `prompt`.

        Raises:
            PromptTooLong: The prompt has too many characters however it is tokenised.
        """
        table, most = opened.tokenizer.table, opened.info.max_context
        check_text_size(prompt, table, most)
        return Tokenizing(
            encode,
            lambda ids: len(ids) - known if is_text(prompt) else 0,
            check=partial(check_fewest_tokens, prompt, table, most),
            here=is_short(prompt, table) and not tools,
            cost=tokenizing_cost(prompt, tools),
            tenant=tenant,
            charge=charge,
        )

    def submit(self, helper: FairWorker, done: Done) -> None:
        """Tokenise, and call `done(result, error)` on the event loop: at once if the prompt is quick."""
        if not self._here:
            self._queue(helper, self._run, done)
            return
        try:
            result = self._run()
        except Exception as error:
            self._pay()
            done(None, error)
        else:
            self._pay()
            done(result, None)

    async def ask(self, helper: FairWorker) -> T:
        """Tokenise and return the result; a caller who is cancelled leaves at once, and work that waits never begins.

        Raises:
            BaseException: `encode` raised it, or the helper was told to drop its calls with it.
        """
        if not self._here:
            return await helper.ask(self._run, partial(self._queue, helper))
        try:
            return self._run()
        finally:
            self._pay()

    def _queue(self, helper: FairWorker, call: Callable[[], T | None], done: Done) -> None:
        def ended(result: Any, error: BaseException | None) -> None:
            self._pay()
            done(result, error)

        helper.submit_for(self._tenant, call, ended, cost=self._cost)

    def _run(self) -> T:
        self._check()
        began = time.perf_counter()
        try:
            result = self._encode()
        except BaseException:
            self._work = int((time.perf_counter() - began) * TOKENS_A_SECOND)
            raise
        self._work = self._made(result)
        return result

    def _pay(self) -> None:
        if self._work > 0:
            self._charge(self._work)
