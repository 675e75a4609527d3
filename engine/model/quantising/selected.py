"""`select`: decides which matrices of a decoder are quantised, and in which format; never reads or writes a tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.engine.model.checkpoint.plan import layer_plan, per_layer_plan, top_plan
from headrace.engine.model.experts import routing_of
from headrace.engine.model.roles import Fused, Names, Part
from headrace.engine.model.spec import DecoderSpec
from headrace.ops.quantise import GROUPS, Method, common_group, format_for
from headrace.ops.quantised import Fp8, IntGroups

__all__ = ["Module", "Selection", "select"]

_NEVER = "router"
"""Role of the matrix that chooses experts, which is small and decides much."""
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Module:
    """A linear layer whose weight is quantised."""

    name: str
    """Name in the checkpoint, such as `model.layers.0.mlp.up_proj`."""
    part: Part
    shape: tuple[int, int]
    """Outputs and inputs."""
    format: Fp8 | IntGroups

    @property
    def weight(self) -> str:
        """Name of the tensor that holds the weight in the checkpoint that is read."""
        return self.name + _WEIGHT


@dataclass(frozen=True, slots=True)
class Selection:
    """What a way to quantise does with the linear layers of a model."""

    method: Method
    symmetric: bool
    """Whether groups of 4-bit integers have no zero points."""
    group: int | None
    """Inputs of every group of 4-bit integers; None for 8 bits."""
    modules: tuple[Module, ...]
    """Modules that are quantised, in the order of the layers."""
    ignored: Mapping[str, str]
    """Linear modules that are not quantised, by name or an expression, each with the reason."""
    odd: Mapping[str, str]
    """Ignored modules whose inputs the format does not fit, each with the reason."""

    @property
    def by_weight(self) -> Mapping[str, Module]:
        """The quantised modules by the name of their weight."""
        return {module.weight: module for module in self.modules}

    def notes(self) -> Iterator[str]:
        """Yield lines that a person should read: what is left out."""
        yield from (f"{name} is not quantised: {reason}" for name, reason in self.odd.items())


def select(
    spec: DecoderSpec,
    names: Names,
    method: Method,
    *,
    head: bool,
    symmetric: bool | None = None,
    group: int | None = None,
) -> Selection:
    """Return which linear layers of a decoder are quantised: all within the layers but routers.

    Norms, embeddings and a head that is the table of embeddings never are.

    Args:
        spec: The shape of the model.
        names: Names of the tensors in the checkpoint.
        method: The way to quantise.
        head: Whether to quantise the output head.
        symmetric: Whether groups of 4-bit integers have no zero points; None for the groups of models with experts
            alone, since transformers reads no zero points of experts, and vLLM only on some devices.
        group: Inputs of every group of 4-bit integers; None for the largest that divides the inputs of all matrices.
    """
    if symmetric is None:
        symmetric = method == "int4" and routing_of(spec) is not None
    told = f"multiple of {group or min(GROUPS)}"
    if method == "int4" and group is None:
        group = common_group([fused.shape[1] for fused, is_head in _matrices(spec) if head or not is_head])
    modules: list[Module] = []
    ignored: dict[str, str] = {}
    odd: dict[str, str] = {}
    for fused, is_head in _matrices(spec):
        for part in fused.parts:
            name, size_in = names.of(part).removesuffix(_WEIGHT), fused.shape[1]
            format = format_for(method, size_in, symmetric=symmetric, group=group)
            if is_head and not head:
                ignored[name] = "the output head"
            elif fused.in_float32 or part.role.startswith(_NEVER):
                ignored[name] = "a router"
            elif names.is_transposed(part):
                odd[name] = "this family stores it [in, out]"
            elif fused.is_split:
                ignored[name] = "split as it is loaded"
            elif format is None:
                odd[name] = f"{size_in} inputs are no {told}"
            else:
                modules.append(Module(name, part, (part.rows, size_in), format))
    if spec.per_layer is not None:
        ignored[names.of(per_layer_plan(spec)["product_XE"].parts[0]).removesuffix(_WEIGHT)] = "beside the embeddings"
    if spec.tied_head and spec.has_head:
        ignored[names.of(Part("head.weight", 0)).removesuffix(_WEIGHT)] = "the table of embeddings"
    others = {rf"re:(model\.)?{re.escape(part)}\..*": "a part that is left unread" for part in names.others}
    return Selection(method, symmetric, group, tuple(modules), ignored | odd | others, odd)


def _matrices(spec: DecoderSpec) -> Iterator[tuple[Fused, bool]]:
    """Yield the matrices of the linear layers, each with whether it is the output head."""
    for layer in range(spec.num_layers):
        for plan in layer_plan(spec, layer):
            yield from ((fused, False) for fused in plan.values() if fused.columns is not None)
    if not spec.tied_head:
        yield top_plan(spec)["head"], True
