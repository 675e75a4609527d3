"""`PoolingCalls`: the methods of `Engine` that compute a text and generate nothing; pools no text itself.

Next to read: many/pooled.py, embeddings.py and scoring.py beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from anyio import Event

from headrace.engine.errors import InvalidParams
from headrace.engine.intake.prompts import Charge, Prompt, charge_nobody
from headrace.engine.life.serving import Serving
from headrace.engine.many.embeddings import Embeddings, EmbedOptions, embed
from headrace.engine.many.pooled import PoolingIntake, Text, Who
from headrace.engine.many.scoring import Scores, score
from headrace.engine.scheduling.pooling import Pooling, PoolingKind

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PoolingCalls"]


class PoolingCalls:
    """Methods of `Engine` that embed, score and read hidden states."""

    _serving: Serving

    async def embed(
        self,
        prompts: str | Iterable[Prompt],
        *,
        pooling: PoolingKind | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        started: Event | None = None,
        charge: Charge = charge_nobody,
        progress: bool = False,
    ) -> Embeddings:
        """Turn texts into vectors, at most two for each row at a time; other arguments are those of `stream`.

        Args:
            prompts: A text, or any iterable of prompts, each taken when there is room for it.
            pooling: "last" token, "mean" of all or "cls" (first token); None is the choice of the model's
                files, else "last".
            normalize: Scale vectors to length 1; None is the choice of the model's files, else True.
            dimensions: Number of leading elements to keep, before normalising; None keeps all.
            truncate: Cut prompts that are longer than the context instead of rejecting them.
            adapter: Adapter of all prompts, or a sequence with one for each.
            started: Event that is set when a step computes the first prompt.
            progress: Show a bar on stderr with prompts done and tokens per second of the whole engine.

        Returns:
            Vectors, float32 [prompts, dimensions] in the order of the prompts, and the token counts of all together.

        Raises:
            InvalidParams: The model or its device does not support that, or `prompts` are not prompts.
            HeadraceError: The first prompt that failed, its message naming `prompts[index]`; the others are cancelled.
        """
        options = EmbedOptions(pooling=pooling, normalize=normalize, dimensions=dimensions, truncate=truncate)
        who = Who(None, tenant, cache_salt, priority, charge)
        return await embed(self._pooling(started), prompts, options, who, adapter, progress=progress)

    async def score(
        self,
        query: Prompt,
        documents: str | Iterable[Prompt],
        *,
        truncate: bool = False,
        adapter: str | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        started: Event | None = None,
        charge: Charge = charge_nobody,
    ) -> Scores:
        """Score how well documents answer a query, at most two for each row at a time.

        A cross-encoder (a sequence classifier with one label) reads the query with each document; any other model gives
        the cosine of their vectors, as `embed` makes them. Other arguments are those of `stream`.

        Args:
            query: A text; any prompt for models that embed.
            documents: A text or an iterable of texts; any prompts for models that embed.
            truncate: Cut inputs that are longer than the context, documents at their end, instead of rejecting them.
            started: Event that is set when a step computes the first text.

        Raises:
            InvalidParams: The model does neither, or an argument is of the wrong kind.
            HeadraceError: The first document that failed, its message naming `documents[index]`.
        """
        who = Who(adapter, tenant, cache_salt, priority, charge)
        return await score(self._pooling(started), query, documents, who, truncate=truncate)

    async def hidden_states(
        self,
        prompt: Prompt,
        *,
        adapter: str | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Tensor:
        """Return the hidden states of a prompt after the final norm; arguments are those of `stream`.

        Returns:
            A tensor [tokens, hidden size] in the model's dtype on its device, made under `torch.inference_mode`. If the
            prompt took one step, it is the tensor that the model wrote, not a copy.

        Raises:
            InvalidParams: The model or its device does not support that.
            Rejected: The request can never run.
            RequestFailed: The request ended early.
        """
        if self._serving.parts().opened.embedding is None:
            raise InvalidParams("prompt: this model or its device gives no hidden states", field="prompt")
        who = Who(adapter, tenant, cache_salt, priority)
        states: Tensor = (await self._pooling().pool(Text(prompt, Pooling("all")), who))[0]
        return states

    def _pooling(self, started: Event | None = None) -> PoolingIntake:
        self._serving.parts()  # a draining engine rejects this; calls that have begun may go on
        return PoolingIntake(self._serving, started)
