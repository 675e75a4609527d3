"""Anthropic's messages: the fields of a request, and the chat that it means; messages_answer.py makes the answer."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, field_validator

from headrace.server.errors import ApiError
from headrace.server.protocol.chat import check_kind, joined_parts, not_text, parts_schema
from headrace.server.protocol.documented import Also
from headrace.server.protocol.fields import Bool, RequestFields, Stop

__all__ = ["MESSAGE_NAMES", "MESSAGE_REFUSED", "CountFields", "MessageFields"]

_MAX_MESSAGES = 10_000
_MAX_BLOCKS = 10_000

MESSAGE_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "container": (),
    "context_management": (),
    "logprobs": (False,),
    "mcp_servers": ([],),
    "n": (1,),
    "speed": ("standard",),
    "stop": (),
    "stream_options": (),
    "top_logprobs": (0,),
}
"""Fields that this endpoint refuses besides `REFUSED`, each with the values that ask for nothing."""

MESSAGE_NAMES: Final = {
    "enable_thinking": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
}
"""Name of a chat's field -> its name in messages."""

Text = Annotated[str, Field(strict=True)]
CallId = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=256)]
ToolName = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=128)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class TextBlock(_Part):
    """Text of the user or the model."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(_Part):
    """Reasoning of the model in an earlier turn."""

    type: Literal["thinking"]
    thinking: Text


class ToolUseBlock(_Part):
    """A call that the model made in an earlier turn."""

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]


class ToolResultBlock(_Part):
    """The result of a tool that was called."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Annotated[Text, parts_schema("text")] = ""

    @field_validator("content", mode="before")
    @classmethod
    def _parts_are_joined(cls, value: object) -> object:
        return joined_parts(value, "text")


def _kind(block: object) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else None
    return f"tagged-{kind}" if isinstance(kind, str) else None


Block = Annotated[
    Annotated[TextBlock, Tag("tagged-text")]
    | Annotated[ThinkingBlock, Tag("tagged-thinking")]
    | Annotated[ToolUseBlock, Tag("tagged-tool_use")]
    | Annotated[ToolResultBlock, Tag("tagged-tool_result")],
    Discriminator(
        _kind,
        custom_error_type="block",
        custom_error_message="must be a block of text, thinking, tool_use or tool_result; others are not supported",
    ),
]


_KINDS: Final = frozenset(("text", "thinking", "tool_use", "tool_result"))


