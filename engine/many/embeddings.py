"""`Engine.embed`: turns many texts into vectors, a bounded number at a time.

Owns the step from pooled hidden states to vectors; never plans a step or touches a tensor. Next to read: pooled.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from operator import length_hint
from typing import TYPE_CHECKING, Any

from headrace.engine.errors import InvalidParams
from headrace.engine.events import Usage
from headrace.engine.many.bars import ManyBar
from headrace.engine.many.generate import Many
from headrace.engine.many.pooled import PoolingIntake, Text, Who
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.pooling import Embedding, Pooling, PoolingKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.engine.intake.prompts import Prompt

__all__ = ["AHEAD", "EmbedOptions", "Embeddings", "add_usage", "embed"]

AHEAD = 2
"""Requests submitted for each row, as in generate.py."""
_NO_PARAMS = SamplingParams()


@dataclass(slots=True, kw_only=True)
class Embeddings:
    """Vectors of texts."""

    vectors: NDArray[np.float32]
    """[inputs, dimensions], in the order of the inputs."""
    usage: Usage
    """Tokens of all inputs together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions:
    """The options of `Engine.embed` for its vectors."""

    pooling: PoolingKind | None
    normalize: bool | None
    dimensions: int | None
    truncate: bool

    def checked(self, model: Embedding | None) -> tuple[Pooling, Callable[[Any], NDArray[np.float32]]]:
        """Return the pooling of `model`, and the function that makes a vector of pooled hidden states.

        Raises:
            InvalidParams: The model or its device cannot do what an option asks for.
        """
        if model is None:
            why = "this model or its device gives no hidden states"
            raise InvalidParams(f"pooling: {why}", field="pooling", value=self.pooling)
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
        for field, flag in (("normalize", self.normalize), ("truncate", self.truncate)):
            if flag is not None and type(flag) is not bool:
                raise InvalidParams(f"{field}: must be a bool, got {flag!r}", field=field, value=flag)
        normalize = model.normalize if self.normalize is None else self.normalize
        return Pooling(kind), partial(_vector, size=size, normalize=normalize)


def _vector(pooled: NDArray[np.float32], *, size: int, normalize: bool) -> NDArray[np.float32]:
    """Return a copy of the first `size` elements, scaled to length 1 with `normalize`."""
    vector = pooled[:size].copy()
    if normalize:
        vector /= max(float(vector @ vector) ** 0.5, 1e-12)
    return vector


async def embed(
    intake: PoolingIntake,
    prompts: str | Iterable[Prompt],
    options: EmbedOptions,
    who: Who,
    adapter: str | None | Sequence[str | None],
    *,
    naming: str = "prompts",
    progress: bool = False,
) -> Embeddings:
    """Return vectors for all prompts, which errors call `naming`; do what `Engine.embed` describes."""
    import numpy as np

    parts = intake.serving.parts(draining=True)
    loop, opened = parts.loop, parts.opened
    pooling, make_vector = options.checked(opened.embedding)
    usages: list[Usage] = []

    async def one(asked: tuple[Prompt, str | None], _: object) -> NDArray[np.float32]:
        prompt, named = asked
        value, usage = await intake.pool(Text(prompt, pooling, options.truncate), who._replace(adapter=named))
        usages.append(usage)
        return make_vector(value)

    asked, most = _with_adapters(prompts, adapter, naming), AHEAD * opened.info.max_rows
    many = Many(one, asked, _NO_PARAMS, most, return_errors=False, naming=naming)
    if progress:
        with ManyBar(
            lambda: many.ended,
            lambda: loop.scheduler.prompt_tokens,
            1 if isinstance(prompts, str) else length_hint(prompts, -1),
        ) as bar:
            vectors = await many.run(bar.keep_drawing)
    else:
        vectors = await many.run()
    dimensions = options.dimensions or (opened.embedding.size if opened.embedding else 0)
    return Embeddings(
        vectors=np.stack(vectors) if vectors else np.empty((0, dimensions), np.float32), usage=add_usage(usages)
    )


def _with_adapters(prompts: Any, adapter: str | None | Sequence[str | None], naming: str) -> Iterable[Any]:
    """Return each prompt with its adapter id.

    Raises:
        InvalidParams: `prompts` is not an iterable, or there is not one adapter for each.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray | Mapping):
        kind = type(prompts).__name__
        raise InvalidParams(f"{naming}: must be an iterable of prompts, got {kind}", field=naming, value=prompts)
    if adapter is None or isinstance(adapter, str):
        return ((prompt, adapter) for prompt in prompts)
    if not isinstance(adapter, Sequence) or not isinstance(prompts, Sized) or len(adapter) != len(prompts):
        count = len(prompts) if isinstance(prompts, Sized) else "an unknown number of"
        raise InvalidParams(f"adapter: must be one, or one for each of {count} prompts", field="adapter", value=adapter)
    return zip(prompts, adapter, strict=True)


def add_usage(usages: Sequence[Usage]) -> Usage:
    """Return the usage of several texts together."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
    )
