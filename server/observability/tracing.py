"""Spans of OpenTelemetry, where `opentelemetry-api` is installed and the process has set it up; nothing otherwise.

Attributes are those of OpenTelemetry's conventions for generative AI, without any that hold prompts or answers. A
span's parent is the caller's current one, or else the request's `traceparent`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from headrace.engine import Prompt, SamplingParams
from headrace.server.observability.figures import Figures, between

try:
    from opentelemetry import context, propagate, trace
except ImportError:  # an optional library
    _INSTALLED = False
else:
    _INSTALLED = True

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["continued", "end_span", "start_span"]

_NOTHING: AbstractContextManager[None] = nullcontext()


def continued(headers: Iterable[tuple[bytes, bytes]]) -> AbstractContextManager[None]:
    """Make the trace that a request's headers name current for the block, unless the caller has a span."""
    if not _set_up() or trace.get_current_span().get_span_context().is_valid:
        return _NOTHING
    carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    return _attached(propagate.extract(carrier))


def start_span(figures: Figures, prompts: Sequence[Prompt], params: SamplingParams, model: str) -> Span | None:
    """Begin the span of a generation request; return None where nobody records it."""
    if not _set_up():
        return None
    operation = "chat" if _is_chat(prompts[0]) else "text_completion"
    parent = trace.get_current_span().get_span_context()
    inner = parent.is_valid and not parent.is_remote
    span = trace.get_tracer("headrace.server").start_span(
        f"{operation} {model}",
        kind=trace.SpanKind.INTERNAL if inner else trace.SpanKind.SERVER,
        attributes={
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "headrace",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            **_requested(params),
        },
    )
    if not span.is_recording():
        return None
    figures.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
    return span


def end_span(span: Span, figures: Figures) -> None:
    """End the span of a request, with its counts and its error, if any."""
    told: dict[str, Any] = {
        "gen_ai.usage.input_tokens": figures.prompt_tokens,
        "gen_ai.usage.output_tokens": figures.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": figures.cached_tokens,
        "gen_ai.response.finish_reasons": figures.finish_reasons or None,
        "gen_ai.response.time_to_first_chunk": between(figures.began, figures.first),
        "headrace.queue_time": between(figures.queued, figures.taken_up),
        "headrace.request_id": figures.request_id,
    }
    span.set_attributes({name: value for name, value in told.items() if value is not None})
    if figures.reason != "finished":
        span.set_attribute("error.type", figures.reason or "other")
        if not figures.refused:  # the conventions of HTTP: a client's fault is no error of the server
            span.set_status(trace.Status(trace.StatusCode.ERROR))
    span.end()


def _set_up() -> bool:
    """Return whether the process records spans, as far as can be known."""
    return _INSTALLED and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


@contextmanager
def _attached(current: Any) -> Iterator[None]:
    token = context.attach(current)
    try:
        yield
    finally:
        context.detach(token)


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], int)


def _requested(params: SamplingParams) -> dict[str, Any]:
    given = params.model_fields_set  # the model chooses what was left out
    wanted = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature if "temperature" in given else None,
        "top_p": params.top_p if "top_p" in given else None,
        "top_k": params.top_k or None,
        "seed": params.seed,
        "frequency_penalty": params.frequency_penalty or None,
        "presence_penalty": params.presence_penalty or None,
        "choice.count": params.n if params.n > 1 else None,
    }
    return {f"gen_ai.request.{name}": value for name, value in wanted.items() if value is not None}
