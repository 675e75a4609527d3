"""`quantise_folder`: writes a quantised copy of a model folder, tensor by tensor; goes on where an earlier run stopped.

selected.py decides what is quantised, compressed.py how it is stored, calibrated.py finds the codes where there is
data, and partial.py keeps a half-written copy apart. Without data one matrix is in memory at a time.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from headrace.engine.errors import HeadraceError, InvalidParams
from headrace.engine.model.checkpoint.inventory import Inventory
from headrace.engine.model.checkpoint.parameters import FileMaker
from headrace.engine.model.checkpoint.plan import all_parts
from headrace.engine.model.checkpoint.safetensors import INDEX_FILE, SafetensorsFolder
from headrace.engine.model.experts import routing_of
from headrace.engine.model.families.registry import from_hf
from headrace.engine.model.quantising.calibrated import Calibration
from headrace.engine.model.quantising.compressed import TensorSpec, encoded, quantization_config, tensor_specs
from headrace.engine.model.quantising.files import copy_others, digests, read_plain_config, write_config
from headrace.engine.model.quantising.finished import Record
from headrace.engine.model.quantising.own_texts import OwnTexts
from headrace.engine.model.quantising.partial import Partial, drop_leftover
from headrace.engine.model.quantising.read_back import WrittenModules
from headrace.engine.model.quantising.selected import Module, Selection, select
from headrace.engine.model.quantising.shards import Shards, index, lay_out, nbytes
from headrace.engine.model.roles import Fused
from headrace.engine.model.spec import DecoderSpec
from headrace.engine.version import headrace_version
from headrace.ops.formats import Stored
from headrace.ops.quantise import GROUPS, Method, quantise

__all__ = ["SHARD_BYTES", "Report", "Watcher", "quantise_folder"]

SHARD_BYTES = 4 << 30
"""Most bytes of tensors in a file, unless one tensor has more."""
_BLOCK_ELEMENTS = 1 << 24
_DIGITS = re.compile(r"(\d+)")


class Watcher(Protocol):
    """Protocol of what is told how far a copy is."""

    def advance(self, doing: str, done: int, total: int) -> None:
        """Take the tensor or module that is on the disk now, the bytes of the model that are done, and all of them."""
        ...

    def note(self, line: str) -> None:
        """Take a line that a person should read."""
        ...


@dataclass(frozen=True, slots=True)
class Report:
    """What a finished copy is."""

    out: Path
    before: int
    """Bytes of the model's tensors."""
    after: int
    """Bytes of the copy's tensors."""
    quantised: int
    """Number of linear layers that are quantised."""
    dense: Mapping[str, int]
    """Bytes that stay as they were, by what they are: embeddings, norms and so on."""


