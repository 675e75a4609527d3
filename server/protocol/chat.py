"""Chat completions: the fields of a request; chat_answer.py makes the answer."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from headrace.engine import InvalidParams, TokenizeOptions
from headrace.engine.tools import (
    CallStructure,
    Tool,
    ToolChoice,
    ToolParser,
    call_structure,
    check_tools,
    template_tools,
)
from headrace.server.errors import ApiError
from headrace.server.protocol.documented import Also
from headrace.server.protocol.fields import Bool, RequestFields
from headrace.server.protocol.forced import checked
from headrace.server.protocol.template_fields import TemplateFields

__all__ = [
    "ChatFields",
    "ChatMessage",
    "Messages",
    "Offered",
    "check_kind",
    "ending_of",
    "joined_parts",
    "not_text",
    "parts_schema",
]

_MAX_MESSAGES = 10_000
_MAX_TOOLS = 1_000
_MEDIA: Final = {
    "image": "images",
    "audio": "audio files",
    "video": "videos",
    "file": "files",
    "document": "documents",
}
"""Word in the type of a content part -> the noun for such parts in a refusal."""
Result = TypeVar("Result")


def parts_schema(*kinds: str) -> Also:
    """Return the schema of a field that also takes a list of text parts, as `joined_parts` does."""
    properties = {"type": {"enum": list(kinds)}, "text": {"type": "string"}}
    items = {"type": "object", "properties": properties, "required": ["type", "text"]}
    return Also({"type": "array", "items": items})


def joined_parts(value: object, *kinds: str, optional: bool = False) -> object:
    """Return a text, or the text of a list of parts of these types, a line each; None where that is `optional`.

    Raises:
        PydanticCustomError: The value is something else, or a part is of another type.
    """
    if isinstance(value, str) or (optional and value is None):
        return value
    if not isinstance(value, list):
        raise not_text()
    texts = []
    for index, part in enumerate(value):
        check_kind(part, index, kinds)
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("text_part", "must have its text in text", {"part": index})
        texts.append(part["text"])
    return "\n".join(texts)


def not_text() -> PydanticCustomError:
    """Return the complaint about content that is neither a text nor a list."""
    return PydanticCustomError("text_type", "must be a string or a list of text parts")


def check_kind(part: Any, index: int, kinds: Container[str]) -> None:
    """Refuse a part of a message's content whose type is not among `kinds`, and name what it holds.

    Raises:
        PydanticCustomError: The part is of another type, or of none.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise PydanticCustomError("text_part", "must be an object with a type", {"part": index})
    if kind not in kinds:
        what = next((what for name, what in _MEDIA.items() if name in kind), f"parts of the type {kind[:40]!r}")
        raise PydanticCustomError("text_part", "{what} are not supported, only text", {"part": index, "what": what})


class CalledFunction(BaseModel):
    """A function that an assistant called."""

    name: Annotated[str, StringConstraints(strict=True, min_length=1, max_length=128)]
    arguments: Annotated[str, Field(strict=True)]


