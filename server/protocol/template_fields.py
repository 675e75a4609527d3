"""Fields of a request that reach the chat template besides its messages: reasoning effort, and values by name."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from headrace.engine.intake.template_kwargs import checked_template_kwargs
from headrace.server.errors import ApiError

__all__ = ["TemplateFields"]


class TemplateFields(BaseModel):
    """Fields of a chat whose values reach the chat template."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: Annotated[bool, Field(strict=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def template_kwargs(self, switches: AbstractSet[str], *, reasons: bool) -> dict[str, Any]:
        """Return the values that the request adds to those of the chat template.

        Args:
            switches: Names, among `enable_thinking` and `reasoning_effort`, that the template reads.
            reasons: Whether the model reasons by default.

        Raises:
            ApiError: The model cannot reason as much or as little as the request asks.
            InvalidParams: The values that the client gives by name are malformed, or only the engine may give them.
        """
        found: dict[str, Any] = {}
        effort, thinks = self.reasoning_effort, self.enable_thinking
        if effort is not None:
            values = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
            found = {name: value for name, value in values.items() if name in switches}
            if not found and effort != ("medium" if reasons else "none"):
                raise _not_switched("reasoning_effort", reasons)
        if thinks is not None:
            if "enable_thinking" not in switches and thinks != reasons:
                raise _not_switched("enable_thinking", reasons)
            found["enable_thinking"] = thinks
        return found | checked_template_kwargs(self.chat_template_kwargs or {})


def _not_switched(param: str, reasons: bool) -> ApiError:
    what = "always reasons, and its chat template reads no such value" if reasons else "does not reason"
    return ApiError(400, "unsupported_parameter", f"{param}: this model {what}", param=param)
