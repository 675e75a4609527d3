"""`Renderer`: renders chats with the templates of one model, with typed errors for a caller; never tokenises."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.engine.errors import InvalidParams, ModelRejected, RequestFailed
from headrace.engine.tokens.chat_template import MAX_SOURCE, ChatTemplate, TemplateRefused, TemplateTooCostly

__all__ = ["Renderer"]


class Renderer:
    """Renders chats with a model's template; if there are several, with the one for tools or the one without.

    Safe to call from several threads.
    """

    def __init__(self, templates: object, names: Mapping[str, Any], model: str) -> None:
        """Check the templates.

        Args:
            templates: One template, several by name, or None.
            names: Special tokens by the names that templates use, such as `bos_token`.
            model: Name of the model in messages.

        Raises:
            ModelRejected: A template is not text, or is too long.
        """
        named: Mapping[str, Any] = templates if isinstance(templates, Mapping) else {"default": templates or ""}
        for text in named.values():
            _check(text)
        self._model = model
        self._sources: dict[bool, str] = {
            offers_tools: next((named[name] for name in order if named.get(name)), "")
            for offers_tools, order in ((False, ("default", "tool_use")), (True, ("tool_use", "default")))
        }
        self.source = self._sources[True]
        """Text of the template for tools; empty if the model has none."""
        self._templates = {source: ChatTemplate(source, names) for source in self._sources.values() if source}

    def start(self) -> None:
        """Start the process of the template without tools, if there is one; does not wait for it."""
        template = self._templates.get(self._sources[False])
        if template is not None:
            with contextlib.suppress(OSError):  # the first chat raises the error again if it persists
                template.start()

    def render(
        self,
        chat: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        more: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a chat that may offer `tools`; the beginning of an answer is optional. Blocks.

        The template may read the values in `more` by their names.

        Raises:
            InvalidParams: There is no template, it refuses the messages, or it costs too much.
            RequestFailed: No process can be started to render the chat, or it was ended by others.
        """
        tools = tools or None  # an empty list offers none, and templates ask whether there is a list
        template = self._templates.get(self._sources[tools is not None])
        if template is None:
            raise InvalidParams(
                f"messages: the tokenizer of {self._model} has no chat template; pass text or token ids instead",
                field="messages",
            )
        try:
            return template.render(chat, tools=tools, more=more, add_generation_prompt=add_generation_prompt)
        except (TemplateRefused, TemplateTooCostly) as error:
            raise InvalidParams(
                f"messages: the chat template of {self._model} refused them: {error}", field="messages"
            ) from error
        except OSError as error:
            raise RequestFailed(f"the chat template of {self._model} could not be rendered: {error}") from error

    def close(self) -> None:
        """End the processes that render chats."""
        for template in self._templates.values():
            template.close()


def _check(template: object) -> None:
    if isinstance(template, str) and len(template) <= MAX_SOURCE:
        return
    found = f"has {len(template)} characters" if isinstance(template, str) else f"is a {type(template).__name__}"
    raise ModelRejected(
        f"chat_template: must be a text of at most {MAX_SOURCE} characters, and {found}",
        field="chat_template",
        value=template[:100] if isinstance(template, str) else template,
        limit=MAX_SOURCE,
    )
