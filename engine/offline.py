"""`LLM`, an engine for code without an event loop; it runs no thread or loop itself.

A call is made in the caller's thread and answered on the loop of a `Host`. Next to read: blocking/host.py.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from headrace.engine.blocking.host import Host, HostCall
from headrace.engine.blocking.options import (
    ChatKeepingErrors,
    ChatManyOptions,
    EmbedKeywords,
    HiddenKeywords,
    ScoreKeywords,
    StreamKeywords,
    TokenizeKeywords,
)
from headrace.engine.blocking.stream import LLMAdapters, LLMStream
from headrace.engine.engine import Engine, Message, Prompt
from headrace.engine.errors import HeadraceError, InvalidParams
from headrace.engine.events import Completion
from headrace.engine.intake.prompt_ids import ChatOptions, TokenizerInfo
from headrace.engine.many.embeddings import Embeddings
from headrace.engine.many.generate import KeepingErrors, ManyOptions, ManyParams, check_many, run_many
from headrace.engine.many.scoring import Scores
from headrace.engine.options import EngineOptions
from headrace.engine.params import SamplingParams
from headrace.engine.stats import EngineInfo, EngineStats

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LLM"]

_DEFAULT_PARAMS = SamplingParams()


class LLM:
    """An open engine for scripts and notebooks: `LLM("path/to/model").generate(prompts)`.

    Works with or without an event loop in the calling thread, and from several threads at once, whose requests run
    in one batch. `close`, leaving `with`, dropping the last reference or the end of the interpreter closes it.
    """

    def __init__(
        self, model: str | os.PathLike[str] | Engine, *, progress: bool = True, **options: Unpack[EngineOptions]
    ) -> None:
        """Load the model and wait for it.

        Args:
            model: A model folder, a `.gguf` file, a hub id, or an engine that has not been opened.
            progress: Show a bar while the weights are read, on a terminal or in a notebook.
            options: The fields of `EngineConfig`, which `EngineOptions` (options.py) describes; not allowed with an
                engine, which has its own.

        Raises:
            InvalidParams: An option is unknown or out of its range.
            ModelRejected: The model's files cannot be used.
            DeviceUnavailable: The device does not exist.
        """
        if isinstance(model, Engine) and options:
            field, value = next(iter(options.items()))
            raise InvalidParams(f"{field}: an engine has its own options", field=field, value=value)
        self._host = Host(model if isinstance(model, Engine) else Engine(model, **options))
        self._host.open(progress=progress)
        finalizer = weakref.finalize(self, self._host.stop)  # may run in any thread at any point, so it only posts
        finalizer.atexit = False  # the host also waits for the end at exit

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
        """Run a generation for a prompt, or for each of many, and wait for the end; Ctrl-C cancels all.

        Args:
            prompts: One prompt (text, token ids or a chat), or any iterable of prompts. An iterable other than a list
                or a tuple is iterated in the calling thread, as there is room.
            params: Parameters of all prompts, or a sequence with one for each.
            progress: Show a bar on stderr while there are many prompts.
            return_errors: Return the error of a request that fails in place of its answer, and go on.
            asked: `adapter`, `tenant`, `cache_salt`, `priority`, `deadline` and hooks, as in `Engine.stream`.

        Returns:
            The answer, or the list of answers in the order of the prompts.

        Raises:
            InvalidParams: `prompts` are not prompts, or `params` are not one `SamplingParams` for each.
            RuntimeError: A `stop_when` of this LLM calls it, which would wait for itself.
            EngineStopped: The LLM is closed, or was closed meanwhile.
            HeadraceError: The first request that failed; among many, its message names `prompts[index]`.
        """
        return self._answer(prompts, params, {}, progress=progress, return_errors=return_errors, **asked)

    @overload
    def chat(
        self, messages: Sequence[Message], params: ManyParams = ..., **options: Unpack[ChatManyOptions]
    ) -> Completion: ...
    @overload
    def chat(
        self, messages: Sequence[Message], params: ManyParams = ..., **options: Unpack[ChatKeepingErrors]
    ) -> Completion | HeadraceError: ...
    @overload
    def chat(
        self, messages: Iterable[Sequence[Message]], params: ManyParams = ..., **options: Unpack[ChatManyOptions]
    ) -> list[Completion]: ...
    @overload
    def chat(
        self, messages: Iterable[Sequence[Message]], params: ManyParams = ..., **options: Unpack[ChatKeepingErrors]
    ) -> list[Completion | HeadraceError]: ...
    def chat(self, messages: Any, params: ManyParams = _DEFAULT_PARAMS, **options: Any) -> Any:
        """Answer a chat, or each of many, as `generate` does, with options for the chat template.

        Args:
            messages: One chat, or an iterable of chats.
            params: Parameters of all chats, or a sequence with one for each.
            options: `tools`, `template_kwargs`, `continue_final_message` and `add_generation_prompt`, as in
                `Engine.tokenize`; `headrace.engine.tools` reads the calls in an answer. Also `progress`,
                `return_errors`, `adapter`, `tenant` and so on, as in `generate`.

        Returns:
            The answer, or the list of answers in the order of the chats; errors are those of `generate`.
        """
        written: Any = {name: options.pop(name) for name in ChatOptions.__annotations__ if name in options}
        return self._answer(messages, params, written, **options)

    def _answer(
        self,
        prompts: Any,
        params: ManyParams,
        written: ChatOptions,
        *,
        progress: bool = True,
        return_errors: bool = False,
        **asked: Any,
    ) -> Any:
        """Generate for one prompt or for many, as `generate` does; `written` has options of the chat template."""
        one = _is_one(prompts)
        given: Any = [prompts] if one else prompts
        check_many(given, params)
        call = HostCall(given)

        async def ask(engine: Engine) -> None:
            shown, kept = progress and not one, return_errors or one
            call.answers = await run_many(
                engine, call.prompts, params, progress=shown, return_errors=kept, written=written, **asked
            )

        self._host.wait_for(call, ask)
        if not one:
            return call.answers
        [answer] = call.answers
        if isinstance(answer, HeadraceError) and not return_errors:
            raise answer
        return answer

    def stream(
        self, prompt: Prompt, params: SamplingParams = _DEFAULT_PARAMS, **asked: Unpack[StreamKeywords]
    ) -> LLMStream:
        """Start a generation and return its tokens as a plain iterator, which `close` ends early.

        Args:
            prompt: Text, token ids or a chat.
            params: Options for choosing tokens and for stopping.
            asked: `adapter`, `tenant`, `cache_salt`, `priority`, `deadline` and hooks, as in `Engine.stream`.

        Raises:
            InvalidParams: `params` are not `SamplingParams`, or ask for `best_of`, which cannot be streamed.
            EngineStopped: The LLM is closed.
        """
        return LLMStream(self, self._host, self._host.look(lambda engine: engine.stream(prompt, params, **asked)))

    def embed(
        self, prompts: str | Iterable[Prompt], *, progress: bool = True, **options: Unpack[EmbedKeywords]
    ) -> Embeddings:
        """Turn texts into vectors and wait for them; arguments, result and errors are those of `Engine.embed`.

        Args:
            prompts: A text, or any iterable of prompts, which is iterated in the calling thread.
            progress: Show a bar on stderr while there are many prompts.
            options: `pooling`, `normalize`, `dimensions`, `truncate`, `adapter` and so on.
        """
        given, shown = _taken(prompts), progress and not isinstance(prompts, str)

        async def embed(engine: Engine) -> Embeddings:
            return await engine.embed(given, progress=shown, **options)

        return self._host.ask(embed)

    def score(self, query: Prompt, documents: str | Iterable[Prompt], **options: Unpack[ScoreKeywords]) -> Scores:
        """Score how well documents answer a query; arguments, result and errors are those of `Engine.score`."""
        given = _taken(documents)

        async def score(engine: Engine) -> Scores:
            return await engine.score(query, given, **options)

        return self._host.ask(score)

    def hidden_states(self, prompt: Prompt, **options: Unpack[HiddenKeywords]) -> Tensor:
        """Return the hidden states of a prompt after the final norm, as `Engine.hidden_states` does."""

        async def states(engine: Engine) -> Tensor:
            return await engine.hidden_states(prompt, **options)

        return self._host.ask(states)

    def tokenize(self, prompt: Prompt, **options: Unpack[TokenizeKeywords]) -> list[int]:
        """Return the token ids of `prompt`; arguments and errors are those of `Engine.tokenize`."""

        async def tokenize(engine: Engine) -> list[int]:
            return await engine.tokenize(prompt, **options)

        return self._host.ask(tokenize)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; errors are those of `Engine.detokenize`."""
        return self._host.look(lambda engine: engine.detokenize(ids, skip_special_tokens=skip_special_tokens))

    @property
    def chat_template(self) -> str:
        """Text of the model's chat template; empty if it has none."""
        return self._host.look(lambda engine: engine.chat_template)

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        """Properties of the model's tokenizer besides its vocabulary."""
        return self._host.look(lambda engine: engine.tokenizer_info)

    @property
    def info(self) -> EngineInfo:
        """Model and limits of the engine."""
        return self._host.look(lambda engine: engine.info)

    def stats(self) -> EngineStats:
        """Return a snapshot of queues, pages, counts and rates."""
        return self._host.look(lambda engine: engine.stats())

    @property
    def adapters(self) -> LLMAdapters:
        """Adapters of the engine, with `load`, `unload`, `list` and `pin`."""
        return LLMAdapters(self._host)

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load the adapter for `generate(..., adapter=name)` and wait for it, as `adapters.load` does.

        Raises:
            AdapterRejected: The name, the files or the size do not fit; nothing changes.
            InvalidParams: The engine was opened without adapter slots.
            RuntimeError: A `stop_when` calls it, which would wait for itself.
            EngineStopped: The LLM is closed, or was closed meanwhile.
        """
        self.adapters.load(name, path)

    def resize_kv(self, kv_memory: int | str) -> None:
        """Change the memory for keys and values; arguments and errors are those of `Engine.resize_kv`."""
        self._host.ask(lambda engine: engine.resize_kv(kv_memory))

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Free the memory of keys, values and weights until `wake`; arguments and errors are those of `Engine.sleep`.

        Calls of other threads wait meanwhile.
        """
        self._host.ask(lambda engine: engine.sleep(level))

    def wake(self) -> None:
        """End a `sleep`; errors are those of `Engine.wake`."""
        self._host.ask(lambda engine: engine.wake())

    @property
    def sleep_level(self) -> int:
        """Level of sleep; 0 while the engine is awake."""
        return self._host.look(lambda engine: engine.sleep_level)

    def close(self) -> None:
        """Cancel running requests, free all memory and join all threads; may be called more than once.

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
        """Close the engine; an error of the block takes precedence over one of closing."""
        try:
            self.close()
        except HeadraceError:
            if error is None:
                raise


def _is_one(prompts: object) -> bool:
    """Return whether `prompts` is a prompt, well-formed or not, rather than an iterable of prompts."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and not isinstance(prompts[0], str | Sequence)


def _taken(prompts: Any) -> Any:
    """Return `prompts` for use on the event loop; items of an iterator are taken here, in the calling thread."""
    is_whole = isinstance(prompts, str | bytes | Sequence | Mapping) or not isinstance(prompts, Iterable)
    return prompts if is_whole else list(prompts)
