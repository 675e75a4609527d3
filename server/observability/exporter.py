"""`Exporter`: the counts of a server and its engine as Prometheus' text; read when asked, never counted here.

Each application has a registry of its own. Names begin with `headrace:`; on request the same values appear under vLLM's
names too, where both mean the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headrace.engine import EngineInfo, EngineStats, HeadraceError
from headrace.server.observability.recorder import Histogram
from headrace.server.service import Service

__all__ = ["MEDIA_TYPE", "VLLM_NAMES", "Exporter"]

VLLM_NAMES: Final = {
    "headrace:requests_running": "vllm:num_requests_running",
    "headrace:requests_waiting": "vllm:num_requests_waiting",
    "headrace:kv_usage": "vllm:kv_cache_usage_perc",
    "headrace:prefix_cache_queries": "vllm:prefix_cache_queries",
    "headrace:prefix_cache_hits": "vllm:prefix_cache_hits",
    "headrace:preemptions": "vllm:num_preemptions",
    "headrace:spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "headrace:spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "headrace:spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "headrace:spec_decode_num_draft_tokens_per_pos": "vllm:spec_decode_num_draft_tokens_per_pos",
    "headrace:spec_decode_num_accepted_tokens_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos",
    "headrace:prompt_tokens": "vllm:prompt_tokens",
    "headrace:generation_tokens": "vllm:generation_tokens",
    "headrace:choices_finished": "vllm:request_success",
    "headrace:time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "headrace:inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "headrace:time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "headrace:request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "headrace:queue_time_seconds": "vllm:request_queue_time_seconds",
    "headrace:prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "headrace:decode_time_seconds": "vllm:request_decode_time_seconds",
    "headrace:request_prompt_tokens": "vllm:request_prompt_tokens",
    "headrace:request_generation_tokens": "vllm:request_generation_tokens",
}
"""Our name of a metric -> vLLM's name of the same; counters without their `_total`."""

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SHARE = 0.02  # largest share of the event loop's time for clients that ask without pause


class Exporter:
    """The metrics of one application."""

    def __init__(self, service: Service) -> None:
        """Read from `service` and its engine."""
        self._registry = CollectorRegistry()
        self._registry.register(_Families(service))
        ProcessCollector(registry=self._registry)
        self._text = b""
        self._fresh_until = 0.0

    def text(self) -> bytes:
        """Return the metrics in `MEDIA_TYPE`.

        A text is used again for fifty times the processor time that it took to make: asking without pause costs the
        streams little.
        """
        if time.monotonic() >= self._fresh_until:
            began = time.thread_time()
            self._text = generate_latest(self._registry)
            self._fresh_until = time.monotonic() + (time.thread_time() - began) / _SHARE
        return self._text


class _Families(Collector):
    """The collector that Prometheus' registry asks for metrics."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> Iterable[Metric]:
        """Return no metric: the registry need not look for names before the engine is open."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its present value."""
        service = self._service
        families = [*_of_server(service), *_of_requests(service)]
        engine = service.engine
        try:
            stats = engine.stats()
            families += [*_of_engine(engine.info, stats), *_of_steps(stats, engine.step_age), *_of_drafts(stats)]
            model = service.model
        except HeadraceError:  # closed or dead: the server's own counts still stand
            model = ""
        yield from families
        if service.settings.vllm_metric_names:
            for family in families:
                if family.name in VLLM_NAMES:
                    yield _renamed(family, VLLM_NAMES[family.name], {"engine": "0", "model_name": model})


def _of_engine(info: EngineInfo, stats: EngineStats) -> Iterator[Metric]:
    named = {"model": info.model, "architecture": info.architecture, "device": info.device, "dtype": info.dtype}
    yield InfoMetricFamily("headrace:engine", "What the engine runs.", value=named)
    yield _gauge("requests_running", "Choices that are planned in steps.", stats.running)
    yield _gauge("requests_waiting", "Choices that hold neither a row nor pages.", stats.waiting)
    yield _gauge("requests_paused", "Choices whose reader is behind.", stats.paused)
    pages = GaugeMetricFamily("headrace:kv_pages", "Pages of keys and values by state.", labels=["state"])
    pages.add_metric(["held"], stats.pages_held)
    pages.add_metric(["cached"], stats.pages_cached)
    pages.add_metric(["free"], stats.pages - stats.pages_held - stats.pages_cached)
    yield pages
    slots = stats.pages_held * info.page_size
    yield _gauge(
        "kv_usage", "Share of the pages that requests hold, from 0 to 1.", stats.pages_held / max(1, stats.pages)
    )
    yield _gauge("kv_live_tokens", "Distinct tokens in held pages.", stats.live_tokens)
    efficiency = stats.live_tokens / slots if slots else 1.0
    yield _gauge(
        "kv_memory_efficiency", "Share of the memory of held pages that tokens fill; 1 if none is.", efficiency
    )
    prompt, cached = stats.prompt_tokens, stats.cached_tokens
    yield _counter("prompt_tokens", "Prompt tokens of admitted requests.", prompt)
    yield _counter("generation_tokens", "Generated tokens.", stats.generated_tokens)
    yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", prompt)
    yield _counter("prefix_cache_hits", "Prompt tokens that the prefix cache spared.", cached)
    yield _counter("preemptions", "Choices sent back to wait to make room for others.", stats.preemptions)
    yield _counter("swaps", "Those whose pages went to host memory, to come back.", stats.swaps)
    yield _counter("memory_retries", "Steps without memory, tried again in smaller ones.", stats.memory_retries)
    yield _gauge("sleep_level", "0 while the engine is awake, else as it was put to sleep.", stats.sleep_level)


