"""Tiny models to quantise, and what the tests of quantised copies share; holds no tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import quantised_checkpoints
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.engine.model.quantising.run import Report, quantise_folder

__all__ = ["Told", "contents", "copied", "dense_folder", "sequences", "unstack"]


class Told:
    """What a run told; it raises `KeyboardInterrupt` as Ctrl-C would after so many tensors."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.done: list[str] = []
        self.lines: list[str] = []
        self.shares: list[float] = []
        self._stop_after = stop_after

    def advance(self, doing: str, done: int, total: int) -> None:
        self.done.append(doing)
        self.shares.append(done / total)
        if len(self.done) == self._stop_after:
            raise KeyboardInterrupt

    def note(self, line: str) -> None:
        self.lines.append(line)


def dense_folder(
    folder: Path, dtype: torch.dtype = torch.bfloat16, architecture: str = "Llama", **changes: Any
) -> Path:
    """A model whose matrices have 192 and 320 inputs, in one file, with a tokenizer and other files beside it."""
    torch.manual_seed(11)
    config = getattr(transformers, f"{architecture}Config")(**quantised_checkpoints.CONFIG | changes)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 1.0 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5)
    model.to(dtype).save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    (folder / "LICENSE").write_text("as is")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"0")
    return folder


def unstack(file: Path) -> None:
    """Give each expert of a file that transformers has just made the tensors of its own that published models have."""
    found = {}
    for name, tensor in load_file(file).items():
        place, _, kind = name.rpartition(".")
        if place.endswith(".experts"):
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for expert, matrix in enumerate(tensor):
                parts = zip(kinds, matrix.chunk(len(kinds)), strict=True)
                found |= {f"{place}.{expert}.{each}.weight": rows.clone() for each, rows in parts}
        else:
            found[name] = tensor
    save_file(found, file, metadata={"format": "pt"})


def sequences(count: int = 12, tokens: int = 40, most: int = 90) -> torch.Tensor:
    return torch.randint(most, (count, tokens), generator=torch.Generator().manual_seed(2))


def copied(model: Path, out: Path, method: Any, told: Told | None = None, **options: Any) -> Report:
    return quantise_folder(model, out, method, told or Told(), **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
