"""Reads an encoder's parameters from safetensors; never decides what the model looks like.

A tensor that is missing, left over or of another shape is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from headrace.engine.errors import ModelRejected
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.checkpoint.weight_parts import WeightSum, name_of
from headrace.engine.model.encoder.spec import EncoderSpec
from headrace.engine.stats import ModelPart, WeightPart
from headrace.ops.formats import Stored

__all__ = ["Affine", "BiasedWeight", "EncoderLayer", "EncoderWeights", "encoder_parts", "load_encoder"]

_HARMLESS = re.compile(r"(bert\.|roberta\.)?(pooler\.dense\.(weight|bias)|embeddings\.(position|token_type)_ids)")
"""Names that may be left over in a checkpoint: weights that only a head would use, and values that are computed."""
_BLOCK = 1 << 24


@dataclass(frozen=True, slots=True)
class Affine:
    """Weight and bias of a layer norm, [E] and [E]."""

    weight: Tensor
    bias: Tensor

    def to(self, device: torch.device) -> Affine:
        """Return the same parameters on `device`."""
        return Affine(self.weight.to(device), self.bias.to(device))


@dataclass(frozen=True, slots=True)
class BiasedWeight:
    """Weight and bias of a product, [out, in] and [out]."""

    weight: Stored
    bias: Tensor

    def to(self, device: torch.device) -> BiasedWeight:
        """Return the same parameters on `device`."""
        return BiasedWeight(self.weight.to(device), self.bias.to(device))


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """Parameters of one block."""

    qkv: BiasedWeight
    """Product whose rows are E of queries, E of keys and E of values."""
    o: BiasedWeight
    attention_norm: Affine
    up: BiasedWeight
    down: BiasedWeight
    output_norm: Affine

    def to(self, device: torch.device) -> EncoderLayer:
        """Return the same parameters on `device`."""
        return EncoderLayer(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """All parameters of an encoder."""

    words_VE: Tensor
    positions_PE: Tensor
    types_TE: Tensor
    norm: Affine
    layers: tuple[EncoderLayer, ...]
    head: tuple[BiasedWeight, BiasedWeight] | None
    """Products [E, E] and [1, E] of the head, if the model scores pairs, else None."""

    def to(self, device: torch.device) -> EncoderWeights:
        """Return the same parameters on `device`."""
        return EncoderWeights(
            words_VE=self.words_VE.to(device),
            positions_PE=self.positions_PE.to(device),
            types_TE=self.types_TE.to(device),
            norm=self.norm.to(device),
            layers=tuple(layer.to(device) for layer in self.layers),
            head=None if self.head is None else (self.head[0].to(device), self.head[1].to(device)),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = [self.norm, *(self.head or ())]
        parts += [getattr(layer, field.name) for layer in self.layers for field in fields(layer)]
        tensors = [self.words_VE, self.positions_PE, self.types_TE]
        return sum(
            tensor.nbytes for tensor in [*tensors, *(each for part in parts for each in (part.weight, part.bias))]
        )


def encoder_parts(weights: EncoderWeights) -> tuple[WeightPart, ...]:
    """Return the bytes of an encoder by part and format; the embedding holds words, positions and types."""
    total = WeightSum()
    for table in (weights.words_VE, weights.positions_PE, weights.types_TE):
        total.add("embedding", name_of(table), table.nbytes)
    norms = [weights.norm]
    products: list[tuple[ModelPart, BiasedWeight]] = [("head", product) for product in weights.head or ()]
    for layer in weights.layers:
        products += [("attention", layer.qkv), ("attention", layer.o)]
        products += [("feed-forward", layer.up), ("feed-forward", layer.down)]
        norms += [layer.attention_norm, layer.output_norm]
    for part, product in products:
        total.add(part, product.weight.format.name, product.weight.nbytes)
    total.add_vectors(product.bias for _, product in products)
    total.add_vectors(each for norm in norms for each in (norm.weight, norm.bias))
    return total.parts()


def load_encoder(folder: Path, spec: EncoderSpec, *, dtype: torch.dtype, device: torch.device) -> EncoderWeights:
    """Return a model's parameters in `dtype` on `device`; on the meta device without their numbers, which are not read.

    Raises:
        ModelRejected: A tensor is missing, left over, of another shape or not finite, or a file is damaged.
    """
    with SafetensorsFolder(folder) as files:
        return _Loader(files, spec, dtype, device).load()


class _Loader:
    def __init__(self, files: SafetensorsFolder, spec: EncoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._files, self._spec, self._dtype, self._device = files, spec, dtype, device
        has_prefix = any(name.startswith(spec.prefix + "embeddings.") for name in files.shapes)
        self._prefix = spec.prefix if has_prefix else ""
        self._read: set[str] = set()

    def load(self) -> EncoderWeights:
        spec, hidden = self._spec, self._spec.hidden_size
        top = f"{self._prefix}embeddings"
        weights = EncoderWeights(
            words_VE=self._tensor(f"{top}.word_embeddings.weight", spec.vocab_size, hidden),
            positions_PE=self._tensor(f"{top}.position_embeddings.weight", spec.num_positions, hidden),
            types_TE=self._tensor(f"{top}.token_type_embeddings.weight", spec.num_types, hidden),
            norm=self._affine(f"{top}.LayerNorm", hidden),
            layers=tuple(self._layer(layer) for layer in range(spec.num_layers)),
            head=self._head(),
        )
        left = [name for name in self._files.shapes if name not in self._read and not _HARMLESS.fullmatch(name)]
        if left:
            self._refuse(left[0], "left over", f"the tensors of the model ({len(left)} left over)")
        return weights

    def _layer(self, layer: int) -> EncoderLayer:
        hidden, ffn = self._spec.hidden_size, self._spec.ffn_size
        name = f"{self._prefix}encoder.layer.{layer}"
        parts = [self._affine(f"{name}.attention.self.{part}", hidden, hidden) for part in ("query", "key", "value")]
        return EncoderLayer(
            qkv=BiasedWeight(
                Stored.from_dense(torch.cat([part.weight for part in parts])), torch.cat([part.bias for part in parts])
            ),
            o=self._product(f"{name}.attention.output.dense", hidden, hidden),
            attention_norm=self._affine(f"{name}.attention.output.LayerNorm", hidden),
            up=self._product(f"{name}.intermediate.dense", ffn, hidden),
            down=self._product(f"{name}.output.dense", hidden, ffn),
            output_norm=self._affine(f"{name}.output.LayerNorm", hidden),
        )

    def _head(self) -> tuple[BiasedWeight, BiasedWeight] | None:
        if self._spec.head is None:
            return None
        hidden = self._spec.hidden_size
        dense, out = self._spec.head
        return self._product(dense, hidden, hidden), self._product(out, 1, hidden)

    def _product(self, name: str, rows: int, columns: int) -> BiasedWeight:
        weight, bias = self._tensor(f"{name}.weight", rows, columns), self._tensor(f"{name}.bias", rows)
        return BiasedWeight(Stored.from_dense(weight), bias)

    def _affine(self, name: str, rows: int, *inner: int) -> Affine:
        return Affine(self._tensor(f"{name}.weight", rows, *inner), self._tensor(f"{name}.bias", rows))

    def _tensor(self, name: str, *shape: int) -> Tensor:
        found = self._files.shapes.get(name)
        if found is None:
            self._refuse(name, "missing", "every tensor of the model")
        if found != shape:
            self._refuse(name, list(found or ()), f"the shape {list(shape)}")
        self._read.add(name)
        if self._device.type == "meta":
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        tensor = torch.empty(shape, dtype=self._dtype)
        for first, rows in self._files.blocks(name, _BLOCK):
            tensor[first : first + len(rows)] = rows
        if not bool(tensor.isfinite().all()):
            self._refuse(name, "not finite", f"finite values in {str(self._dtype).removeprefix('torch.')}")
        return tensor.to(self._device)

    def _refuse(self, tensor: str, value: object, limit: object) -> None:
        message = f"{self._files.name}: the tensor {tensor[:200]} is {value}; wanted: {limit}"
        raise ModelRejected(message, field=tensor, value=value, limit=limit)
