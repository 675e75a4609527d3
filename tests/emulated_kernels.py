"""The GPU kernels of `ops/cuda/` but those of products and attention, in slow, obvious torch, by their names.

Each function takes what its kernel's launch passes, by the kernel's own parameter names, and does what the docstring of
the launching function promises. What a GPU would answer with an illegal access or an undefined order raises `Misuse`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from headrace.ops.cpu.logprobs import logprobs
from headrace.ops.cpu.sample import Choosing, sample

__all__ = [
    "KERNELS", "Misuse", "attend", "attend_rows", "demand", "gated", "normed", "prepare", "rotate_and_store", "store",
    "turned", "unpack",
]  # fmt: skip

LARGEST = 3.38e38
_ASKED: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
"""The filters that a search was launched with, by the address of its result, for the choice that reads it."""


class Misuse(Exception):
    """A launch that no GPU would survive, or whose result would be undefined."""


def demand(condition: object, what: str) -> None:
    if not condition:
        raise Misuse(what)


# -- words ----------------------------------------------------------------------------------------------------------


def scatter(at: SimpleNamespace) -> None:
    places, words = at.staged[1 : 1 + 2 * at.count : 2].long(), at.staged[2 : 2 + 2 * at.count : 2]
    demand(len(places.unique()) == len(places), "a place comes twice among the words of one kernel")
    demand(not len(places) or (places.min() >= 0 and places.max() < len(at.target)), "a word outside the arena")
    at.target[places] = words


def apply(at: SimpleNamespace) -> None:
    number = int(at.turn[0])
    line = torch.empty(at.stride, dtype=torch.int32)
    line.copy_(at.words[number], non_blocking=True)  # a fault if the host writes there too early
    scatter(SimpleNamespace(target=at.target, staged=line, count=int(line[0])))
    at.turn.copy_(torch.tensor([(number + 1) % at.turns, number]))
    if at.ROWS:
        demand(at.ROWS >= at.size == len(at.batch), "rows that nobody looks at")
        at.active[: at.size] = torch.where(at.stopped[at.batch.long()] != 0, at.padding, at.batch)


def leave(at: SimpleNamespace) -> None:
    demand(at.ROWS >= at.size == len(at.ids) <= at.lines.shape[1], "ids that nobody asks for")
    at.lines[int(at.turn[1]), : at.size].copy_(at.ids, non_blocking=True)


# -- decode inputs --------------------------------------------------------------------------------------------------


def prepare(at: SimpleNamespace) -> None:
    rows = at.rows.long()
    position = at.lengths[rows].clamp(max=at.context - 1).long()
    demand((position >= 0).all(), "a row of a negative length")
    page = at.table[rows, position // at.PAGE].long()
    at.tokens.copy_(at.pool[rows, position])
    at.positions.copy_(position)
    at.slots.copy_(page * at.PAGE + position % at.PAGE)
    at.seq_lens.copy_(position + 1)
    at.tails.copy_(position + 1 - (at.columns - 1) * at.PAGE)
    used = torch.arange(at.columns) * at.PAGE <= position[:, None]
    at.pages.copy_(torch.where(used, at.table[rows, : at.columns], at.pages))


# -- norms, products ------------------------------------------------------------------------------------------------


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.float()


def rms_norm(at: SimpleNamespace) -> None:
    value = at.x.float()
    if at.ADD:
        value = value + at.residual.float()
        at.residual.copy_(value)
    at.out.copy_(normed(value, at.weight, at.eps))


def layer_norm(at: SimpleNamespace) -> None:
    value = at.x.float().reshape(len(at.x), -1, at.size)  # parts that are normed by themselves
    value = value - value.mean(-1, keepdim=True)
    normed = (value / torch.sqrt((value * value).mean(-1, keepdim=True) + at.eps)).flatten(1) * at.weight.float()
    demand(at.BIAS == (at.bias is not None), "a bias that the kernel does not read, or none that it does")
    at.out.copy_(normed + at.bias.float() if at.BIAS else normed)


def activate(at: SimpleNamespace) -> None:
    value = at.x.float()
    demand(at.x.is_contiguous(), "rows that are not contiguous")
    shares = {
        "relu": (value > 0).float(),
        "relu2": value.clamp(min=0),
        "gelu": (1 + torch.erf(value / math.sqrt(2))) / 2,
        "gelu_tanh": (1 + torch.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3))) / 2,
    }
    at.x.copy_(value * shares[at.KIND])


def finish_norm(at: SimpleNamespace) -> None:
    demand(at.squares.shape == (at.parts, at.rows) and len(at.x) == at.rows, "squares of another sum")
    at.x.copy_(at.x.float() * torch.rsqrt(at.squares.sum(0) / at.size + at.eps)[:, None])


def gated(both: Tensor) -> Tensor:
    gate, up = both.float().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def activate_mul(at: SimpleNamespace) -> None:
    gate, up = at.gate_up.float().chunk(2, -1)
    at.out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up if at.GELU else gated(at.gate_up))


# -- embeddings ---------------------------------------------------------------------------------------------------


def read_rows(at: SimpleNamespace) -> None:
    """The bits of the layout's own `dense`, so that a table in codes gives the embeddings of a plain one."""
    memory, ids = at.memory, at.ids.long()
    layout = importlib.import_module("headrace.ops.cuda.codes.layout").CodeLayout(at.KIND, memory.scales.dtype)
    shape = (len(memory.words), at.chunks * at.KIND.chunk)
    demand(0 <= int(ids.min()) and int(ids.max()) < shape[0], "a row beyond the table")
    parts = {"codes": memory.words.view(torch.uint8)}
    parts |= {name: getattr(memory, name) for name in layout.parts(shape) if name != "codes"}
    at.out.copy_(layout.dense(parts, shape, torch.bfloat16)[ids].view(torch.int32))


