"""Tokenises prompts that are not quick in a thread, by turns of tenants; never knows the use of the ids.

Next to read: prompts.py for the tokenising, concurrency/fair_worker.py for the turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from headrace.engine.concurrency.ask import ask as ask_thread
from headrace.engine.concurrency.fair_worker import FairWorker
from headrace.engine.concurrency.threads import Done
from headrace.engine.intake.prompts import Tokenizing, is_chat, text_size

__all__ = ["ask", "submit", "tokenizing_cost"]

T = TypeVar("T")
_MESSAGE = 32  # characters that tokenise in the time in which the template writes a message
_COSTLY = 2**20  # characters beyond which a prompt is as costly as any


def submit(
    work: Tokenizing[T],
    helper: FairWorker,
    call: Callable[[], T | None],
    done: Done,
    *,
    tenant: str | None,
    cost: float,
) -> None:
    """Queue a tokenising for a thread, charge for it when it ends, and then call `done(result, error)`.

    Args:
        work: The tokenising.
        helper: The threads.
        call: `work.encode`, or a function that may call it.
        done: Function of the result and the error, called on the event loop.
        tenant: The tenant whose turn is taken.
        cost: Order of the work among that of its tenant, the lowest first: roughly the characters of the prompt.
    """

    def ended(result: Any, error: BaseException | None) -> None:
        work.pay()
        done(result, error)

    helper.submit_for(tenant, call, ended, cost=cost)


async def ask(work: Tokenizing[T], helper: FairWorker, *, tenant: str | None, cost: float) -> T:
    """Tokenise in a thread and return the result; a caller who is cancelled leaves at once, and work that waits never
    begins. The arguments are those of `submit`.

    Raises:
        BaseException: The tokenising raised it, or the helper was told to drop its calls with it.
    """
    return await ask_thread(partial(submit, work, helper, tenant=tenant, cost=cost), work.encode)


def tokenizing_cost(prompt: object, tools: Sequence[Mapping[str, Any]] | None = None, most: int = _COSTLY) -> int:
    """Return roughly the characters of a prompt and of its tools, counted no further than somewhat past `most`."""
    if not is_chat(prompt):
        return text_size(prompt)
    cost, left = 0, [*prompt, *(tools or ())]
    while left and cost <= most:
        part = left.pop()
        if isinstance(part, str):
            cost += len(part)
        elif isinstance(part, Mapping | Sequence):
            cost += _MESSAGE * (1 + len(part) // 4)
            left += part.values() if isinstance(part, Mapping) else part
    return cost
