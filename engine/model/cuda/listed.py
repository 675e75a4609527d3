"""`list_kernels`: the kernels that an engine on a GPU would use for a model, and why it would use no others.

Needs neither the GPU nor a compiler, as the choice itself does not, and of weights their formats and shapes alone. Next
to read: ops/cuda/kernels.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import filterfalse
from typing import Final, NamedTuple, TypeVar

import torch

from headrace.engine.model.checkpoint.weights import DecoderWeights, SublayerWeights, describe_weights
from headrace.engine.model.experts import ExpertsBesideDense, ExpertsFeed, down_of, gate_up_of, is_of_expert
from headrace.engine.model.latent import has_latents, uniform_latents
from headrace.engine.model.shared.heads import attention_kinds, head_shape
from headrace.engine.model.spec import Attention, DecoderSpec, DenseFeed, MixerSpec
from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.attention.registry import DecodeChoice, resolve_decode, resolve_prefill
from headrace.ops.cuda.attention.shape import HeadShape
from headrace.ops.cuda.codes.held import kind_of, kinds_of_pieces
from headrace.ops.cuda.codes.kinds import Kind
from headrace.ops.cuda.experts.arena import common_kind
from headrace.ops.cuda.experts.registry import ExpertShape, resolve_experts
from headrace.ops.cuda.kernels import KERNELS, Kernels
from headrace.ops.cuda.latents.shape import LatentShape
from headrace.ops.cuda.products.fusion import Fusion
from headrace.ops.cuda.products.registry import ByRows, ProductKernel, Resolved, WeightShape, resolve
from headrace.ops.cuda.tuning.table import Span
from headrace.ops.formats import Dense, Format, Stacked, Stored

__all__ = ["KernelList", "Line", "Refusal", "list_kernels"]

_STEPS: Final[dict[str, tuple[Fusion, ...]]] = {
    "qkv": ("norm plain", "heads", "factors plain", "plain"),
    "q": ("plain",),
    "q_a": ("plain",),
    "q_b": ("plain",),
    "kv_a": ("plain",),
    "o": ("residual", "plain"),
    "gate_up": ("norm gated", "factors gated", "gated", "plain"),
    "up": ("plain",),
    "down": ("residual", "plain"),
    "shared_gate_up": ("plain",),
    "shared_down": ("plain",),
    "own_gate": ("plain",),
    "own_result": ("plain",),
    "per_layer": ("plain",),
    "head": ("logits",),
}
"""What a launch of each product may compute, the most first; a step takes the first that a kernel computes."""
_WORDS: Final[dict[Fusion, str]] = {
    "plain": "product",
    "logits": "product in float32",
    "gated": "product, silu(gate) * up",
    "residual": "product, sum, part of the next norm",
    "norm plain": "norm, product",
    "norm gated": "norm, product, silu(gate) * up",
    "factors plain": "rest of the norm, product",
    "factors gated": "rest of the norm, product, silu(gate) * up",
    "heads": "rest of the norm, product, rotation, KV write",
}
_SPLIT: Final = "kv_b"
"""Matrix of latent attention whose heads are multiplied each by itself."""
T = TypeVar("T")
_CONTEXTS: Final = (1024, 16384)
"""Tokens of a row for which decodes are listed by rows."""


class Line(NamedTuple):
    """One operation and the kernels that compute it."""

    what: str
    fused: str
    """What one launch computes."""
    kernels: tuple[str, ...]
    """A kernel for each number of rows that was asked for, or for each range of rows; "-" where none does it."""


class Refusal(NamedTuple):
    """A kernel that is not used, and where."""

    kernel: str
    where: str
    why: str


class KernelList(NamedTuple):
    """The kernels of a model on a GPU."""

    lines: tuple[Line, ...]
    refusals: tuple[Refusal, ...]


def list_kernels(
    spec: DecoderSpec,
    arch: Arch,
    *,
    rows: Sequence[int] = (),
    fp8: bool = False,
    kernels: Kernels = KERNELS,
    weights: DecoderWeights | None = None,
) -> KernelList:
    """Return the kernels for the products and the attention of a model.

    Args:
        spec: The shape of the model.
        arch: The GPU.
        rows: Numbers of rows to list a kernel for; without any, ranges of rows.
        fp8: Whether keys and values are stored in 8 bits.
        kernels: The kernels to choose among.
        weights: The weights in the formats in which they are stored, on any device; None for dense ones.

    Raises:
        ModelRejected: No kernel computes the attention of a layer.
    """
    shapes = {shape.key: shape for shape in _shapes(spec, fp8=fp8).values()}.values()
    kernels = kernels.to_latents() if has_latents(spec) else kernels
    lines, refusals = list[Line](), list[Refusal]()
    for what, product in _products(spec, weights).items():
        kind = product.shape.kind
        coded = () if kind is None else kernels.coded(kind)
        resolved, steps = resolve((*coded, *kernels.products), arch, product.shape), _steps(spec, product)
        lines += [Line(what, _WORDS[fusion], _cells(resolved, fusion, rows, kind)) for fusion in steps]
        refusals += _product_refusals(what, steps, resolved)
        if product.is_unpacked is not None:
            refusals.append(Refusal("those for codes", what, f"{product.is_unpacked}: kept in bfloat16"))
    for what, experts in _experts(spec, weights).items():
        chosen = resolve_experts(kernels.experts, arch, experts.shape)
        lines.append(Line(what, "router, products, weighted sum", _by_rows(chosen.kernels, rows, lambda one: one.name)))
        refusals += [Refusal(name, what, why) for name, why in chosen.refused.items()]
        refusals += [Refusal("those for codes", what, f"{why}: kept in bfloat16") for why in experts.unpacked]
    if has_latents(spec):
        lines.append(Line(_SPLIT, "products of single heads", ("cuBLAS",) * max(1, len(rows))))
    for shape in shapes:
        of_window = f", heads of {shape.head_dim}" if len({each.head_dim for each in shapes}) > 1 else ""
        of_window += "" if shape.window is None else f", window of {shape.window}"
        choice, (prefills, refused) = (
            resolve_decode(kernels.decodes, shape, arch), resolve_prefill(kernels.prefills, shape, arch),
        )  # fmt: skip
        lines += _decode_lines(choice, of_window, rows)
        lines.append(Line(f"prefill{of_window}", "attention", (prefills[0].name,) * max(1, len(rows))))
        refusals += [Refusal(name, f"decode{of_window}", why) for name, why in choice.refused.items()]
        refusals += [Refusal(name, f"prefill{of_window}", why) for name, why in refused.items()]
    return KernelList(tuple(lines), tuple(_together(refusals)))


def _shapes(spec: DecoderSpec, *, fp8: bool) -> dict[MixerSpec, HeadShape]:
    """Return the shapes of the different attentions of a model, by mixer.

    Raises:
        ModelRejected: No kernel computes the attention of a layer.
    """
    if has_latents(spec):
        mixer = uniform_latents(spec)
        return {
            mixer: LatentShape(
                heads=mixer.heads, latent_dim=mixer.latent_dim, rotated_dim=mixer.rotated_dim, scale=mixer.scale
            )
        }  # fmt: skip
    kv_dtype = torch.float8_e4m3fn if fp8 else None
    return {attention: head_shape(attention, kv_dtype=kv_dtype) for attention in attention_kinds(spec)}


def _steps(spec: DecoderSpec, product: _Product) -> tuple[Fusion, ...]:
    """Return what a launch of a product may compute, by what a model's norms are and what its feed's activation is.

    Where several weights are multiplied one after the other, and next to layer norms, that is the product alone.
    """
    if product.is_piece or any(layer.norms.kind != "rms" or layer.norms.is_parallel for layer in spec.layers):
        return _STEPS[product.name][-1:]
    placements = {layer.norms.placement for layer in spec.layers}
    unused: set[Fusion] = set()
    if placements != {"pre"}:
        unused |= {"heads", "residual", "factors plain", "factors gated"}
    attentions = [kind for kind in spec.mixer_kinds if isinstance(kind, Attention)]
    if product.name == "qkv" and any(each.has_steps_before_attention for each in attentions):
        unused |= {"norm plain", "heads", "factors plain"}
    if "post" in placements:
        unused |= {"norm plain", "norm gated", "gated"}
    feeds = [layer.feed for layer in spec.layers]
    if all(isinstance(feed, ExpertsFeed) for feed in feeds):
        unused |= {"heads", "factors plain"}
    dense = (feed.dense if isinstance(feed, ExpertsBesideDense) else feed for feed in feeds)
    if any(isinstance(feed, DenseFeed) and feed.activation != "silu" for feed in dense):
        unused |= {"norm gated", "factors gated", "gated"}
    return tuple(fusion for fusion in _STEPS[product.name] if fusion not in unused)


class _Product(NamedTuple):
    """A product of some layers, whose weights have one shape and one format."""

    name: str
    """Key of `_STEPS`."""
    shape: WeightShape
    format: str
    """Name of the format in which the weight is stored."""
    is_unpacked: str | None
    """Why a quantised weight is not multiplied by its codes, in words; None where it is, and for dense ones."""
    is_piece: bool = False
    """Whether it is one of several weights that are multiplied one after the other."""


def _products(spec: DecoderSpec, weights: DecoderWeights | None) -> dict[str, _Product]:
    """Return the different products of the layers and of the output head, by what they are called in the list."""
    if weights is None:
        weights = describe_weights("random", spec, dtype=torch.bfloat16)
    shapes = _shapes(spec, fp8=False)
    first_dim = shapes[spec.layers[0].mixer].head_dim
    found: dict[str, Counter[_Product]] = {}
    for number in range(len(weights.layers)):
        layer, own_dim = weights.layers[number], shapes[spec.layers[number].mixer].head_dim
        for of_layer in (layer.mixer, layer.feed):
            for name in filterfalse(_is_apart, of_layer.matrices):
                head_dim = own_dim if name == "qkv" else first_dim  # other products know nothing of heads
                found.setdefault(name, Counter()).update(dict.fromkeys(_pieces(name, of_layer, head_dim), 1))
    if weights.per_layer is not None:
        of_all = SublayerWeights({"per_layer": weights.per_layer.product_XE}, {})
        found["per_layer"] = Counter([_product("per_layer", of_all, first_dim)])
    if spec.has_head:
        found["head"] = Counter([_product("head", SublayerWeights({"head": weights.head}, {}), first_dim)])
    return {_called(product, varieties): product for varieties in found.values() for product in varieties}


def _is_apart(name: str) -> bool:
    """Return whether a matrix is multiplied by other kernels than those of products."""
    return is_of_expert(name) or name == _SPLIT


def _product(name: str, of_layer: SublayerWeights, head_dim: int) -> _Product:
    weight = of_layer.matrices[name]
    (size_out, size_in), has_bias = weight.shape, f"{name}_bias" in of_layer.vectors
    shape = WeightShape(size_out, size_in, head_dim, has_bias)
    format = _name(weight.format)
    if isinstance(weight.format, Dense):
        return _Product(name, shape, format, None)
    kind = kind_of(weight.format, weight.shape)
    if isinstance(kind, str):
        return _Product(name, shape, format, kind)
    return _Product(name, shape._replace(kind=kind), format, None)


def _pieces(name: str, of_layer: SublayerWeights, head_dim: int) -> list[_Product]:
    """Return the products of which a layer's is made: one, or one for each weight that has a kind of its own."""
    weight = of_layer.matrices[name]
    whole, pieces, found = _product(name, of_layer, head_dim), iter(weight.pieces()), list[_Product]()
    for kind, count in kinds_of_pieces(weight.format, weight.shape) if whole.is_unpacked else ():
        piece = Stored.stack([next(pieces) for _ in range(count)])
        shape = WeightShape(piece.shape[0], piece.shape[1], head_dim, kind=kind)
        found.append(_Product(name, shape, _name(piece.format), None, is_piece=True))
    return found or [whole]


