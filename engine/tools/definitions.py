"""`Tool` and `ToolChoice`: the functions that a model may or must call, checked when built; never calls one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from headrace.engine.errors import InvalidParams
from headrace.engine.params import invalid_params, shown
from headrace.engine.tools.events import Parsed
from headrace.engine.tools.values import MAX_DEPTH

__all__ = ["MAX_TOOLS", "Tool", "ToolChoice", "assistant_message", "check_tools", "template_tools"]

MAX_TOOLS = 128
_MAX_DESCRIPTION = 65_536
_MAX_SCHEMA = 262_144

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}\z")]


class Tool(BaseModel):
    """A function that a model may call. Frozen; do not change `parameters` either.

    Raises:
        InvalidParams: The name is not 1 to 64 of `a-zA-Z0-9_-`, or the parameters are no JSON schema of an object,
            nest deeper than 128 or have more than 256 Ki characters.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    description: Annotated[str, StringConstraints(max_length=_MAX_DESCRIPTION)] = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments. Whether its rules are valid is checked when a grammar is compiled from it."""

    def __init__(self, **values: Any) -> None:
        """Validate `values`, turning pydantic's error into `InvalidParams`."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise invalid_params(error, type(self)) from None

    @classmethod
    def parse(cls, value: Tool | Mapping[str, Any]) -> Tool:
        """Make a tool from the form that OpenAI clients and transformers write, with or without `{"type": "function"}`.

        `strict` is accepted and ignored; a field that is None counts as absent.
        """
        if isinstance(value, Tool):
            return value
        if not isinstance(value, Mapping) or value.get("type", "function") != "function":
            raise InvalidParams("a tool is a mapping of type 'function'", field="tools", value=value, limit=None)
        inner = value.get("function", {key: part for key, part in value.items() if key != "type"})
        if not isinstance(inner, Mapping) or not all(isinstance(key, str) for key in inner):
            raise InvalidParams("a tool's function is a mapping", field="tools", value=value, limit=None)
        return cls(**{key: part for key, part in inner.items() if key != "strict" and part is not None})

    @field_validator("parameters")
    @classmethod
    def _an_object_of_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.get("type", "object") != "object":
            raise ValueError("parameters must be the schema of an object")
        if not isinstance(value.get("properties", {}), dict):
            raise ValueError("properties must be an object")
        if _depth(value) > MAX_DEPTH:
            # No value in the error: a value that nests too deep cannot be shown either.
            raise InvalidParams("parameters nest too deep", field="parameters", value=None, limit=MAX_DEPTH)
        try:
            size = len(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            raise ValueError("parameters must be JSON") from None
        if size > _MAX_SCHEMA:
            raise ValueError(f"parameters take more than {_MAX_SCHEMA} characters")
        return copy.deepcopy(value)

    def as_function(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates and OpenAI's API use."""
        function = {"name": self.name, "description": self.description, "parameters": copy.deepcopy(self.parameters)}
        return {"type": "function", "function": function}


_MODES = ("none", "auto", "required")


class ToolChoice(BaseModel):
    """Whether the model may call tools (`auto`), must not (`none`), must (`required`), or must call one by `name`.

    Raises:
        InvalidParams: The mode is `named` without a name, or another mode with one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: Name | None = None

    def __init__(self, **values: Any) -> None:
        """Validate `values`, turning pydantic's error into `InvalidParams`."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise invalid_params(error, type(self)) from None

    @model_validator(mode="after")
    def _a_name_where_one_belongs(self) -> ToolChoice:
        if (self.mode == "named") != (self.name is not None):
            raise InvalidParams("mode 'named' and a name go together", field="name", value=self.name, limit=self.mode)
        return self

    @classmethod
    def parse(cls, value: ToolChoice | str | Mapping[str, Any] | None) -> ToolChoice:
        """Parse a choice as OpenAI clients write it: a mode, `{"type": "function", "function": {"name": ...}}`, None.

        Raises:
            InvalidParams: `value` has none of these forms.
        """
        if isinstance(value, ToolChoice):
            return value
        if value is None or value in _MODES:
            return cls(mode=value or "auto")
        function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if name is None:
            message = f"tool_choice: must be one of {', '.join(_MODES)}, or name a function, got {shown(value)}"
            raise InvalidParams(message, field="tool_choice", value=value, limit=_MODES)
        try:
            return cls(mode="named", name=name)
        except InvalidParams as error:
            message = f"tool_choice: the function's {error}"
            raise InvalidParams(message, field="tool_choice", value=name, limit=error.limit) from None

    def allowed(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return the tools that may be called.

        Raises:
            InvalidParams: A call is required, and there is no tool, or none of that name.
        """
        if self.mode == "none":
            return ()
        allowed = tuple(tool for tool in tools if self.name in (None, tool.name))
        if not allowed and self.mode != "auto":
            names = [tool.name for tool in tools]
            what = "asks for a call, and there are no tools" if self.name is None else f"no tool is named {self.name!r}"
            raise InvalidParams(f"tool_choice: {what}", field="tool_choice", value=self.name, limit=names)
        return allowed


def check_tools(tools: Iterable[Tool | Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Parse a request's tools.

    Raises:
        InvalidParams: There are more than 128 tools, two of one name, or one that is not a tool.
    """
    checked: dict[str, Tool] = {}
    for value in tools:
        tool = Tool.parse(value)
        if tool.name in checked:
            raise InvalidParams(f"two tools are named {tool.name!r}", field="tools", value=tool.name, limit=None)
        if len(checked) == MAX_TOOLS:
            raise InvalidParams(f"at most {MAX_TOOLS} tools", field="tools", value=len(checked) + 1, limit=MAX_TOOLS)
        checked[tool.name] = tool
    return tuple(checked.values())


def template_tools(tools: Sequence[Tool], choice: ToolChoice | None = None) -> list[dict[str, Any]] | None:
    """Return the `tools` argument for `apply_chat_template`; None, which leaves tools out, if none may be called."""
    if not tools or (choice is not None and choice.mode == "none"):
        return None
    return [tool.as_function() for tool in tools]


def assistant_message(parsed: Parsed) -> dict[str, Any]:
    """Return the completion as a message for the chat template of the next turn, which expects arguments as mappings.

    Incomplete calls are left out, since no tool can have answered them.
    """
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in parsed.tool_calls
        if call.complete
    ]
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    return message | {"tool_calls": calls} if calls else message


def _depth(value: object) -> int:
    """Return the nesting depth of lists and mappings, counted no further than one past the limit."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [item for part in inner for item in part]
        depth += bool(inner)
    return depth
