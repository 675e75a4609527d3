"""`has_other_code`: whether a config.json names Python code that computes something other than transformers' class."""

from __future__ import annotations

from collections.abc import Collection, Mapping

__all__ = ["has_other_code"]

_MODELS = ("AutoModelForCausalLM", "AutoModel")


def has_other_code(described: Mapping[str, object], known: Collection[str]) -> bool:
    """Return whether the file's `auto_map` names a class of a model that has none of the names in `known`.

    Many checkpoints come with the code of a class that transformers has taken over since under the same name. They need
    none of it, and it is not run. `auto_map` names classes as `module.Class`; configurations and tokenizers that it
    names do not count, and a model without a head counts only where it is the only one.
    """
    named = described.get("auto_map")
    if named is None:
        return False
    if not isinstance(named, Mapping):
        return True
    found = next((named[kind] for kind in _MODELS if kind in named), None)
    return found is not None and not (isinstance(found, str) and found.rpartition(".")[2] in known)