class _Experts(NamedTuple):
    """The experts of some layers, which have one shape and one format."""

    shape: ExpertShape
    format: str
    unpacked: tuple[str, ...]
    """Why quantised weights are not multiplied by their codes, in words."""


def _experts(spec: DecoderSpec, weights: DecoderWeights | None) -> dict[str, _Experts]:
    """Return the different experts of the layers, by what they are called in the list."""
    if weights is None:
        weights = describe_weights("random", spec, dtype=torch.bfloat16)
    found = Counter[_Experts]()
    for number, layer in enumerate(spec.layers):
        if isinstance(layer.feed, ExpertsFeed):
            found[_experts_of(layer.feed, spec.hidden_size, weights.layers[number].feed)] += 1
    names = [each.format for each in found]
    return {
        "experts" + (f" ({each.format}, {count} layer{'s' * (count != 1)})" if len(names) > 1 else ""): each
        for each, count in found.items()
    }


def _experts_of(feed: ExpertsFeed, hidden: int, of_layer: SublayerWeights) -> _Experts:
    every = range(feed.routing.experts)
    both = ([of_layer.matrices[name(expert)] for expert in every] for name in (gate_up_of, down_of))
    kinds, unpacked, formats = list[Kind | None](), list[str](), list[str]()
    for weights in both:
        kind = common_kind([kind_of(weight.format, weight.shape) for weight in weights])
        kinds.append(kind if isinstance(kind, Kind) else None)
        formats += [_name(weight.format) for weight in weights]
        if isinstance(kind, str) and not all(isinstance(weight.format, Dense) for weight in weights):
            unpacked.append(kind)
    shape = ExpertShape(feed.routing, hidden, feed.size, gate_up=kinds[0], down=kinds[1])
    return _Experts(shape, " + ".join(dict.fromkeys(formats)), tuple(dict.fromkeys(unpacked)))


