"""The GPU's time in a short window: by kernel class, and the share in which it idles; starts no work itself.

Tracing slows small kernels a little, so the figures show where time goes, not how fast a step is.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import anyio
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = ["Activity", "GpuWindow", "kernel_class", "summarise", "trace", "warm_up"]

_LONG_GAP = 5e-6  # seconds; within a captured step the gaps are shorter
_KEPT = (0.4, 0.8)  # part of a trace that counts
_CLASSES = (
    ("copies", r"memcpy|memset|copy|fillfunctor"),
    ("attention", r"attention|attn|flash|fmha|mha|xqa|fused_decode|paged|prefill|decode|attend|merge_state"),
    ("experts", r"expert|router|gather_rows"),
    (
        "product",
        r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|linear|vector_kernel|coded_|to_codes|gather_inputs|matmul|many_rows|scaled_tiles",
    ),
    ("norm, rope, silu, embedding", r"norm|rope|rotary|silu|activate|act_and_mul|embed|vectorized_gather|indexselect"),
    (
        "sampling",
        r"sampl|choose|shape_kernel|words_kernel|count_|scores|survey|bounds|gather_kernel|search_kernel|argmax|topk|top_k|softmax|sort",
    ),
    ("prepare", r"prepare|scatter|unpack"),
)


class Activity(NamedTuple):
    """One kernel or copy on the GPU; times in seconds."""

    name: str
    start: float
    end: float


class GpuWindow(NamedTuple):
    """The division of a window of GPU time."""

    seconds: float
    by_class: dict[str, float]
    """Seconds in kernels of each class, longest first; overlapping kernels count in full."""
    idle: float
    """Share of the window in which nothing ran."""
    idle_between: float
    """Share of the window in gaps of 5 µs and more: between steps, not between the kernels of one."""


def kernel_class(name: str) -> str:
    """Return the class of a kernel, by its name."""
    lowered = name.lower()
    return next((title for title, pattern in _CLASSES if re.search(pattern, lowered)), "other")


def summarise(activities: Sequence[Activity]) -> GpuWindow | None:
    """Sum up the activities between the first start and the last end; return None if there are none."""
    if not activities:
        return None
    ordered = sorted(activities, key=lambda activity: activity.start)
    by_class: dict[str, float] = defaultdict(float)
    idle = between = 0.0
    first = reached = ordered[0].start
    for activity in ordered:
        by_class[kernel_class(activity.name)] += activity.end - activity.start
        gap = activity.start - reached
        if gap > 0.0:
            idle += gap
            between += gap if gap >= _LONG_GAP else 0.0
        reached = max(reached, activity.end)
    seconds = reached - first
    if seconds <= 0.0:
        return None
    longest = dict(sorted(by_class.items(), key=lambda entry: -entry[1]))
    return GpuWindow(seconds, longest, idle / seconds, between / seconds)


def warm_up() -> None:
    """Start and stop the tracer once: the first time takes seconds."""
    os.environ.update(DISABLE_CUPTI_LAZY_REINIT="1", TEARDOWN_CUPTI="0")  # captured graphs survive neither
    recorder = profile(activities=[ProfilerActivity.CUDA])
    recorder.start()
    recorder.stop()


async def trace(seconds: float) -> GpuWindow | None:
    """Record the GPU for `seconds` while other tasks run; return None where nothing ran on one."""
    recorder: Any = profile(activities=[ProfilerActivity.CUDA])
    recorder.start()
    try:
        await anyio.sleep(seconds)
    finally:
        recorder.stop()
    found = [
        Activity(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in recorder.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return summarise(_middle(found))


def _middle(activities: Sequence[Activity]) -> list[Activity]:
    """Return the activities well inside the trace: host and GPU stand still while the tracer starts and stops."""
    if not activities:
        return []
    first = min(activity.start for activity in activities)
    span = max(activity.end for activity in activities) - first
    early, late = (first + part * span for part in _KEPT)
    return [activity for activity in activities if early <= activity.start and activity.end <= late]
