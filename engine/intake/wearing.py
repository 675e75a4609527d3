"""What a request wears and what follows for its tokens and its place in the prefix cache; never loads an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from headrace.adapters.slots import AdapterVersion
from headrace.engine.errors import InvalidParams, UnknownAdapter
from headrace.engine.params import SamplingParams

__all__ = ["dressed", "find", "root_of", "worn_by"]

T = TypeVar("T")


def find(name: str, adapters: Mapping[str, T]) -> T:
    """What stands under `name`.

    Raises:
        UnknownAdapter: No adapter is loaded under that name.
    """
    if name not in adapters:
        raise UnknownAdapter(f"adapter: none is loaded under the name {name!r}", field="adapter", value=name)
    return adapters[name]


def worn_by(name: str | None, adapters: Mapping[str, AdapterVersion]) -> AdapterVersion | None:
    """What a request that names `name` wears.

    Raises:
        UnknownAdapter: No adapter is loaded under that name.
    """
    return None if name is None else find(name, adapters)


def root_of(worn: AdapterVersion | None, sharing: str | None) -> bytes:
    """First link of the prefix hash chain: what the weights are, whatever their name, and who may share."""
    return repr((None if worn is None else worn.digest, sharing)).encode()


def dressed(
    name: str | None, ids: Sequence[int], params: SamplingParams, adapters: Mapping[str, AdapterVersion]
) -> tuple[AdapterVersion | None, Sequence[int]]:
    """What a request that names `name` wears, and its prompt after the virtual tokens of that.

    Virtual tokens stand under the id of the prompt's first one.

    Raises:
        UnknownAdapter: No adapter is loaded under that name.
        InvalidParams: Log-probabilities of the prompt are wanted, too.
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