def _name(format: Format) -> str:
    """Return the name of a format; of weights one above the other the different names, each once."""
    pieces = [piece for piece, _ in format.pieces] if isinstance(format, Stacked) else [format]
    return " + ".join(dict.fromkeys(piece.name for piece in pieces))


def _called(product: _Product, varieties: Mapping[_Product, int]) -> str:
    """Return the name of a product, with its format if it is quantised, its outputs if they are not all of its layer's,
    its inputs and outputs if these differ among layers, and its number of layers if anything does."""
    layers = varieties[product] if len(varieties) > 1 else None
    is_dense = product.shape.kind is None and product.is_unpacked is None
    told = [] if is_dense and layers is None else [product.format]
    told += [f"{product.shape.size_out} outputs"] if product.is_piece else []
    if len({(each.shape.size_out, each.shape.size_in) for each in varieties if not each.is_piece}) > 1:
        told += [f"{product.shape.size_in} to {product.shape.size_out}"] if not product.is_piece else []
    told += [] if layers is None else [f"{layers} layer{'s' * (layers != 1)}"]
    return f"{product.name} ({', '.join(told)})" if told else product.name


def _cells(resolved: Resolved, fusion: Fusion, rows: Sequence[int], kind: Kind | None) -> tuple[str, ...]:
    """Return the kernels, without the kind of codes: the line of a product names its format."""

    def name_of(kernel: ProductKernel) -> str:
        return kernel.name if kind is None else kernel.name.removesuffix(f", {kind.name}")

    return _by_rows(resolved.kernels[fusion], rows, name_of)


