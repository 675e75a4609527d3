"""Invented adapters for a benchmark: most without a file, some read from one PEFT folder; never a trained one."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import torch

from headrace.adapters.bank import AdapterDevice
from headrace.adapters.layout import BlockLayout, ModelShape
from headrace.adapters.loaded import LoadedAdapter, Stamp

__all__ = ["FROM_FILE", "invented", "write_adapter"]

FROM_FILE = "file"
"""Beginning of the folder names that stand for the written adapter."""
_STORED = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def write_adapter(folder: Path, shape: ModelShape, modules: tuple[str, ...], rank: int, dtype: torch.dtype) -> None:
    """Write a PEFT folder of random updates of `modules` in all layers."""
    header: dict[str, object] = {}
    end = 0
    for layer in range(shape.num_layers):
        for module in modules:
            part = "self_attn" if module in ("q", "k", "v", "o") else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}_proj"
            inputs, outputs = shape.size(module, layer)
            for half, size in (("A", [rank, inputs]), ("B", [outputs, rank])):
                start, end = end, end + size[0] * size[1] * dtype.itemsize
                known = {"dtype": _STORED[dtype], "shape": size, "data_offsets": [start, end]}
                header[f"{name}.lora_{half}.weight"] = known
    folder.mkdir()
    text = json.dumps(header).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        values = torch.empty(end // dtype.itemsize, dtype=dtype).normal_(0.0, 0.01)
        file.write(values.view(torch.uint8).numpy().data)
    targets = [f"{module}_proj" for module in modules]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def invented(device: AdapterDevice, layout: BlockLayout, block: torch.Tensor, written: Path) -> AdapterDevice:
    """Return a device that reads `written` for names that begin with `FROM_FILE`, and `block` for all others."""

    def read(path: str, root: Path | None, stamp: Stamp | None) -> LoadedAdapter:
        digest = path.encode()
        if not Path(path).name.startswith(FROM_FILE):
            return LoadedAdapter(layout, block, None, None, digest)
        loaded = device.read(str(written), None, stamp)
        return replace(loaded, digest=digest, stamp=loaded.stamp and loaded.stamp._replace(digest=digest))

    return replace(device, read=read)