class ToolCallFields(BaseModel):
    """A call that an assistant made in an earlier turn."""

    id: Annotated[str, StringConstraints(strict=True, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Annotated[str, Field(strict=True)] | None, parts_schema("text")] = None
    tool_calls: Annotated[tuple[ToolCallFields, ...], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, StringConstraints(strict=True, max_length=256)] | None = None
    reasoning_content: Annotated[str, Field(strict=True)] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _parts_are_joined(cls, value: object) -> object:
        return joined_parts(value, "text", optional=True)

    @model_validator(mode="after")
    def _content_where_one_belongs(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":  # calls, even cut ones, come without it
            raise _wrong("content", "must be a string or a list of text parts")
        if self.tool_calls and self.role != "assistant":
            raise _wrong("tool_calls", "only an assistant has some")
        if self.role == "tool" and self.tool_call_id is None:
            raise _wrong("tool_call_id", "a tool's message needs the id of its call")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        if self.tool_calls:
            message["tool_calls"] = [_call(call) for call in self.tool_calls]
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _wrong(part: str, what: str) -> PydanticCustomError:
    """Return the complaint about one part of a message."""
    return PydanticCustomError("message", "{what}", {"part": part, "what": what})


def _call(call: ToolCallFields) -> dict[str, Any]:
    """Return a call as chat templates read it: its arguments as an object, or as the text that they were cut to."""
    try:
        found = orjson.loads(call.function.arguments or "{}")
    except orjson.JSONDecodeError:
        found = None
    arguments = found if isinstance(found, dict) else call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


Messages = Annotated[tuple[ChatMessage, ...], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)]


class ChatFields(RequestFields, TemplateFields):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=_MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Bool | None = None
    logprobs: Bool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None

    @property
    def reports(self) -> int | None:
        """Number of likeliest tokens to report with each token; None reports no log-probabilities.

        Raises:
            ApiError: The client asks for likeliest tokens without log-probabilities.
        """
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "invalid_value", "top_logprobs: only with logprobs", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def names(self) -> dict[str, str]:
        """Engine's name of a field -> the name that the client used, where they differ."""
        names = super().names
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.reports:
            names["logprobs"] = "top_logprobs"
        return names

    @property
    def limit(self) -> int | None:
        """Largest number of tokens of each choice; None is as many as fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def chat(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates read them."""
        return [message.for_template() for message in self.messages]

    @property
    def ending(self) -> TokenizeOptions:
        """Options for the end of the prompt.

        Raises:
            ApiError: Two fields contradict each other, or the last message cannot be continued.
        """
        return ending_of(self.messages[-1], self.add_generation_prompt, self.continue_final_message)

    def offered(self) -> Offered:
        """Return the tools that the model may call, and the choice among them.

        Raises:
            ApiError: A tool is malformed, there are too many, or the choice asks for none of them.
        """
        parsed = [
            _checked(Tool.parse, value, param=f"tools[{place}]", inside=".function")
            for place, value in enumerate(self.tools or ())
        ]
        tools = _checked(check_tools, parsed, param="tools")
        choice = _checked(ToolChoice.parse, self.tool_choice, param="tool_choice")
        allowed = _checked(choice.allowed, tools, param="tool_choice")
        return Offered(allowed, choice, self.parallel_tool_calls, template_tools(tools, choice))


def ending_of(last: ChatMessage, add_generation_prompt: bool | None, continues: bool | None) -> TokenizeOptions:
    """Return the engine's options for the end of a chat whose last message is `last`.

    Raises:
        ApiError: Two fields contradict each other, or the message cannot be continued.
    """
    name = "continue_final_message"
    if not continues:
        return {} if add_generation_prompt is not False else {"add_generation_prompt": False}
    if add_generation_prompt:
        raise ApiError(400, "invalid_value", f"{name}: cannot go with add_generation_prompt true", param=name)
    if last.role != "assistant" or last.tool_calls:
        raise ApiError(400, "invalid_value", f"{name}: the last message must be text of the assistant", param=name)
    return {"continue_final_message": True}


class Offered(NamedTuple):
    """The tools that a model may call, and whether it must."""

    allowed: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool | None
    """Whether the client wants several calls; None where it does not say."""
    template: list[dict[str, Any]] | None
    """Tools as the chat template is given them."""

    @property
    def forced(self) -> bool:
        """Whether a call is demanded."""
        return self.choice.mode in ("required", "named")

    def structure(self, parser: type[ToolParser], *, instead: bool) -> CallStructure | None:
        """Return the structure of the demanded calls or, with `instead`, of calls that may replace the content.

        The structure is one call unless the client asks for several: a small model that may go on does so to its limit.

        Raises:
            ApiError: The format of `parser` cannot be forced.
        """
        param = "tool_choice" if self.forced else "response_format"
        choice = ToolChoice(mode="required") if instead and self.choice.mode == "auto" and self.allowed else self.choice
        tools, parallel = self.allowed, self.parallel is True
        return _checked(lambda choice: checked(call_structure(parser, tools, choice, parallel)), choice, param=param)


def _checked(check: Callable[[Any], Result], value: Any, *, param: str, inside: str | None = None) -> Result:
    """Return `check(value)`; name in a refusal the field `param`, or with `inside` the field at fault in it."""
    try:
        return check(value)
    except InvalidParams as error:
        detail = str(error)
        if inside is not None and error.field not in (None, "tools"):
            param += f"{inside}.{error.field}"
            detail = detail.removeprefix(f"{error.field}: ")
        raise ApiError(400, "invalid_value", f"{param}: {detail.removeprefix(f'{param}: ')}", param=param) from None
