"""Every kernel and tiling, compiled for every kind of GPU that the engine runs on, without one of them.

The launches are those of the engine's own code, for the sizes of real models, so a tiling is the one that would be
chosen there. What a kernel wants of a block's shared memory must be what the GPU has. Usually Hopper gets the kernels
of a decode step, and those with the fewest features and the least shared memory get all kernels, each for one size of
model and batch; of the other GPUs each commit takes one. A fifth of these cases compile, which a commit's hash chooses,
and launches of the others are noted alone; of what differs in a number, such as the kinds of codes of quantised
weights, it chooses a few. HEADRACE_MATRIX=all, which `make soak` sets, gives every GPU all kernels for many sizes: some
1,000 of Triton for each, at a second of one core apiece, and 200 of csrc/ for Hopper. It goes in parts, each a test,
and build/matrix says which have passed with the same sources, so that a run that was interrupted goes on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from commit import chosen, head
from compiled_kernels import Launch, compiling_for
from source_files import ROOT, name_of, repository_files
from stored_codes import OTHERS, random_weight

from headrace.ops.formats import Stored
from headrace.ops.stream import HeadNorms, Stream

pytest.importorskip("triton", reason="needs triton, which `make test` installs")

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
POSITIONS, PAGES, SLOTS, RANK = 4096, 64, 4, 16
ALL_KERNELS = ("sm_86",)
"""GPUs of the oldest features and the least shared memory."""
EVERYTHING = os.environ.get("HEADRACE_MATRIX") == "all"
PARTS = 12 if EVERYTHING else 1
"""Tests that share what is compiled for a GPU: a part takes minutes and no more memory than its own kernels do."""
USUAL = "llama-3.1-8b"
COMMIT = head(Path(__file__).parent)
ALWAYS = (*ALL_KERNELS, "sm_90")
"""GPUs for which Triton compiles at every commit; of the others each commit takes one, and `make soak` all."""
SHARE = 1 if EVERYTHING else 5
"""One in so many cases compiles."""
SAMPLE = ARCHS if EVERYTHING else (*ALWAYS, *chosen([arch for arch in ARCHS if arch not in ALWAYS], 1, COMMIT))


Case = TypeVar("Case")


class Model(NamedTuple):
    """The sizes of a model."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    has_head_norms: bool = False


MODELS = {
    "smollm2-135m": Model(576, 9, 3, 64, 1536, 49152),
    "qwen3-0.6b": Model(1024, 16, 8, 128, 3072, 151936, has_head_norms=True),
    "llama-3.1-8b": Model(4096, 32, 8, 128, 14336, 128256),
    "qwen2.5-32b": Model(5120, 40, 8, 128, 27648, 152064),
}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def ring_kinds() -> tuple[list[Any], list[Any]]:
    """The kinds of floats and of integers that the kernels of csrc/ take."""
    from headrace.ops.cuda.codes.kinds import E4M3, INT4, INT8, Kind

    groups = (32, 64, 128)
    integers = [Kind(INT8), *(Kind(INT8, group) for group in groups)]
    integers += [Kind(INT4, group, zeros) for group in groups for zeros in (False, True)]
    return [Kind(E4M3), *(Kind(E4M3, group) for group in groups)], integers


def some_kinds(what: str) -> list[Any]:
    """All kinds that the kernels of csrc/ take, or of floats and of integers one that the commit chooses for `what`."""
    found = []
    for kinds in ring_kinds():
        names = [kind.name for kind in kinds]
        names = names if EVERYTHING else chosen(names, 1, f"{COMMIT} {what}")
        found += [kind for kind in kinds if kind.name in names]
    return found


def ring_layouts() -> Iterator[Any]:
    """The layouts that the kernels of csrc/ take."""
    from headrace.ops.cuda.codes.layout import CodeLayout

    floats, integers = ring_kinds()
    for kind in (*floats, *integers):
        halves = kind.group and kind not in floats
        for scale in (torch.bfloat16, torch.float16) if halves else (torch.float32,):
            yield CodeLayout(kind, scale)


def other_layouts() -> Iterator[Any]:
    """The layouts that Triton's kernels alone take."""
    from headrace.ops.cuda.codes.packing import in_codes

    return (in_codes(random_weight(format, 8, 1024), torch.bfloat16).format for format in OTHERS)


def layouts(arch: str) -> list[Any]:
    """The layouts of quantised weights that `arch` gets: all, or one of each sort that the commit chooses."""
    found = []
    for sort in (ring_layouts(), other_layouts()):
        named = {f"{layout.name} {layout.scale}": layout for layout in sort}
        names = list(named) if EVERYTHING else chosen(list(named), 1, f"{COMMIT} {arch}")
        found += [named[name] for name in names]
    return found


