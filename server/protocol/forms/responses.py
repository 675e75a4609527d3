"""Responses: the fields of a request, and the chat that it means; responses_answer.py makes the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, field_validator
from pydantic_core import PydanticCustomError

from headrace.server.errors import ApiError
from headrace.server.protocol.chat import joined_parts, parts_schema
from headrace.server.protocol.documented import Also
from headrace.server.protocol.fields import Bool, RequestFields

__all__ = [
    "RESPONSE_NAMES",
    "RESPONSE_REFUSED",
    "CallItem",
    "Item",
    "MessageItem",
    "OutputItem",
    "ReasoningItem",
    "ResponseFields",
]

_MAX_ITEMS = 10_000
_ENCRYPTED: Final = "reasoning.encrypted_content"

RESPONSE_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "logprobs": (False,),
    "max_tokens": (),
    "max_tool_calls": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "response_format": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that this endpoint refuses besides `REFUSED`, each with the values that ask for nothing."""

RESPONSE_NAMES: Final = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text",
}
"""Name of a chat's field -> its name in responses."""

CallId = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=256)]


class _Item(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class MessageItem(_Item):
    """A message of the user, the model or the application."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Annotated[str, Field(strict=True)], parts_schema("input_text", "output_text")]

    @field_validator("content", mode="before")
    @classmethod
    def _parts_are_joined(cls, value: object) -> object:
        return joined_parts(value, "input_text", "output_text")

    def join(self, chat: list[dict[str, Any]]) -> None:
        """Add the message to the chat; merge an assistant's message with the reasoning before it."""
        last = chat[-1] if chat else {}
        only_reasons = "reasoning_content" in last and not last["content"] and "tool_calls" not in last
        if self.role == "assistant" and only_reasons:
            last["content"] = self.content
        else:
            chat.append({"role": self.role, "content": self.content})


class CallItem(_Item):
    """A function call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: CallId
    name: Annotated[str, StringConstraints(strict=True, min_length=1, max_length=128)]
    arguments: Annotated[str, Field(strict=True)]

    def join(self, chat: list[dict[str, Any]]) -> None:
        """Add the call to the assistant's message at the end of the chat."""
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        _assistant(chat).setdefault("tool_calls", []).append(call)


class OutputItem(_Item):
    """The result of a function that was called."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Annotated[Annotated[str, Field(strict=True)], parts_schema("input_text")]

    @field_validator("output", mode="before")
    @classmethod
    def _parts_are_joined(cls, value: object) -> object:
        return joined_parts(value, "input_text")

    def join(self, chat: list[dict[str, Any]]) -> None:
        """Add the result to the chat."""
        chat.append({"role": "tool", "content": self.output, "tool_call_id": self.call_id})


class ReasoningItem(_Item):
    """Reasoning of the model in an earlier turn."""

    type: Literal["reasoning"]
    content: Annotated[Annotated[str, Field(strict=True)] | None, parts_schema("reasoning_text")] = None
    summary: Annotated[Annotated[str, Field(strict=True)] | None, parts_schema("summary_text")] = None

    @field_validator("content", "summary", mode="before")
    @classmethod
    def _parts_are_joined(cls, value: object) -> object:
        return joined_parts(value, "reasoning_text", "summary_text", optional=True)

    def join(self, chat: list[dict[str, Any]]) -> None:
        """Begin the assistant's message to which the reasoning belongs."""
        text = self.content or self.summary
        if text:
            chat.append({"role": "assistant", "content": "", "reasoning_content": text})


def _assistant(chat: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message at the end of the chat; add one where there is none."""
    if not chat or chat[-1]["role"] != "assistant":
        chat.append({"role": "assistant", "content": ""})
    return chat[-1]


def _kind(item: object) -> str | None:
    if not isinstance(item, dict):
        return None
    kind = item.get("type", "message" if "role" in item else None)
    return f"tagged-{kind}" if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("tagged-message")]
    | Annotated[CallItem, Tag("tagged-function_call")]
    | Annotated[OutputItem, Tag("tagged-function_call_output")]
    | Annotated[ReasoningItem, Tag("tagged-reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message="must be a message, function_call, function_call_output or reasoning; "
        "items of other types, and those stored elsewhere, are not supported",
    ),
]


class TextOptions(_Item):
    """Format of the text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponseFields(RequestFields):
    """Body of POST /v1/responses."""

    input: Annotated[Annotated[list[Item], Field(min_length=1, max_length=_MAX_ITEMS)], Also({"type": "string"})]
    instructions: Annotated[str, Field(strict=True)] | None = None
    max_output_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Bool | None = None
    text: TextOptions | None = None
    reasoning: dict[str, Any] | None = None
    include: list[Any] | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    store: Bool | None = None
    previous_response_id: Annotated[str, Field(strict=True, max_length=128)] | None = None
    prompt_cache_key: Annotated[str, Field(strict=True, max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(strict=True, max_length=512)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _a_text_is_a_message(cls, value: object) -> object:
        if not isinstance(value, str | list):
            raise PydanticCustomError("text_type", "must be a string or a list of items")
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    def chat(self, earlier: Sequence[Item] = ()) -> dict[str, Any]:
        """Return the body of the chat completion that asks for the same, after the items of earlier turns.

        Raises:
            ApiError: The request asks for something that no chat can ask for.
        """
        wanted = {name: value for name, value in (self.reasoning or {}).items() if value is not None}
        effort = wanted.pop("effort", None)
        if wanted:
            raise _unsupported(f"reasoning.{next(iter(wanted))}")
        if any(each != _ENCRYPTED for each in self.include or ()):
            raise _unsupported("include")
        body = self.shared()
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for item in (*earlier, *self.input):
            item.join(messages)
        if not messages:
            raise ApiError(400, "invalid_value", "input: holds nothing to answer", param="input")
        body |= {"messages": messages, "tools": self.tools, "tool_choice": _choice(self.tool_choice)}
        body |= {"max_completion_tokens": self.max_output_tokens, "parallel_tool_calls": self.parallel_tool_calls}
        body |= {"response_format": self._format(), "reasoning_effort": effort}
        return body | {"chat_template_kwargs": self.chat_template_kwargs}

    def _format(self) -> dict[str, Any] | None:
        """Return the format in the form of chats."""
        given = self.text.format if self.text is not None else None
        if given is None or given.get("type") != "json_schema":
            return given
        return {"type": "json_schema", "json_schema": {key: part for key, part in given.items() if key != "type"}}


def _choice(value: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Return the choice of a tool in the form of chats."""
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    return value


def _unsupported(param: str) -> ApiError:
    return ApiError(400, "unsupported_parameter", f"{param}: this server does not support it", param=param)