# -- adapters -------------------------------------------------------------------------------------------------------


def group(at: SimpleNamespace) -> None:
    slots = at.slots[at.batch.long()]
    order = torch.argsort(torch.where(slots < 0, 1 << 30, slots), stable=True)
    demand(len(at.sorted) == len(at.order) == len(at.token_slots) == len(slots) == at.rows, "a batch of another size")
    at.order.copy_(order)
    at.token_slots.copy_(slots)
    place = 0
    while place < len(order):
        slot = int(slots[order[place]])
        alike = int((slots[order[place:]] == slot).sum())
        count = min(at.ROWS, alike)
        for other in range(place, place + count):
            at.sorted[other] = torch.tensor([slot, other, count if other == place else 0, int(order[other])])
        place += count


def enter(at: SimpleNamespace) -> None:
    leads = at.sorted[at.sorted[:, 2] > 0]
    at.entries.copy_(torch.tensor([-1, 0, 0, 0]))
    at.entries[: len(leads)] = leads
    at.counts.copy_(torch.tensor([int((leads[:, 0] >= 0).sum()), len(leads)]))


def pick(at: SimpleNamespace) -> None:
    at.own.copy_(at.table[max(int(at.entries[0, 0]), 0)])


def unpack(at: SimpleNamespace) -> None:
    for (start, first, count, columns, to, down, along, kind), scale in zip(
        at.parts.tolist(), at.scales.tolist(), strict=True
    ):
        if kind == at.KIND:
            here = start % at.STAGED // at.staged.itemsize
            demand(here + count <= len(at.staged), "a part beyond the staged bytes")
            element = first + torch.arange(count)
            place = to + element // columns * down + element % columns * along
            demand(not count or 0 <= int(place.min()) <= int(place.max()) < len(at.target), "a place beyond the target")
            at.target[place] = (at.staged[here : here + count].float() * scale).to(at.target.dtype)


def worn_tokens(at: SimpleNamespace) -> list[tuple[int, Tensor]]:
    """(slot, its tokens) of every entry that has any."""
    found = []
    for slot, start, count, first in at.entries.tolist():
        order, rows = getattr(at, "order", None), getattr(at, "ROWS", 1)
        demand(count <= rows, "an entry of more tokens than a program holds")
        tokens = torch.arange(first, first + count) if order is None else order[start : start + count].long()
        if count:
            found.append((slot, tokens))
    counts = getattr(at, "counts", None)
    if counts is not None and getattr(at, "order", None) is not None:
        demand(int(counts[1]) == len(found), "a count of other entries")
    return found


