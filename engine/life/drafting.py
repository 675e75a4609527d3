"""`open_speculation`: how deep an engine's steps may speculate, with a warning where that is less than was asked for.

Next to read: ../scheduling/speculation/counts.py.
"""

from __future__ import annotations

import logging
from bisect import bisect_left

from headrace.engine.config import EngineConfig
from headrace.engine.life.opened import Opened
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.scheduling.speculation.counts import FixedDepths, Speculation

__all__ = ["open_speculation"]

logger = logging.getLogger("headrace.engine")


def open_speculation(config: EngineConfig, opened: Opened) -> Speculation | None:
    """Return what decides how deep the steps of an engine speculate; None if they do not."""
    if config.speculation is None:
        return None
    runner, most = opened.runner, config.speculation.k
    speculation = Speculation(most, depths=runner.draft_depths if isinstance(runner, FixedDepths) else None)
    _warn_of_room(speculation, most, opened.capacity)
    return speculation


def _warn_of_room(speculation: Speculation, most: int, capacity: Capacity) -> None:
    """Log a warning if no step has room for `most` drafts of a row, or a step of all rows has no room for any."""
    tokens, rows = capacity.max_batched_tokens, capacity.max_rows
    alone = speculation.room(1, tokens)
    if alone < most:
        told = (
            "speculation.k: it is %d, and steps verify at most %d of a row: max_batched_tokens is %d, of which "
            "half of what decodes leave is for prompts; one row needs %d for k drafts"
        )
        logger.warning(told, most, alone, tokens, 2 * most + 1)
    if not speculation.room(rows, tokens):
        fitting = bisect_left(range(1, rows + 1), True, key=lambda each: speculation.room(each, tokens) == 0)
        told = (
            "max_rows: it is %d, and steps of more than %d rows that speculate verify no drafts: max_batched_tokens, "
            "which is %d, or the graphs of the device have no room for any"
        )
        logger.warning(told, rows, fitting, tokens)
