"""`InspectionCalls`: the methods of `Engine` that look at its tokenizer, figures and cache; they change nothing.

Next to read: stats.py, intake/prompt_ids.py, delivery/kv_events.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from headrace.engine.delivery.kv_events import KvEvents
from headrace.engine.intake.adapter_names import version_of
from headrace.engine.intake.prompt_ids import TokenizeOptions, TokenizerInfo, detokenize, tokenize, tokenizer_info
from headrace.engine.intake.prompts import Charge, Prompt, charge_nobody
from headrace.engine.life.serving import Serving
from headrace.engine.scheduling.memory.prefix import root_of
from headrace.engine.stats import EngineInfo, EngineStats
from headrace.engine.steps.snapshot import snapshot

__all__ = ["InspectionCalls"]


class InspectionCalls:
    """Methods of `Engine` that tokenise, and that tell of its state."""

    _serving: Serving

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        tenant: str | None = None,
        charge: Charge = charge_nobody,
        **options: Unpack[TokenizeOptions],
    ) -> list[int]:
        """Return the token ids of `prompt`, as a request of `tenant` would have them.

        Raises:
            InvalidParams: The prompt or an option is malformed.
            PromptTooLong: The text is too long for the context, however it is tokenised.
        """
        parts = self._serving.parts()
        return await tokenize(prompt, options, parts.opened, parts.helper, tenant, charge)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`.

        Raises:
            InvalidParams: An id is not in the vocabulary.
        """
        return detokenize(ids, self._serving.parts().opened, skip_special_tokens)

    @property
    def chat_template(self) -> str:
        """Text of the model's chat template; empty if it has none."""
        return self._serving.parts().opened.tokenizer.chat_template

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        """Properties of the model's tokenizer besides its vocabulary."""
        return tokenizer_info(self._serving.parts().opened.tokenizer)

    @property
    def step_age(self) -> float:
        """Seconds since a step last ended, or was launched after idling, while a step is in flight; 0 otherwise.

        It grows without end if the device hangs. It may be read in any thread, since the event loop may be what hangs.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: Its step loop died.
        """
        loop = self._serving.parts_anywhere().loop
        return loop.meter.step_age(loop.now)

    @property
    def info(self) -> EngineInfo:
        """Model and limits of the engine; may be read in any thread.

        Raises:
            EngineStopped: The engine is not open.
        """
        parts = self._serving.parts_anywhere()
        return replace(parts.opened.info, num_pages=parts.loop.scheduler.capacity.num_pages)

    def stats(self) -> EngineStats:
        """Return a snapshot of queues, pages, counts and rates.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: Its step loop died.
        """
        loop = self._serving.parts().loop
        return snapshot(loop.scheduler, loop.meter, loop.now)

    def kv_events(self) -> KvEvents:
        """Return an iterator of additions to and evictions from the prefix cache, and of the engine's load.

        It begins with a `KvReset`, and begins again with one after its reader was too slow. Pages that were stored
        while nobody held such an iterator are reported only once they are stored again.

        Raises:
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
        """
        return self._serving.parts().loop.kv.open()

    def kv_scope(self, *, adapter: str | None = None, tenant: str | None = None, cache_salt: str | None = None) -> str:
        """Return a name for all requests that share prefix pages with one of these arguments; see `PageStored.scope`.

        Raises:
            UnknownAdapter: No adapter of that name is loaded.
            EngineStopped: The engine is not open.
            EngineCrashed: The step loop died.
        """
        parts = self._serving.parts()
        root = root_of(version_of(adapter, parts.adapters.versions), tenant if cache_salt is None else cache_salt)
        return parts.loop.scheduler.pool.log.scope(root)