def _by_rows(table: ByRows[T], rows: Sequence[int], name_of: Callable[[T], str]) -> tuple[str, ...]:
    """Return the name of a kernel for each number of rows, or all of them with their ranges of rows."""
    if rows:
        return tuple("-" if (kernel := table.at(count)) is None else name_of(kernel) for count in rows)
    return (", ".join(f"{_of(span)}: {name_of(kernel)}" for span, kernel in table.spans) or "-",)


def _of(rows: range) -> str:
    """Return a range of rows as text."""
    if len(rows) == 1:
        return str(rows.start)
    return f"{rows.start}+" if rows.stop >= 1 << 31 else f"{rows.start}-{rows.stop - 1}"


def _decode_lines(choice: DecodeChoice, of_window: str, rows: Sequence[int]) -> Iterator[Line]:
    whole = {"fused": "norms, rotation, KV write, attention"}
    if not rows:
        for kernel, spans in choice.ways:
            where = " or ".join(map(_words_of, spans))
            yield Line(f"decode{of_window}", whole.get(kernel.name, "attention"), (f"{where}: {kernel.name}",))
        return
    for context in _CONTEXTS:
        cells = tuple(choice.at(count, context).name for count in rows)
        yield Line(f"decode, {context:,} tokens a row{of_window}", "attention", cells)


def _words_of(span: Span) -> str:
    """Return the batches of a span as text."""
    tokens = span.tokens
    most = "" if tokens.stop >= 1 << 31 else f" of up to {tokens.stop - 1:,} tokens together"
    least = "" if tokens.start <= 1 else f" of {tokens.start:,} tokens or more together"
    return f"{_of(span.rows)}{most or least}"


def _product_refusals(what: str, steps: Sequence[Fusion], resolved: Resolved) -> Iterator[Refusal]:
    """Return why kernels are not used for a product, but for those that do not compute such a thing at all."""
    for fusion in steps:
        for name, why in resolved.refused[fusion].items():
            if why != "does not fuse this":
                yield Refusal(name, what, f"{why}: {_WORDS[fusion]}" if why.startswith("does not pay") else why)


def _together(refusals: Sequence[Refusal]) -> Iterator[Refusal]:
    """Return one refusal for each kernel and reason."""
    places: Mapping[tuple[str, str], list[str]] = {(each.kernel, each.why): [] for each in refusals}
    for each in refusals:
        places[each.kernel, each.why].append(each.where)
    for (kernel, why), where in places.items():
        yield Refusal(kernel, ", ".join(dict.fromkeys(where)), why)
