"""Bodies of requests to /v1/adapters and of the answers; never loads an adapter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.server.protocol.document.bodies import Count

__all__ = ["AdapterCard", "AdapterFields", "AdapterGone", "AdapterList"]


class AdapterFields(BaseModel):
    """Body of PUT /v1/adapters/{name}."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Annotated[str, Field(strict=True, min_length=1, max_length=255)] | None = None
    """A folder in the server's folder of adapters; the adapter's name where it is left out."""
    pinned: Annotated[bool, Field(strict=True)] = False
    """Whether the adapter stays on the device."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AdapterCard(_Body):
    """An adapter that is loaded."""

    id: str
    object: Literal["adapter"]
    digest: str
    """Digest of the weights."""
    nbytes: Count
    virtual_tokens: Count
    where: Literal["device", "loading", "host", "disk"]
    pinned: bool
    requests: Count
    """Requests with this adapter that have not ended."""


class AdapterList(_Body):
    """All loaded adapters."""

    object: Literal["list"]
    data: list[AdapterCard]


class AdapterGone(_Body):
    """An adapter that was unloaded."""

    id: str
    object: Literal["adapter"]
    deleted: Literal[True]
