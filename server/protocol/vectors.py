"""Vectors, scores and ranks: the fields of requests, and the schemas of answers; never sends anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from headrace.server.errors import ApiError, shape_error
from headrace.server.protocol.completions import TEXTS_OR_IDS
from headrace.server.protocol.documented import Also
from headrace.server.protocol.refused import check_refused
from headrace.server.settings import ServerSettings

__all__ = [
    "EmbeddingFields",
    "EmbeddingList",
    "RankList",
    "RerankFields",
    "ScoreFields",
    "ScoreList",
    "document_texts",
    "parse_vectors",
    "ranked",
    "usage_of",
]

Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, StringConstraints(strict=True, min_length=1)]
_DOCUMENT: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "object", "properties": {"text": {"type": "string", "minLength": 1}}, "required": ["text"]},
    ]
}


class _Fields(BaseModel):
    """Fields of all three endpoints. Unknown fields are dropped."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    model: Annotated[str, Field(strict=True, min_length=1)]
    truncate_prompt_tokens: Literal[-1] | None = None
    """-1 cuts a text that is longer than the context; null refuses it."""
    adapter: Annotated[str, Field(strict=True, min_length=1)] | None = None
    priority: Annotated[int, Field(strict=True, ge=-1000, le=1000)] | None = None
    user: Annotated[str, Field(strict=True, max_length=512)] | None = None

    @property
    def truncates(self) -> bool:
        """Whether a text that is too long is cut."""
        return self.truncate_prompt_tokens is not None


class EmbeddingFields(_Fields):
    """Body of POST /v1/embeddings."""

    input: Annotated[Any, TEXTS_OR_IDS]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None


class ScoreFields(_Fields):
    """Body of POST /v1/score."""

    text_1: Text
    text_2: Annotated[Any, Also({"anyOf": [_DOCUMENT, {"type": "array", "items": _DOCUMENT, "minItems": 1}]})]


class RerankFields(_Fields):
    """Body of POST /v1/rerank."""

    query: Text
    documents: Annotated[Any, Also({"type": "array", "items": _DOCUMENT, "minItems": 1})]
    top_n: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    return_documents: Annotated[bool, Field(strict=True)] | None = None


FieldsT = TypeVar("FieldsT", bound=_Fields)


def parse_vectors(shape: type[FieldsT], body: dict[str, Any], settings: ServerSettings) -> FieldsT:
    """Check a body against its shape.

    Raises:
        ApiError: A field is missing, malformed, out of range or not supported, or unknown where `strict_fields` wants
            none.
    """
    refused = check_refused(shape, body, {"add_special_tokens": (True,)})
    if settings.strict_fields:
        unknown = sorted(body.keys() - refused - shape.model_fields.keys())
        if unknown:
            raise ApiError(400, "unknown_parameter", f"{unknown[0]}: unknown field", param=unknown[0])
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        raise shape_error(error) from None


def document_texts(value: Any, name: str, most: int) -> list[str]:
    """Return the texts of the field `name`: a text or a list of texts, or of objects with a text each.

    Raises:
        ApiError: The field holds something else, nothing, or more than `most` texts.
    """
    documents = value if isinstance(value, list) else [value]
    if not documents or len(documents) > most:
        message = f"{name}: from 1 to {most} documents here, got {len(documents)}"
        raise ApiError(400, "invalid_value", message, param=name)
    texts: list[str] = []
    for place, document in enumerate(documents):
        text = document.get("text") if isinstance(document, Mapping) else document
        param = f"{name}[{place}]"
        if not isinstance(text, str):
            raise ApiError(400, "invalid_type", f"{param}: must be a text, or an object with one", param=param)
        if not text:
            raise ApiError(400, "empty_prompt", f"{param}: is empty", param=param)
        texts.append(text)
    return texts


# -- answers, for the OpenAPI document --------------------------------------------------------------------------------


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptUsage(_Body):
    """Tokens over all inputs."""

    prompt_tokens: Count
    total_tokens: Count


class EmbeddingBody(_Body):
    """The vector of one input: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class EmbeddingList(_Body):
    """Vectors of all inputs."""

    object: Literal["list"]
    data: list[EmbeddingBody]
    model: str
    usage: PromptUsage


class ScoreBody(_Body):
    """The score of one text."""

    object: Literal["score"]
    index: Count
    score: float


class ScoreList(_Body):
    """Scores of all texts."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreBody]
    usage: PromptUsage


class DocumentBody(_Body):
    """One document as the client sent it."""

    text: str


class RankBody(_Body):
    """One document's place in the request, and its score."""

    index: Count
    relevance_score: float
    document: DocumentBody | None = None


class RankList(_Body):
    """Documents, the best first."""

    id: str
    model: str
    results: list[RankBody]
    usage: PromptUsage


def usage_of(prompt_tokens: int) -> dict[str, int]:
    """Return the usage object that `PromptUsage` describes."""
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}


def ranked(scores: Sequence[float], most: int | None) -> list[int]:
    """Return the places of the best scores, best first, and among equals the first."""
    return sorted(range(len(scores)), key=lambda place: -scores[place])[:most]
