"""Roles of a checkpoint's tensors, the parameters that they are fused into, and their names; never holds a tensor."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

__all__ = ["Fused", "Names", "Part", "Rotated", "bias", "head_norm_roles", "matrix", "norm"]

_ROTATED = re.compile(r"[qk](_norm(_\d+)?)?")


@dataclass(frozen=True, slots=True)
class Rotated:
    """Rows of a tensor that are the elements of rotated heads: queries or keys."""

    head_dim: int
    rotary_dim: int
    """Number of first elements of each head that are rotated."""
    interleaved: bool
    """Whether the two elements of each pair lie side by side, not half of the rotated part of the head apart."""
    rows: int
    """Number of these rows, which are the tensor's first; those behind them are values."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a checkpoint: its role, and the rows that it has."""

    role: str
    """Role and kind, such as `q.weight` or `q.bias`; `Names` knows where a file keeps it."""
    rows: int
    layer: int | None = None
    """Number of the layer that the tensor belongs to; None outside the layers."""
    rotated: Rotated | None = None
    """The rows that are rotated, as the model's authors order them; None if none are."""
    groups: int | None = None
    """Number of groups of heads, each with its queries, then its key, then its value, where the tensor holds all."""
    expert: int | None = None
    """Number of the expert that the tensor belongs to; None outside experts."""


@dataclass(frozen=True, slots=True)
class Fused:
    """A parameter: its parts, one above the other, and their inner size (None for vectors)."""

    parts: tuple[Part, ...]
    columns: int | None
    is_norm: bool = False
    """Whether random weights are 1: the weight of a norm."""
    in_float32: bool = False
    """Whether the parameter is a float32 tensor, whatever the model's dtype, and never quantised: a router's."""
    is_split: bool = False
    """Whether the parameter is a dense matrix, since a mixer multiplies by parts of it in ways of its own."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape, [out, in] or [out]."""
        rows = sum(part.rows for part in self.parts)
        return (rows,) if self.columns is None else (rows, self.columns)

    @property
    def shapes(self) -> Iterator[tuple[Part, tuple[int, ...]]]:
        """The parts, each with the shape of its tensor."""
        inner = () if self.columns is None else (self.columns,)
        return ((part, (part.rows, *inner)) for part in self.parts)

    @property
    def is_bias(self) -> bool:
        """Whether the parameter is the bias of a product or a norm."""
        return all(part.role.endswith(".bias") for part in self.parts)

    def rotated(self, head_dim: int, rotary_dim: int, *, interleaved: bool) -> Fused:
        """Return the same parameter, with the rows of queries and keys, or of their norms, marked as rotated."""
        parts = []
        for part in self.parts:
            is_rotated = _ROTATED.fullmatch(part.role.split(".")[0]) is not None
            rotated = Rotated(head_dim, rotary_dim, interleaved, part.rows) if is_rotated else None
            parts.append(replace(part, rotated=rotated))
        return replace(self, parts=tuple(parts))

    def of_expert(self, expert: int) -> Fused:
        """Return the same parameter of the expert with the number `expert`."""
        return self._with([Part(p.role, p.rows, p.layer, p.rotated, p.groups, expert) for p in self.parts])

    def of_layer(self, layer: int) -> Fused:
        """Return the same parameter of the layer with the number `layer`."""
        return self._with([Part(p.role, p.rows, layer, p.rotated, p.groups, p.expert) for p in self.parts])

    def _with(self, parts: Iterable[Part]) -> Fused:
        # By hand, as above: `dataclasses.replace` takes several times as long, which models of many experts feel.
        return Fused(tuple(parts), self.columns, self.is_norm, self.in_float32, self.is_split)


def matrix(columns: int, **rows: int) -> Fused:
    """Return a matrix [out, in] of `columns` inputs whose parts have the given roles and rows, in order."""
    return Fused(tuple(Part(f"{role}.weight", count) for role, count in rows.items()), columns)


def bias(**rows: int) -> Fused:
    """Return the bias of a product whose parts have the given roles and rows, in order."""
    return Fused(tuple(Part(f"{role}.bias", count) for role, count in rows.items()), None)


def norm(**rows: int) -> Fused:
    """Return the weight of a norm, with its role and its size."""
    return Fused(tuple(Part(f"{role}.weight", count) for role, count in rows.items()), None, is_norm=True)


def head_norm_roles(heads: int, kv_heads: int) -> list[str]:
    """Return the roles of norms of which each query and key head has one of its own, queries first."""
    return [*(f"q_norm_{head}" for head in range(heads)), *(f"k_norm_{head}" for head in range(kv_heads))]


def _has(tensors: Collection[str], module: str) -> bool:
    """Return whether one of the tensors is a module's."""
    return any(name.startswith(f"{module}.") for name in tensors)


