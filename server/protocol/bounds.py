"""Bounds of the sampling values of requests over HTTP and of `headrace chat`; passes no value on.

This module imports no library of the extra `server`, which a chat in the terminal does without.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["SamplingBounds"]

_INT64: Final = 2**63


class SamplingBounds(BaseModel):
    """Sampling values as a client may give them; None is a value that was left out."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    max_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-_INT64, lt=_INT64)] | None = None
    presence_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(strict=True, ge=0.01, le=100)] | None = None