def module_of(at: SimpleNamespace, slot: int, module: int) -> tuple[int, int, int, int]:
    """Where A and B of a module are, its rank, and the ranks before it."""
    a, b, rank, before = at.table[slot, at.index + module].tolist()
    demand(at.table.shape[1] == at.modules and before + rank <= at.PLANE, "a table of another shape")
    return 8 * a, 8 * b, rank, before


def shrink(at: SimpleNamespace) -> None:
    """All of t in the first plane; the others hold nothing."""
    for slot, tokens in worn_tokens(at):
        if slot >= 0:
            a, _, _, _ = module_of(at, slot, 0)
            _, _, rank, before = module_of(at, slot, at.MODULES - 1)
            ranks = rank + before
            a_RI = at.arena[a : a + ranks * at.size_in].view(ranks, at.size_in).float()
            at.planes[:, tokens, :ranks] = 0.0
            at.planes[0, tokens, :ranks] = at.x[tokens].float() @ a_RI.T


def look_up(at: SimpleNamespace) -> None:
    for token, slot in enumerate(at.slots.tolist()):
        if slot >= 0:
            a, _, rank, _ = module_of(at, slot, 0)
            first = a + int(at.tokens[token]) * rank
            at.planes[0, token, :rank] = at.arena[first : first + rank].float()


def update(at: SimpleNamespace, slot: int, tokens: Tensor, module: int, size: int) -> Tensor:
    _, b, rank, before = module_of(at, slot, module)
    t = at.planes[:, tokens, before : before + rank].sum(0).to(at.arena.dtype).float()
    return t @ at.arena[b : b + rank * size].view(rank, size).float()


def expand(at: SimpleNamespace) -> None:
    sizes = [at.size_0, at.size_1, at.size_2][: at.MODULES]
    demand(at.y.shape[1] == sum(sizes) and len(at.planes) == at.SPLITS, "a product of another shape")
    for slot, tokens in worn_tokens(at):
        total = at.y[tokens].float()
        if slot >= 0:
            total += torch.cat([update(at, slot, tokens, module, size) for module, size in enumerate(sizes)], 1)
        at.out[tokens] = (gated(total) if at.GATED else total).to(at.out.dtype)


def alike(at: SimpleNamespace) -> SimpleNamespace:
    """Rows of one adapter or of none, one by one."""
    worn = int(at.entries[0, 0])
    slots = at.slots.tolist() if hasattr(at, "slots") else [worn] * at.rows
    demand(len(slots) == at.rows and {slot for slot in slots if slot >= 0} <= {worn}, "more adapters than one")
    entries = torch.tensor([[slot, row, 1, row] for row, slot in enumerate(slots)])
    return SimpleNamespace(**vars(at) | {"entries": entries})  # a replay comes with the same `at` again


def shrink_alike(at: SimpleNamespace) -> None:
    shrink(alike(at))


def expand_alike(at: SimpleNamespace) -> None:
    expand(alike(at))


def vector_shrink(at: SimpleNamespace) -> None:
    at.out.copy_(at.x.float() @ at.weight.float().T)
    at.entries, at.PLANE = torch.tensor([[int(at.slots[0]), 0, 1, 0]]), at.planes.shape[2]
    shrink(at)


def norm_shrink(at: SimpleNamespace) -> None:
    """The sum, all of its squares in the first part; t is left to `vector_expand`."""
    slot, total = int(at.slots[0]), at.y.float()
    if at.ADD:
        demand(at.total.data_ptr() not in {at.residual.data_ptr(), at.y.data_ptr()}, "a sum over what others read")
        total = total + at.residual.float()
    if at.UPDATE and slot >= 0:
        before = SimpleNamespace(**vars(at) | {"index": at.index_before, "planes": at.low_before})
        before.PLANE = at.low_before.shape[2]
        total = total + update(before, slot, torch.tensor([0]), 0, at.size)
    if at.ADD:
        at.total.copy_(total)
    at.out.copy_(total * at.weight.float())
    at.squares.zero_()
    at.squares[0] = (total * total).sum()


