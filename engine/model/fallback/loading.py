"""`load_module`: a transformers module with the weights of a folder, or with random ones; never decides what it is.

transformers finds the tensors by the names of the checkpoint, converts those that it keeps otherwise (experts as one
tensor, for instance), and copies each to its place as it is read. Tensors that are missing, left over or not finite are
refused, as everywhere in headrace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from headrace.adapters.untrusted import plain
from headrace.engine.errors import ModelRejected
from headrace.engine.model.fallback.config import ModelClass
from headrace.engine.model.fallback.interface import ATTENTION

__all__ = ["Empty", "check_files", "load_module", "moved", "random_module"]

Empty: TypeAlias = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes tensors on the device of the model, always in the same order."""
_ADAPTER = "adapter_config.json"


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
        ModelRejected: A file is missing or damaged, or a tensor is missing, left over, of another shape or not finite.
    """
    check_files(folder)
    try:
        with _quietly():
            model, told = found.kind.from_pretrained(
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
        shown = plain(f"{type(error).__name__}: {error}".split("\n")[0])
        raise ModelRejected(f"weights: transformers cannot load them: {shown}", field="weights") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, told[problem]))
        if names:
            shown = ", ".join(names[:5])
            raise ModelRejected(f"weights: {problem.replace('_', ' ')}: {plain(shown)}", field=names[0])
    _check_finite(model)
    loaded: PreTrainedModel = model.eval()
    return loaded


def random_module(found: ModelClass, dtype: torch.dtype, seed: int, attention: str = ATTENTION) -> PreTrainedModel:
    """Return the module of a model on the CPU with the random weights that transformers gives to it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = found.kind._from_config(found.copied(), attn_implementation=attention, dtype=dtype)
    return model.eval()


def moved(model: PreTrainedModel, device: torch.device, empty: Empty) -> PreTrainedModel:
    """Put the weights of a module, one after the other, into tensors of `empty`, and what it computed on `device`."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                there = empty(parameter.shape, parameter.dtype)
                there.copy_(parameter.detach())
                made[parameter] = nn.Parameter(there, requires_grad=False)
            module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return model


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep transformers from drawing a progress bar of its own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter.detach()).all()):
            raise ModelRejected(f"{name}: holds numbers that are not finite", field=name)
