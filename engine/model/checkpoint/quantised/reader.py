"""`QuantisedTensors`: reads the weights that a folder's config says are quantised, each by its tool's layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final
from weakref import WeakKeyDictionary

from headrace.adapters.untrusted import Fields
from headrace.engine.model.checkpoint.found import Checkpoint, Found, refuse_tensor
from headrace.engine.model.checkpoint.quantised import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    float4,
    fp8,
    gptq,
    modelopt,
)
from headrace.engine.model.checkpoint.quantised.parts import CODES, is_plain, present
from headrace.engine.model.checkpoint.quantised.rules import Rules
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.families.registry import read_hf_config

__all__ = ["METHODS", "QuantisedTensors"]

METHODS: Final[Mapping[str, Callable[[Fields, frozenset[str]], Rules]]] = {
    "fp8": fp8.parse,
    "fbgemm_fp8": fp8.parse,
    "modelopt": modelopt.parse,
    "compressed-tensors": compressed_tensors.parse,
    "gptq": gptq.parse,
    "awq": awq.parse,
    "auto-round": auto_round.parse,
    "mxfp4": float4.parse,
    "bitsandbytes": bitsandbytes.parse,
}
"""What reads a quantization_config, by its `quant_method`."""
_SPELLINGS: Final = {"intel/auto-round": "auto-round", "modelopt_fp4": "modelopt"}
_WEIGHT: Final = ".weight"


class QuantisedTensors:
    """Reads quantised weights of safetensors folders, by `quantization_config` or hf_quant_config.json."""

    def __init__(self) -> None:
        """Start without an open folder."""
        self._rules: WeakKeyDictionary[SafetensorsFolder, Rules | None] = WeakKeyDictionary()

    def find(self, files: Checkpoint, name: str) -> Found | None:
        """Return how a folder holds a quantised weight.

        None for plain numbers, and for folders whose config says nothing of quantised weights.

        Raises:
            ModelRejected: The config or the weight's tensors are damaged, or of a kind that is not read.
        """
        if not isinstance(files, SafetensorsFolder) or not name.endswith(_WEIGHT):
            return None
        if files not in self._rules:
            self._rules[files] = _rules(files)
        rules, module = self._rules[files], name.removesuffix(_WEIGHT)
        layout = None if rules is None else rules(module)
        if layout is not None:
            return layout.find(files, module)
        _check_plain(files, module, is_quantised=rules is not None)
        return None


def _check_plain(files: SafetensorsFolder, module: str, *, is_quantised: bool) -> None:
    """Refuse the codes of a module that the config does not quantise; `is_quantised`: it quantises others."""
    reason = (
        "the quantization_config leaves this module as it is" if is_quantised else "there is no quantization_config"
    )
    for tensor in present(files, module, CODES):
        if not is_plain(files, tensor):
            dtype = str(files.dtype(tensor)).removeprefix("torch.")
            refuse_tensor(files, tensor, dtype, f"floats that are weights as they are, since {reason}")


def _rules(files: SafetensorsFolder) -> Rules | None:
    if not (files.path / "config.json").exists():
        return None
    given = read_hf_config(files.path).get("quantization_config")
    if given is None:
        return None
    fields = Fields(given if isinstance(given, Mapping) else {}, f"{files.name}: quantization_config")
    method = fields.data.get("quant_method")
    known = _SPELLINGS.get(method, method) if isinstance(method, str) else ""
    if known not in METHODS:
        fields.refuse("quant_method", ", ".join(METHODS))
    # A module is what a tensor's name says before its last part, or before the part `weight`.
    modules = frozenset(name.rpartition(".")[0] for name in files.shapes)
    return METHODS[known](fields, modules)
