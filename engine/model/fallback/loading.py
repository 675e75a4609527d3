"""`load_module`: a transformers module with the weights of a folder, or with random ones; never decides what it is.

transformers finds the tensors by the names of the checkpoint, converts those that it keeps otherwise (experts as one
tensor, for instance), and copies each to its place as it is read. Tensors that are missing, left over or not finite are
refused, as everywhere in headrace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from headrace.adapters.untrusted import plain
from headrace.engine.errors import ModelRejected
from headrace.engine.model.checkpoint.parameters import Empty
from headrace.engine.model.fallback.config import ModelClass
from headrace.engine.model.fallback.interface import ATTENTION
from headrace.engine.model.fallback.values import told

__all__ = ["check_files", "check_finite", "evaluating", "load_module", "made", "moved", "random_module"]

_ADAPTER = "adapter_config.json"
_MAKERS = frozenset(("empty", "zeros", "ones", "rand", "randn"))
"""Functions of torch that make tensors of the default dtype."""


def check_files(folder: Path) -> None:
    """Refuse a folder for which transformers would read a model elsewhere.

    Raises:
        ModelRejected: The folder is an adapter, too.
    """
    if (folder / _ADAPTER).exists():
        raise ModelRejected(
            f"{_ADAPTER}: {folder} holds an adapter beside the model, which transformers' loader would follow; "
            "move it to a folder of its own",
            field=_ADAPTER,
        )


def load_module(found: ModelClass, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the module of a model with the weights in `folder`, on the CPU in `dtype`.

    Raises:
        ModelRejected: A file is missing or damaged, or a tensor is missing, left over or of another shape.
    """
    check_files(folder)
    try:
        with _quietly():
            # Typed as a model alone, which is not what comes with `output_loading_info`.
            loaded: Any = _without_default_dtype(found.kind, dtype).from_pretrained(
                folder,
                config=found.copied(),
                dtype=dtype,
                attn_implementation=ATTENTION,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except MemoryError:
        raise
    except Exception as error:  # a stranger's files in another library's reader
        raise ModelRejected(f"weights: transformers cannot load them: {told(error)}", field="weights") from error
    model: PreTrainedModel = loaded[0]
    report: Mapping[str, Iterable[object]] = loaded[1]
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, report.get(problem, ())))
        if names:
            shown = ", ".join(names[:5])
            raise ModelRejected(f"weights: {problem.replace('_', ' ')}: {plain(shown)}", field=names[0])
    return evaluating(model)


def random_module(found: ModelClass, dtype: torch.dtype, seed: int, attention: str = ATTENTION) -> PreTrainedModel:
    """Return the module of a model on the CPU with the random weights that transformers gives to it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return made(found.kind, found.copied(), attention, dtype)


def made(kind: type[PreTrainedModel], config: PreTrainedConfig, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a module with the weights that it has at first, on torch's default device."""
    make: Callable[..., PreTrainedModel] = kind._from_config  # untyped
    with _Floats(dtype):
        model = evaluating(make(config, attn_implementation=attention, dtype=torch.float32))
    for parameter in model.parameters():  # some are made of a number, which no function of `_MAKERS` does
        parameter.data = parameter.data.to(dtype)
    return model


def evaluating(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same module, which neither drops anything at random nor learns from now on."""
    model.train(False)
    return model.requires_grad_(False)


def moved(model: PreTrainedModel, device: torch.device, empty: Empty) -> PreTrainedModel:
    """Put the weights of a module, one after the other, into tensors of `empty`, and what it computed on `device`.

    Raises:
        ModelRejected: A tensor is not finite.
    """
    copies: dict[Tensor, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in copies:
                there = empty(parameter.shape, parameter.dtype)
                there.copy_(parameter.detach())
                _check_finite(f"{path}.{name}" if path else name, there)  # there, since a GPU reads memory faster
                copies[parameter] = nn.Parameter(there, requires_grad=False)
            module._parameters[name] = copies[parameter]
        for name, buffer in module._buffers.items():
            is_weight = buffer is not None and buffer.dim() and name not in module._non_persistent_buffers_set
            if is_weight:  # as checkpoints hold it, too
                module._buffers[name] = empty(buffer.shape, buffer.dtype).copy_(buffer)
            else:
                module._buffers[name] = None if buffer is None else buffer.to(device)
    return model


class _Floats(TorchFunctionMode):
    """Context manager in which this thread makes floating-point tensors of one dtype unless another is asked for.

    transformers sets torch's default dtype instead, which all threads share: the steps of another engine among them.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> object:
        """Call a function of torch."""
        given = kwargs or {}
        if getattr(func, "__name__", "") in _MAKERS and given.get("dtype") is None:
            given = {**given, "dtype": self._dtype}
        return func(*args, **given)


def _without_default_dtype(kind: type[PreTrainedModel], dtype: torch.dtype) -> type[PreTrainedModel]:
    """Return a model's class with a loader that makes weights in `dtype` and leaves torch's default dtype alone."""

    def get_init_context(_: object, __: torch.dtype, /, *rest: object, **named: object) -> list[object]:
        contexts: Callable[..., list[object]] = kind.get_init_context
        return [*contexts(torch.float32, *rest, **named), _Floats(dtype)]

    named = {"get_init_context": classmethod(get_init_context), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), named)


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep transformers from drawing a progress bar of its own."""
    shown = logging.is_progress_bar_enabled()
    hide: Callable[[], None] = logging.disable_progress_bar  # untyped
    show: Callable[[], None] = logging.enable_progress_bar
    hide()
    try:
        yield
    finally:
        if shown:
            show()


def check_finite(model: nn.Module) -> None:
    """Refuse a module whose weights are not all finite.

    Raises:
        ModelRejected: A tensor is not finite.
    """
    for name, parameter in model.named_parameters():
        _check_finite(name, parameter.detach())


def _check_finite(name: str, tensor: Tensor) -> None:
    if not tensor.numel():
        return
    least, most = tensor.aminmax()
    if not math.isfinite(float(least) + float(most)):
        raise ModelRejected(f"{name}: holds numbers that are not finite", field=name)
