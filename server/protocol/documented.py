"""The annotation `Also`: a further type that a field takes, for the OpenAPI document; never validates anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

__all__ = ["Also"]


@dataclass(frozen=True)
class Also:
    """An annotation that adds an alternative to the JSON schema of a field."""

    alternative: dict[str, Any]

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return a schema that allows the field's own schema or the alternative."""
        own = handler(schema)
        others = own["anyOf"] if own.keys() == {"anyOf"} else [own] if own else []
        return {"anyOf": [*others, self.alternative]}
