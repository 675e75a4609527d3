"""Counts the distinct experts that decode steps of an open engine choose, layer by layer; times nothing.

A step that is seen takes longer, so nothing may be timed meanwhile. On a CPU the choice itself is seen. On a GPU a
graph shows nothing: decodes run operation by operation, by the same kernels, and `route` of ops/experts.py chooses once
more from what a layer's router reads, where scores that nearly tie may fall otherwise. What is replaced in the runner
and in the device's operations is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from headrace.engine import Engine
from headrace.engine.bench.profile import replaced
from headrace.engine.scheduling.plan import StepPlan
from headrace.ops.experts import route

__all__ = ["ChosenExperts", "counting"]

_Function = Callable[..., Any]


class ChosenExperts:
    """The distinct experts of each step in which all rows decode and nothing else is computed."""

    def __init__(self, rows: int) -> None:
        """Start without a step of `rows` rows."""
        self._rows = rows
        self._steps: list[list[Tensor]] = []
        self._layers: list[Tensor] | None = None
        """Counts of the layers of the step at hand; None if that step does not count."""

    def by_layer(self, skip: int, steps: int) -> list[float]:
        """Return the distinct experts of each layer with experts, the mean of `steps` steps behind the first `skip`.

        It is empty if no layer was seen to choose, as in steps of another library's layers.
        """
        counted = self._steps[skip : skip + steps]
        if not counted:
            return []
        means: list[float] = torch.stack([torch.stack(layers) for layers in counted]).float().mean(0).tolist()
        return means

    def watched(self, original: _Function) -> _Function:
        """Return `original`, a runner's method that computes a plan, such that its step is counted."""

        def call(plan: StepPlan, *rest: Any) -> Any:
            is_full = len(plan.decodes) == self._rows and not plan.others
            self._layers = [] if is_full else None
            try:
                return original(plan, *rest)
            finally:
                if self._layers:
                    self._steps.append(self._layers)
                self._layers = None

        return call

    def seen_routing(self, original: _Function) -> _Function:
        """Return `original`, which is `route`, such that a layer's choice is counted."""

        def call(logits_NX: Tensor, *rest: Any) -> Any:
            choice = original(logits_NX, *rest)
            if self._layers is not None:
                self._layers.append(_distinct(choice.ids_NK, logits_NX.shape[1]))
            return choice

        return call

    def seen_on_gpu(self, original: _Function) -> _Function:
        """Return `original`, which is `CudaExperts.__call__`, such that the choice of tokens but padding is counted."""

        def call(packed: Any, x_NE: Tensor, routed_NE: Tensor | None = None) -> Any:
            if self._layers is not None:
                ids_NK = _ids_on_gpu(packed, x_NE if routed_NE is None else routed_NE)
                self._layers.append(_distinct(ids_NK, packed.weights.routing.experts))
            return original(packed, x_NE, routed_NE)

        return call


def _distinct(ids_NK: Tensor, experts: int) -> Tensor:
    """Return the number of different ids below `experts`, an int64 scalar on the same device, without waiting."""
    hit_X = torch.zeros(experts + 1, dtype=torch.int64, device=ids_NK.device)
    hit_X[ids_NK.flatten().long()] = 1
    return hit_X[:experts].sum()


def _ids_on_gpu(packed: Any, routed_NE: Tensor) -> Tensor:
    """Return the experts of each token, [N, K]; for padding, the number behind that of the last expert."""
    weights, padding = packed.weights, packed._products.padding
    logits_NX = routed_NE.float() @ weights.router_XE.T
    if weights.router_bias_X is not None:
        logits_NX = logits_NX + weights.router_bias_X
    ids_NK = route(logits_NX, weights.routing, weights.correction_X).ids_NK
    if padding is None:
        return ids_NK
    return ids_NK.masked_fill((padding.rows_N == padding.row)[:, None], weights.routing.experts)


@contextmanager
def counting(engine: Engine, rows: int) -> Iterator[ChosenExperts]:
    """Count the experts that steps of `rows` rows choose while the block lasts.

    The engine must be idle where the block begins and where it ends. Rows must not speculate: drafts are tokens of a
    step, too, and what makes them may have experts of its own.
    """
    loop: Any = engine._life.loop
    runner = loop._runner
    chosen = ChosenExperts(rows)
    places = _on_gpu(runner, chosen) if hasattr(runner, "_graphs") else _on_cpu(runner, chosen)
    with ExitStack() as stack:
        for owner, name, wrap in places:
            stack.enter_context(replaced(owner, name, wrap))
        yield chosen


def _on_cpu(runner: Any, chosen: ChosenExperts) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return (object, attribute, what makes its replacement of it)."""
    from headrace.ops.cpu import experts
    from headrace.ops.cpu.native import experts as native

    routes = [(module, "route", chosen.seen_routing) for module in (experts, native)]
    return [(runner, "_run", chosen.watched), *routes]


def _on_gpu(runner: Any, chosen: ChosenExperts) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return the same; captured graphs are set aside, as is what some leave to others."""
    from headrace.ops.cuda.experts.packed import CudaExperts

    graphs = runner._graphs
    return [
        (runner, "_enqueue", chosen.watched),
        (CudaExperts, "__call__", chosen.seen_on_gpu),
        (graphs, "_is_capturing", lambda _: False),
        (graphs, "_graphs", lambda _: {}),
        (graphs, "_between", lambda _: {}),
    ]
