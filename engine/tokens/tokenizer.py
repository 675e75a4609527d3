"""The tokenizer of a model: text and chats to ids, ids to text; never runs code that a model names or downloads.

`transformers` and `tokenizers` are imported when a tokenizer is built, not with this module.
Next to read: gguf.py for GGUF files, table.py and text.py for the incremental way back to text.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headrace.engine.errors import InvalidParams, ModelRejected
from headrace.engine.intake.messages import Message, check_text, checked_messages, map_strings
from headrace.engine.intake.prompts import check_fewest_tokens, check_text_size
from headrace.engine.intake.template_kwargs import checked_template_kwargs
from headrace.engine.life.opened import EncodedPair
from headrace.engine.tokens.core import TokenizerCore
from headrace.engine.tokens.folder import folder_eos_ids, load_folder
from headrace.engine.tokens.gguf import build_gguf_tokenizer, gguf_eos_ids
from headrace.engine.tokens.interface import ChatEnd
from headrace.engine.tokens.limits import check_core
from headrace.engine.tokens.panics import typed
from headrace.engine.tokens.rendering import Renderer
from headrace.engine.tokens.speed import is_quick
from headrace.engine.tokens.table import token_table
from headrace.engine.tokens.token_table import TokenTable

__all__ = ["Tokenizer"]

_UNKNOWN_CONTEXT = 2**24  # tokens


class Tokenizer:
    """One model's tokenizer and chat template, shared by all requests. Safe to call from several threads."""

    def __init__(self, backend: Any, *, name: str, eos_ids: Sequence[int] = (), is_exact: bool = True) -> None:
        """Wrap a `transformers.PreTrainedTokenizerFast`.

        Args:
            backend: The tokenizer; not changed by others from here on.
            name: Name of the model in messages.
            eos_ids: End-of-sequence ids of the model, united with the tokenizer's own.
            is_exact: Whether ids must give their exact text, as generation needs.

        Raises:
            ModelRejected: The tokenizer cannot decode token by token, or could cost too much.
        """
        self._core = backend.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        self.name = name
        vocabulary: dict[str, int] = self._core.get_vocab(with_added_tokens=True)  # a copy, which takes its time
        growth = check_core(self._core, vocabulary)
        self._encoder = TokenizerCore(self._core, name, growth=growth)
        own = () if backend.eos_token_id is None else (int(backend.eos_token_id),)
        self.eos_ids: tuple[int, ...] = tuple(sorted({*eos_ids, *own}))
        """Ids that end a completion, ascending."""
        added = self._core.get_added_tokens_decoder()
        self._special = {index: token for index, token in added.items() if token.special}
        self.table: TokenTable = token_table(self._core, vocabulary, frozenset(self._special), is_exact)
        """Text of each id, for `Detokenizer`."""
        self.table.is_quick = is_quick(self._core, growth)
        self.table.most_characters = self._encoder.most_characters
        self.vocab_size: int = len(self.table.pieces)
        """Highest id plus one; the model's logits may be wider."""
        self._control = _any_of(token.content for token in self._special.values())
        self._renderer = Renderer(backend.chat_template, backend.special_tokens_map, name)
        self.special_tokens: Mapping[str, Any] = dict(backend.special_tokens_map)
        """Special tokens by the names that chat templates use for them."""
        self._max_context = _UNKNOWN_CONTEXT
        self.chat_template = self._renderer.source
        """Text of the chat template, the one for tools if there are several; empty if there is none."""
        self._escape: _Escape | None = None
        self._escape_lock = threading.Lock()

    @classmethod
    def from_folder(cls, path: str | Path, *, is_exact: bool = True) -> Tokenizer:
        """Load from a folder in Hugging Face layout; `is_exact` is the constructor's argument.

        Raises:
            ModelRejected: Files are missing or damaged, or the tokenizer wants to run its own code.
        """
        folder = Path(path)
        with typed(partial(_unusable, f"the files in {folder} could not be read")):
            backend, eos_ids = load_folder(folder), folder_eos_ids(folder)
            return cls(backend, name=folder.resolve().name, eos_ids=eos_ids, is_exact=is_exact)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from the metadata of a GGUF file, given as plain values.

        Raises:
            ModelRejected: Tokenizer fields are missing, contradict each other or are of an unknown kind.
        """
        with typed(partial(_unusable, "none could be built from tokenizer.ggml.*")):
            backend = build_gguf_tokenizer(metadata)
            return cls(backend, name=str(metadata.get("general.name", "gguf")), eos_ids=gguf_eos_ids(metadata))

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        """Return the ids of `text` as it stands; if `framed`, with BOS or EOS if the tokenizer adds them by default.

        Special tokens written out in `text` become these tokens: raw text is the caller's own prompt.

        Raises:
            InvalidParams: `text` is not a string that UTF-8 can express.
        """
        check_text(text, "prompt")
        return self._encoder.encode(text, framed=framed)

    def encode_pair(self, query: str, document: str) -> EncodedPair:
        """Return the ids of two texts that are read together, with the special tokens around and between them.

        Raises:
            InvalidParams: A text is not a string that UTF-8 can express.
        """
        check_text(query, "query")
        check_text(document, "document")
        found = self._encoder.encode_pair(query, document)
        second = next((place for place, kind in enumerate(found.type_ids) if kind), 0)
        place = next((place for place, text in enumerate(found.sequence_ids) if text == 1), len(found.ids))
        return EncodedPair(found.ids, second, place)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        end: ChatEnd = "answer",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a chat in the model's template, by default up to where the assistant's next answer begins.

        A special token written out inside a message or a tool stays plain text, so that no message can end its own
        turn. Beware: the first such message builds a second encoder, which takes up to a second for the largest
        vocabularies.

        Args:
            messages: Messages of the chat, at least one.
            tools: Definitions of functions that the model may call, as OpenAI's API writes them.
            end: Place at which the ids end.
            template_kwargs: More values for the template, such as `enable_thinking`; plain JSON by name.

        Raises:
            InvalidParams: A message or a value is malformed, there is no template, it refuses the messages, it costs
                too much, or it does not write the message to be continued as it is.
        """
        given: list[Any] = [checked_messages(messages), tools, checked_template_kwargs(template_kwargs or {})]
        quotes = self._quotes_control(given)
        chat, offered, more = map_strings(given, self._escaping().hide) if quotes else given
        if end == "open":
            rendered = self._render_open(chat, offered, more)
        else:
            rendered = self._renderer.render(chat, offered, more, add_generation_prompt=end == "answer")
        return self._encode_escaped(rendered) if quotes else self._encode_plain(rendered)

    def _render_open(
        self, chat: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, more: Mapping[str, Any]
    ) -> str:
        """Render a chat up to the end of the text of its last message.

        A mark behind that text shows its end. If the template strips the space behind the mark, it strips the space
        behind every text, and the text loses its own as well, as in `transformers`.
        """
        mark = f"\ue004{secrets.randbelow(10**20)}\ue005"
        marked = [*chat[:-1], chat[-1] | {"content": f"{chat[-1]['content']}{mark} "}]
        rendered = self._renderer.render(marked, tools, more, add_generation_prompt=False)
        text, found, rest = rendered.rpartition(mark)
        if not found:
            raise InvalidParams(
                f"messages: the chat template of {self.name} does not write the last one as it is: "
                "it cannot be continued",
                field="messages",
            )
        return text if rest.startswith(" ") else text.rstrip()

    def encode_more(self, text: str) -> list[int]:
        """Return the ids of `text` that continues other text: as `encode`, but with nothing put around or before it.

        Raises:
            InvalidParams: `text` is not a string that UTF-8 can express.
        """
        check_text(text, "prompt")
        if not self.table.byte_ids:
            return self._encoder.encode(text)
        begun = self._encoder.encode("\n")  # SentencePiece puts its space here
        return self._encoder.encode("\n" + text)[len(begun) :]

    def encode_reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids that the chat template puts behind an answer: its end, `messages`, the start of the next
        answer.

        The template is given a chat of one message, an answer and `messages`; only its text after the answer is used.
        With `tools` the template for tools is used. Special tokens in messages stay plain text, as in `encode_chat`.

        Raises:
            InvalidParams: An argument is refused as by `encode_chat`, or the template does not write the answer as it
                is.
        """
        given: list[Any] = [checked_messages(messages), tools, checked_template_kwargs(template_kwargs or {})]
        quotes = self._quotes_control(given)
        chat, offered, more = map_strings(given, self._escaping().hide) if quotes else given
        answer = f"\ue004{secrets.randbelow(10**20)}\ue005"
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": answer}]
        parts = self._renderer.render([*before, *chat], offered, more).split(answer)
        if len(parts) != 2:
            raise InvalidParams(
                f"messages: the chat template of {self.name} does not write an answer as it is: nothing can follow it",
                field="messages",
            )
        return self._encode_escaped(parts[1]) if quotes else self._encode_plain(parts[1])

    def start(self, max_context: int) -> None:
        """Start the process that renders chats, if there is a template; does not wait for it.

        Args:
            max_context: Most tokens of a prompt and its answer; a longer text from a template is not tokenised.
        """
        self._max_context = max_context
        self._renderer.start()

    def close(self) -> None:
        """End the processes that render chats."""
        self._renderer.close()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens; ids that the vocabulary lacks have no text.

        Raises:
            InvalidParams: An id is not an integer from 0 to 2**32 - 1.
        """
        return self._encoder.decode(ids)

    def _quotes_control(self, value: object) -> bool:
        """Return whether any string in `value` contains the text of a special token."""
        found = False

        def look(text: str) -> str:
            nonlocal found
            found = found or self._control.search(text) is not None
            return text

        map_strings(value, look)
        return found

    def _encode_plain(self, rendered: str) -> list[int]:
        """Encode a template's text, unless it is too long however it is tokenised."""
        self._check_size(rendered)
        return self._encoder.encode(rendered)

    def _encode_escaped(self, rendered: str) -> list[int]:
        """Encode a template's text of hidden values: their special tokens stay text, the template's own do not.

        The size is checked without the marks, which have more characters than most of the strings that they stand for.
        """
        escape = self._escaping()
        self._check_size(escape.shown(rendered))
        ids = escape.encode(rendered)
        if ids is None:
            raise InvalidParams(
                "messages: they hold the string of a special token, which this tokenizer cannot write as plain text",
                field="messages",
            )
        return ids

    def _check_size(self, rendered: str) -> None:
        check_text_size(rendered, self.table, self._max_context)
        check_fewest_tokens(rendered, self.table, self._max_context)

    def _escaping(self) -> _Escape:
        with self._escape_lock:
            if self._escape is None:
                self._escape = _Escape(self._encoder, self._special, self._control)
            return self._escape