def _of_steps(stats: EngineStats, step_age: float) -> Iterator[Metric]:
    yield _counter("steps", "Steps that have ended.", stats.steps)
    yield _gauge("steps_in_flight", "Steps that have been launched and have not ended.", stats.steps_in_flight)
    what = "Seconds with a step in flight; the rate is the share of time in which the device is in use."
    yield _counter("device_busy_seconds", what, stats.busy_seconds)
    yield _gauge("step_age_seconds", "Seconds for which no step has ended while one is in flight, else 0.", step_age)


def _of_drafts(stats: EngineStats) -> Iterator[Metric]:
    what = "Runs of drafts that steps verified, one for each choice and step that had any."
    yield _counter("spec_decode_num_drafts", what, stats.draft_runs)
    yield _counter("spec_decode_num_draft_tokens", "Drafts that steps verified.", stats.drafted_tokens)
    yield _counter("spec_decode_num_accepted_tokens", "Drafts that were right.", stats.accepted_tokens)
    what = "Drafts that steps verified, by their position in the run."
    yield _by_position("spec_decode_num_draft_tokens_per_pos", what, stats.drafted_by_position)
    what = "Drafts that were right, by their position in the run."
    yield _by_position("spec_decode_num_accepted_tokens_per_pos", what, stats.accepted_by_position)
    yield _gauge(
        "spec_decode_depth",
        "Most drafts of a choice in the latest step with decodes; 0 before one.",
        stats.speculation_depth,
    )


def _of_server(service: Service) -> Iterator[Metric]:
    recorder = service.telemetry.recorder
    yield _gauge("ready", "1 where /health/ready says so, else 0.", float(service.trouble() is None))
    yield _gauge("requests_in_progress", "Generation requests that are being answered.", len(service.running))
    http = CounterMetricFamily("headrace:http_requests", "HTTP requests.", labels=["method", "route", "status"])
    for labels, count in recorder.http.items():
        http.add_metric(list(labels), count)
    yield http
    yield _counter("stalls", "Times that the watchdog found no step ending, or the event loop held.", recorder.stalls)
    lag = "How late the event loop comes to what it is to do, measured four times a second."
    yield _histogram("event_loop_lag_seconds", lag, recorder.loop_lag)


def _of_requests(service: Service) -> Iterator[Metric]:
    recorder = service.telemetry.recorder
    finished = CounterMetricFamily("headrace:choices_finished", "Choices by finish reason.", labels=["finished_reason"])
    for reason, count in recorder.finished.items():
        finished.add_metric([reason], count)
    yield finished
    aborted = CounterMetricFamily("headrace:requests_aborted", "Requests without their answer.", labels=["reason"])
    for reason, count in recorder.aborted.items():
        aborted.add_metric([reason], count)
    yield aborted
    yield from _of_tenants(service)
    for name, what, histogram in (
        ("time_to_first_token_seconds", "From the request to its first token.", recorder.time_to_first_token),
        ("inter_token_latency_seconds", "Between tokens of a choice, each counted.", recorder.inter_token_latency),
        ("time_per_output_token_seconds", "Mean of it in each stream.", recorder.time_per_output_token),
        ("request_latency_seconds", "From the request to the end of its answer.", recorder.request_latency),
        ("tokenize_time_seconds", "From the request to its prompts as token ids.", recorder.tokenize_time),
        ("queue_time_seconds", "From there until a step takes it up.", recorder.queue_time),
        ("prefill_time_seconds", "From there to its first token.", recorder.prefill_time),
        ("decode_time_seconds", "From there to the end of its answer.", recorder.decode_time),
        ("request_prompt_tokens", "Prompt tokens of a request.", recorder.prompt_tokens),
        ("request_generation_tokens", "Generated tokens of a request.", recorder.generation_tokens),
    ):
        yield _histogram(name, what, histogram)


def _of_tenants(service: Service) -> Iterator[Metric]:
    labels = ["tenant", "adapter"]
    requests = CounterMetricFamily("headrace:tenant_requests", "Admitted requests.", labels=labels)
    prompt = CounterMetricFamily("headrace:tenant_prompt_tokens", "Prompt tokens.", labels=labels)
    cached = CounterMetricFamily("headrace:tenant_cached_tokens", "Those the prefix cache spared.", labels=labels)
    generated = CounterMetricFamily("headrace:tenant_generation_tokens", "Generated tokens.", labels=labels)
    for key, used in service.telemetry.recorder.tenants.items():
        requests.add_metric(list(key), used.requests)
        prompt.add_metric(list(key), used.prompt)
        cached.add_metric(list(key), used.cached)
        generated.add_metric(list(key), used.generated)
    yield from (requests, prompt, cached, generated)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"headrace:{name}", what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"headrace:{name}", what, value=value)


def _by_position(name: str, what: str, counts: Sequence[int]) -> Metric:
    """Return a counter with a value for each position of a run of drafts; 0 at the first without speculation."""
    family = CounterMetricFamily(f"headrace:{name}", what, labels=["position"])
    for position, count in enumerate(counts or (0,)):
        family.add_metric([str(position)], count)
    return family


def _histogram(name: str, what: str, histogram: Histogram) -> Metric:
    buckets: list[Any] = []
    count = 0
    for bound, more in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        count += more
        buckets.append((bound, count))
    return HistogramMetricFamily(f"headrace:{name}", what, buckets=buckets, sum_value=histogram.total)


def _renamed(family: Metric, name: str, labels: dict[str, str]) -> Metric:
    """Return the metric's values under another name, with more labels."""
    copy = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        renamed = name + sample.name.removeprefix(family.name)
        copy.samples.append(Sample(renamed, labels | sample.labels, sample.value))
    return copy
