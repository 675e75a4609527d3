"""Runs the command line as `python -m headrace.server`, which needs no installed program."""

from __future__ import annotations

from headrace.server.cli import main

__all__ = ["main"]

main()