class _Escape:
    """Encodes text in which some special tokens' strings are meant and others are only quoted.

    A copy of the tokenizer reads special tokens as ordinary text and knows an unguessable alias for each. Before the
    template is rendered, quoted strings are replaced by marks; the strings in the result are then the template's own
    and become aliases, and the marks become the strings again. One encoding keeps all rules about neighbours.
    """

    def __init__(self, encoder: TokenizerCore, special: Mapping[int, Any], control: re.Pattern[str]) -> None:
        # Digits and private-use characters: no normaliser or template filter changes them, and nobody can guess them.
        nonce = str(secrets.randbelow(10**20))
        self._control = control
        self._mark = f"\ue000{nonce}.%d\ue001"
        self._marks = re.compile(f"\ue000{nonce}\\.([0-9]{{1,9}})\ue001")
        self._strings = {token.content: index for index, token in special.items()}
        self._contents = {index: string for string, index in self._strings.items()}
        aliases = {index: f"\ue002{nonce}.{index}\ue003" for index in special}
        self._aliases = aliases
        self._encoder, alias_ids = encoder.with_aliases({aliases[index]: token for index, token in special.items()})
        self._meant = {alias_ids[alias]: index for index, alias in aliases.items()}
        # The unknown token marks text without a token, so it does not show that a quoted string was read as meant.
        self._forbidden = frozenset(special) - {encoder.unknown_id}

    def hide(self, text: str) -> str:
        """Replace special tokens' strings by marks."""
        return self._control.sub(lambda match: self._mark % self._strings[match.group()], text)

    def shown(self, text: str) -> str:
        """Replace marks by the strings that they stand for; a mark that a template has forged becomes empty."""
        return self._marks.sub(lambda match: self._contents.get(int(match.group(1)), ""), text)

    def encode(self, rendered: str) -> list[int] | None:
        """Return the ids of a text with marks; None if a quoted string would still become its special token."""
        text = self._control.sub(lambda match: self._aliases[self._strings[match.group()]], rendered)
        ids = self._encoder.encode(self.shown(text))
        if not self._forbidden.isdisjoint(ids):
            return None
        return [self._meant.get(index, index) for index in ids]


def _any_of(strings: Any) -> re.Pattern[str]:
    """Return a pattern for the longest of `strings` at the leftmost place; without strings, one that never matches."""
    longest_first = sorted((string for string in strings if string), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _unusable(what: str, problem: str) -> ModelRejected:
    return ModelRejected(f"tokenizer: {what}: {problem}", field="tokenizer", value=problem)
