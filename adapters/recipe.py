"""`recipe_of`: maps a PEFT file's tensors to the places of its updates in a block; never reads a number.

Names and shapes come from a stranger: each is checked against the model's. Next to read: stored.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

import numpy as np

from headrace.adapters.layout import EMBED, HEAD, SITES, BlockLayout, ModelShape, module_row
from headrace.adapters.peft_config import WEIGHTS_FILE, PeftConfig
from headrace.adapters.safetensors_header import TensorEntry, refuse_file
from headrace.adapters.stored import DTYPES, Part, Recipe, Span, cut
from headrace.adapters.untrusted import in_turns

__all__ = ["PROMPT_KEY", "recipe_of", "virtual_recipe"]

PROMPT_KEY = "prompt_embeddings"
"""Name of the only tensor in the file of an adapter of virtual tokens."""
_JOINED = {site: modules for site, modules in SITES.items() if len(modules) > 1}
"""Modules that some models have as one, by its name."""
_FEED = ("gate", "up", "down", "gate_up")
_SHARED = "shared_"
"""Beginning of the roles of a shared expert's modules."""
_KINDS = {"F32": 0, "F16": 1, "BF16": 2}
_ALIGNMENT = 16  # bytes, since a tensor may follow another of smaller numbers
_Place = tuple[int, str]


def recipe_of(entries: dict[str, TensorEntry], config: PeftConfig, shape: ModelShape, *, in_pieces: bool) -> Recipe:
    """Return the recipe that turns a file's tensors into a block.

    Args:
        entries: The file's tensors.
        config: The parsed adapter_config.json.
        shape: The model's sizes.
        in_pieces: Whether the tensors will lie in several pieces of memory instead of one.

    Raises:
        ModelRejected: A tensor is missing, unknown, of another shape or of a dtype that is not in `DTYPES`.
    """
    pairs = _pairs(entries, config, shape)
    layout = BlockLayout.of(shape, {place: pair.rank for place, pair in pairs.items()})
    return _recipe(entries, list(_matrices(pairs, layout)), layout, layout.elements, in_pieces)


def virtual_recipe(entry: TensorEntry, shape: ModelShape, scale: float = 1.0) -> Recipe:
    """Return the recipe that turns the embeddings, or keys and values, of virtual tokens into one block, times `scale`.

    Raises:
        ModelRejected: Their dtype is not in `DTYPES`.
    """
    count, width = entry.shape
    matrix = _Matrix(PROMPT_KEY, 0, width, 1, scale)
    return _recipe({PROMPT_KEY: entry}, [matrix], BlockLayout.of(shape, {}), count * width, in_pieces=False)


def _recipe(
    entries: dict[str, TensorEntry], found: list[_Matrix], layout: BlockLayout, elements: int, in_pieces: bool
) -> Recipe:
    spans, ats, end = _placed(entries, {matrix.key for matrix in found})
    lines, scales, names = [], [], []
    for matrix in in_turns(sorted(found, key=lambda each: (ats[each.key], each.skip))):  # the order of memory
        kind, (rows, width) = _kind(entries, matrix.key), entries[matrix.key].shape
        size = DTYPES[kind].itemsize
        at = ats[matrix.key] + matrix.skip * width * size
        end_at = at + (matrix.rows or rows) * width * size
        for start, stop in cut(at, end_at) if in_pieces else [(at, end_at)]:
            first, count = (start - at) // size, (stop - start) // size
            lines.append((start, first, count, width, matrix.to, matrix.down, matrix.along, kind))
            scales.append(matrix.scale)
            names.append(matrix.key)
    parts = np.array(lines, np.int64)
    is_padded = int(parts[:, Part.COUNT].sum()) < elements
    return Recipe(layout, elements, spans, end, parts, np.array(scales, np.float32), tuple(names), is_padded)


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two tensors of one module's update."""

    a: str
    b: str
    rank: int
    scale: float
    skip: int = 0
    """Rows of B before those of the module, where the file has several modules in one."""
    groups: int = 1
    """Number of groups of rows of B, of each of which some rows are the module's."""
    group_rows: int = 0
    """Rows of B in a group, where there are several."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The place of a stored matrix, or of some of its rows, in the block, and the factor that it is multiplied by."""

    key: str
    to: int
    """Element of the block at which the first of the rows begins."""
    down: int
    """Elements of the block from one row to the next."""
    along: int
    """Elements of the block from one column to the next."""
    scale: float = 1.0
    skip: int = 0
    """Rows before the first."""
    rows: int | None = None
    """Number of rows; None for all."""


def _matrices(pairs: dict[_Place, _Pair], layout: BlockLayout) -> Iterator[_Matrix]:
    for (layer, module), pair in in_turns(pairs.items()):
        row = module_row(layer, module) if layer >= 0 else {"embed": EMBED, "head": HEAD}[module]
        inputs, outputs = layout.shape.size(module, max(layer, 0))
        a, b = int(layout.a[row]), int(layout.b[row])
        if module == "embed":  # stored [rank, vocab], used by token
            yield _Matrix(pair.a, a, 1, int(layout.ranks[row]))
        else:
            yield _Matrix(pair.a, a, inputs, 1)
        rows = outputs // pair.groups
        for group in range(pair.groups):
            skip = pair.skip + group * pair.group_rows
            yield _Matrix(pair.b, b + group * rows, 1, outputs, pair.scale, skip, rows)