class Turn(_Part):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[list[Block], Field(max_length=_MAX_BLOCKS)], Also({"type": "string"})]

    @field_validator("content", mode="before")
    @classmethod
    def _a_text_is_a_block(cls, value: object) -> object:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        if not isinstance(value, list):
            raise not_text()
        for index, block in enumerate(value):
            check_kind(block, index, _KINDS)
        return value

    def chat(self, param: str) -> list[dict[str, Any]]:
        """Return the chat messages for this turn: one for an assistant's, and one for each result of a tool.

        Raises:
            ApiError: A block belongs to another role.
        """
        kinds = {"user": (TextBlock, ToolResultBlock), "assistant": (TextBlock, ThinkingBlock, ToolUseBlock)}
        for index, block in enumerate(self.content):
            if not isinstance(block, kinds.get(self.role, (TextBlock,))):
                param = f"{param}.content[{index}]"
                raise ApiError(400, "invalid_value", f"{param}: is not for the role {self.role}", param=param)
        return [self._assistant()] if self.role == "assistant" else self._others()

    def _assistant(self) -> dict[str, Any]:
        calls = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": _json(each.input)}}
            for each in self.content
            if isinstance(each, ToolUseBlock)
        ]
        thoughts = [each.thinking for each in self.content if isinstance(each, ThinkingBlock)]
        message: dict[str, Any] = {"role": "assistant", "content": _text(self.content)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        return message | {"tool_calls": calls} if calls else message

    def _others(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        texts: list[Block] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                if texts:
                    messages.append({"role": self.role, "content": _text(texts)})
                    texts = []
                messages.append({"role": "tool", "content": block.content, "tool_call_id": block.tool_use_id})
            else:
                texts.append(block)
        if texts or not messages:
            messages.append({"role": self.role, "content": _text(texts)})
        return messages


def _text(blocks: Any) -> str:
    return "\n".join([block.text for block in blocks if isinstance(block, TextBlock)])


def _json(value: dict[str, Any]) -> str:
    return orjson.dumps(value).decode()


class ToolFields(_Part):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: dict[str, Any]

    def function(self) -> dict[str, Any]:
        """Return the tool in the form of chats."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ChoiceFields(_Part):
    """Whether tools are to be called."""

    type: Literal["auto", "none", "any", "tool"]
    name: ToolName | None = None
    disable_parallel_tool_use: Bool | None = None

    def choice(self) -> str | dict[str, Any]:
        """Return the choice in the form of chats."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingFields(_Part):
    """Whether the model is to reason; the model decides how much."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(_Part):
    """Format of the text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(_Part):
    """Format of the answer, and the effort that it is to take."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class MessageFields(RequestFields):
    """Body of POST /v1/messages."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=_MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)]
    system: Annotated[Text | None, parts_schema("text")] = None
    stop_sequences: Annotated[tuple[Stop, ...], Field(max_length=16)] | None = None
    tools: Annotated[tuple[ToolFields, ...], Field(max_length=128)] | None = None
    tool_choice: ChoiceFields | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("system", mode="before")
    @classmethod
    def _parts_are_joined(cls, value: object) -> object:
        return joined_parts(value, "text", optional=True)

    def chat(self, switches: AbstractSet[str] = frozenset()) -> dict[str, Any]:
        """Return the body of the chat completion that asks for the same.

        Args:
            switches: Names, among `enable_thinking` and `reasoning_effort`, that the chat template reads.

        Raises:
            ApiError: The request asks for something that no chat can ask for.
        """
        body = self.shared() | {"chat_template_kwargs": self.chat_template_kwargs}
        body["reasoning_effort"] = self._effort(switches)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for place, turn in enumerate(self.messages):
            messages += turn.chat(f"messages[{place}]")
        body |= {"messages": messages, "stop": list(self.stop_sequences or ())}
        if (given := self._format()) is not None:
            body["response_format"] = given
        body["continue_final_message"] = self._continues()
        if self.thinking is not None:
            body["enable_thinking"] = self.thinking.type != "disabled"
        if self.tools:
            body["tools"] = [tool.function() for tool in self.tools]
        if self.tool_choice is not None:
            body["tool_choice"] = self.tool_choice.choice()
            alone = self.tool_choice.disable_parallel_tool_use
            body["parallel_tool_calls"] = None if alone is None else not alone
        return body

    @property
    def names(self) -> dict[str, str]:
        """Name of a chat's field -> the name that the client used.

        Raises:
            ApiError: Several fields ask for a format of the text.
        """
        config = self.output_config.format if self.output_config is not None else None
        given = {"output_format": self.output_format, "output_config.format": config}
        named = [name for name, value in given.items() if value is not None]
        if (field := self.format_field) is not None:
            named.append(field)
        if len(named) > 1:
            raise ApiError(400, "invalid_value", f"{named[1]}: cannot go with {named[0]}", param=named[1])
        return MESSAGE_NAMES | ({"response_format": named[0]} if named else {})

    def _effort(self, switches: AbstractSet[str]) -> str | None:
        """Return the effort for the chat; None for `high`, Anthropic's default, if the template reads no effort."""
        effort = self.output_config.effort if self.output_config is not None else None
        return None if effort == "high" and "reasoning_effort" not in switches else effort

    def _format(self) -> dict[str, Any] | None:
        """Return the format of the text in the form of chats."""
        given = self.output_config.format if self.output_config is not None else None
        given = given or self.output_format
        if given is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.schema_}}

    def _continues(self) -> bool:
        """Return whether the last message is the assistant's, which the answer then continues.

        Raises:
            ApiError: The message ends with a call, or the request asks for a format, which it cannot begin.
        """
        last = self.messages[-1]
        if last.role != "assistant":
            return False
        if last.content and isinstance(last.content[-1], ToolUseBlock):
            message = "messages: a use of a tool at the end cannot be continued; its result is missing"
            raise ApiError(400, "invalid_value", message, param="messages")
        if (field := self.names.get("response_format")) is not None:
            message = f"{field}: cannot go with an assistant's message at the end, which the answer continues"
            raise ApiError(400, "invalid_value", message, param=field)
        return True


class CountFields(MessageFields):
    """Body of POST /v1/messages/count_tokens."""

    max_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] = 1
