"""Quantised weights in the layout of compressed-tensors: names, shapes, packing and config; never opens a file.

All schemes are weight-only, as headrace computes: activations stay in the model's dtype. 8-bit floats are
`float-quantized`, integers `pack-quantized`. checkpoint/quantised/compressed_tensors.py reads what is made here.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from headrace.engine.model.quantising.selected import Module, Selection
from headrace.ops.formats import Stored
from headrace.ops.quantised import Fp8, IntGroups, pack_nibbles

__all__ = ["TensorSpec", "encoded", "quantization_config", "tensor_specs"]

TensorSpec = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor of a checkpoint."""
_WORD_BYTES: Final = 4


def tensor_specs(module: Module) -> dict[str, TensorSpec]:
    """Return the tensors that hold a quantised module, by their names."""
    (outs, ins), format, name = module.shape, module.format, module.name
    if isinstance(format, Fp8):
        return {
            f"{name}.weight": (torch.float8_e4m3fn, (outs, ins)),
            f"{name}.weight_scale": (torch.float32, (outs, 1)),
        }
    parts, in_word = format.parts(module.shape), 32 // format.bits
    found: dict[str, TensorSpec] = {
        f"{name}.weight_packed": (torch.int32, (outs, -(-ins // in_word))),
        f"{name}.weight_scale": (format.scale, parts["scale"].shape),
        f"{name}.weight_shape": (torch.int64, (2,)),
    }
    if format.zeros:
        groups = parts["zero"].shape[1]
        found[f"{name}.weight_zero_point"] = (torch.int32, (-(-outs // in_word), groups))
    return found


def encoded(module: Module, weight: Stored) -> dict[str, Tensor]:
    """Return the tensors that hold a weight of the module's format, by their names."""
    name, parts, format = module.name, weight.parts, module.format
    if isinstance(format, Fp8):
        return {f"{name}.weight": parts["values"], f"{name}.weight_scale": parts["scale"].unsqueeze(1)}
    found = {
        f"{name}.weight_packed": _words(parts["values"]),
        f"{name}.weight_scale": parts["scale"],
        f"{name}.weight_shape": torch.tensor(module.shape),
    }
    if format.zeros:
        zero_GO = parts["zero"].T  # zero points are packed along the outputs
        packed = pack_nibbles(zero_GO) if format.bits == 4 else zero_GO
        found[f"{name}.weight_zero_point"] = _words(packed).T.contiguous()
    return found


def _words(data: Tensor) -> Tensor:
    """Return bytes [rows, count] as int32 [rows, ceil(count / 4)], the first byte in the lowest bits."""
    padded = torch.nn.functional.pad(data, (0, -data.shape[1] % _WORD_BYTES))
    return padded.clone(memory_format=torch.contiguous_format).view(torch.int32)


def quantization_config(selection: Selection) -> dict[str, Any]:
    """Return what config.json says of a model whose modules are quantised as `selection` says.

    All of them have one format: transformers dequantises every layer by the first that it finds. `dequantize` is an
    option of transformers alone, which reads zero points in no other way: the layers that compressed-tensors would make
    otherwise have room for unpacked ones.
    """
    (format,) = {module.format for module in selection.modules}
    group = {
        "format": _format_name(format),
        "targets": ["Linear"],
        "weights": _weights(format),
        "input_activations": None,
        "output_activations": None,
    }
    found: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": group["format"],
        "config_groups": {"group_0": group},
        "ignore": sorted(selection.ignored),
        "kv_cache_scheme": None,
    }
    if isinstance(format, IntGroups) and format.zeros:
        found["dequantize"] = True
    return found


def _format_name(format: Fp8 | IntGroups) -> str:
    return "float-quantized" if isinstance(format, Fp8) else "pack-quantized"


def _weights(format: Fp8 | IntGroups) -> dict[str, Any]:
    group = None if isinstance(format, Fp8) else format.group
    return {
        "num_bits": 8 if isinstance(format, Fp8) else format.bits,
        "type": "float" if isinstance(format, Fp8) else "int",
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "symmetric": isinstance(format, Fp8) or not format.zeros,
        "dynamic": False,
        "actorder": None,
    }
