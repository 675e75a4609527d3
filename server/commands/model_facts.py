"""`print_facts`: what is known of a model, as tables in a terminal and as plain lines elsewhere; finds nothing out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.engine.inspection.facts import DeviceFacts, ModelFacts, ModelShape, Problem
    from headrace.engine.stats import WeightPart

__all__ = ["print_facts"]

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class _Section(NamedTuple):
    """One table, or lines of text under a title."""

    title: str
    rows: list[tuple[str, str]]
    notes: tuple[str, ...] = ()


def print_facts(facts: ModelFacts, console: Console) -> None:
    """Print all facts: tables if `console` is a terminal, else lines that other programs can cut at the first colon."""
    for section in _sections(facts):
        if console.is_terminal:
            _print_table(section, console)
        else:
            _print_lines(section, console)


def _sections(facts: ModelFacts) -> Iterator[_Section]:
    rows = [("model", facts.model)]
    rows += [] if facts.path in (None, facts.model) else [("found at", str(facts.path))]
    rows += [] if facts.shape is None else _shape(facts.shape)
    rows += [] if facts.fallback is None else [("computed by", f"transformers (fallback): {facts.fallback}")]
    yield _Section("Model", rows)
    if facts.stored_bytes:
        rows = _weights(facts.stored, facts.stored_bytes)
        rows += [("read for a token", _size(facts.active_bytes))] if facts.active_bytes < facts.stored_bytes else []
        if facts.unread:
            rows += [("not read", f"{', '.join(facts.unread)}: {_size(facts.unread_bytes)}; text alone is computed")]
        yield _Section("Weights in the files", rows)
    for device in facts.devices:
        yield _Section(f"On {device.device}, {device.name}", list(_device(device)), device.assumptions)
    if facts.problems:
        yield _Section("Does not run", list(map(_problem, facts.problems)))


def _shape(shape: ModelShape) -> list[tuple[str, str]]:
    sizes = {
        "layers": shape.layers,
        "hidden size": shape.hidden_size,
        "attention heads": shape.heads,
        "key and value heads": shape.kv_heads,
        "head size": shape.head_size,
        "vocabulary": shape.vocab_size,
        "most tokens of context": shape.max_context,
        "experts in a layer": shape.experts,
        "experts of a token": shape.experts_per_token,
    }
    known = [(name, f"{size:,}") for name, size in sizes.items() if size is not None]
    kind = "" if shape.kind == "unknown" else f", {shape.kind}"
    return [("architecture", f"{shape.architecture}{kind}"), ("family", shape.family or "not named"), *known]


def _weights(parts: Sequence[WeightPart], total: int) -> list[tuple[str, str]]:
    return [(part.part, f"{_size(part.nbytes)} in {part.format}") for part in parts] + [("all weights", _size(total))]


def _device(device: DeviceFacts) -> Iterator[tuple[str, str]]:
    if device.weights:
        yield from _weights(device.weights, device.weight_bytes)
    if device.dtype is not None:
        yield "arithmetic", device.dtype
    if device.kv_bytes_per_token is not None:
        yield "keys and values", f"{device.kv_bytes_per_token:,} bytes a token"
    yield "free memory", _size(device.free_bytes)
    if device.pages:
        yield "pages", f"{device.pages:,}"
    for fit in device.fits:
        yield f"rows of {fit.context:,} tokens", f"{fit.rows:,} at once"
    if device.problem is not None:
        yield _problem(device.problem)
    if device.advice is not None:
        yield "what would run", device.advice


def _problem(problem: Problem) -> tuple[str, str]:
    return problem.error, problem.message


def _size(count: int) -> str:
    """Return a number of bytes in the largest unit of which it has one."""
    amount, unit = float(count), 0
    while amount >= 1024 and unit + 1 < len(_UNITS):
        amount, unit = amount / 1024, unit + 1
    return f"{count:,} bytes" if unit == 0 else f"{amount:,.2f} {_UNITS[unit]}"


def _print_table(section: _Section, console: Console) -> None:
    table = Table(title=escape(section.title), title_justify="left", show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in section.rows:
        table.add_row(escape(name), escape(value))
    console.print(table)
    for note in section.notes:
        console.print(note, style="dim", markup=False, highlight=False)


def _print_lines(section: _Section, console: Console) -> None:
    console.print(section.title, markup=False, highlight=False, soft_wrap=True)
    for name, value in section.rows:
        console.print(f"  {name}: {value}", markup=False, highlight=False, soft_wrap=True)
    for note in section.notes:
        console.print(f"  ({note})", markup=False, highlight=False, soft_wrap=True)
