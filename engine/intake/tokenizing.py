"""`Tokenizing`: makes token ids of a prompt, here where that is quick and else in a turn of its tenant in a thread.

Owns where a prompt is tokenised and what is charged for it; never knows what becomes of the ids.
Next to read: prompts.py for what is tokenised, fair_worker.py for the turns.
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
"""Is told on the event loop of work that was done for a request besides its steps, in tokens."""
TOKENS_A_SECOND: Final = 1000
"""What is charged for work that has made no tokens."""


def charge_nobody(tokens: int) -> None:
    """Do nothing, as the `Charge` of those who ask for no other."""


class Tokenizing(Generic[T]):
    """One tokenising of a prompt. Its tenant is charged for it when it ends, even if nobody waits for it any more."""

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
        """Begin nothing yet.

        Args:
            encode: Tokenises the prompt, in any thread.
            made: Returns how many tokens were made of text, given what `encode` returned.
            check: Called just before `encode`, and refuses what takes next to no time to refuse.
            here: It is quick enough for the event loop's own thread.
            cost: Roughly the characters of the prompt, the cheapest of a tenant being next.
            tenant: Whose turn it takes.
            charge: Is told of the tokens, or of one for each millisecond where `encode` raised.
        """
        self._encode, self._made, self._check = encode, made, check
        self._here, self._cost, self._tenant = here, cost, tenant
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
        """Begin nothing yet, with a prompt as `to_token_ids` takes it; other arguments as for the constructor.

        Args:
            prompt: What `encode` makes token ids of.
            opened: The model.
            encode: Returns the ids.
            tenant: Whose turn it takes.
            charge: Is told of the work.
            tools: What a chat offers.
            known: Leading ids that are not made of `prompt`.

        Raises:
            PromptTooLong: It has too many characters however it is tokenised.
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
        """Tokenise, and call `done(result, error)` on the event loop, here and now where it is quick."""
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
        """Tokenise and return the result; a caller who is cancelled leaves at once, and what waits never begins.

        Raises:
            BaseException: Whatever `encode` raised, or the helper was told to drop its calls with.
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
