"""`PlanThread`: carries out plans one after the other in a thread of its own; never knows how it is done."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from headrace.engine.model.shared.torch_threads import use_threads
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.result import StepResult

__all__ = ["PlanStep", "PlanThread"]


class PlanStep:
    """A launched step whose result comes from the thread."""

    __slots__ = ("_done", "_error", "_result")

    def __init__(self) -> None:
        """Start without a result."""
        self._done = threading.Event()
        self._result = StepResult(())
        self._error: BaseException | None = None

    def settle(self, result: StepResult, error: BaseException | None) -> None:
        """Set the result; called in the thread."""
        self._result = result
        self._error = error
        self._done.set()

    def wait(self) -> StepResult:
        """Return the result once the step has run; raise its error if it failed."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class PlanThread:
    """Thread in which all steps of a runner run, so that launching never waits."""

    def __init__(self, carry_out: Callable[[StepPlan], StepResult], *, name: str, threads: int) -> None:
        """Start the thread.

        Args:
            carry_out: Runs a plan; called under `torch.inference_mode`.
            name: Name of the thread, for debuggers.
            threads: Number of threads that one operation uses on a CPU.
        """
        self._carry_out: Callable[[StepPlan], StepResult] | None = carry_out
        self._plans: queue.SimpleQueue[tuple[StepPlan, PlanStep] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(threads,), name=name, daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> PlanStep:
        """Queue `plan` behind the steps launched before it; return its step."""
        step = PlanStep()
        self._plans.put((plan, step))
        return step

    def close(self) -> None:
        """Finish what is queued and join the thread."""
        self._plans.put(None)
        self._thread.join()
        self._carry_out = None

    def _run(self, threads: int) -> None:
        carry_out = self._carry_out
        assert carry_out is not None
        use_threads(threads)
        with torch.inference_mode():
            while (item := self._plans.get()) is not None:
                plan, step = item
                try:
                    result = carry_out(plan)
                except Exception as error:
                    step.settle(StepResult(()), error)
                else:
                    step.settle(result, None)
                    del result
                del item, plan, step
