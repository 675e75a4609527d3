"""`FusedLayers`: compiles the layers of a transformers module with torch, so that what lies between products is fused.

A module computes norms, rotations and activations by many small operations, each of which is a kernel on a GPU.
`torch.compile` makes one kernel of those that follow each other. Attention and the products that headrace has packed
are left out of what is compiled (`torch.compiler.disable`). Whether the compiled layers compute the same is tried on
the model itself when it is loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config

from headrace.engine.model.fallback.interface import attach
from headrace.engine.model.fallback.values import told

__all__ = ["FusedLayers"]

_Backend: TypeAlias = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]

logger = logging.getLogger("headrace.engine")

_SIZES: Final = (1, 7)
"""Numbers of tokens of a trial: torch compiles for one token, and once more for any other number."""
_TOLERANCE: Final = 2**-5
"""Largest error of most tokens behind one layer, in units of its largest number: a few roundings to bfloat16."""
_VARIANTS: Final = 64
"""Most versions of one function of a module: kinds of layers, one token or more, and models of the same process."""
_OPTIONS: Final[dict[str, str | int | bool | Callable[..., Any]]] = {
    "emulate_precision_casts": True,  # round where the module's own operations do
    "compile_threads": 1,  # here instead of in processes of torch's, which an application would not expect
}


class FusedLayers:
    """The layers of one module, which are computed as they are, or compiled while `used` is entered."""

    def __init__(self, base: nn.Module, attentions: Iterable[str], *, backend: str | _Backend = "inductor") -> None:
        """Prepare the layers of `base`; nothing is compiled yet.

        Args:
            base: The module without its head.
            attentions: Names, within `base`, of the modules that attend, each of which lies in one layer.
            backend: What compiles, as `torch.compile` takes it.
        """
        self._base, self._is_used = base, False
        self._errors: list[float] | None = None
        """During a trial, the error of each layer that was computed both ways."""
        self._attentions = [base.get_submodule(name) for name in attentions]
        options = _OPTIONS if backend == "inductor" else None
        for layer in _layers(base, attentions):
            plain: Callable[..., Any] = layer.forward
            fused: Callable[..., Any] = torch.compile(plain, dynamic=True, backend=backend, options=options)
            layer.forward = self._chosen(plain, fused)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compute by compiled layers until this ends."""
        self._is_used = True
        try:
            yield
        finally:
            self._is_used = False

    def agree(self) -> bool:
        """Compile the layers, compare each with itself uncompiled on a few tokens, and return whether all agree.

        What attends is replaced meanwhile, since a model has no pages yet; the caller attaches its own afterwards. A
        line in the log says why layers that cannot be compiled, or compute something else, are left as they are.
        """
        began = time.monotonic()
        attach(self._attentions, _stand_in)
        try:
            with dynamo_config.patch(recompile_limit=_VARIANTS):
                for size in _SIZES:
                    worst = self._tried(size)
                    if not worst <= _TOLERANCE:  # or not a number
                        raise ArithmeticError(f"a compiled layer differs by {worst:.2g} of its largest number")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # another library's compiler on another library's code
            logger.warning("the layers of this model are not compiled, and slower: %s", told(error))
            return False
        logger.info("compiled the layers of the model in %.1f s", time.monotonic() - began)
        return True

    def _tried(self, size: int) -> float:
        """Return the largest error of a layer for `size` tokens."""
        device = next(self._base.parameters()).device
        ids_1N = torch.arange(size, device=device)[None]
        self._errors = []
        try:
            with self.used():
                self._base(input_ids=ids_1N, position_ids=ids_1N, use_cache=False)
            return max(self._errors, default=0.0)
        finally:
            self._errors = None

    def _chosen(self, plain: Callable[..., Any], fused: Callable[..., Any]) -> Callable[..., Any]:
        """Return a layer's function that computes by `fused` where it may, and in a trial both ways."""

        def forward(*given: Any, **named: Any) -> Any:
            if not self._is_used:
                return plain(*given, **named)
            if self._errors is None:
                return fused(*given, **named)
            expected = plain(*_copies(given), **{name: _copy(value) for name, value in named.items()})
            self._errors.append(_error(expected, fused(*_copies(given), **named)))
            return expected

        return forward


def _layers(base: nn.Module, attentions: Iterable[str]) -> list[nn.Module]:
    """Return the modules in lists of modules that hold what attends, the innermost of each."""
    lists = {name for name, module in base.named_modules() if isinstance(module, nn.ModuleList)}
    found: dict[str, nn.Module] = {}
    for attention in attentions:
        parts = attention.split(".")
        for end in range(len(parts), 0, -1):
            if ".".join(parts[: end - 1]) in lists:
                name = ".".join(parts[:end])
                found[name] = base.get_submodule(name)
                break
    return list(found.values())


def _stand_in(qkv_NX: Tensor, width: int) -> Tensor:
    """Return something of the form of an attention's result that depends on all queries, keys and values."""
    return qkv_NX[:, :width] * qkv_NX[:, width:].cumsum(1)[:, -1:].sigmoid()


def _copies(values: Iterable[Any]) -> list[Any]:
    return [_copy(value) for value in values]


def _copy(value: Any) -> Any:
    """Return a copy of a tensor, which a layer may change where it lies, and anything else as it is."""
    return value.clone() if isinstance(value, Tensor) else value


def _error(expected: Any, found: Any) -> float:
    """Return the median over tokens of the largest error of each, in units of the largest number.

    Rounding may send a token to another expert, so that some tokens may differ.
    """
    wanted_1NE, got_1NE = (each if isinstance(each, Tensor) else each[0] for each in (expected, found))
    error_N = (wanted_1NE.float() - got_1NE.float()).abs().amax(-1).flatten()
    return float(error_N.median() / wanted_1NE.float().abs().max())
