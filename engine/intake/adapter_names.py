"""Finds the adapter that a request names, and the tokens that it puts before a prompt; never loads an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from headrace.adapters.slots import AdapterVersion
from headrace.engine.errors import InvalidParams, UnknownAdapter
from headrace.engine.params import SamplingParams

__all__ = ["find", "version_of", "with_virtual_tokens"]

T = TypeVar("T")


def find(name: str, adapters: Mapping[str, T]) -> T:
    """Return the entry of `adapters` under `name`.

    Raises:
        UnknownAdapter: No adapter is loaded under that name.
    """
    if name not in adapters:
        raise UnknownAdapter(f"adapter: none is loaded under the name {name!r}", field="adapter", value=name)
    return adapters[name]


def version_of(name: str | None, adapters: Mapping[str, AdapterVersion]) -> AdapterVersion | None:
    """Return the adapter version of a request that names `name`; None without a name.

    Raises:
        UnknownAdapter: No adapter is loaded under that name.
    """
    return None if name is None else find(name, adapters)


def with_virtual_tokens(
    name: str | None, ids: Sequence[int], params: SamplingParams, adapters: Mapping[str, AdapterVersion]
) -> tuple[AdapterVersion | None, Sequence[int]]:
    """Return the adapter version of a request that names `name`, and the prompt with its virtual tokens in front.

    Each virtual token has the id of the prompt's first token.

    Raises:
        UnknownAdapter: No adapter is loaded under that name.
        InvalidParams: The adapter has virtual tokens, and log-probabilities of the prompt are wanted.
    """
    version = version_of(name, adapters)
    if version is None or not version.virtual_tokens:
        return version, ids
    if params.prompt_logprobs is not None:
        raise InvalidParams(
            "prompt_logprobs: cannot go with an adapter that has virtual tokens",
            field="prompt_logprobs",
            value=params.prompt_logprobs,
        )
    return version, [ids[0]] * version.virtual_tokens + list(ids)