def _placed(entries: dict[str, TensorEntry], wanted: Set[str]) -> tuple[tuple[Span, ...], dict[str, int], int]:
    """Return the spans of a file to read, the place of each matrix's tensor in memory, and the end of the last.

    Tensors that follow each other in the file do so in memory, except where a dtype needs padding to its alignment.
    """
    spans: list[Span] = []
    ats: dict[str, int] = {}
    end = 0
    for key, entry in in_turns(entries.items()):  # in the file's order
        if key not in wanted:
            continue
        last = spans[-1] if spans else None
        size = DTYPES[_kind(entries, key)].itemsize
        if last is None or last.offset + last.nbytes != entry.offset or end % size:
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            last = Span(entry.offset, 0, end)
            spans.append(last)
        ats[key] = end
        spans[-1] = replace(last, nbytes=last.nbytes + entry.nbytes)
        end += entry.nbytes
    return tuple(spans), ats, end


def _kind(entries: dict[str, TensorEntry], key: str) -> int:
    """Return the index of a tensor's dtype in `DTYPES`, or refuse the tensor."""
    kind = _KINDS.get(entries[key].dtype)
    if kind is None:
        refuse_file(WEIGHTS_FILE, f"the dtype of {key}", entries[key].dtype, ", ".join(_KINDS))
    return kind


def _pairs(entries: dict[str, TensorEntry], config: PeftConfig, shape: ModelShape) -> dict[_Place, _Pair]:
    """Return the updates in the file, in the order of layers and modules, each with two tensors of the right shapes.

    The one update of joined modules, as of Phi-3's `qkv_proj`, becomes one of each module: they share A and have some
    rows of B each.
    """
    keys: dict[_Place, dict[str, str]] = {}
    for key, entry in in_turns(entries.items()):
        found = _place(key, shape)
        if found is not None:
            place, half = found
            if half in (known := keys.setdefault(place, {})):
                refuse_file(WEIGHTS_FILE, "tensor", key, f"one of its module, which {known[half]} is")
            known[half] = key
        elif not _is_frozen_base(key, entry, shape):
            refuse_file(WEIGHTS_FILE, "tensor", key, _supported(shape))
    if not keys:
        refuse_file(WEIGHTS_FILE, "the number of updates", 0, "at least 1")
    pairs: dict[_Place, _Pair] = {}
    for (layer, module), both in in_turns(sorted(keys.items())):
        if len(both) < 2:
            half, key = next(iter(both.items()))
            refuse_file(WEIGHTS_FILE, "tensor", key, f"one with its {'B' if half == 'A' else 'A'} beside it")
        several = _JOINED.get(module, (module,))
        sizes = [shape.size(each, max(layer, 0)) for each in several]
        total = sum(size for _, size in sizes)
        pair = _checked_pair(entries, both["A"], both["B"], config, (sizes[0][0], total))
        if shape.grouped and len(several) > 1:
            pair = replace(pair, groups=shape.num_kv_heads, group_rows=total // shape.num_kv_heads)
        for each, (_, outputs) in zip(several, sizes, strict=True):
            if (layer, each) in pairs:
                refuse_file(WEIGHTS_FILE, "tensor", both["B"], f"one of its module, which {pairs[layer, each].b} is")
            pairs[layer, each] = pair
            pair = replace(pair, skip=pair.skip + outputs // pair.groups)
    return dict(sorted(pairs.items()))


def _supported(shape: ModelShape) -> str:
    """Return in words which modules adapters of the model may update."""
    names, layers = shape.names, range(shape.num_layers)
    updated = [name for name, role in names.modules if any(_module(role, layer, shape) for layer in layers)]
    modules = f"updates of {', '.join(updated)} in layers 0 to {shape.num_layers - 1}"
    tops = f"of {names.embedding.rpartition('.')[2]} and of {names.head}"
    return f"{modules}, {tops}{shape.left_out and f', since {shape.left_out}'}"


def _place(key: str, shape: ModelShape) -> tuple[_Place, str] | None:
    """Return ((layer, module), "A" or "B") for a tensor's name; None if it names no update that the model has."""
    found = shape.names.place(key)
    if found is None or found[0] >= shape.num_layers:
        return None
    layer, role, half = found
    module = role if layer < 0 else _module(role, layer, shape)
    return None if module is None else ((layer, module), half)


def _module(role: str, layer: int, shape: ModelShape) -> str | None:
    """Return the module, or several as one, that a role is in a layer; None if the layer has no such product.

    It may have a shared expert in place of a feed, or take its keys for values.
    """
    module = role.removeprefix(_SHARED)
    if module in _FEED and shape.is_shared(layer) != (module != role):
        return None
    return module if any(shape.size(each, layer)[1] for each in _JOINED.get(module, (module,))) else None


def _is_frozen_base(key: str, entry: TensorEntry, shape: ModelShape) -> bool:
    size = (shape.vocab_size,) if key.endswith(".bias") else (shape.vocab_size, shape.hidden_size)
    return shape.names.is_frozen(key) and entry.shape == size


def _checked_pair(entries: dict[str, TensorEntry], a: str, b: str, config: PeftConfig, size: tuple[int, int]) -> _Pair:
    inputs, outputs = size
    module = a.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")[0]
    rank = config.rank_of(module)
    for key, expected in ((a, (rank, inputs)), (b, (outputs, rank))):
        if entries[key].shape != expected:
            refuse_file(
                WEIGHTS_FILE, f"the shape of {key}", entries[key].shape, f"{expected}: the model's sizes, and the rank"
            )
    return _Pair(a, b, rank, config.scale_of(module))
