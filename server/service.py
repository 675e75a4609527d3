"""`Service`: the engine, limits, pace and drain that all requests of a server share; starts and ends no request."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from headrace.engine import Engine, HeadraceError, InvalidParams
from headrace.engine.tools import (
    Detected,
    ReasoningMode,
    ReasoningTags,
    Tool,
    ToolParser,
    detect,
    make_parser,
    parser_class,
    reasoning_mode,
)
from headrace.engine.version import headrace_version
from headrace.server.errors import ApiError
from headrace.server.http.pacing import Pacer
from headrace.server.limits import Limits
from headrace.server.observability.telemetry import Telemetry
from headrace.server.settings import ServerSettings
from headrace.server.stored import ResponseStore

__all__ = ["Running", "Service", "Socket"]

logger = logging.getLogger("headrace.server")

_TAIL = 16  # tokens at the end of a prompt that tell whether its template opens the reasoning


class Running(Protocol):
    """A request that is being answered."""

    def end(self, error: ApiError) -> None:
        """End the request now and tell its client `error`."""
        ...


class Socket(Protocol):
    """A WebSocket that is open."""

    def drain(self) -> None:
        """Close the socket once nothing runs on it."""
        ...


class Service:
    """One engine that is served, with the state that its requests share."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        """Serve `engine`, which may still be closed."""
        self.engine = engine
        self.settings = settings
        self.limits = Limits(settings)
        self.pacer = Pacer(settings.max_events_per_second)
        self.responses = ResponseStore(settings.max_stored_bytes)
        self.telemetry = Telemetry()
        self.created = self.now()
        self.running: set[Running] = set()
        self.sockets: set[Socket] = set()
        self.draining = False
        self._detected: Detected | None = None
        self._fingerprint: str | None = None

    @staticmethod
    def now() -> int:
        """Return the seconds since 1970, by which answers are dated."""
        return int(time.time())

    @property
    def model(self) -> str:
        """Name of the model for clients."""
        return self.settings.served_model_name or self.engine.info.model

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of answers: where it differs, the same seed may give other tokens."""
        if self._fingerprint is None:
            info = self.engine.info
            parts = (
                headrace_version(),
                info.model,
                info.architecture,
                info.dtype,
                info.device,
                info.max_batched_tokens,
            )
            self._fingerprint = "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
        return self._fingerprint

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served.

        Raises:
            ApiError: 404 where the model is not served.
        """
        self.adapter_of(name)

    def adapter_of(self, model: str, adapter: str | None = None) -> str | None:
        """Return the adapter that a request names as `adapter` or as its model; None for the model itself.

        Raises:
            ApiError: 404 where there is no such model or adapter, 400 where the request names two.
        """
        if model != self.model:
            if model not in self.engine.adapters.versions:
                message = f"the model {_shown(model)} is not served here; GET /v1/models lists what is"
                raise ApiError(404, "model_not_found", message, param="model")
            if adapter is not None and adapter != model:
                raise ApiError(400, "invalid_value", "adapter: the model is another adapter already", param="adapter")
            return model
        if adapter is not None and adapter not in self.engine.adapters.versions:
            raise ApiError(404, "model_not_found", f"the adapter {_shown(adapter)} is not loaded", param="adapter")
        return adapter

    async def load_adapters(self) -> None:
        """Load the adapters that the settings name and that are not loaded yet.

        Raises:
            AdapterRejected: An adapter cannot be used.
            InvalidParams: An adapter has the name of the model, or the engine was opened without adapters.
        """
        for name, path in self.settings.adapters.items():
            if name == self.model:
                raise InvalidParams("adapters: one has the name of the model", field="adapters", value=name)
            if name in self.engine.adapters.versions:
                continue
            await self.engine.adapters.load(name, path)

    # -- formats of the model's text --------------------------------------------------------------------------------

    @property
    def tool_format(self) -> str | None:
        """Name of the format in which the model writes tool calls; None where it is not known."""
        return self.settings.tool_call_parser or self._taught().tools

    def warn_of_template(self) -> None:
        """Log a warning where calls can be read, and the chat template does not show tools or earlier calls."""
        name, is_set = self.tool_format, self.settings.tool_call_parser is not None
        template = self.engine.chat_template if name is not None else ""
        parts = {"tools": "the tools of a request", "tool_calls": "the calls of earlier turns"}
        missing = [what for word, what in parts.items() if not re.search(rf"\b{word}\b", template)]
        if name is not None and missing:
            what = "tool_call_parser" if is_set else "tool calls in the format"
            message = "%s %s: the chat template of %s leaves out %s, so the model is not told of them"
            logger.warning(message, what, name, self.model, " and ".join(missing))

    def keeps_special_tokens(self, *, calls: bool) -> bool:
        """Return whether reasoning or, with `calls`, tool calls can only be read from text with its special tokens."""
        detected = self._taught()
        reasons = detected.reasoning and detected.tags.keeps_special_tokens
        return reasons or (calls and parser_class(self.tool_format).keeps_special_tokens)

    def make_parser(self, reasoning: ReasoningMode, offered: Sequence[Tool]) -> Callable[[], ToolParser] | None:
        """Return a function that makes the parser of a choice; None where a choice is nothing but content.

        Args:
            reasoning: The way in which the choice may begin with reasoning.
            offered: Tools that may be called.
        """
        name = self.tool_format
        if not offered and not parser_class(name).reads_all_answers:
            name = None
        if name is None and reasoning == "none":
            return None
        return partial(make_parser, name, reasoning, tags=self.tags, offered=offered)

    @property
    def reasons(self) -> bool:
        """Whether the model reasons before it answers."""
        return self._taught().reasoning

    @property
    def tags(self) -> ReasoningTags:
        """Marks of the model's reasoning, if it reasons."""
        return self._taught().tags

    @property
    def switches(self) -> frozenset[str]:
        """Names of the values that switch reasoning, as far as the chat template reads them."""
        return self._taught().switches

    def reasoning(self, prompt: list[int], begun: str = "") -> ReasoningMode:
        """Return how the answer to `prompt` may begin with reasoning; `begun` is the text that it continues, if any."""
        detected = self._taught()
        if not detected.reasoning:
            return "none"
        if detected.tags.are_open(begun):
            return "opened"
        return reasoning_mode(detected, self.engine.detokenize(prompt[-_TAIL:], skip_special_tokens=False))

    def _taught(self) -> Detected:
        if self._detected is None:
            self._detected = detect(self.engine.chat_template)
        return self._detected

    # -- life -------------------------------------------------------------------------------------------------------

    def check_accepting(self) -> None:
        """Refuse new work while the server drains.

        Raises:
            ApiError: 503 while the server drains.
        """
        if self.draining:
            raise self.shutting_down()

    def drain(self) -> None:
        """Refuse new work from now on."""
        self.draining = True
        for socket in list(self.sockets):
            socket.drain()

    def end_all(self, error: ApiError | None = None) -> None:
        """End the requests that still run, and tell every client `error`, by default that the server shuts down."""
        for running in list(self.running):
            running.end(error or self.shutting_down())

    def shutting_down(self) -> ApiError:
        """Return the error for clients of a draining server."""
        headers = {"retry-after": "5", "connection": "close"}
        return ApiError(503, "server_shutting_down", "the server is shutting down", headers=headers)

    def trouble(self) -> str | None:
        """Return the reason why the server is not ready; None where it is."""
        if self.draining:
            return "draining"
        try:
            age, sleeps = self.engine.step_age, self.engine.sleep_level > 0
        except HeadraceError as error:
            return type(error).__name__
        if sleeps:
            return "asleep"
        if age > self.settings.ready_stall:
            return f"no step has ended for {age:.0f} seconds"
        return None


def _shown(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:77] + "...")
