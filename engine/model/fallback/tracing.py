"""`trace`: what a transformers module asks of its attention, found by running it without numbers, on the meta device.

Each call of the attention function shows a layer's heads, scale, cap, sinks and mask, whatever the configuration calls
them. What the paged cache cannot answer is refused by name. Next to read: model.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.adapters.untrusted import refuse
from headrace.engine.errors import ModelRejected
from headrace.engine.model.fallback.config import ModelClass
from headrace.engine.model.fallback.head import split_head
from headrace.engine.model.fallback.interface import TRACED_ATTENTION, Call, Mask, attach
from headrace.engine.model.fallback.loading import made
from headrace.engine.model.fallback.ropes import freeze_ropes
from headrace.engine.model.fallback.values import told
from headrace.engine.model.spec import Attention, SinkAttention, SoftcappedAttention

__all__ = ["Traced", "build_blank", "embedding_of", "trace"]

_TOKENS: Final = 3
_FAR: Final = 1 << 26  # a position behind the longest context, from which every window is seen
_KNOWN: Final = frozenset(
    ("scaling", "softcap", "sliding_window", "dropout", "is_causal", "position_ids", "cache_position", "use_cache",
     "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "layer_idx",
     "position_embeddings", "s_aux")
)  # fmt: skip
"""Options of the attention function that are read, or that say nothing that matters here."""
_MIXING: Final = (nn.Conv1d, nn.Conv2d, nn.RNNBase)
"""Modules that mix tokens, or keep what they saw, beside attention."""


class Traced(NamedTuple):
    """What a trace has found."""

    layers: tuple[Attention, ...]
    """Attention of each layer, in the order in which they are computed."""
    modules: tuple[str, ...]
    """Name, within the model without its head, of the module that calls the attention of each layer."""
    sinks: tuple[str | None, ...]
    """Name, there, of the parameter that has a score for each head of each layer, its sink; None without sinks."""
    hidden_size: int
    vocab_size: int


def build_blank(found: ModelClass, attention: str = TRACED_ATTENTION) -> PreTrainedModel:
    """Return the module of a model on the meta device: shapes without numbers.

    Raises:
        ModelRejected: The module cannot be made of this configuration.
    """
    config = found.copied()
    config._experts_implementation = "batched_mm"  # the one way of experts that looks at no numbers
    try:
        with torch.device("meta"):
            model = made(found.kind, config, attention, torch.float32)
    except Exception as error:  # a stranger's values in another library's constructors
        _fail(found, "cannot be made of this config", error)
    freeze_ropes(model, config, found.context)
    return model


def trace(found: ModelClass, model: PreTrainedModel) -> Traced:
    """Run a module that `build_blank` made, and return what it asks of its attention.

    Raises:
        ModelRejected: The module asks for what the paged cache cannot answer, or cannot be run on a batch of tokens
            that have positions and no mask; the error names what.
    """
    for name, module in model.named_modules():
        if isinstance(module, _MIXING):
            _refuse(found, name, type(module).__name__, "layers that see other tokens through attention alone")
    base, head = split_head(model, has_head=found.has_head)
    calls: list[Call] = []

    def record(call: Call) -> Tensor:
        calls.append(call)
        q, v = call.q_1HND, call.v_1KND
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

    attach(base.modules(), record)
    if "position_ids" not in inspect.signature(base.forward).parameters:
        _refuse(found, "position_ids", None, "modules that take the position of each token")
    with torch.inference_mode():
        hidden_1NE = _attempt(found, lambda: _run(base))
        logits_1NV = hidden_1NE if head is None else _attempt(found, lambda: head(hidden_1NE))
    vocab = embedding_of(base).shape[0] if head is None else logits_1NV.shape[-1]
    names = {module: name for name, module in base.named_modules()}
    layers = tuple(_attention(found, names.get(call.module, ""), call) for call in calls)
    _check_layers(found, base, calls)
    modules = tuple(names[call.module] for call in calls)
    sinks = tuple(_sinks(found, base, name, call) for name, call in zip(modules, calls, strict=True))
    return Traced(layers, modules, sinks, hidden_1NE.shape[-1], vocab)


def embedding_of(model: PreTrainedModel) -> Tensor:
    """Return the embeddings of the tokens, [V, E]."""
    embedding: Any = model.get_input_embeddings()  # a module of which transformers says no more
    weight: Tensor = embedding.weight
    return weight


def _run(base: nn.Module) -> Tensor:
    """Return the last hidden states of a few tokens, [1, N, E]. A mask of ones keeps modules from looking for gaps."""
    meta = torch.device("meta")
    ids_1N = torch.zeros(1, _TOKENS, dtype=torch.int64, device=meta)
    found: Tensor = base(
        input_ids=ids_1N,
        position_ids=torch.arange(_TOKENS, device=meta)[None],
        attention_mask=torch.ones_like(ids_1N),
        use_cache=False,
    ).last_hidden_state
    return found


def _attempt(found: ModelClass, run: Callable[[], Tensor]) -> Tensor:
    try:
        return run()
    except Exception as error:
        _fail(found, "cannot be run on tokens without looking at numbers", error)


def _check_layers(found: ModelClass, base: PreTrainedModel, calls: list[Call]) -> None:
    """Refuse a model in which some layer does not attend, or attends twice."""
    if not calls:
        _refuse(found, "attention", "not through transformers' attention interface", "attention that is")
    modules = [call.module for call in calls]
    if len(set(modules)) != len(modules):
        _refuse(found, "attention", "called twice by one layer", "one attention in each layer")
    layers = getattr(base.config.get_text_config(), "num_hidden_layers", None)
    if layers != len(calls):
        _refuse(found, "layers with attention", f"{len(calls)} of {layers}", "attention in every layer")


def _attention(found: ModelClass, name: str, call: Call) -> Attention:
    """Return the attention that a call asks for."""
    options = call.options
    for option, value in options.items():
        if value is not None and option not in _KNOWN:
            _refuse(found, name, f"attention with {option}", "attention with a scale, a window, a cap or sinks alone")
    for option in ("scaling", "softcap", "sliding_window"):
        if not isinstance(options.get(option), int | float | None):
            _refuse(found, name, f"attention whose {option} is no number", "numbers")
    causal = options.get("is_causal")
    if not (getattr(call.module, "is_causal", True) if causal is None else causal):
        _refuse(found, name, "attention to later tokens", "causal attention")
    window = _window(found, name, call.mask)
    stated = options.get("sliding_window")
    if stated is not None and stated != window:
        _refuse(found, name, f"a window of {stated} and a mask of {window or 'all'} tokens", "windows as their masks")
    return _of_shapes(found, name, call, window)


def _of_shapes(found: ModelClass, name: str, call: Call, window: int | None) -> Attention:
    (_, heads, tokens, size), keys, values = call.q_1HND.shape, call.k_1KND.shape, call.v_1KND.shape
    if tokens != _TOKENS or keys[2] != _TOKENS:
        _refuse(found, name, f"attention of {tokens} tokens to {keys[2]}", "attention among the tokens of the batch")
    if keys[1] != values[1] or heads % keys[1] or keys[3] != size or values[3] > size:
        shapes = f"queries {heads} x {size}, keys {keys[1]} x {keys[3]}, values {values[1]} x {values[3]}"
        _refuse(found, name, shapes, "query heads that share key heads evenly, and values no larger than keys")
    scale, cap = call.options.get("scaling"), call.options.get("softcap")
    scale = None if scale is None else float(scale)
    if cap is not None:
        return SoftcappedAttention(heads, keys[1], size, window=window, scale=scale, cap=cap)
    kind = Attention if call.options.get("s_aux") is None else SinkAttention
    return kind(heads, keys[1], size, window=window, scale=scale)


def _sinks(found: ModelClass, base: nn.Module, name: str, call: Call) -> str | None:
    """Return the name of the parameter that a call gives as sinks."""
    sinks, heads = call.options.get("s_aux"), call.q_1HND.shape[1]
    if sinks is None:
        return None
    if call.options.get("softcap") is not None:
        _refuse(found, name, "attention with a cap and with sinks", "either of them")
    given = next((each for each, parameter in base.named_parameters() if parameter is sinks), None)
    if given is None or tuple(sinks.shape) != (heads,):
        _refuse(found, name, "attention with sinks that the module computes", "a parameter of one number for each head")
    return given


def _window(found: ModelClass, name: str, mask: object) -> int | None:
    """Return the number of last tokens that a mask allows, None for all.

    Raises:
        ModelRejected: The module has changed the mask, or it is no window.
    """
    if not isinstance(mask, Mask):
        _refuse(found, name, "attention with a mask that the module changes", "causal masks and windows")
    window: int | None = _FAR - _first_seen(mask, _FAR) + 1
    if window == _FAR + 1:
        window = None
    near = window or 5
    for query in (0, 1, 2, near - 1, near, 2 * near + 1, _FAR - 3):
        first = 0 if window is None else max(0, query - window + 1)
        keys = _places(first, query)
        if not torch.equal(_allowed(mask, query, keys), (keys >= first) & (keys <= query)):
            _refuse(found, name, "attention with a mask that is no window", "causal masks and windows")
    return window


def _first_seen(mask: Mask, query: int) -> int:
    """Return the first position that the token at `query` attends to, if it attends to all from there on."""
    low, high = 0, query
    while low < high:
        middle = (low + high) // 2
        if bool(_allowed(mask, query, torch.tensor([middle]))):
            high = middle
        else:
            low = middle + 1
    return low


def _places(first: int, query: int) -> Tensor:
    """Return positions on both sides of the first and the last one that a token attends to, and between them."""
    span = query - first
    between = [first + span * part // 16 for part in range(17)]
    before = [first * part // 16 for part in range(17)]
    edges = [max(0, edge + step) for edge in (first, query) for step in range(-3, 4)]
    return torch.tensor(sorted({*between, *before, *edges}))


def _allowed(mask: Mask, query: int, keys: Tensor) -> Tensor:
    """Return which of the positions `keys` the token at `query` attends to, bool."""
    zero = torch.tensor(0)
    return torch.as_tensor(mask.allows(zero, zero, torch.tensor(query), keys)).expand(keys.shape)


def _refuse(found: ModelClass, field: str, value: object, supported: str) -> NoReturn:
    refuse(f"{found.kind.__name__} of transformers", field, value, supported)


def _fail(found: ModelClass, what: str, error: Exception) -> NoReturn:
    name = found.kind.__name__
    raise ModelRejected(
        f"architectures: transformers' {name} {what}: {told(error)}", field="architectures", value=name
    ) from error