@dataclass(frozen=True, slots=True)
class Names:
    """Names that a checkpoint gives to the roles."""

    layer_prefix: str
    """Prefix of a layer's tensors, with `{}` for the layer's number."""
    roles: Mapping[str, str]
    """Name of each role, that of an expert's with `{}` for the expert's number; empty for what a layer itself has."""
    harmless: re.Pattern[str]
    """Names that may be left over: they hold only what is computed from the spec."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Names within a layer of tensors that are not called by their role and kind, by both, such as `q.weight`."""
    kv_scales: tuple[str, ...] = ()
    """Names that the scales of an 8-bit cache may have within a layer, with `{0}` for `k` or `v`."""
    interleaved: bool = False
    """Whether the file holds the two elements of each pair of a rotated head side by side, whatever the model does."""
    norm_offset: float = 0.0
    """Number that the checkpoint leaves out of the weights of norms. Such weights are kept in float32, since 1 and a
    small difference have no room in 16 bits."""
    has_float32_norms: bool = False
    """Whether weights of norms are kept in float32 without an offset, too: the file has added one to them."""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Roles whose one tensor holds those of several others, one above the other: `qkv` for q, k and v."""
    grouped: bool = False
    """Whether joined queries, keys and values lie group by group: the queries of a key, this key and its value."""
    transposed: frozenset[str] = frozenset()
    """Roles whose matrices are stored [in, out]."""
    prefix: str = "model."
    """Beginning of most names, which a checkpoint lacks that was saved without the class that holds the head; empty
    once it is known to be one."""
    later: Mapping[str, str] = field(default_factory=dict)
    """Names that some roles have in checkpoints of transformers 5 that are not written in their former format; the
    first one's tensor tells."""
    homes: tuple[tuple[str, str], ...] = ()
    """Beginnings that names may have in place of `prefix`, each with what then stands before the name of the head:
    those of a text part within a larger model. Empty for a model of text alone."""
    others: tuple[str, ...] = ()
    """Names of the other parts of a larger model, whose tensors are left unread."""
    is_peft: bool = True
    """Whether adapters of the model name its modules so, too; otherwise they name them as those of Llama."""

    def of(self, part: Part) -> str:
        """Return the checkpoint's name of a part."""
        role, kind = part.role.split(".")
        prefix = "" if part.layer is None else self.layer_prefix.format(part.layer)
        if part.role in self.whole:
            return prefix + self.whole[part.role]
        name = self.roles[role] if part.expert is None else self.roles[role].format(part.expert)
        return f"{prefix}{name}.{kind}" if name else prefix + kind

    def stored(self, fused: Fused) -> Fused:
        """Return a parameter as a checkpoint with these names stores it: from fewer parts where some are joined."""
        roles = tuple(part.role.split(".")[0] for part in fused.parts) if self.joined else ()
        for role, others in self.joined.items():
            if roles == others:
                first = fused.parts[0]
                kind, rows = first.role.split(".")[1], sum(part.rows for part in fused.parts)
                heads = sum(part.rotated.rows for part in fused.parts if part.rotated is not None)
                rotated = first.rotated and replace(first.rotated, rows=heads)
                part = Part(f"{role}.{kind}", rows, first.layer, rotated)
                if self.grouped and rotated is not None:
                    part = replace(part, groups=fused.parts[1].rows // rotated.head_dim)
                return replace(fused, parts=(part,))
        return fused

    def is_transposed(self, part: Part) -> bool:
        """Return whether a checkpoint holds a matrix [in, out]."""
        role, kind = part.role.split(".")
        return kind == "weight" and role in self.transposed

    def found_in(self, tensors: Collection[str]) -> Names:
        """Return the names as a checkpoint with these tensors spells them.

        They may lack the prefix or stand within a home, and some roles may have their later names.
        """
        if self.later:
            telling = f".{next(iter(self.later.values()))}.weight"
            is_later = any(name.endswith(telling) for name in tensors)
            roles = {**self.roles, **self.later} if is_later else self.roles
            return replace(self, roles=roles, later={}).found_in(tensors)
        if not self.homes:
            return self if any(name.startswith(self.prefix) for name in tensors) else self.bare()
        candidates = [self._at_home(*each) for each in self.homes]
        held = [each for each in candidates if _has(tensors, each.roles["embedding"])]
        with_head = (each for each in held if _has(tensors, each.roles["head"]))
        return next(with_head, (held or candidates)[0])

    def is_other(self, tensor: str) -> bool:
        """Return whether a tensor belongs to another part of a larger model."""
        name = tensor.removeprefix("model.")
        return any(name == part or name.startswith(f"{part}.") for part in self.others)

    def _at_home(self, home: str, before_head: str) -> Names:
        """Return the names within a larger model."""

        def moved(name: str) -> str:
            return home + name.removeprefix(self.prefix) if name.startswith(self.prefix) else name

        roles = {role: moved(name) for role, name in self.roles.items()}
        beginnings = "|".join(map(re.escape, (home, before_head)))
        return replace(
            self,
            layer_prefix=moved(self.layer_prefix),
            roles=roles | {"head": before_head + roles["head"]},
            harmless=re.compile(f"(?:{beginnings})(?:{self.harmless.pattern})"),
            prefix=home,
        )

    def bare(self) -> Names:
        """Return the names of a checkpoint that was saved without the prefix."""
        return replace(
            self,
            layer_prefix=self.layer_prefix.removeprefix(self.prefix),
            roles={role: name.removeprefix(self.prefix) for role, name in self.roles.items()},
            prefix="",
        )
