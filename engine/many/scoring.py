"""`Engine.score`: scores documents for a query, by a cross-encoder or by the products of vectors.

Owns the choice between the two; never plans a step and never touches a tensor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headrace.engine.errors import InvalidParams, Rejected
from headrace.engine.events import Usage
from headrace.engine.many.embeddings import AHEAD, EmbedOptions, add_usage, embed
from headrace.engine.many.generate import Many
from headrace.engine.many.pooled import Pair, PoolingIntake, Text, Who
from headrace.engine.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.engine.intake.prompts import Prompt

__all__ = ["Scores", "score"]


@dataclass(slots=True, kw_only=True)
class Scores:
    """Scores of documents as answers to a query."""

    scores: NDArray[np.float32]
    """[documents], in their order; higher is better."""
    method: Literal["cross-encoder", "embedding"]
    """`cross-encoder`: a model that reads query and document together, from 0 to 1 where its files ask for a sigmoid.
    `embedding`: the cosine of their vectors, from -1 to 1."""
    usage: Usage
    """Tokens of all documents; a cross-encoder counts the query once for each."""


async def score(
    intake: PoolingIntake, query: Prompt, documents: str | Iterable[Prompt], who: Who, *, truncate: bool
) -> Scores:
    """Score every document; arguments, result and errors are those of `Engine.score`."""
    import numpy as np

    opened = intake.serving.parts(draining=True).opened
    if isinstance(documents, str):
        documents = [documents]
    if opened.scoring is None:
        options = EmbedOptions(pooling=None, normalize=True, dimensions=None, truncate=truncate)
        pooling, make_vector = options.checked(opened.embedding)
        with _naming_query():
            pooled, used = await intake.pool(Text(query, pooling, truncate), who)
        found = await embed(intake, documents, options, who, who.adapter, naming="documents")
        usage = add_usage([used, found.usage])
        return Scores(scores=found.vectors @ make_vector(pooled), method="embedding", usage=usage)
    if not isinstance(query, str):
        raise InvalidParams(
            f"query: this model takes texts alone, got {type(query).__name__}", field="query", value=query
        )
    has_sigmoid, usages = opened.scoring.has_sigmoid, list[Usage]()

    async def one(document: Any, _: object) -> float:
        if not isinstance(document, str):
            kind = type(document).__name__
            raise InvalidParams(f"document: must be a text, got {kind}", field="document", value=document)
        value, usage = await intake.pool(Pair(query, document, truncate), who)
        usages.append(usage)
        return _sigmoid(float(value[0])) if has_sigmoid else float(value[0])

    many = Many(one, documents, SamplingParams(), AHEAD * opened.info.max_rows, return_errors=False, naming="documents")
    scores = np.array(await many.run(), np.float32)
    return Scores(scores=scores, method="cross-encoder", usage=add_usage(usages))


@contextmanager
def _naming_query() -> Iterator[None]:
    """Say "query" for "prompt" in a refusal that the block raises."""
    try:
        yield
    except Rejected as error:
        field = error.field or ""
        if not field.startswith("prompt"):
            raise
        named = copy.copy(error)  # the original may belong to other requests too
        named.field = "query" + field.removeprefix("prompt")
        named.args = ("query" + str(error).removeprefix("prompt"),)
        raise named from error.__cause__


def _sigmoid(logit: float) -> float:
    """Return 1 / (1 + e^-x) without overflow."""
    shrunk = math.exp(-abs(logit))
    return 1 / (1 + shrunk) if logit >= 0 else shrunk / (1 + shrunk)
