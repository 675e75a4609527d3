"""headrace.server: the HTTP server and the command line; never imported by the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.server.app import create_app
    from headrace.server.draining import drain, drained_at_signal
    from headrace.server.http.running import DrainingServer
    from headrace.server.settings import KeyLimits, ServerSettings
    from headrace.server.transport import OpenAITransport, openai_transport

__all__ = [
    "DrainingServer",
    "KeyLimits",
    "OpenAITransport",
    "ServerSettings",
    "create_app",
    "drain",
    "drained_at_signal",
    "openai_transport",
]

_HOMES = {
    "DrainingServer": "http.running",
    "KeyLimits": "settings",
    "OpenAITransport": "transport",
    "ServerSettings": "settings",
    "create_app": "app",
    "drain": "draining",
    "drained_at_signal": "draining",
    "openai_transport": "transport",
}


def __getattr__(name: str) -> Any:
    """Import an exported name at its first use, so that the command line works without the libraries of a server."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"headrace.server.{_HOMES[name]}"), name)