def quantise_folder(
    model: Path,
    out: Path,
    method: Method,
    watcher: Watcher,
    *,
    head: bool = False,
    symmetric: bool | None = None,
    group: int | None = None,
    data: Tensor | OwnTexts | None = None,
    device: torch.device | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Report:
    """Write the model folder `model` as a compressed-tensors folder `out`; if it is that already, leave it.

    Args:
        model: A folder with safetensors of a decoder in bfloat16, float16 or float32.
        out: The folder to be, which is new, empty, or what an earlier run of the same arguments has made. It appears
            when it is whole.
        method: The way to quantise.
        watcher: Told how far the copy is.
        head: Whether to quantise the output head as well.
        symmetric: Whether groups of 4-bit integers have no zero points; None for those of models with experts alone.
        group: Inputs of a group of 4-bit integers, one of `GROUPS`; None for the largest that divides all matrices'.
        data: Token ids to calibrate with, int64 [S, T], or the model's own texts; None for the weights alone.
        device: The device that quantises; None for the CPU.
        shard_bytes: Most bytes of tensors in a file.

    Raises:
        InvalidParams: An option does not fit the model, or `out` is taken.
        ModelRejected: The model's files are missing, damaged, quantised already or of an unknown family.
        HeadraceError: A file cannot be written; the message says what to do.
    """
    config = read_plain_config(model)
    spec = from_hf(config)
    _check_apart(model, out)
    try:
        with SafetensorsFolder(model) as files:
            inventory = Inventory(files, spec)
            inventory.check_numbers()
            selection = _selected(spec, inventory, method, head, symmetric, group, data)
            for line in selection.notes():
                watcher.note(line)
            tensors = _tensors(files, selection)
            arguments = _arguments(model, selection, head, data, shard_bytes, device)
            copy = _Copy(files, inventory, spec, selection, watcher, device or torch.device("cpu"))
            report = Report(out, copy.total, sum(map(nbytes, tensors.values())), len(selection.modules), copy.dense())
            if _is_made(out, arguments, watcher):
                return report
            with Partial(out, arguments) as written:
                shards = lay_out(tensors, shard_bytes)
                _check_room(written, sum(shard.size for shard in shards))
                with Shards(written.folder, shards) as opened:
                    write_config(written.folder, config, quantization_config(selection))
                    _write_index(written.folder, index(shards, tensors))
                    copy.write(written, opened, data)
                _finish(written, model, arguments)
            return report
    except OSError as error:
        raise _not_written(out, error) from error


def _is_made(out: Path, arguments: Mapping[str, object], watcher: Watcher) -> bool:
    """Return whether an earlier run has made the whole copy, and remove what a run that was killed then has left."""
    if not Record(arguments).is_of(out):
        return False
    drop_leftover(out)
    watcher.note(f"{out} is complete: an earlier run has made it from this model with these options")
    return True


def _finish(written: Partial, model: Path, arguments: Mapping[str, object]) -> None:
    """Add the files beside the weights to a copy that has all tensors, then its record, and give it its name."""
    copy_others(model, written.folder)
    Record(arguments).write(written.folder)
    written.finish()


def _not_written(out: Path, error: OSError) -> HeadraceError:
    what = f"{error.strerror or error}, at {error.filename or out}"
    return HeadraceError(f"{out} was not written ({what}); set that right and repeat the command to go on")


def _check_apart(model: Path, out: Path) -> None:
    if out.resolve().is_relative_to(model.resolve()):
        _refuse("out", str(out), "a folder outside the model's", "lies in the model's folder")


def _write_index(folder: Path, text: bytes | None) -> None:
    if text is not None:
        (folder / INDEX_FILE).write_bytes(text)


class _Copy:
    """The writing of one copy."""

    def __init__(
        self,
        files: SafetensorsFolder,
        inventory: Inventory,
        spec: DecoderSpec,
        selection: Selection,
        watcher: Watcher,
        device: torch.device,
    ) -> None:
        empty = partial(torch.empty, device=device)
        self._files, self._spec, self._selection, self._watcher = files, spec, selection, watcher
        self._maker = FileMaker(
            inventory, spec, lambda shape, dtype: empty(tuple(shape), dtype=dtype), torch.float32, device, False, None
        )
        self.total = sum(map(files.nbytes, files.shapes))
        """Bytes of the model's tensors."""
        self._done = 0

    def write(self, written: Partial, shards: Shards, data: Tensor | OwnTexts | None) -> None:
        """Write all tensors that an earlier run has not written."""
        modules = self._selection.by_weight
        for name in sorted(self._files.shapes, key=_natural):
            module = modules.get(name)
            if module is None and name not in written.done:
                shards.write_blocks(name, (block for _, block in self._files.raw_blocks(name, _BLOCK_ELEMENTS)))
                written.mark(name)
            elif module is not None and data is None and module.name not in written.done:
                self._keep(module, self._quantised(module), written, shards)
                continue
            elif module is not None and module.name not in written.done:
                continue
            self._advance(name)
        if data is not None:
            self._calibrate(written, shards, data)

    def _calibrate(self, written: Partial, shards: Shards, data: Tensor | OwnTexts) -> None:
        if all(module.name in written.done for module in self._selection.modules):
            return
        ids_ST = data.ids_ST(written) if isinstance(data, OwnTexts) else data
        before = WrittenModules(written.folder)
        try:
            Calibration(self._spec, self._maker, self._selection, ids_ST).run(
                lambda module, weight: self._keep(module, weight, written, shards),
                lambda module: before.read(module) if module.name in written.done else None,
            )
        finally:
            before.close()

    def _quantised(self, module: Module) -> Stored:
        in_order = replace(module.part, rotated=None)  # as the file has its rows, and the copy will
        values_OI = self._maker.dense(Fused((in_order,), module.shape[1]))
        self._maker.check_finite()
        how = self._selection
        return quantise(Stored.from_dense(values_OI), how.method, symmetric=how.symmetric, group=how.group)

    def _keep(self, module: Module, weight: Stored, written: Partial, shards: Shards) -> None:
        shards.write(encoded(module, weight.to(torch.device("cpu"))))
        written.mark(module.name)
        self._advance(module.weight)

    def _advance(self, name: str) -> None:
        self._done += self._files.nbytes(name)
        self._watcher.advance(name.removesuffix(".weight"), self._done, self.total)

    def dense(self) -> dict[str, int]:
        """Return the bytes of the tensors that are copied, by what they are."""
        kinds = {self._maker.names.of(part): _kind(part.role) for part, _ in all_parts(self._spec)}
        found: Counter[str] = Counter()
        for name in self._files.shapes:
            if name not in self._selection.by_weight:
                found[kinds.get(name, "others")] += self._files.nbytes(name)
        return dict(found)


def _kind(role: str) -> str:
    if role.endswith(".bias"):
        return "biases"
    if "norm" in role:
        return "norms"
    return {"embedding.weight": "embeddings", "head.weight": "output head"}.get(role, "linear layers")


def _natural(name: str) -> list[str | int]:
    """Return a key that sorts names by their numbers: layer 2 before layer 10."""
    return [int(piece) if piece.isdecimal() else piece for piece in _DIGITS.split(name)]


def _selected(
    spec: DecoderSpec,
    inventory: Inventory,
    method: Method,
    head: bool,
    symmetric: bool | None,
    group: int | None,
    data: Tensor | OwnTexts | None,
) -> Selection:
    if head and spec.tied_head:
        _refuse(
            "quantize_head",
            head,
            "a model with an output head of its own",
            "is not possible: the head is the table of embeddings",
        )
    if group is not None:
        _check_group(group, method)
    selection = select(spec, inventory.names, method, head=head, symmetric=symmetric, group=group)
    if not selection.modules:
        told = f"fits no linear layer: no number of inputs is a multiple of {group or min(GROUPS)}"
        _refuse("format", method, "another format, such as int8", told)
    for module in selection.modules:
        if inventory.of(module.part).place is not None:
            tensor, limit = inventory.of(module.part).tensors[0], "each expert's own tensors"
            told = f"holds all experts of a layer in {tensor}; the option quantize of an engine takes that"
            _refuse("model", tensor, limit, told)
    if data is None:
        return selection
    if routing_of(spec) is not None:
        told = "is not possible for models with experts; leave the data out"
        _refuse("data", spec.architecture, "a model without experts", told)
    if not spec.has_softmax_alone:
        _refuse("data", spec.architecture, "a model whose attention is plain softmax", "is not possible for this model")
    if any(layer.tail is not None for layer in spec.layers):
        told = "is not possible for this model, whose layers end behind their feeds"
        _refuse("data", spec.architecture, "a model whose layers end with their feeds", told)
    if any(layer.norms.is_parallel for layer in spec.layers):
        _refuse(
            "data",
            spec.architecture,
            "a model whose feeds read what its mixers have added",
            "is not possible for this model, whose mixers and feeds stand side by side",
        )
    _check_length(data, spec, most=max(module.shape[1] for module in selection.modules))
    return selection


def _check_length(data: Tensor | OwnTexts, spec: DecoderSpec, most: int) -> None:
    """Refuse sequences that are too long for the model, or too short together for products of up to `most` inputs."""
    sequences, tokens = data.shape if isinstance(data, Tensor) else (data.sequences, data.tokens)
    if tokens > spec.max_context:
        _refuse("sequence_tokens", tokens, f"at most {spec.max_context}", f"is more than the model takes, got {tokens}")
    if sequences * tokens < most:
        told = f"is too short: {sequences * tokens} tokens for products of up to {most} inputs"
        _refuse("data", sequences * tokens, f"at least {most} tokens; 65,536 are usual", told)


def _check_group(group: int, method: Method) -> None:
    """Refuse a size of groups for a format without groups, or one that kernels do not take."""
    if method != "int4":
        _refuse("group_size", group, "format int4", f"is for int4 alone: {method} has a scale for each output")
    if group not in GROUPS:
        _refuse(
            "group_size", group, ", ".join(map(str, sorted(GROUPS))), f"must be a size that kernels take, got {group}"
        )


def _tensors(files: SafetensorsFolder, selection: Selection) -> dict[str, TensorSpec]:
    """Return the tensors of the copy, layer by layer."""
    modules, found = selection.by_weight, dict[str, TensorSpec]()
    for name in sorted(files.shapes, key=_natural):
        found |= tensor_specs(modules[name]) if name in modules else {name: (files.dtype(name), files.shapes[name])}
    return found


def _arguments(
    model: Path,
    selection: Selection,
    head: bool,
    data: Tensor | OwnTexts | None,
    shard_bytes: int,
    device: torch.device | None,
) -> dict[str, object]:
    """Return everything that decides the bytes of the copy."""
    return {
        "headrace": headrace_version(),
        "torch": torch.__version__,
        "format": selection.method,
        "symmetric": selection.symmetric,
        "group": selection.group,
        "quantize_head": head,
        "data": None if data is None else _described(data),
        "device": "cpu" if device is None else str(device),
        "shard_bytes": shard_bytes,
        "model": digests(model),
    }


def _described(data: Tensor | OwnTexts) -> str:
    if isinstance(data, OwnTexts):
        return str(data)
    return f"{list(data.shape)} {hashlib.blake2b(data.numpy().tobytes()).hexdigest()}"


def _check_room(written: Partial, wanted: int) -> None:
    """Refuse a disk that has no room for the copy, before hours of calibration."""
    there = sum(path.stat().st_blocks * 512 for path in written.folder.iterdir() if path.is_file())
    free = shutil.disk_usage(written.folder).free
    if wanted - there > free:
        told = f"lies on a disk with {free:,} bytes free; the copy takes {wanted - there:,}"
        _refuse("out", str(written.folder), "a disk with more room", told)


def _refuse(field: str, value: object, limit: str, told: str) -> NoReturn:
    raise InvalidParams(f"{field}: {told}; wanted: {limit}", field=field, value=value, limit=limit)
