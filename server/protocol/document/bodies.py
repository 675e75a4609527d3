"""Schemas of answers for the OpenAPI document; answers are written elsewhere and checked against these in tests.

Other modules write answers directly as bytes, since that is most of a server's work; nothing in this module runs then.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "ChatChunk",
    "ChatCompletion",
    "CompletionChunk",
    "Error",
    "Health",
    "ModelCard",
    "ModelList",
    "OpenApi",
    "TextCompletion",
    "TokenIds",
    "TokenText",
    "TokenizerCard",
    "Version",
]

Count = Annotated[int, Field(ge=0)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Body):
    """The reason for an error."""

    message: str
    type: str
    param: str | None
    """The field at fault, as the client wrote it."""
    code: str


class Error(_Body):
    """OpenAI's error object."""

    error: ErrorDetail


class CachedTokens(_Body):
    """Prompt tokens that were not computed again."""

    cached_tokens: Count


class UsageBody(_Body):
    """Token counts over all choices."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


class _Generated(_Body):
    id: str
    created: int
    model: str
    system_fingerprint: str


class TopLogprob(_Body):
    """One token and its natural-log probability."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ContentLogprob(TopLogprob):
    """The token that was chosen, and the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Body):
    """Log-probabilities of a chat."""

    content: list[ContentLogprob]
    refusal: None


class FunctionBody(_Body):
    """A function that is called; `arguments` is JSON text."""

    name: str
    arguments: str


class CallBody(_Body):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionBody


class AssistantMessage(_Body):
    """A whole answer to a chat."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[CallBody] = []


ChatReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(_Body):
    """One of `n` answers."""

    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason


class ChatCompletion(_Generated):
    """A chat's answer as one body."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageBody


class ChunkChoice(_Body):
    """The part that one choice gained."""

    index: Count
    delta: dict[str, Any]
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason | None


class ChatChunk(_Generated):
    """Data of one event of a chat's stream; the last one may have usage alone."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: UsageBody | None = None


class TextLogprobs(_Body):
    """Log-probabilities of a completion, as lists of one length."""

    text_offset: list[Count]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class TextChoice(_Body):
    """One choice of one prompt."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(_Generated):
    """A completion as one body."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: UsageBody


class TextChunkChoice(TextChoice):
    """The part that one choice gained."""

    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]


class CompletionChunk(_Generated):
    """Data of one event of a completion's stream; the last one may have usage alone."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: UsageBody | None = None


class ModelCard(_Body):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: Count
    parent: str | None = None
    """The model that an adapter was made for; None for a model."""


class ModelList(_Body):
    """All models that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenIds(_Body):
    """Answer of /tokenize."""

    count: Count
    max_model_len: Count
    tokens: list[Count]


class TokenizerCard(BaseModel):
    """Answer of /tokenizer_info; special tokens stand under the names that the model gives them."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    eos_token_ids: list[Count]
    added_tokens_decoder: dict[str, dict[str, Any]]
    model_max_length: Count
    chat_template: str | None


class TokenText(_Body):
    """Answer of /detokenize."""

    prompt: str


class OpenApi(BaseModel):
    """The OpenAPI document itself."""

    openapi: Literal["3.1.0"]


class Version(_Body):
    """The version of headrace."""

    version: str


class Health(_Body):
    """Whether the server can answer, and why not."""

    status: Literal["live", "ready", "not ready"]
    reason: str = ""
