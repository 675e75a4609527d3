"""Schemas of responses and messages for the OpenAPI document; the bodies are written elsewhere, checked in tests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "InputItemList",
    "MessageBody",
    "MessageError",
    "MessageEvent",
    "MessageTokens",
    "ResponseBody",
    "ResponseEvent",
    "ResponseGone",
]

Count = Annotated[int, Field(ge=0)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Item(_Body):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class OutputText(_Body):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: Annotated[list[Any], Field(max_length=0)]


class ReasoningText(_Body):
    """The text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class MessageOutput(_Item):
    """A message of the model."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningOutput(_Item):
    """The reasoning of the model."""

    type: Literal["reasoning"]
    summary: Annotated[list[Any], Field(max_length=0)]
    content: list[ReasoningText]


class CallOutput(_Item):
    """A function that is called; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputDetails(_Body):
    """Input tokens that were not computed again."""

    cached_tokens: Count
    cache_write_tokens: Count


class OutputDetails(_Body):
    """Output tokens up to the end of the reasoning."""

    reasoning_tokens: Count


class ResponseUsage(_Body):
    """Token counts of a response."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class ResponseBody(_Body):
    """A response as one body."""

    id: str
    object: Literal["response"]
    access_programs: None
    created_at: int
    completed_at: int | None
    conversation: None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: dict[str, Any] | None
    frequency_penalty: float
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[MessageOutput | ReasoningOutput | CallOutput]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Literal[0]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseGone(_Body):
    """A stored response that was forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItem(BaseModel):
    """An item that a response was made from; what else it has depends on its type, as in OpenAI's API."""

    id: str
    type: Literal["message", "function_call", "function_call_output", "reasoning"]
    status: Literal["completed", "incomplete"]


class InputItemList(_Body):
    """One page of input items."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str
    last_id: str
    has_more: bool


class ResponseEvent(BaseModel):
    """Data of one event of a response's stream; what else it has depends on its type, as in OpenAI's API."""

    type: str
    sequence_number: Count


class TextContent(_Body):
    """Text of the answer."""

    type: Literal["text"]
    text: str
    citations: None


class ThinkingContent(_Body):
    """The reasoning of the model."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class DirectCaller(_Body):
    """The model itself calls the tool."""

    type: Literal["direct"]


class ToolUseContent(_Body):
    """A tool that is to be used."""

    type: Literal["tool_use"]
    id: str
    caller: DirectCaller
    name: str
    input: dict[str, Any]


class ThinkingCount(_Body):
    """Output tokens up to the end of the reasoning."""

    thinking_tokens: Count


class CacheCreation(_Body):
    """Tokens written to caches that are billed; there are none here."""

    ephemeral_1h_input_tokens: Literal[0]
    ephemeral_5m_input_tokens: Literal[0]


class MessageUsage(_Body):
    """Token counts of a message; `input_tokens` are those that were computed."""

    cache_creation: CacheCreation
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    inference_geo: None
    input_tokens: Count
    output_tokens: Count
    output_tokens_details: ThinkingCount
    server_tool_use: None
    service_tier: Literal["standard"]
    speed: None


class MessageBody(_Body):
    """A message as one body."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    container: None
    diagnostics: None
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_details: None
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(_Body):
    """The number of tokens of a prompt."""

    input_tokens: Count


class MessageEvent(BaseModel):
    """Data of one event of a message's stream; what else it has depends on its type, as in Anthropic's API."""

    type: str


class MessageErrorDetail(_Body):
    """The reason for an error."""

    type: str
    message: str


class MessageError(_Body):
    """Anthropic's error object."""

    type: Literal["error"]
    request_id: str | None
    error: MessageErrorDetail
