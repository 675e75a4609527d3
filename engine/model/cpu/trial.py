"""`try_fallback`: tries the fallback on a small model of the same kind, with random weights, before any weight is read.

transformers computes two texts whole, by its plainest attention and with a mask; the fallback computes them side by
side, in pieces, over pages. What a config or a trace does not show, such as a module that keeps something from one call
to the next, is found here. Next to read: ../fallback/small.py, which makes the small model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import accumulate
from typing import Final, NoReturn, TypeAlias

import torch
from torch import Tensor

from headrace.engine.errors import ModelRejected
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.cpu.rows import CpuRows
from headrace.engine.model.cpu.sizing import runs_native
from headrace.engine.model.fallback.model import FallbackModel
from headrace.engine.model.fallback.network import FallbackDecoder
from headrace.engine.model.fallback.small import SmallModel, small_model
from headrace.engine.model.fallback.state import changed, state_of
from headrace.engine.model.shared.kv_layout import kv_layout
from headrace.engine.model.spec import MixerSpec
from headrace.engine.scheduling.asked import Asked, Sampling
from headrace.engine.scheduling.plan import Capacity, NewRow, PageEntry, StepPlan, Work
from headrace.engine.scheduling.request import Request
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.kv import CpuKv
from headrace.ops.cpu.linear import CpuLinear
from headrace.ops.cpu.native.library import Context
from headrace.ops.cpu.step import CpuStep

__all__ = ["try_fallback"]

_Paged: TypeAlias = FallbackDecoder[CpuLinear, CpuStep, CpuKv]

_PAGE: Final = 4
_CUTS: Final = ((8, 9, 1, 1, 4), (8, 1, 2, 1, 2))
"""Tokens of each text in each step."""
_TOLERANCE: Final = 1e-4
"""Largest difference of results in float32, in units of the largest one or of 1."""
_ROUNDED: Final = 0.1
"""Largest error of most tokens, in the same units, where products round their inputs to bfloat16."""


def try_fallback(model: FallbackModel, kinds: Collection[str] = ()) -> frozenset[str]:
    """Compare what the fallback and transformers compute for a small model of the kind of `model`.

    Args:
        model: The model.
        kinds: Kinds of its products and norms (../fallback/inner.py) that the device would compute.

    Returns:
        Those of `kinds` that the small model has, and with which it computes the same if the device's own are in the
        place of them all.

    Raises:
        ModelRejected: They differ, the module keeps state from one call to the next, or no such model can be made.
    """
    with torch.inference_mode():
        small = small_model(model)
        generator = torch.Generator().manual_seed(3)
        texts = [torch.randint(small.spec.vocab_size, (sum(cuts),), generator=generator) for cuts in _CUTS]
        expected = [small.whole(ids_N) for ids_N in texts]
        if (why := _differs(expected, _in_pieces(small, texts))) is not None:
            _refuse(model, why)
        tried = small.kinds.intersection(kinds)
        if not tried or _works(small, texts, expected, tried):
            return tried
        taken = frozenset(kind for kind in tried if _works(small, texts, expected, {kind}))
        return taken if _works(small, texts, expected, taken) else frozenset()


def _works(small: SmallModel, texts: list[Tensor], expected: list[Tensor], taken: Collection[str]) -> bool:
    """Return whether the module works with the device's products and norms in the place of those of the kinds `taken`.

    In float32 results are to be the same, with weights in bfloat16 about so.
    """
    narrow = torch.float32 if runs_native(small.spec) else torch.bfloat16
    try:
        exact = _in_pieces(small, texts, activations=torch.float32, taken=taken)
        rounded = _in_pieces(small, texts, dtype=torch.bfloat16, activations=narrow, taken=taken)
    except Exception:  # another library's code, whose modules are not what it expects
        return False
    if _differs(expected, exact) is not None:
        return False
    # Rounding may send a token to another expert, so that some results may differ.
    error_N = torch.cat([_error(wanted_NX, got_NX) for wanted_NX, got_NX in zip(expected, rounded, strict=True)])
    return bool(error_N.median() <= _ROUNDED)


def _error(wanted_NX: Tensor, got_NX: Tensor) -> Tensor:
    """Return the largest error of each token, [N], in units of the largest result or of 1."""
    return (wanted_NX - got_NX).abs().amax(1) / max(1.0, float(wanted_NX.abs().max()))


def _differs(expected: list[Tensor], found: list[Tensor]) -> str | None:
    """Return where results differ; None if they do not."""
    for row, (wanted_NX, got_NX) in enumerate(zip(expected, found, strict=True)):
        error_N = _error(wanted_NX, got_NX)
        wrong = (~(error_N <= _TOLERANCE)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            step = sum(end <= at for end in accumulate(_CUTS[row]))
            return (
                f"differs over pages: {float(error_N[at]):.2g} of the largest number at token {at} of text {row}, in "
                f"step {step} ({_CUTS[row][step]} tokens of it), where {_TOLERANCE:g} is allowed"
            )
    return None


def _in_pieces(
    small: SmallModel,
    texts: list[Tensor],
    dtype: torch.dtype = torch.float32,
    activations: torch.dtype | None = None,
    taken: Collection[str] = (),
) -> list[Tensor]:
    """Return what `SmallModel.whole` returns of each text, computed side by side over pages."""
    spec = small.spec
    context = Context(1) if runs_native(spec) else None
    positions = max(len(ids_N) for ids_N in texts)
    ops = cpu_ops(spec, page_size=_PAGE, max_positions=positions, dtype=dtype, context=context)
    with ExitStack() as opened:
        for each in ops.values():
            opened.enter_context(closing(each))
        network: _Paged = small.paged(
            ops, lambda step: step.positions_N, dtype=dtype, activations=activations, taken=taken
        )
        before = state_of(network.base)
        pieces: list[list[Tensor]] = [[] for _ in texts]
        for row, result_NX in _steps(network, ops, texts):
            pieces[row].append(result_NX)
        if (name := changed(before, network.base)) is not None:
            _refuse(small.origin, f"keeps state from one call to the next, in {name}")
    return [torch.cat(parts) for parts in pieces]


def _steps(network: _Paged, ops: Mapping[MixerSpec, CpuOps], texts: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield (text, results of some of its tokens) for each step and text."""
    wide = -(-max(len(ids_N) for ids_N in texts) // _PAGE)
    capacity = Capacity(
        num_pages=len(texts) * wide,
        page_size=_PAGE,
        max_rows=len(texts),
        max_batched_tokens=64,
        max_context=wide * _PAGE,
        vocab_size=network.spec.vocab_size,
    )
    rows, plan = CpuRows(capacity), StepPlan(0)
    for row, ids_N in enumerate(texts):
        plan.new_rows.append(NewRow(row, 0, ids_N.tolist(), Sampling(), -1))
        # The rows' pages lie interleaved, and backwards, so that no page has the number of its place.
        places = range(-(-len(ids_N) // _PAGE))
        plan.entries.extend(PageEntry(row, place, len(texts) * (wide - 1 - place) + row) for place in places)
    rows.update(plan)
    kv = CpuKv.allocate(kv_layout(network.spec, ops), capacity.num_pages, next(iter(ops.values())).dtype)
    done = [0] * len(texts)
    for counts in zip(*_CUTS, strict=True):
        works = []
        for row, count in enumerate(counts):
            request = Request(Asked(limit=capacity.max_context, sampling=Sampling()), texts[row].tolist())
            works.append(Work(request, row, done[row], count, True))
            done[row] += count
        batch = rows.batch(works)
        steps = {mixer: each.prepare(batch.paged) for mixer, each in ops.items()}
        result_NX = network.hidden(batch.tokens_N, steps, kv)
        if network.spec.has_head:
            result_NX = network.logits(result_NX)
        for index, last in zip(batch.samplers, batch.last_S.tolist(), strict=True):
            work = works[index]
            yield work.row, result_NX[last + 1 - work.num_tokens : last + 1]


def _refuse(model: FallbackModel, why: str) -> NoReturn:
    name = model.spec.architecture
    raise ModelRejected(
        f"architectures: a trial of transformers' {name} with random weights {why}", field="architectures", value=name
    )