def words(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


class Chip:
    """The engine's operations on one GPU, with as little memory as it has."""

    def __init__(self, arch: str, model: Model, *, fp8: bool = False, codes: Any = None) -> None:
        from headrace.ops.cuda.arch import Arch
        from headrace.ops.cuda.attention.shape import HeadShape
        from headrace.ops.cuda.block import CudaOps
        from headrace.ops.cuda.hazards import Chain
        from headrace.ops.cuda.kernels import KERNELS
        from headrace.ops.cuda.products.linear import LinearScratch
        from headrace.ops.cuda.products.packed import Products
        from headrace.ops.cuda.products.registry import ProductRoom

        def stored(outs: int, ins: int) -> Stored:
            if codes is None:
                return Stored.from_dense(empty(outs, ins))
            return Stored.allocate(codes, (outs, ins), lambda shape, dtype: empty(*shape, dtype=dtype))

        def weight(outs: int, ins: int) -> Any:
            return self.ops.pack(stored(outs, ins), None)

        self.arch, self.model = Arch.named(arch), model
        shape = HeadShape(
            heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim,
            kv_dtype=torch.float8_e4m3fn if fp8 else None,
        )  # fmt: skip
        room = ProductRoom(LinearScratch("meta", self.arch), 1e-6, pdl=self.arch.has("dependent_launch"), chain=Chain())
        able = [*(() if codes is None else KERNELS.coded(codes.kind)), *KERNELS.products]
        late = [kernel for kernel in able if not kernel.builds(updates=False)]  # nvcc compiles the others
        table = empty(POSITIONS, model.head_dim, dtype=torch.float32)
        self.ops = CudaOps(shape, cos_sin_PD=table, products=Products(self.arch, room, late))
        self.kv = empty(1, PAGES, 2, 16, model.kv_heads, model.head_dim, dtype=shape.kv_dtype)
        width = (model.heads + 2 * model.kv_heads) * model.head_dim
        self.norm = empty(model.hidden)
        self.head_norms = HeadNorms(empty(model.head_dim), empty(model.head_dim)) if model.has_head_norms else None
        self.qkv, self.out = weight(width, model.hidden), weight(model.hidden, model.heads * model.head_dim)
        self.gate_up, self.down = weight(2 * model.ffn, model.hidden), weight(model.hidden, model.ffn)
        self.head = self.ops.pack(Stored.from_dense(empty(model.vocabulary, model.hidden)), None)
        self.table = None if codes is None else self.ops.read_table(stored(1024, model.hidden))
        self.pdl = self.ops.pdl

    def inputs(self, rows: int) -> Any:
        from headrace.ops.cuda.fused import DecodeInputs

        slots = empty(rows, dtype=torch.int64)
        return DecodeInputs(words(rows), words(rows), slots, words(rows), words(rows, PAGES), words(rows))


def decode(chip: Chip, rows: int) -> None:
    """A layer, as graphs run it: with the attention of few rows, whose other kernels are the same for all."""
    from headrace.ops.cuda.attention.kernels import FusedDecodes
    from headrace.ops.cuda.attention.registry import DecodeRoom
    from headrace.ops.cuda.fused import prepare_decode

    ops, inputs = chip.ops, chip.inputs(rows)
    state = words(rows), words(9, POSITIONS), words(9), words(9, PAGES)
    prepare_decode(*state, inputs, page_size=16)
    room = DecodeRoom(chip.arch, torch.device("meta"), most_rows=rows, pdl=chip.pdl)
    step = FusedDecodes().open(ops.shape, inputs, room)
    layer(chip, ops, step, empty(rows, chip.model.hidden))


def layer(chip: Chip, ops: Any, step: Any, x: torch.Tensor) -> None:
    """A layer, the attention of the next one, and the head."""
    x, total = ops.attend(Stream(x), chip.norm, chip.qkv, chip.head_norms, step, chip.kv, 0)
    stream = ops.add(x, chip.out, total, chip.norm, 0, "o")
    x, total = ops.feed(stream, chip.norm, chip.gate_up, 0)
    stream = ops.add(x, chip.down, total, chip.norm, 0, "down")
    ops.attend(stream, chip.norm, chip.qkv, chip.head_norms, step, chip.kv, 0)
    hidden, _ = ops.normed(Stream(empty(len(x), chip.model.hidden), empty(len(x), chip.model.hidden)), chip.norm)
    chip.ops.product(hidden, chip.head)
    ops.logits(hidden, chip.head)


class Pinless:
    """The way of a plan to the device, without pinned memory."""

    def __init__(self, device: torch.device) -> None:
        pass

    def send(self, words: Any) -> torch.Tensor:
        return torch.from_numpy(words).int().to("meta")


def attended(heads: int, kv_heads: int, head_dim: int, **more: Any) -> Callable[[Chip, int], None]:
    """The call of Triton's own attention, of decodes and of a prefill, for heads that other kernels refuse."""

    def call(chip: Chip, rows: int) -> None:
        from headrace.ops.cuda.attention import grouped
        from headrace.ops.cuda.attention.kernels import FusedDecodes, SplitDecodes
        from headrace.ops.cuda.attention.registry import DecodeRoom
        from headrace.ops.cuda.attention.shape import HeadShape
        from headrace.ops.cuda.heads import norm_rope_write
        from headrace.ops.paged import UNSCALED

        shape = HeadShape(heads=heads, kv_heads=kv_heads, head_dim=head_dim, **more)
        kv, meta = empty(PAGES, 2, 16, kv_heads, head_dim, dtype=shape.kv_dtype), torch.device("meta")
        sinks = empty(heads, dtype=torch.float32) if shape.has_sinks else None
        room = DecodeRoom(chip.arch, meta, most_rows=rows, pdl=chip.pdl)
        inputs, q = chip.inputs(rows), empty(rows, heads, head_dim)
        for lines in (1, *(count for count in (4, 8) if rows % count == 0)):
            split: Any = SplitDecodes().open(shape, inputs, room, lines)
            split.attention.run(q, kv, inputs, q, UNSCALED, sinks)
        if FusedDecodes().refuses(shape, chip.arch) is None:
            packed, table = empty(rows, (heads + 2 * kv_heads) * head_dim), empty(99, head_dim, dtype=torch.float32)
            fused: Any = FusedDecodes().open(shape, inputs, room)
            fused.attention.run(packed, None, None, table, kv, inputs, q, UNSCALED, sinks, eps=1e-6, pdl=chip.pdl)
        if shape.values != "products":
            for values, kinds in (("normed", 2), ("normed keys", 1), ("stored", 0)):
                packed, table = (
                    empty(rows, (heads + kinds * kv_heads) * head_dim),
                    empty(99, head_dim, dtype=torch.float32),
                )
                norm_rope_write(
                    packed, empty(head_dim), empty(head_dim), table, inputs.positions_B, inputs.slots_B, kv,
                    heads=heads, kv_heads=kv_heads, eps=1e-6, q_out=q, values=values, pdl=chip.pdl,
                )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grouped, "PlanRing", Pinless)
            prefill = grouped.GroupedAttention(shape, meta, shared_bytes=chip.arch.shared_bytes)
            prefill.plan([rows], [rows + 20], [list(range(-(-(rows + 20) // 16)))])
            prefill.run(q, kv, q, UNSCALED, sinks)

    return call


ATTENTION: dict[str, dict[str, Any]] = {
    "gpt-oss": {"heads": 64, "kv_heads": 8, "head_dim": 64, "window": 128, "has_sinks": True},
    "gemma-2-9b": {"heads": 16, "kv_heads": 8, "head_dim": 256, "cap": 50.0},
    "phi-2": {"heads": 32, "kv_heads": 32, "head_dim": 80},
    "gemma 4": {"heads": 32, "kv_heads": 4, "head_dim": 512, "values": "normed keys"},
    "falcon-7b": {"heads": 71, "kv_heads": 1, "head_dim": 64},
    "gpt-oss, 8 bits": {
        "heads": 64, "kv_heads": 8, "head_dim": 64, "has_sinks": True, "kv_dtype": torch.float8_e4m3fn,
    },
}  # fmt: skip
"""Heads of Triton's own attention."""


def attentions(arch: str, chip: Chip, *, everything: bool) -> Iterator[tuple[str, Any, Chip, int]]:
    """The attention that is compiled, as `cases` returns it: usually for two sorts of heads, one of them gpt-oss's."""
    able = [name for name in ATTENTION if "8 bits" not in name or chip.arch.has("fp8")]
    names = able if everything else ["gpt-oss", *chosen(able[1:], 1, f"{COMMIT} {arch} attention")]
    for name in names:
        for rows in (1, 64) if everything else (16,):
            yield f"attention of {name}", attended(**ATTENTION[name]), chip, rows


def layer_normed(chip: Chip, rows: int) -> None:
    """What layers with layer norms and feeds without a gate have in place of fused kernels."""
    from headrace.ops.stream import LayerNorm

    x, shape = empty(rows, chip.model.hidden), chip.ops.shape
    for bias in (None, chip.norm):
        chip.ops.layer_norm(x, LayerNorm(chip.norm, bias))
    for activation in ("gelu", "gelu_tanh", "relu", "relu2"):
        chip.ops.activate_plain(x, activation)
    heads = shape.heads + shape.kv_heads
    chip.ops.layer_norm_heads(empty(rows, (heads + shape.kv_heads) * shape.head_dim), empty(heads * shape.head_dim))


class NoAttention:
    def run(self, *given: Any) -> None:
        pass


def prefill(chip: Chip, tokens: int) -> None:
    """A layer of a prefill but its attention, which FlashInfer compiles, or csrc/."""
    from headrace.ops.cuda.attention.steps import PrefillStep

    ops = chip.ops
    step = PrefillStep(empty(tokens, dtype=torch.int64), empty(tokens, dtype=torch.int64), NoAttention())
    layer(chip, ops, step, empty(tokens, chip.model.hidden))


def choose(chip: Chip, rows: int) -> None:
    """From logits to tokens: shaped, filtered, drawn, reported."""
    from headrace.ops.cuda.sampling import logprobs as cuda_logprobs
    from headrace.ops.cuda.sampling.sample import SampleScratch, sample
    from headrace.ops.cuda.sampling.shape import ShapeArrays, count_chosen, count_known, shape

    size = chip.model.vocabulary
    numbers, whole = [empty(9, dtype=torch.float32) for _ in range(3)], [words(9) for _ in range(3)]
    for logits in (empty(rows, size), empty(rows, size, dtype=torch.float32)):
        arrays = ShapeArrays(8, size, 64, "meta")
        shape(logits, words(rows), words(rows), words(9, POSITIONS), arrays, pdl=chip.pdl)
        count_chosen(words(rows), words(rows), arrays, pdl=chip.pdl)
        count_known(words(9, POSITIONS), 1, 5, 100, arrays)
        scratch = SampleScratch(rows, size, "meta", dtype=logits.dtype)
        for filtered in (False, True):
            sample(
                logits, words(rows), numbers[0], whole[0], numbers[1], numbers[2], empty(9, dtype=torch.int64),
                words(rows), words(9, POSITIONS), words(9), words(rows), scratch,
                stops_RS=words(9, 8), stopped_R=words(9), filtered=filtered, pdl=chip.pdl,
            )  # fmt: skip
        listed = cuda_logprobs.ListScratch(rows, size, 20, "meta")
        out = words(rows, cuda_logprobs.HEAD + 40)
        cuda_logprobs.logprobs(logits, words(rows), words(9), words(rows), out, listed, pdl=chip.pdl)


def exchange(chip: Chip, rows: int) -> None:
    """What crosses between host and device within a step."""
    from headrace.ops.cuda.memory.scatter import Batch, ExchangeLines, apply_words, leave_ids, scatter_words

    turns = ExchangeLines(words(2), words(4, 64), words(4, 64))
    apply_words(words(512), turns)
    apply_words(words(512), turns, Batch(words(rows), words(9), words(rows), 8))
    leave_ids(words(rows), turns, pdl=chip.pdl)
    scatter_words(words(512), words(2, 64), 64)


def adapted(chip: Chip, rows: int) -> None:
    """A layer whose rows use adapters: each its own, few among many, one for all, and in a prefill."""
    from headrace.ops.cuda.adapters.products import CudaAdapterOps
    from headrace.ops.cuda.adapters.rows import ALIKE, GROUP, SEGMENT, LoraBatch, LoraSite, group_rows, pick
    from headrace.ops.cuda.attention.steps import PrefillStep

    model = chip.model
    width, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    sites = {
        (0, "qkv"): LoraSite(0, model.hidden, (width, keys, keys)),
        (0, "o"): LoraSite(3, width, (model.hidden,)),
        (0, "gate_up"): LoraSite(4, model.hidden, (model.ffn, model.ffn)),
        (0, "down"): LoraSite(6, model.ffn, (model.hidden,)),
        (-1, "embed"): LoraSite(7, model.vocabulary, (model.hidden,)),
        (-1, "head"): LoraSite(8, model.hidden, (model.vocabulary,)),
    }
    for group in (1, GROUP, ALIKE, SEGMENT):
        if group == ALIKE and not 1 < rows <= 64:
            continue
        entries = words(rows, 4)
        batch = LoraBatch(
            empty(1 << 20),
            words(SLOTS, 9, 4),
            entries,
            words(2),
            words(rows),
            words(rows),
            group,
            RANK,
            chip.arch.shared_bytes,
        )
        if group != SEGMENT:
            group_rows(words(9), words(rows), batch)
        if group == ALIKE:
            pick(batch, words(9, 4))
        side = None if group == SEGMENT else torch.cuda.current_stream()
        ops = CudaAdapterOps(chip.ops, batch, sites, ends=group != ALIKE, side=side)
        places = empty(rows, dtype=torch.int64)
        step = PrefillStep(places, places, NoAttention())
        layer(chip, ops, step, ops.embed(empty(rows, model.hidden), words(rows)))


def unpack(chip: Chip, rows: int) -> None:
    """Adapters' files become blocks of the arena."""
    from headrace.adapters.stored import DTYPES
    from headrace.ops.cuda.memory.unpack import Unpacker

    Unpacker(empty(1 << 20), DTYPES, 1 << 16)


def coded(chip: Chip, rows: int) -> None:
    """The products of a feed, plain and with the activation, logits, and rows of a table."""
    ops = chip.ops
    ops.product(empty(rows, chip.model.ffn), chip.down)
    ops.gated(empty(rows, chip.model.hidden), chip.gate_up)
    ops.logits(empty(rows, chip.model.hidden), chip.gate_up)
    chip.table[empty(rows, dtype=torch.int64)]


class Mixture(NamedTuple):
    """The sizes of a layer's experts."""

    hidden: int
    size: int
    experts: int
    top_k: int


MIXTURES = {
    "qwen3-30b-a3b": Mixture(2048, 768, 128, 8),
    "mixtral-8x7b": Mixture(4096, 14336, 8, 2),
    "granite-3.1-1b-a400m": Mixture(1024, 512, 32, 8),
    "olmoe-1b-7b": Mixture(2048, 1024, 64, 8),
}
USUAL_MIXTURE = "qwen3-30b-a3b"


def mixture(sizes: Mixture, codes: Any = None) -> Callable[[Chip, int], None]:
    """The call that routes tokens and computes their experts, some of them padding, after a norm that was begun."""
    from headrace.ops.cuda.experts.registry import Padding
    from headrace.ops.cuda.products.fusion import SQUARED, Squares
    from headrace.ops.experts import Experts
    from headrace.ops.routing import Routing

    def weight(outs: int, ins: int) -> Any:
        if codes is None:
            return Stored.from_dense(empty(outs, ins))
        return Stored.allocate(codes, (outs, ins), lambda shape, dtype: empty(*shape, dtype=dtype))

    hidden, size, count = sizes.hidden, sizes.size, sizes.experts
    both = tuple((weight(*shape),) * count for shape in ((2 * size, hidden), (hidden, size)))
    experts = Experts(Routing(count, sizes.top_k), empty(count, hidden, dtype=torch.float32), *both)

    def call(chip: Chip, rows: int) -> None:
        packed, x = chip.ops.pack_experts(experts), empty(rows, hidden)
        squares = Squares(empty(hidden // SQUARED, rows, dtype=torch.float32), chip.pdl)
        x, _ = chip.ops.normed(Stream(x, x, squares), empty(hidden))
        with chip.ops.experts.padded(Padding(words(rows), 9)):
            packed(x)

    return call


def mixtures(arch: str, chip: Chip, *, everything: bool) -> Iterator[tuple[str, Any, Chip, int]]:
    """The experts that are compiled, as `cases` returns them; usually in one layout, besides dense ones."""
    coded = {f"{layout.name} {layout.scale}": layout for layout in layouts(arch)}
    for name in coded if everything else chosen(list(coded), 1, f"{COMMIT} {arch} experts"):
        layout = coded[name]
        mixed = mixture(MIXTURES[USUAL_MIXTURE], layout)
        for rows in (1, 16, 64, 2048) if everything else (1, 64):
            yield f"{layout.name}, experts of {rows}", mixed, chip, rows
    for name in MIXTURES if everything else (USUAL_MIXTURE,):
        mixed = mixture(MIXTURES[name])
        for rows in (1, 16, 256, 8192) if everything else (1, 16, 256) if arch in ALL_KERNELS else (1, 64):
            yield f"{name}, experts of {rows}", mixed, chip, rows


def latent(heads: int, latent_dim: int, plain: int, value: int) -> Callable[[Chip, int], None]:
    """The call that attends to latent vectors, as a layer of a decode and of a prefill does."""
    from headrace.ops.cuda.attention.registry import DecodeRoom
    from headrace.ops.cuda.hazards import Chain
    from headrace.ops.cuda.latents.attend import attend_prefill
    from headrace.ops.cuda.latents.expand import attend_expanded
    from headrace.ops.cuda.latents.kernels import LatentDecodes
    from headrace.ops.cuda.latents.packed import CudaLatents
    from headrace.ops.cuda.latents.running import expanded_tiling, prefill_tiling
    from headrace.ops.cuda.latents.shape import LatentShape
    from headrace.ops.latents import LatentWeights

    shape = LatentShape(heads=heads, latent_dim=latent_dim, rotated_dim=64, scale=0.1)
    up = Stored.from_dense(empty(heads * (plain + value), latent_dim))
    weights = LatentWeights(up, heads, plain, empty(latent_dim), 1e-6)

    def call(chip: Chip, rows: int) -> None:
        table = empty(POSITIONS, 64, dtype=torch.float32)
        attention = CudaLatents(weights, 0, shape, table, Chain(), paired=True, pdl=chip.pdl)
        kv = empty(1, PAGES, 16, shape.head_dim)
        room = DecodeRoom(chip.arch, torch.device("meta"), most_rows=rows, pdl=chip.pdl)
        step = LatentDecodes().open(shape, chip.inputs(rows), room)
        queries = empty(rows, heads, plain + 64)
        attention(queries, empty(rows, shape.head_dim), step, kv)
        q, out, tiling = empty(rows, heads, shape.head_dim), empty(rows, heads, latent_dim), prefill_tiling(chip.arch)
        attend_prefill(q, kv[0], words(3, 4), words(64), out, shape, tiling, pdl=chip.pdl)
        keys, made = q[:, 0, latent_dim:], empty(rows, heads * (plain + value))
        tiling = expanded_tiling(chip.arch, plain + 64 + value)
        parts = queries[:, :, :plain], empty(rows, heads, 64), made, keys, words(3, 3), empty(rows, heads, value)
        attend_expanded(*parts, tiling, scale=0.1, pdl=chip.pdl)

    return call


def latents(chip: Chip, *, everything: bool) -> Iterator[tuple[str, Any, Chip, int]]:
    """The attentions to latent vectors that are compiled, as `cases` returns them."""
    sizes = [(20, 512, 192, 256), (128, 512, 128, 128), (16, 512, 128, 128), (4, 96, 32, 48)]
    for of_model in sizes if everything else sizes[:1]:
        for rows in (1, 64, 512) if everything else (1,):
            yield f"latent vectors, {of_model}, {rows} rows", latent(*of_model), chip, rows


def cases(arch: str, *, everything: bool) -> Iterator[tuple[str, Callable[[Chip, int], None], Chip, int]]:
    """What is compiled: its name, the call, and the arguments of that."""
    from headrace.ops.cuda.codes.kinds import E4M3, Kind
    from headrace.ops.cuda.codes.layout import CodeLayout

    floats = Chip(arch, MODELS[USUAL], codes=CodeLayout(Kind(E4M3), torch.float32))
    for tokens in (1, 40, 2048) if everything else (1, 128):
        yield f"fp8, prefill of {tokens}", prefill, floats, tokens
    blocks = Chip(arch, MODELS[USUAL], codes=CodeLayout(Kind(E4M3, 128, blocks=True), torch.float32))
    for tokens in (65, 2048) if everything else (128,):
        yield f"fp8 in blocks, prefill of {tokens}", prefill, blocks, tokens
    for layout in layouts(arch):
        chip = Chip(arch, MODELS[USUAL], codes=layout)
        for rows in (1, 4, 16, 17, 64, 128) if everything else (1, 64, 128):
            yield f"{layout.name}, products of {rows}", coded, chip, rows
    yield from mixtures(arch, floats, everything=everything)
    yield from attentions(arch, floats, everything=everything)
    yield from latents(floats, everything=everything)
    for name in MODELS if everything else (USUAL,):
        model = MODELS[name]
        chip = Chip(arch, model)
        for rows in (1, 2, 32, 64, 256) if everything else (1, 64):
            yield f"{name}, decode of {rows}", decode, chip, rows
        if not everything and arch not in ALL_KERNELS:
            continue
        for rows in (1, 8, 64, 256) if everything else (64,):
            yield f"{name}, adapters of {rows}", adapted, chip, rows
        for tokens in (65, 2048) if everything else (2048,):
            yield f"{name}, prefill of {tokens}", prefill, chip, tokens
        yield f"{name}, choice", choose, chip, 64
        yield f"{name}, layer norms", layer_normed, chip, 4
        if chip.arch.has("fp8"):
            yield f"{name}, 8 bits", decode, Chip(arch, model, fp8=True), 4
            yield f"{name}, 8 bits, prefill", prefill, Chip(arch, model, fp8=True), 128
    if everything or arch in ALL_KERNELS:
        yield "exchange", exchange, chip, 64
        yield "adapters' files", unpack, chip, 1


def share_of(names: Sequence[str], salt: str) -> list[str]:
    """Those of `names` that compile, as the commit chooses."""
    return chosen(names, -(-len(names) // SHARE), f"{COMMIT} {salt}")


def part_of(found: Sequence[Case], part: int) -> Sequence[Case]:
    """The neighbours that a part compiles, since neighbours share kernels."""
    return found[len(found) * part // PARTS : len(found) * (part + 1) // PARTS]


@cache
def passed_folder() -> Path:
    """Where it is kept which parts of everything have passed with these sources and this compiler."""
    digest, here = sha256(version("torch").encode() + version("triton").encode()), Path(__file__)
    own = {here, *(here.parents[1] / name for name in ("compiled_kernels.py", "stored_codes.py"))}
    for path in repository_files():
        if path in own or name_of(path).startswith("ops/"):
            digest.update(path.read_bytes())
    return ROOT / "build" / "matrix" / digest.hexdigest()[:16]


@contextlib.contextmanager
def once(name: str, folder: Path) -> Iterator[None]:
    """Run what compiles everything into `folder`, which takes a gigabyte, unless it has passed before."""
    if not EVERYTHING:
        yield
        return
    if (passed := passed_folder() / name).exists():
        pytest.skip(f"passed before with the same sources; delete {passed} to compile again")
    try:
        yield
    finally:
        shutil.rmtree(folder)
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.touch()


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", SAMPLE)
def test_kernels_of_triton_compile_and_fit(arch: str, part: int, tmp_path: Path) -> None:
    unfit: list[tuple[str, Launch]] = []
    with once(f"triton-{arch}-{part}", tmp_path), compiling_for(arch, tmp_path) as launches:
        asked = part_of(list(cases(arch, everything=EVERYTHING)), part)
        some = share_of([what for what, *_ in asked], arch)
        for what, call, chip, rows in asked:
            before = set(launches.compiled)
            launches.compiles = what in some
            call(chip, rows)
            new = launches.compiled - before
            unfit += [(what, launch) for launch in new if launch.shared_bytes > chip.arch.shared_bytes]
        assert not unfit, f"{arch} has {chip.arch.shared_bytes} bytes"
        assert launches.compiled
    kernels = launches.kernels
    if EVERYTHING or arch not in ALWAYS:
        return
    assert kernels >= {"_unpack_kernel", "_read_rows_kernel", "_coded_vector_kernel", "_coded_tiles_kernel"}
    assert kernels >= {"_expert_tiles_kernel", "_expert_up_kernel", "_expert_down_kernel", "_router_vector_kernel"}
    assert kernels >= {"_split_decode_kernel", "_grouped_attention_kernel"}
    assert kernels >= {
        "_store_latents_kernel",
        "_latent_decode_kernel",
        "_latent_merge_kernel",
        "_latent_prefill_kernel",
    }
    assert "_to_codes_kernel" in kernels or not chip.arch.has("wgmma")
    assert "_to_codes_of_groups_kernel" in kernels or not chip.arch.has("fp8")
    assert len(kernels) >= 30 or arch not in ALL_KERNELS, kernels


SHAPES = [(32, 8, 128), (16, 8, 128), (28, 4, 128), (8, 1, 128), (9, 3, 64), (14, 2, 64), (64, 8, 64)]
"""Query heads, key heads and head size of models that csrc/even_decode.cu is compiled for."""


def shapes(arch: str, *, everything: bool) -> list[tuple[tuple[int, int, int], torch.dtype | None]]:
    """Heads and the dtype of keys and values; usually both dtypes, but each with one of two shapes."""
    dtypes = (None, torch.float8_e4m3fn)
    if everything:
        return [(heads, dtype) for heads in SHAPES for dtype in dtypes]
    first, second = chosen([str(dtype) for dtype in dtypes], 2, f"{COMMIT} {arch}")
    heads = {first: SHAPES[0], second: SHAPES[3]}
    return [(heads[str(dtype)], dtype) for dtype in dtypes]


def line_builds(attention: Any, shape: Any, chip: Any) -> list[Callable[[], object]]:
    """What compiles all kernels of attention for rows of several lines: those of the fewest lines, and of the most."""
    most = attention.most_lines(shape, chip) if hasattr(attention, "most_lines") else 1
    return [build for lines in sorted({2, most}) if 1 < lines <= most for build in attention.builds(shape, lines)]


def worn_by(product: Any, *, everything: bool) -> tuple[bool, ...]:
    """Whether a product is compiled with updates; usually with them, or with codes as the commit chooses."""
    if not product.has_updates:
        return (False,)
    if everything:
        return (False, True)
    return (product.kind is None or chosen(["with", "without"], 1, f"{COMMIT} {product.kind.codes}") == ["with"],)


def asked_of_nvcc(arch: str, *, everything: bool) -> list[tuple[str, dict[str, int]]]:
    """The sources of csrc/ that an engine on `arch` may compile, with the values of their macros."""
    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.attention import even as cuda_even
    from headrace.ops.cuda.attention import tile as cuda_tile
    from headrace.ops.cuda.attention.shape import HeadShape
    from headrace.ops.cuda.codes.kinds import E2M1, Kind
    from headrace.ops.cuda.compiling import source as cuda_source
    from headrace.ops.cuda.kernels import KERNELS

    asked: list[tuple[str, dict[str, int]]] = []
    chip = Arch.named(arch)
    with pytest.MonkeyPatch.context() as patch:
        for module in (cuda_even, cuda_source, cuda_tile):
            patch.setattr(module, "compiled", lambda name, **sizes: asked.append((name, sizes)))
        for (heads, kv_heads, head_dim), kv_dtype in shapes(arch, everything=everything):
            shape = HeadShape(heads=heads, kv_heads=kv_heads, head_dim=head_dim, kv_dtype=kv_dtype)
            for attention in (*KERNELS.decodes, *KERNELS.prefills):
                if attention.refuses(shape, chip) is None:
                    for build in (*attention.builds(shape), *line_builds(attention, shape, chip)):
                        build()
        kinds = some_kinds("csrc")
        for kernel in KERNELS.experts:
            for build in kernel.builds(chip, (*kinds, Kind(E2M1, 32, scales="e8m0"))):
                build()
        coded = [each for kind in kinds for each in KERNELS.coded(kind)]
        for product in (*KERNELS.products, *coded):
            if product.lacks(chip, torch.bfloat16, 128) is None:
                for worn in worn_by(product, everything=everything):
                    for build in product.builds(updates=worn):
                        build()
    widest = max((sizes["ROWS"] for _, sizes in asked if "ROWS" in sizes), default=0)
    first = [each for number, each in enumerate(asked) if each not in asked[:number]]
    found = [(name, sizes) for name, sizes in first if everything or sizes.get("ROWS", widest) == widest]
    some = {name: share_of([str(each[1]) for each in found if each[0] == name], f"{arch} {name}") for name, _ in found}
    return [(name, sizes) for name, sizes in found if str(sizes) in some[name]]


NEWER = ("sm_100", "sm_120")
"""GPUs that run a few of the kernels of csrc/: each commit compiles for one of them, and always for Hopper."""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", ["sm_90", *(NEWER if EVERYTHING else chosen(NEWER, 1, COMMIT))])
def test_kernels_of_csrc_compile_and_fit(arch: str, part: int, tmp_path: Path) -> None:
    """What shared memory a launch asks for is known to the launcher, which the sources check as they compile."""
    with once(f"csrc-{arch}-{part}", tmp_path):
        compile_with_nvcc(arch, part, tmp_path)


def compile_with_nvcc(arch: str, part: int, tmp_path: Path) -> None:
    with compiling_for(arch, tmp_path):
        from headrace.ops.cuda.arch import Arch
        from headrace.ops.cuda.compiling.toolkit import find_toolkit

        asked, chip = asked_of_nvcc(arch, everything=EVERYTHING), Arch.named(arch)
        toolkit = find_toolkit("13.0")
        sources = Path(importlib.import_module("headrace.ops.cuda.compiling.source").__file__ or "").parents[1] / "csrc"
    ffi = Path((importlib.util.find_spec("tvm_ffi") or pytest.fail("needs apache-tvm-ffi")).origin or "").parent
    includes = [f"-I{folder}" for folder in (*toolkit.includes, ffi / "include", ffi / "3rdparty/dlpack/include")]
    hoppers = {"even_decode", "even_linear", "expert_dense", "expert_rows", "many_rows"}
    names = {name for name, _ in asked}
    assert names >= (hoppers if arch == "sm_90" else {"even_decode"})
    if not EVERYTHING:  # a source takes nvcc seconds: half of them, as the commit chooses
        names = set(chosen(list(names), -(-len(names) // 2), f"{COMMIT} {arch}"))
        asked = [each for each in asked if each[0] in names]
    target = f"{arch.removeprefix('sm_')}a"
    for number, (name, sizes) in enumerate(part_of(asked, part)):
        macros = [f"-D{macro}={value}" for macro, value in sizes.items()]
        code = f"-gencode=arch=compute_{target},code=sm_{target}"
        output = ["-cubin", "-Xptxas", "-v", "-o", str(tmp_path / f"{number}.cubin")]
        done = subprocess.run(
            [toolkit.nvcc, "-std=c++17", "-O3", code, *macros, *includes, *output, sources / f"{name}.cu"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not done.returncode, f"{name} {sizes} for {arch}: {done.stderr}"
        for report in done.stderr.split("Compiling entry function")[1:]:
            static = re.search(r"(\d+) bytes smem", report)
            dynamic = sizes.get("SHARED_BYTES", 0) if "attend" in report else 0
            assert (int(static[1]) if static else 0) + dynamic <= chip.shared_bytes, (name, sizes, report)
