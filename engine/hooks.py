"""Hooks: a caller's own code in the middle of a generation, held to what it promised; never what is done about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from headrace.engine.errors import HookFailed, InvalidParams
from headrace.engine.events import Token

__all__ = ["StopWhen", "asks_to_stop", "check_hook"]

StopWhen: TypeAlias = Callable[[Token], bool]
"""Whether a choice ends with the token that it is given."""


def check_hook(hook: object, field: str) -> None:
    """Refuse what cannot be called.

    Raises:
        InvalidParams: It is neither None nor callable.
    """
    if hook is not None and not callable(hook):
        raise InvalidParams(f"{field}: must be callable, got {type(hook).__name__}", field=field, value=hook)


def asks_to_stop(stop_when: StopWhen, token: Token, seconds: float) -> bool:
    """Call `stop_when`, which has so many seconds.

    Raises:
        HookFailed: It raised, took longer, or returned something other than a bool.
    """
    started = time.perf_counter()
    try:
        answer = stop_when(token)
    except Exception as error:
        raise HookFailed(f"stop_when raised {type(error).__name__} at token {token.position}") from error
    spent = time.perf_counter() - started
    if spent > seconds:
        raise HookFailed(f"stop_when took {spent:.3f} s at token {token.position}, where a hook has {seconds:g}")
    if type(answer) is not bool:
        raise HookFailed(f"stop_when must return a bool, got {type(answer).__name__} at token {token.position}")
    return answer
