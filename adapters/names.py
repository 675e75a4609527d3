"""`AdapterNames`: what PEFT calls a model's modules in an adapter's file, and which module a tensor's name means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

__all__ = ["LLAMA_MODULES", "AdapterNames"]

LLAMA_MODULES = tuple(
    (f"{half}.{module}_proj", module)
    for half, modules in (("self_attn", ("q", "k", "v", "o", "qkv")), ("mlp", ("gate", "up", "down", "gate_up")))
    for module in modules
)
"""Modules of Llama and of most families after it, by their names within a layer."""
_BASE = re.escape("base_model.model.")


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """Names of a model's modules in the files of its adapters."""

    layer_prefix: str = "model.layers.{}."
    """Beginning of the names of a layer's modules, with `{}` for the layer's number."""
    modules: tuple[tuple[str, str], ...] = LLAMA_MODULES
    """(Name within a layer, module or site), of a site if the model has its modules in one."""
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    prefix: str = "model."
    """Beginning that is missing where an adapter was trained on a model without its head, as for embeddings."""
    homes: tuple[tuple[str, str], ...] = ()
    """Beginnings that may stand in place of `prefix` where the model is a part of a larger one, each with what then
    stands before the name of the head."""

    def place(self, key: str) -> tuple[int, str, str] | None:
        """Return (layer, module or site, "A" or "B") for a tensor's name; None if it names no update.

        The layer of `embed` and `head` is -1.
        """
        layered, top = _patterns(self)
        if (match := top.fullmatch(key)) is not None:
            return (-1, "embed", match[1]) if match[1] else (-1, "head", match[2])
        if (match := layered.fullmatch(key)) is None:
            return None
        return int(match[1]), dict(self.modules)[match[2]], match[3]

    def is_frozen(self, key: str) -> bool:
        """Return whether a tensor is the base model's embedding or head, which PEFT saves along with updates of it.

        The bias of a head is one, too.
        """
        return _frozen(self).fullmatch(key) is not None


@cache
def _patterns(names: AdapterNames) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of the names of updates: of layers, then of embeddings and head."""
    before, after = map(re.escape, names.layer_prefix.removeprefix(names.prefix).split("{}"))
    modules = "|".join(re.escape(name) for name, _ in names.modules)
    optional, before_head = _beginnings(names)
    layered = rf"{_BASE}{optional}{before}(0|[1-9]\d{{0,3}}){after}({modules})\.lora_([AB])\.weight"
    embedding, head = re.escape(names.embedding.removeprefix(names.prefix)), re.escape(names.head)
    top = rf"{_BASE}(?:{optional}{embedding}\.lora_embedding_([AB])|{before_head}{head}\.lora_([AB])\.weight)"
    return re.compile(layered), re.compile(top)


@cache
def _frozen(names: AdapterNames) -> re.Pattern[str]:
    """Return the pattern of the names of the frozen embedding and head."""
    embedding, head = re.escape(names.embedding.removeprefix(names.prefix)), re.escape(names.head)
    optional, before_head = _beginnings(names)
    return re.compile(rf"{_BASE}({optional}{embedding}|{before_head}{head})(\.base_layer)?\.(?:weight|bias)")


def _beginnings(names: AdapterNames) -> tuple[str, str]:
    """Return patterns of what may stand before the names of most modules, and before that of the head."""
    homes = {names.prefix, *(home for home, _ in names.homes)}
    heads = {before for _, before in names.homes}
    optional, before_head = ("|".join(map(re.escape, sorted(each, reverse=True))) for each in (homes, heads))
    return f"(?:{optional})?", f"(?:{before_head})?"
