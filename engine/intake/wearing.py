"""Finds a request's adapter, and the tokens and prefix-cache root that follow from it; never loads an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from headrace.adapters.slots import AdapterVersion
from headrace.engine.errors import InvalidParams, UnknownAdapter
from headrace.engine.params import SamplingParams

__all__ = ["dressed", "find", "root_of", "worn_by"]

T = TypeVar("T")


def find(name: str, adapters: Mapping[str, T]) -> T:
    """Return the entry of `adapters` under `name`.

    Raises:
        UnknownAdapter: No adapter is loaded under that name.
    """
    if name not in adapters:
        raise UnknownAdapter(f"adapter: none is loaded under the name {name!r}", field="adapter", value=name)
    return adapters[name]


def worn_by(name: str | None, adapters: Mapping[str, AdapterVersion]) -> AdapterVersion | None:
    """Return the adapter version of a request that names `name`; None without a name.

    Raises:
        UnknownAdapter: No adapter is loaded under that name.
    """
    return None if name is None else find(name, adapters)


def root_of(worn: AdapterVersion | None, sharing: str | None) -> bytes:
    """Return the first link of the prefix hash chain: the digest of the weights, and the value that sharers share."""
    return repr((None if worn is None else worn.digest, sharing)).encode()


def dressed(
    name: str | None, ids: Sequence[int], params: SamplingParams, adapters: Mapping[str, AdapterVersion]
) -> tuple[AdapterVersion | None, Sequence[int]]:
    """Return the adapter version of a request that names `name`, and the prompt with its virtual tokens in front.

    Each virtual token has the id of the prompt's first token.

    Raises:
        UnknownAdapter: No adapter is loaded under that name.
        InvalidParams: The adapter has virtual tokens, and log-probabilities of the prompt are wanted.
    """
    worn = worn_by(name, adapters)
    if worn is None or not worn.virtual_tokens:
        return worn, ids
    if params.prompt_logprobs is not None:
        raise InvalidParams(
            "prompt_logprobs: cannot go with an adapter that has virtual tokens",
            field="prompt_logprobs",
            value=params.prompt_logprobs,
        )
    return worn, [ids[0]] * worn.virtual_tokens + list(ids)
