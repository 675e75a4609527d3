"""`LLM`: an engine for code without an event loop; holds no thread and no loop itself, and never what is asked of it.

A call is made in the caller's thread and answered on the loop of a `Host`. Next to read: llm_host.py.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack, overload

from headrace.engine.embeddings import Embeddings
from headrace.engine.engine import Engine, Prompt
from headrace.engine.errors import HeadraceError, InvalidParams
from headrace.engine.events import Completion
from headrace.engine.llm_host import Call, Host
from headrace.engine.llm_stream import LLMAdapters, LLMStream
from headrace.engine.many import KeepingErrors, ManyOptions, ManyParams, check_many, run_many
from headrace.engine.options import EngineOptions
from headrace.engine.params import SamplingParams
from headrace.engine.scoring import Scores
from headrace.engine.stats import EngineInfo, EngineStats

__all__ = ["LLM"]

_DEFAULT_PARAMS = SamplingParams()


class LLM:
    """An open engine for scripts and notebooks: `LLM("path/to/model").generate(prompts)`.

    Works with or without an event loop in the calling thread, and from several threads at once: all that they ask runs
    in one batch. `close`, leaving `with`, dropping the last reference or the end of the interpreter closes it.
    """

    def __init__(
        self, model: str | os.PathLike[str] | Engine, *, progress: bool = True, **options: Unpack[EngineOptions]
    ) -> None:
        """Load the model and wait for it.

        Args:
            model: A model folder, a `.gguf` file, a hub id, or an engine that was not opened yet.
            progress: Show a bar while the weights are read, where stderr is a terminal.
            options: The fields of `EngineConfig`, which `EngineOptions` (options.py) describes; none with an engine,
                which has its own.

        Raises:
            InvalidParams: An option is unknown or out of its range.
            ModelRejected: The model's files cannot be used.
            DeviceUnavailable: The device is not there.
        """
        if isinstance(model, Engine) and options:
            field, value = next(iter(options.items()))
            raise InvalidParams(f"{field}: an engine has its own options", field=field, value=value)
        self._host = Host(model if isinstance(model, Engine) else Engine(model, **options))
        self._host.open(progress=progress)
        finalizer = weakref.finalize(self, self._host.stop)  # runs in any thread, amid anything: it only posts
        finalizer.atexit = False  # the host sees to that itself, since it also waits

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is one prompt, although it is an iterable of them
        self, prompts: Prompt, params: ManyParams = ..., **options: Unpack[ManyOptions]
    ) -> Completion: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: ManyParams = ..., **options: Unpack[KeepingErrors]
    ) -> Completion | HeadraceError: ...
    @overload
    def generate(
        self, prompts: Iterable[Prompt], params: ManyParams = ..., **options: Unpack[ManyOptions]
    ) -> list[Completion]: ...
    @overload
    def generate(
        self, prompts: Iterable[Prompt], params: ManyParams = ..., **options: Unpack[KeepingErrors]
    ) -> list[Completion | HeadraceError]: ...
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: ManyParams = _DEFAULT_PARAMS,
        *,
        progress: bool = True,
        return_errors: bool = False,
        **asked: Any,
    ) -> Any:
        """Run a generation for a prompt, or for each of many, and wait for the end; Ctrl-C cancels them.

        Args:
            prompts: One prompt (text, token ids or a chat), or any iterable of prompts. An iterable other than a list
                or a tuple is taken from in the calling thread, as room comes.
            params: For all prompts, or a sequence of as many.
            progress: Show a bar on stderr while there are many prompts.
            return_errors: Put the error of a request that fails in the place of its answer, and go on.
            asked: `adapter`, `tenant`, `cache_salt`, `priority`, `deadline` and hooks, as in `Engine.stream`.

        Returns:
            The answer, or the list of answers in the order of the prompts.

        Raises:
            InvalidParams: Not prompts, or not one `SamplingParams` for each.
            RuntimeError: It is called by a `stop_when` of its own, which would wait for itself.
            EngineStopped: It is closed, or was closed meanwhile.
            HeadraceError: The first request that failed; among many, its message names `prompts[index]`.
        """
        one = _is_one(prompts)
        given: Any = [prompts] if one else prompts
        check_many(given, params)
        call = Call(given)

        async def ask(engine: Engine) -> None:
            shown, kept = progress and not one, return_errors or one
            call.answers = await run_many(engine, call.prompts, params, progress=shown, return_errors=kept, **asked)

        self._host.wait_for(call, ask)
        if not one:
            return call.answers
        [answer] = call.answers
        if isinstance(answer, HeadraceError) and not return_errors:
            raise answer
        return answer

    def chat(
        self,
        messages: Prompt | Iterable[Prompt],
        params: ManyParams = _DEFAULT_PARAMS,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Any:
        """Answer a chat, or each of many, as `generate` does, and offer `tools` in it.

        Args:
            messages: One chat, or an iterable of chats.
            params: For all chats, or a sequence of as many.
            tools: Offered by the chat template; `headrace.engine.tools` reads the calls in an answer.
            options: `progress`, `return_errors`, and `adapter`, `tenant` and so on, as `generate`.

        Returns:
            The answer, or the list of answers in the order of the chats; errors as `generate`.
        """
        if not tools:
            return self.generate(messages, params, **options)
        tenant, one = options.get("tenant"), _is_one(messages)

        async def tokenize(engine: Engine) -> list[list[int]]:
            chats: Any = [messages] if one else messages
            return [await engine.tokenize(chat, tools=tools, tenant=tenant) for chat in chats]

        ids = self._host.ask(tokenize)
        return self.generate(ids[0] if one else ids, params, **options)

    def stream(self, prompt: Prompt, params: SamplingParams = _DEFAULT_PARAMS, **asked: Any) -> LLMStream:
        """Start a generation and return its tokens as a plain iterator, which `close` ends early.

        Args:
            prompt: Text, token ids or a chat.
            params: How to choose tokens and when to stop.
            asked: `adapter`, `tenant`, `cache_salt`, `priority`, `deadline` and hooks, as in `Engine.stream`.

        Raises:
            InvalidParams: `params` are not `SamplingParams`, or ask for `best_of`, which is known at the end alone.
            EngineStopped: It is closed.
        """
        return LLMStream(self, self._host, self._host.look(lambda engine: engine.stream(prompt, params, **asked)))

    def embed(self, prompts: str | Iterable[Prompt], *, progress: bool = True, **options: Any) -> Embeddings:
        """Turn texts into vectors and wait for them; arguments, result and errors as `Engine.embed`.

        Args:
            prompts: A text, or any iterable of prompts, which is first taken from in the calling thread.
            progress: Show a bar on stderr while there are many prompts.
            options: `pooling`, `normalize`, `dimensions`, `truncate`, `adapter` and so on.
        """
        given, shown = _taken(prompts), progress and not isinstance(prompts, str)

        async def embed(engine: Engine) -> Embeddings:
            return await engine.embed(given, progress=shown, **options)

        return self._host.ask(embed)

    def score(self, query: Prompt, documents: str | Iterable[Prompt], **options: Any) -> Scores:
        """Tell how well documents answer a query; arguments, result and errors as `Engine.score`."""
        given = _taken(documents)

        async def score(engine: Engine) -> Scores:
            return await engine.score(query, given, **options)

        return self._host.ask(score)

    def tokenize(self, prompt: Prompt, **options: Any) -> list[int]:
        """Return the token ids of `prompt`; arguments and errors as `Engine.tokenize`."""

        async def tokenize(engine: Engine) -> list[int]:
            return await engine.tokenize(prompt, **options)

        return self._host.ask(tokenize)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; errors as `Engine.detokenize`."""
        return self._host.look(lambda engine: engine.detokenize(ids, skip_special_tokens=skip_special_tokens))

    @property
    def info(self) -> EngineInfo:
        """What the engine runs and what it can hold."""
        return self._host.look(lambda engine: engine.info)

    def stats(self) -> EngineStats:
        """Return one snapshot of queues, pages, counts and rates."""
        return self._host.look(lambda engine: engine.stats())

    @property
    def adapters(self) -> LLMAdapters:
        """The adapters of the engine: `load`, `unload`, `list` and `pin`."""
        return LLMAdapters(self._host)

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load what `generate(..., adapter=name)` wears, and wait for it; as `adapters.load`.

        Raises:
            AdapterRejected: The name, the files or the size do not fit; nothing changes.
            InvalidParams: The engine was opened for no adapters.
            RuntimeError: A `stop_when` calls it, which would wait for itself.
            EngineStopped: It is closed, or was closed meanwhile.
        """
        self.adapters.load(name, path)

    def close(self) -> None:
        """Cancel what runs, return all memory and join all threads; may be called more than once.

        Raises:
            EngineCrashed: The step loop had died.
        """
        self._host.stop()
        self._host.join()

    def __enter__(self) -> Self:
        """Return the LLM itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an error that leaves the block goes before one of closing."""
        try:
            self.close()
        except HeadraceError:
            if error is None:
                raise


def _is_one(prompts: object) -> bool:
    """Whether this is a prompt, well-formed or not, rather than an iterable of prompts."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and not isinstance(prompts[0], str | Sequence)


def _taken(prompts: Any) -> Any:
    """`prompts` as the event loop may go through them: what an iterator yields is taken here, in the calling thread."""
    is_whole = isinstance(prompts, str | bytes | Sequence | Mapping) or not isinstance(prompts, Iterable)
    return prompts if is_whole else list(prompts)
