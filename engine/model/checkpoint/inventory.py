"""`Inventory`: the tensors of a model in a checkpoint, found and checked by name and shape; never reads their numbers.

A name that is missing, left over or of another shape is an error before anything is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from headrace.engine.model.checkpoint.found import Checkpoint, Found, Reader, refuse_tensor
from headrace.engine.model.checkpoint.plan import Holding
from headrace.engine.model.checkpoint.readers import READERS, find
from headrace.engine.model.checkpoint.transposed import transposed
from headrace.engine.model.roles import Fused, Names, Part
from headrace.engine.model.spec import DecoderSpec
from headrace.ops.formats import Dense

__all__ = ["Inventory"]


class Inventory:
    """How an open checkpoint holds each tensor that a decoder needs."""

    def __init__(self, files: Checkpoint, spec: DecoderSpec | Holding, readers: Sequence[Reader] = READERS) -> None:
        """Find all tensors of `spec`, each by the first of `readers` that knows it.

        Args:
            files: The open checkpoint.
            spec: The shape of the model, or what a checkpoint must hold of something else.
            readers: Readers of the ways in which a checkpoint may store a weight, in the order in which they are asked.

        Raises:
            ModelRejected: A tensor is missing, left over or of another shape.
        """
        self.files = files
        held = spec if isinstance(spec, Holding) else Holding.of(spec)
        self.names: Names = held.names.found_in(files.shapes)
        """Names of the tensors; a folder may have been saved without the class that holds the head."""
        self.others = [name for name in files.shapes if self.names.is_other(name)]
        """Tensors of the other parts of a larger model, which are left unread."""
        self.scales = [self._scale_names(layer) for layer in range(held.num_layers)]
        """By layer, names of the scales of an 8-bit cache that it may have, each with `k` (keys) or `v` (values)."""
        self.tied_leftover: Found | None = None
        """A stored head that should be the embedding, since the spec ties them; None if there is none."""
        parts = [(self.names.of(part), part, shape) for part, shape in held.parts()]
        wanted = {name: shape for name, _, shape in parts}
        self._turned = {name for name, part, _ in parts if self.names.is_transposed(part)}
        self._found = {name: found for name in wanted if (found := self._find(name, readers)) is not None}
        self._experts = 1 + max((part.expert for _, part, _ in parts if part.expert is not None), default=-1)
        missing = [name for name in wanted if name not in self._found]
        if missing:
            limit = f"the {len(wanted)} tensors of the model ({len(missing)} missing{self._counted()})"
            self.refuse(missing[0], "missing", limit)
        if held.tied_head is not None and self.names.prefix:
            head = self.names.of(Part("head.weight", 0))
            if files.shapes.get(head) == held.tied_head:
                self.tied_leftover = find(files, head, readers)
        self._check_leftovers(is_tied=held.tied_head is not None)
        for name, shape in wanted.items():
            self._check_shape(name, shape)
        self._check_stacks()
        for fused in held.parameters:
            self._check_kinds(fused)

    def check_numbers(self) -> None:
        """Read what decides whether quantised weights are sound, such as their scales, and refuse damaged ones.

        Raises:
            ModelRejected: A scale is not finite, or another such number is none that a tool writes.
        """
        for found in self._found.values():
            if found.check is not None:
                found.check()

    def of(self, part: Part) -> Found:
        """Return how the checkpoint holds a tensor of the model."""
        return self._found[self.names.of(part)]

    def is_plain(self, part: Part) -> bool:
        """Return whether the checkpoint holds a tensor as numbers of one floating-point dtype, nothing packed."""
        found = self.of(part)
        plain = sum(spec.nbytes for spec in found.format.parts(found.shape).values())
        return isinstance(found.format, Dense) and found.nbytes(self.files) == plain

    @property
    def nbytes(self) -> int:
        """Bytes of the files that hold the model's tensors."""
        return sum(found.nbytes(self.files) for found in self._found.values())

    def refuse(self, tensor: str, value: object, limit: object) -> NoReturn:
        """Raise `ModelRejected` that says: the tensor is `value`, but `limit` is wanted."""
        refuse_tensor(self.files, tensor, value, limit)

    def _check_leftovers(self, *, is_tied: bool) -> None:
        known = {tensor for found in self._found.values() for tensor in found.tensors}
        known.update(name for names in self.scales for name in names)
        known.update(self.others)
        if self.tied_leftover is not None:
            known.update(self.tied_leftover.tensors)
        left = [name for name in self.files.shapes if name not in known and not self.names.harmless.fullmatch(name)]
        if not left:
            return
        wanted = f"the tensors of the model ({len(left)} left over{self._counted()})"
        if is_tied and left[0].startswith(f"{self.names.roles['head']}."):
            wanted = "no head of its own, since tie_word_embeddings is true"
        self.refuse(left[0], "left over", wanted)

    def _find(self, name: str, readers: Sequence[Reader]) -> Found | None:
        found = find(self.files, name, readers)
        return transposed(self.files, found) if found is not None and name in self._turned else found

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._found[name]
        if found.shape != shape:
            turn = -1 if name in self._turned else 1
            self.refuse(name, list(found.shape[::turn]), f"the shape {list(shape[::turn])}")
        try:
            found.format.parts(shape)
        except ValueError as error:
            self.refuse(name, f"stored as {found.format.name}", error)

    def _check_stacks(self) -> None:
        """Refuse tensors that hold more experts, or norms of more heads, than the model has."""
        read = Counter(each.tensors[0] for each in self._found.values() if each.place and not each.place.experts)
        for tensor, heads in read.items():
            shape = list(self.files.shapes[tensor])
            if shape[0] != heads:
                self.refuse(tensor, shape, f"the shape {[heads, *shape[1:]]}")
        for found in self._found.values():
            if found.place is not None and found.place.experts > self._experts:
                wanted = f"{self._experts}, as the config says"
                self.refuse(found.tensors[0], f"of {found.place.experts} experts", wanted)

    def _counted(self) -> str:
        """Return how many experts the config gives to a layer, for messages about tensors; empty if none."""
        return f"; the config has {self._experts} experts" if self._experts else ""

    def _check_kinds(self, fused: Fused) -> None:
        """Refuse tensors of one product that a tool has stored in different ways, which it never does on purpose."""
        kinds = {self.names.of(part): self.of(part).kind for part in fused.parts}
        first = next(iter(kinds))
        for name, kind in kinds.items():
            if kind != kinds[first]:
                self.refuse(name, kind or "in plain numbers", f"as {first}, which is {kinds[first] or 'plain'}")

    def _scale_names(self, layer: int) -> dict[str, str]:
        prefix = self.names.layer_prefix.format(layer)
        return {prefix + name.format(kind): kind for kind in "kv" for name in self.names.kv_scales}
