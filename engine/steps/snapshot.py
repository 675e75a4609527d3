"""Reads the counts of a scheduler and a meter into the statistics that callers see; changes nothing."""

from __future__ import annotations

from headrace.engine.scheduling.load import live_tokens, num_swapped
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.stats import EngineStats
from headrace.engine.steps.flights import Meter

__all__ = ["snapshot"]


def snapshot(scheduler: Scheduler, meter: Meter, now: float) -> EngineStats:
    """Return the state of queues, pages, counts and rates at `now`, in seconds on the step loop's clock."""
    tokens_per_second, step_seconds = meter.rates(now)
    speculation = scheduler.speculation
    return EngineStats(
        waiting=scheduler.roster.num_waiting,
        running=scheduler.roster.num_running,
        paused=scheduler.roster.num_paused,
        swapped=num_swapped(scheduler.roster),
        pages=scheduler.pool.num_pages,
        pages_held=scheduler.pool.held,
        pages_cached=scheduler.pool.cached,
        host_pages=scheduler.swaps.host.num_places,
        host_pages_used=scheduler.swaps.host.used,
        live_tokens=live_tokens(scheduler.roster),
        prompt_tokens=scheduler.prompt_tokens,
        cached_tokens=scheduler.cached_tokens,
        generated_tokens=meter.generated_tokens,
        preemptions=scheduler.roster.preemptions,
        swaps=scheduler.swaps.count,
        memory_retries=scheduler.failures.retries,
        speculation_depth=0 if speculation is None else speculation.latest,
        draft_runs=0 if speculation is None else speculation.runs,
        drafted_tokens=0 if speculation is None else speculation.drafted,
        accepted_tokens=0 if speculation is None else speculation.accepted,
        drafted_by_position=() if speculation is None else tuple(speculation.drafted_at),
        accepted_by_position=() if speculation is None else tuple(speculation.accepted_at),
        sleep_level=scheduler.resizing.sleep_level,
        steps=meter.steps,
        steps_in_flight=meter.launched_steps - meter.steps,
        tokens_per_second=tokens_per_second,
        step_seconds=step_seconds,
        busy_seconds=meter.busy_seconds(now),
    )
