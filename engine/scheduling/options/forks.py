"""Makes requests that fork the pages of another one: the beams of a search, and branches of a stream."""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.shaping import Reporting

__all__ = ["branch", "goes_on"]


def goes_on(held: Request, token: int) -> Request:
    """Return a request that forks the pages of `held` and goes on with `token` in place of its sampled one."""
    tokens = [*held.tokens[:-1], token]
    return Request(
        replace(held.asked, limit=len(tokens) + 1),
        tokens,
        arrived=held.arrived,
        leader=held,
        forked=True,
        origin=held.id if held.origin < 0 else held.origin,
    )


def branch(request: Request, count: int, seed: int) -> Request:
    """Return a request that starts with the first `count` tokens of `request`, forks its pages and samples anew."""
    asked, reporting = request.asked, request.asked.reporting
    reports = None if reporting is None or reporting.completion is None else Reporting(reporting.completion)
    return Request(
        replace(asked, sampling=replace(asked.sampling, seed=seed), reporting=reports),
        request.tokens[:count],
        prompt_len=request.prompt_len,
        leader=request,
        forked=True,
        streams=1,
    )