def vector_expand(at: SimpleNamespace) -> None:
    slot, sizes = int(at.slots[0]), [size for size in (at.size_0, at.size_1, at.size_2) if size]
    demand(len(at.weight) == sum(sizes) and len(at.low) % len(sizes) == 0, "a product of another shape")
    total = at.x.float() @ at.weight.float().T
    if slot >= 0:
        at.PLANE, updates = len(at.low), []
        for module, size in enumerate(sizes):
            a, b, rank, _ = module_of(at, slot, module)
            a_RI = at.arena[a : a + rank * at.size_in].view(rank, at.size_in).float()
            updates.append(at.x.float() @ a_RI.T @ at.arena[b : b + rank * size].view(rank, size).float())
        total += torch.cat(updates, 1)
    total *= torch.rsqrt(at.squares.sum() / at.size_in + at.eps)
    at.out.copy_(gated(total) if at.GATED else total)


def expand_norm(at: SimpleNamespace) -> None:
    total = at.y.float() + at.residual.float()
    for token, slot in enumerate(at.slots.tolist()):
        if slot >= 0:
            total[token] += update(at, slot, torch.tensor([token]), 0, at.size)[0]
    at.residual.copy_(total)
    at.out.copy_(normed(total, at.weight, at.eps))


# -- attention ------------------------------------------------------------------------------------------------------


