"""`ServerSettings` and `KeyLimits`: an operator's choices for a server, checked and frozen; reads no environment."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.engine import InvalidParams
from headrace.engine.params import invalid_params

__all__ = ["KeyLimits", "ServerSettings"]

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Secret = Annotated[str, Field(min_length=8, max_length=512, pattern=r"^[!-~]+$")]
Seconds = Annotated[float, Field(gt=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["loc"][:1] not in (("api_keys",), ("admin_keys",)):
                raise invalid_params(error, type(self)) from None
            field, what = str(first["loc"][0]), "a name" if first["loc"][-1] == "[key]" else "a secret"
            message = f"{field}: {what} is malformed: {first['msg']}"  # never shows what was given
            raise InvalidParams(message, field=field) from None


class KeyLimits(_Frozen):
    """Limits of one key; None is no limit.

    Raises:
        InvalidParams: A value is out of its range.
    """

    concurrency: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Requests at once, waiting ones included; each prompt and choice counts."""
    tokens_per_minute: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Prompt and completion tokens. A burst of a whole minute is allowed; one prompt and the answers that run may
    overdraw it, which delays later requests."""
    min_priority: Annotated[int, Field(ge=-1000, le=0, strict=True)] = 0
    """The lowest `priority` that requests may name. Lower is served first: under the policy first_come before the
    requests of all other keys, where keys share the device before other requests of the same key."""


class ServerSettings(_Frozen):
    """Options of `create_app`.

    Raises:
        InvalidParams: A value is out of its range; the error names field, value and limit.
    """

    served_model_name: Name | None = None
    """Name of the model for clients; None is the model's own name."""
    api_keys: dict[Name, Secret] = Field(default_factory=dict, repr=False)
    """Secrets by the name of their holder, which is also the tenant. Without any, everybody may ask."""
    admin_keys: dict[Name, Secret] = Field(default_factory=dict, repr=False)
    """Keys that may also change limits and load adapters while the server runs."""
    metrics_key: Secret | None = Field(default=None, repr=False)
    """Secret that opens /metrics and nothing else; admin keys open it too."""
    vllm_metric_names: bool = False
    """Whether metrics appear under vLLM's names too, where they mean the same."""
    key_limits: dict[Name, KeyLimits] = Field(default_factory=dict)
    """Limits of single keys, by name."""
    default_limits: KeyLimits = KeyLimits()
    """Limits of keys that have none of their own, and of everybody where there are no keys."""
    allowed_hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")
    """Host headers that are served, without ports; `*` is any."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may ask; requests without an Origin come from no page."""
    page: bool = True
    """Whether to serve the playground at `/`, which shows the engine's load."""
    strict_fields: bool = False
    """Whether to refuse unknown fields instead of ignoring them."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 2**20
    max_upload_bytes: Annotated[int, Field(ge=1024)] = 256 * 2**20
    """Bytes of all bodies that are being read, as announced; one key may have half of them at once."""
    max_answer_bytes: Annotated[int, Field(ge=1024)] = 512 * 2**20
    """Bytes of all vectors and scores that are computed or not yet read; one key may have half of them at once."""
    max_stored_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    """Bytes of stored responses, their prompts and answers; 0 stores none. Beyond it the key that has most of them
    loses the one that it has used least recently."""
    max_url_bytes: Annotated[int, Field(ge=64)] = 8192
    max_header_bytes: Annotated[int, Field(ge=1024)] = 32_768
    """Bytes of all header lines of a request together."""
    max_nesting: Annotated[int, Field(ge=8, le=512)] = 64
    """Levels of arrays and objects inside each other in a body."""
    body_timeout: Seconds = 20.0
    """Seconds in which a body must have arrived."""
    max_choices: Annotated[int, Field(ge=1, le=128)] = 16
    """Choices (`n`) of one request."""
    max_prompts: Annotated[int, Field(ge=1, le=2048)] = 128
    """Prompts of one completions request."""
    max_inputs: Annotated[int, Field(ge=1, le=65536)] = 2048
    """Texts of one request for vectors, scores or ranks."""
    max_queue: Annotated[int, Field(ge=1)] = 1024
    """Choices that may wait for their first token; further requests are refused."""
    max_queue_tokens: Annotated[int, Field(ge=1)] = 4_000_000
    """Prompt tokens that may wait."""
    queue_timeout: Seconds = 60.0
    """Seconds a request may wait before any step has taken it up."""
    request_timeout: Seconds = 3600.0
    """Seconds for a whole request; clients may ask for less with the header X-Request-Timeout."""
    stall_timeout: Seconds = 30.0
    """Seconds for which a client may leave what was sent unread; then its request ends."""
    ping_seconds: Seconds = 10.0
    """Seconds of silence after which a stream gets a comment, so that clients and proxies keep it."""
    ready_stall: Seconds = 60.0
    """Seconds without a finished step, while one runs, after which the server is not ready."""
    stall_abort: Seconds = 300.0
    """Seconds without a finished step, while one runs, after which running requests are ended with an error."""
    drain_seconds: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that running requests have to end once the server is told to stop."""
    max_events_per_second: Annotated[int, Field(ge=100)] = 8000
    """Events of all streams together; beyond it each event carries more tokens. First tokens are never delayed."""
    adapters: dict[str, str] = Field(default_factory=dict)
    """Folders of adapters, by name, that are loaded before anybody is served."""
    adapter_folder: str | None = None
    """The folder below which admin keys may load adapters while the server runs; None forbids it."""
    tool_call_parser: str | None = None
    """Format of the model's tool calls; None is the format that its chat template teaches."""
