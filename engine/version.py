"""`headrace_version`: the version of headrace that is installed; imports nothing of the engine."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["headrace_version"]


def headrace_version() -> str:
    """Return the installed version of headrace, "unknown" where it is run from its folders."""
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "unknown"
