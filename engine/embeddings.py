"""`Engine.embed` and `Engine.hidden_states`: requests that are prefilled and generate nothing, and what comes of them.

Owns the way of one prompt through the step loop and of many in turn; never plans a step and never touches a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.engine.errors import EngineStopped, InvalidParams
from headrace.engine.events import Usage
from headrace.engine.generation import Control, Generation
from headrace.engine.loop import StepLoop
from headrace.engine.many import Many
from headrace.engine.opened import Opened
from headrace.engine.params import SamplingParams
from headrace.engine.prompts import (
    TokenizerLike,
    check_text_size,
    check_token_ids,
    is_short,
    to_token_ids,
    tokenizing_cost,
)
from headrace.engine.requests import Asking, make_pooling_request
from headrace.engine.scheduling.plan import Emission
from headrace.engine.scheduling.pooling import Embedding, Pooling, PoolingKind
from headrace.engine.threads import Worker

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.engine.engine import Prompt

__all__ = ["Embeddings", "EmbedOptions", "PoolingIntake", "Who", "embed"]

_AHEAD = 2  # requests submitted for each row, as in many.py
_NO_PARAMS = SamplingParams()


@dataclass(slots=True, kw_only=True)
class Embeddings:
    """Vectors of texts."""

    vectors: NDArray[np.float32]
    """[inputs, dimensions], in the order of the inputs."""
    usage: Usage
    """Over all inputs."""


class Who(NamedTuple):
    """On whose behalf something is asked: arguments of `Engine.stream`."""

    adapter: str | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions:
    """What vectors are wanted: arguments of `Engine.embed`."""

    pooling: PoolingKind | None
    normalize: bool | None
    dimensions: int | None
    truncate: bool

    def checked(self, model: Embedding | None) -> tuple[Pooling, Callable[[Any], NDArray[np.float32]]]:
        """How `model` pools, and what is made of the pooled hidden states.

        Raises:
            InvalidParams: The model or its device does not do that.
        """
        if model is None:
            raise InvalidParams("pooling: this device cannot do it yet", field="pooling", value=self.pooling)
        kind = self.pooling or model.kind
        if kind is None or kind not in model.kinds:
            why = "this model's files ask for another; choose one of" if kind is None else "for this model one of"
            allowed = f"{why} {', '.join(model.kinds)}, got {self.pooling!r}"
            raise InvalidParams(f"pooling: {allowed}", field="pooling", value=self.pooling, limit=model.kinds)
        size = model.size if self.dimensions is None else self.dimensions
        if type(size) is not int or not 1 <= size <= model.size:
            raise InvalidParams(
                f"dimensions: from 1 to {model.size} for this model, got {self.dimensions!r}",
                field="dimensions",
                value=self.dimensions,
                limit=model.size,
            )
        normalize = model.normalize if self.normalize is None else self.normalize
        return Pooling(kind), partial(_vector, size=size, normalize=normalize)


def _vector(pooled: NDArray[np.float32], *, size: int, normalize: bool) -> NDArray[np.float32]:
    """The first `size` elements, of length 1 with `normalize`; a copy, which keeps nothing else alive."""
    vector = pooled[:size].copy()
    if normalize:
        vector /= max(float(vector @ vector) ** 0.5, 1e-12)
    return vector


class _Pooled(Generation):
    """A request that is pooled: one choice without a token, and what came of its hidden states."""

    def __init__(self, control: Control) -> None:
        super().__init__(control, 1, window=1)
        self.value: Any = None

    def deliver(self, emission: Emission) -> None:
        """Keep what came."""
        self.value = emission.pooled
        super().deliver(emission)

    async def result(self) -> tuple[Any, Usage]:
        """Wait for the end: what came, and the tokens it took.

        Raises:
            RequestFailed: The request ended early.
            EngineStopped: The engine closed meanwhile.
            EngineCrashed: The step loop died.
        """
        (end,) = await self.mailbox.take()
        if end.finish_reason == "cancelled":
            raise EngineStopped("the engine closed before the request was done")
        return self.value, self.usage


class PoolingIntake(NamedTuple):
    """What it takes to get a prompt pooled."""

    serving: Callable[[], tuple[StepLoop, Opened]]
    """Raises where the engine takes nothing more in."""
    helper: Worker
    """Tokenises what is long."""

    async def pool(self, prompt: Prompt, who: Who, pooling: Pooling, *, truncate: bool = False) -> tuple[Any, Usage]:
        """Prefill `prompt`: what came of its hidden states, and the tokens it took.

        Raises:
            Rejected: The request can never run.
            RequestFailed: It ended early.
            EngineStopped: The engine is not open, or closed meanwhile.
            EngineCrashed: Its step loop died.
        """
        loop, _ = self.serving()
        generation = _Pooled(loop)
        loop.expect(generation)
        try:
            ids = await self._token_ids(prompt, truncate)
            loop, opened = self.serving()
            loop.scheduler.check_length(len(ids), room=0)  # before looking at each of what may be millions of ids
            check_token_ids(ids, opened.info.vocab_size)
            asking = Asking(_NO_PARAMS, *who)
            loop.submit(generation, ids, [make_pooling_request(ids, asking, pooling, opened.info.vocab_size)])
            return await generation.result()
        finally:
            generation.cancel()

    async def _token_ids(self, prompt: Any, truncate: bool) -> list[int]:
        _, opened = self.serving()
        tokenizer, longest, most = opened.tokenizer, opened.tokenizer.table.longest, opened.info.max_context
        if not truncate:
            check_text_size(prompt, longest, most)
        elif isinstance(prompt, str) and longest:
            prompt = prompt[: longest * most]  # more than the context can hold
        if is_short(prompt):
            ids = to_token_ids(prompt, tokenizer)
        else:
            ids = await self.helper.ask(partial(to_token_ids, prompt, tokenizer), cost=tokenizing_cost(prompt))
        return _truncated(ids, tokenizer, most) if truncate else ids


def _truncated(ids: list[int], tokenizer: TokenizerLike, most: int) -> list[int]:
    """The first `most` of `ids`, of which the last are what the tokenizer ends every text with."""
    if len(ids) <= most:
        return ids
    frame = tokenizer.encode("")
    ending = next((frame[start:] for start in range(len(frame)) if ids[start - len(frame) :] == frame[start:]), [])
    return ids[: max(most - len(ending), 0)] + ending[:most]


async def embed(
    intake: PoolingIntake,
    prompts: str | Iterable[Prompt],
    options: EmbedOptions,
    who: Who,
    adapter: str | None | Sequence[str | None],
) -> Embeddings:
    """Vectors for every prompt; arguments, result and errors as `Engine.embed`."""
    import numpy as np

    _, opened = intake.serving()
    pooling, make_vector = options.checked(opened.embedding)
    usages: list[Usage] = []

    async def one(asked: tuple[Prompt, str | None], _: object) -> NDArray[np.float32]:
        prompt, named = asked
        value, usage = await intake.pool(prompt, who._replace(adapter=named), pooling, truncate=options.truncate)
        usages.append(usage)
        return make_vector(value)

    many = Many(one, _with_adapters(prompts, adapter), _NO_PARAMS, _AHEAD * opened.info.max_rows, return_errors=False)
    vectors = await many.run()
    dimensions = options.dimensions or (opened.embedding.size if opened.embedding else 0)
    return Embeddings(
        vectors=np.stack(vectors) if vectors else np.empty((0, dimensions), np.float32), usage=_add(usages)
    )


def _with_adapters(prompts: Any, adapter: str | None | Sequence[str | None]) -> Iterable[Any]:
    """Each prompt with the adapter that it goes through.

    Raises:
        InvalidParams: `prompts` is no iterable, or there is not one adapter for each.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        kind = type(prompts).__name__
        raise InvalidParams(f"prompts: must be an iterable of prompts, got {kind}", field="prompts", value=prompts)
    if adapter is None or isinstance(adapter, str):
        return ((prompt, adapter) for prompt in prompts)
    if not isinstance(adapter, Sequence) or not isinstance(prompts, Sized) or len(adapter) != len(prompts):
        count = len(prompts) if isinstance(prompts, Sized) else "an unknown number of"
        raise InvalidParams(f"adapter: must be one, or one for each of {count} prompts", field="adapter", value=adapter)
    return zip(prompts, adapter, strict=True)


def _add(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
    )