def turned(x_NHD: Tensor, norm_D: Tensor | None, cos_sin_PD: Tensor, positions_N: Tensor, eps: float) -> Tensor:
    x_NHD = x_NHD.float() if norm_D is None else normed(x_NHD.float(), norm_D, eps)
    cos, sin = cos_sin_PD[positions_N.long()][:, None].chunk(2, -1)
    low, high = x_NHD.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def store(kv: Tensor, slots_N: Tensor, part: int, x_NKD: Tensor, scale: float) -> None:
    demand((slots_N < kv.shape[0] * kv.shape[2]).all(), "a slot outside the cache")
    here = slots_N >= 0
    slots, x = slots_N[here].long(), x_NKD[here]
    if kv.dtype == torch.float8_e4m3fn:
        x = (x / scale).clamp(-448.0, 448.0)
    x = torch.where(x.abs() < LARGEST, x, 0.0).to(kv.dtype)
    kv.view(torch.uint8)[slots // kv.shape[2], part, slots % kv.shape[2]] = x.view(torch.uint8)


def rotate_and_store(y: Tensor, q_out: Tensor, to: Any, eps: float) -> None:
    """Make rotated queries of packed `y`, and store its keys and values at `to`, a `HeadTargets`."""
    demand(len(y[0]) == q_out.shape[1] + 2 * to.kv_layer.shape[3] * 128, "another number of heads")
    norm_rope(SimpleNamespace(
        qkv=y, q_out=q_out, HALF=64, HEADS=q_out.shape[1] // 128, KV_HEADS=to.kv_layer.shape[3], q_norm=to.q_norm_D,
        k_norm=to.k_norm_D, NORM_VALUES=False, KEYS_ARE_VALUES=False,
        cos_sin=to.cos_sin_PD, positions=to.positions_N, slots=to.slots_N, kv=to.kv_layer, eps=eps,
        k_scale=to.scales.k, v_scale=to.scales.v,
    ))  # fmt: skip


def normed_values(v_NKD: Tensor, eps: float) -> Tensor:
    return normed(v_NKD, torch.ones(v_NKD.shape[-1]), eps)


def norm_rope(at: SimpleNamespace) -> None:
    dim, heads, kv_heads = 2 * at.HALF, at.HEADS, at.KV_HEADS
    qkv_NAD = at.qkv.reshape(len(at.qkv), -1, dim)
    demand(qkv_NAD.shape[1] == heads + (1 if at.KEYS_ARE_VALUES else 2) * kv_heads, "heads that nobody reads, or lack")
    if kv_heads:
        k_NKD = turned(qkv_NAD[:, heads : heads + kv_heads], at.k_norm, at.cos_sin, at.positions, at.eps)
        store(at.kv, at.slots, 0, k_NKD, at.k_scale)
        v_NKD = qkv_NAD[:, -kv_heads:].float()
        demand(not at.NORM_VALUES or at.q_norm is not None, "norms of values alone")
        store(at.kv, at.slots, 1, normed_values(v_NKD, at.eps) if at.NORM_VALUES else v_NKD, at.v_scale)
    q_NHD = turned(qkv_NAD[:, :heads], at.q_norm, at.cos_sin, at.positions, at.eps)
    at.q_out.view(len(at.qkv), -1)[:, : heads * dim].copy_(q_NHD.flatten(1))


def attend(
    q_NHD: Tensor, kv: Tensor, pages: Tensor, length: int, *, scale: float, window: int | None, v_scale: float = 1.0,
    cap: float | None = None, sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The last N positions of a row of `length` tokens, causal: float32 [N, H, D]; `kv` is `[pages, 2, T, K, D]`."""
    size, count, keys = kv.shape[2], len(q_NHD), kv.shape[3]
    first = 0 if window is None else max(length - count - window + 1, 0)  # the oldest token that any position sees
    pages = pages[: -(-length // size)].long()
    demand(len(pages) * size >= length, "a row longer than its pages")
    lowest, highest = (int(page) for page in pages.aminmax())
    demand(lowest >= 0 and highest < len(kv), "a page outside the cache")
    raw = kv.view(torch.uint8)[pages[first // size :]].view(kv.dtype).float()  # an fp8 cache cannot be indexed
    begin, end = first % size, length - first // size * size
    keys_KSD, values_KSD = (raw[:, part].flatten(0, 1)[begin:end].transpose(0, 1) for part in (0, 1))
    q_NKGD = q_NHD.float().unflatten(1, (keys, -1))
    scores_KRS = q_NKGD.transpose(0, 1).flatten(1, 2) @ keys_KSD.mT * scale  # rows are positions and heads of a group
    if cap is not None:
        scores_KRS = cap * torch.tanh(scores_KRS / cap)
    if count > 1:
        at, seen = torch.arange(length - count, length)[:, None], torch.arange(first, length)[None]
        hidden = seen > at if window is None else (seen > at) | (seen <= at - window)
        scores_KRS.masked_fill_(hidden.repeat_interleave(q_NKGD.shape[2], 0), -math.inf)
    if sinks_H is not None:
        demand(len(sinks_H) == q_NHD.shape[1] and sinks_H.dtype == torch.float32, "sinks of another shape")
        sinks_KR1 = sinks_H.view(keys, 1, -1).expand(-1, count, -1).reshape(keys, -1, 1)
        scores_KRS = torch.cat((scores_KRS, sinks_KR1), -1)
    out_KRD = torch.softmax(scores_KRS, -1)[..., : values_KSD.shape[1]] @ values_KSD
    return out_KRD.unflatten(1, (count, -1)).transpose(0, 1).flatten(1, 2) * v_scale


def attend_rows(q_BHD: Tensor, kv: Tensor, pages_B: Any, lengths: list[int], **how: Any) -> Tensor:
    """One position of each row: float32 [B, H, D]. Rows of one token, as graphs are padded with, are done at once."""
    out_BHD = torch.empty(q_BHD.shape, dtype=torch.float32)
    ones = [row for row, length in enumerate(lengths) if length == 1]
    if ones:
        out_BHD[ones] = _attend_to_themselves(q_BHD[ones], kv, torch.stack([pages_B[row][0] for row in ones]), **how)
    for row, length in enumerate(lengths):
        if length != 1:
            out_BHD[row] = attend(q_BHD[row : row + 1], kv, pages_B[row], length, **how)[0]
    return out_BHD


def _attend_to_themselves(
    q_BHD: Tensor, kv: Tensor, page_B: Tensor, *, scale: float, window: int | None, v_scale: float = 1.0,
    cap: float | None = None, sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rows of a single token, which has the whole weight, or what a sink leaves of it."""
    demand(page_B.min() >= 0 and page_B.max() < len(kv), "a page outside the cache")
    raw = kv.view(torch.uint8)[page_B.long(), :, 0].view(kv.dtype).float()
    keys_BHD, values_BHD = raw.repeat_interleave(q_BHD.shape[1] // kv.shape[3], 2).unbind(1)
    if sinks_H is not None:
        demand(len(sinks_H) == q_BHD.shape[1] and sinks_H.dtype == torch.float32, "sinks of another shape")
        scores_BH = (q_BHD.float() * keys_BHD).sum(2) * scale
        scores_BH = scores_BH if cap is None else cap * torch.tanh(scores_BH / cap)
        values_BHD = values_BHD * torch.sigmoid(scores_BH - sinks_H)[..., None]
    return values_BHD * v_scale


# -- sampling -------------------------------------------------------------------------------------------------------


def shape(at: SimpleNamespace) -> None:
    """One row after the other, in float32."""
    for place, row in enumerate(at.rows.tolist()):
        value = at.logits[place].float()
        kind, least = at.table[row, :2].tolist()
        if kind:
            repetition, frequency, presence = at.factors[row, 3:6]
            extra = at.added[row] if kind & 1 else torch.zeros_like(value)
            mark = at.marks[row] if kind & 2 else torch.zeros_like(value, dtype=torch.int32)
            banned = extra.isneginf() | ((mark & 2 != 0) & (int(at.positions[place]) + 1 < least))
            if kind & 8:
                words = at.bits[row].repeat_interleave(32)[: len(value)]
                banned |= (words >> torch.arange(len(value)).remainder(32)) & 1 == 0
            shaped = value + extra.where(~extra.isneginf(), 0.0)
            count = (mark >> 2).float()
            less = torch.where(shaped > 0, shaped / repetition, shaped * repetition)
            less = less - frequency * count - presence * (count > 0)
            shaped = torch.where(mark & ~2 != 0, less, shaped).masked_fill(banned, -math.inf)
            shaped = torch.where(value.isnan() | value.isposinf(), value, shaped)
            at.states[place].fill_(int((value > -math.inf).any()) + 2 * int((shaped.isnan() | shaped.isposinf()).any()))
            value = shaped
        at.out[place] = value


def words(at: SimpleNamespace) -> None:
    for place, row in enumerate(at.rows.tolist()):
        known = int(at.positions[place]) + 1
        line, pool = at.words[row].tolist(), at.pool[row, :known].tolist()
        for word in range(int(at.table[row, 2])):
            last, before, start = line[word * at.WORD_COLUMNS : (word + 1) * at.WORD_COLUMNS]
            demand(0 < before <= len(line) - start, "a bad word outside its row")
            if pool[-before:] == line[start : start + before] and at.out[place, last] < math.inf:
                at.out[place, last] = -math.inf


def count_chosen(at: SimpleNamespace) -> None:
    for place, row in enumerate(at.rows.tolist()):
        kind, token = int(at.table[row, 0]), int(at.ids[place])
        if kind & 2 and token >= 0:
            at.marks[row, token] += 4
        if kind and token < 0 and int(at.states[place].max()) == 1:
            at.ids[place] = -2


def count_known(at: SimpleNamespace) -> None:
    tokens = at.pool[at.row, : at.known].long()
    at.marks[at.row, tokens[: at.prompt_len].unique()] |= 1
    at.marks[at.row] += 4 * torch.bincount(tokens[at.prompt_len :], minlength=at.size).int()


def merge(at: SimpleNamespace) -> None:
    """The whole line, by the CPU's function."""
    for place, row in enumerate(at.rows.tolist()):
        wanted, token = int(at.wants[row]), max(int(at.tokens[place]), 0)
        if wanted:
            demand(wanted - 1 <= at.width, "more likeliest tokens than a line has room for")
            (found,) = logprobs(at.logits[place : place + 1], [token], [wanted - 1])
            at.values[place, 0], at.out[place, 1] = found.logprob, found.rank
            for step, (other, value) in enumerate(found.top):
                at.out[place, at.HEAD + step], at.values[place, at.HEAD + at.width + step] = other, value


def nothing(at: SimpleNamespace) -> None:
    """A step towards what `search` does at once."""


def search(at: SimpleNamespace) -> None:
    _ASKED[at.least.data_ptr()] = (at.top_k, at.top_p, at.min_p)


def scores(at: SimpleNamespace) -> None:
    """The whole choice, by the CPU's sampler, so that both devices give the same tokens; filters only if searched."""
    rows = at.rows.long()
    count = len(rows)
    asked = _ASKED[at.least.data_ptr()] if at.FILTER else None
    columns = [at.temperature[rows].tolist()]
    columns += [each[rows].tolist() for each in asked] if asked else [[0] * count, [1.0] * count, [0.0] * count]
    columns += [at.seed[rows].tolist(), (at.positions.long() + 1).tolist()]
    tokens = at.tokens if at.MAPPED else None
    chosen = torch.tensor(sample(at.logits, [Choosing(*each) for each in zip(*columns, strict=True)], tokens))
    at.scores[:count].fill_(-math.inf)
    at.scores[:count, 0] = torch.where(chosen < 0, math.inf, 0.0)
    at.ids[:count, 0] = chosen.int()


def choose(at: SimpleNamespace) -> None:
    count = len(at.rows)
    best = at.scores[:count].argmax(1, keepdim=True)
    chosen = at.ids[:count].gather(1, best)[:, 0]
    finite = at.scores[:count].gather(1, best)[:, 0].isfinite()
    at.out[:count] = torch.where(finite, chosen, -1)
    real = at.rows != at.padding_row
    rows, position = at.rows[real].long(), at.positions[real].int() + 1
    demand(len(rows.unique()) == len(rows), "a row comes twice in one batch")
    at.lengths[rows] = position
    ends = (at.stops[rows] == chosen[real, None]).any(1) & finite[real] if at.STOPS else None
    if ends is not None:
        at.stopped[rows] = ends.int()
    inside = position < at.context
    at.pool[rows[inside], position[inside].long()] = torch.where(finite, chosen, 0)[real][inside].int()


KERNELS: dict[str, Callable[[SimpleNamespace], None]] = {
    "_apply_kernel": apply,
    "_leave_kernel": leave,
    "_scatter_kernel": scatter,
    "_prepare_kernel": prepare,
    "_norm_rope_kernel": norm_rope,
    "_rms_norm_kernel": rms_norm,
    "_layer_norm_kernel": layer_norm,
    "_activate_kernel": activate,
    "_finish_norm_kernel": finish_norm,
    "_activate_mul_kernel": activate_mul,
    "_group_kernel": group,
    "_enter_kernel": enter,
    "_unpack_kernel": unpack,
    "_read_rows_kernel": read_rows,
    "_shrink_row_kernel": shrink,
    "_shrink_group_kernel": shrink,
    "_shrink_long_kernel": shrink,
    "_vector_shrink_kernel": vector_shrink,
    "_pick_kernel": pick,
    "_norm_shrink_kernel": norm_shrink,
    "_vector_expand_kernel": vector_expand,
    "_shrink_alike_kernel": shrink_alike,
    "_expand_alike_kernel": expand_alike,
    "_look_up_kernel": look_up,
    "_expand_row_kernel": expand,
    "_expand_group_kernel": expand,
    "_expand_norm_kernel": expand_norm,
    "_shape_kernel": shape,
    "_words_kernel": words,
    "_count_chosen_kernel": count_chosen,
    "_count_known_kernel": count_known,
    "_list_kernel": nothing,
    "_merge_kernel": merge,
    "_survey_kernel": nothing,
    "_bounds_kernel": nothing,
    "_gather_kernel": nothing,
    "_search_kernel": search,
    "_scores_kernel": scores,
    "_choose_kernel": choose,
}
