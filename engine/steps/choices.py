"""`HostChoices` lets callers' hooks choose tokens in a thread while other requests go on; it never plans or delivers.

Next to read: hooks.py for the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.engine.errors import RequestFailed, as_failure
from headrace.engine.scheduling.commit import Commits
from headrace.engine.scheduling.plan import Emission, StepPlan
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.result import Choice, Chosen
from headrace.engine.steps.hooks import HookThread

__all__ = ["HostChoices"]


class HostChoices:
    """Choices of tokens that the device leaves to the host."""

    def __init__(self, hooks: HookThread, commits: Commits, deliver: Callable[[list[Emission]], None]) -> None:
        """Choose nothing yet.

        Args:
            hooks: Thread in which hooks run.
            commits: Accepts the chosen tokens.
            deliver: Called on the event loop with what each choice means.
        """
        self._hooks = hooks
        self._commits = commits
        self._deliver = deliver

    def begin(self, plan: StepPlan, choices: Mapping[int, Choice]) -> None:
        """Begin the choices of a committed step, by the index of the work item."""
        for index, choice in choices.items():
            request = plan.works[index].request
            if request.awaited == plan.step:
                self._hooks.submit(choice, partial(self._chosen, request, plan.step))

    def _chosen(self, request: Request, step: int, chosen: Chosen | None, error: Any) -> None:
        failure = error if isinstance(error, RequestFailed) else as_failure(error)
        self._deliver(self._commits.supply(request, step, failure if chosen is None else chosen))
