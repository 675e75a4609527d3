"""`Checked`, a frozen model of options that are checked however they are made; it defines no option itself."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.engine.errors import InvalidParams
from headrace.engine.known_names import advice_on

__all__ = ["Checked", "invalid_params", "parameters_of", "shown"]

_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_LIMITS = (*_BOUNDS, "max_length", "min_length", "expected")


class Checked(BaseModel, frozen=True):
    """Base of options that are checked when they are made and cannot change afterwards. Frozen, hashable, serialisable.

    Raises:
        InvalidParams: A value is out of its range; the error names field, value and limit. It is also a `ValueError`.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    known_names: ClassVar[Mapping[str, str]] = {}
    """Advice for names that are not options here, as `advice_on` describes it."""

    def __init__(self, **options: Any) -> None:
        """Validate `options`, turning pydantic's error into `InvalidParams`."""
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise invalid_params(error, type(self)) from None

    if not TYPE_CHECKING:  # type checkers take the class for frozen, and this method would make them allow assignments

        def __setattr__(self, name: str, value: object) -> None:
            """Refuse to set an attribute, since options that were checked stay as they are."""
            copied = f"replace({name}=...)" if hasattr(self, "replace") else f"model_copy(update={{{name!r}: ...}})"
            told = f"{name}: {type(self).__name__} cannot change; make a copy with {copied}"
            raise InvalidParams(told, field=name, value=value)

    def _changed(self, changes: Mapping[str, Any]) -> Self:
        """Return a checked copy with `changes`; options that were never given count as not given in it either."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with `update`, which is checked as in the constructor.

        Raises:
            InvalidParams: An option of `update` is unknown or out of its range.
        """
        return super().model_copy(deep=deep) if update is None else self._changed(update)


def parameters_of(options: type, model: type[BaseModel]) -> list[Parameter]:
    """Return the fields of `model` as keyword parameters, with their defaults, for signatures that users read.

    Args:
        options: The `TypedDict` of the same options, with the types that callers may use.
        model: The model that checks them.
    """
    written = options.__annotations__
    return [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.is_required() else field.default,
            annotation=written[name].__forward_arg__ if name in written else Parameter.empty,
        )
        for name, field in model.model_fields.items()
    ]


def shown(value: object) -> str:
    """Return the `repr` of `value` for a message, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def invalid_params(error: ValidationError, model: type[BaseModel]) -> InvalidParams:
    """Turn the first error of a pydantic `ValidationError` about `model` into `InvalidParams`."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidParams):  # raised by a validator of headrace, with its own field and limit
        return cause
    message = str(cause) if cause is not None else first["msg"]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        advice = advice_on(field, model.model_fields, getattr(model, "known_names", {}))
        message = "there is no such option" + (f" ({advice})" if advice else "")
    value = first["input"]
    context = first.get("ctx", {})
    limits = {name: context[name] for name in _LIMITS if name in context}
    if first["type"] == "finite_number":  # checked before the bounds, so pydantic does not name them
        limits = _bounds(model, field)
        message += "".join(f", {_BOUNDS[name]} {bound}" for name, bound in limits.items())
    return InvalidParams(f"{field}: {message}, got {shown(value)}", field=field, value=value, limit=limits or None)


def _bounds(model: type[BaseModel], field: str) -> dict[str, Any]:
    """Return the bounds of a numeric field of `model` by pydantic's names; empty if it has none."""
    info = model.model_fields.get(field)
    if info is None:
        return {}
    rules = list(info.metadata)
    for part in get_args(info.annotation):  # parts of `Annotated[...] | None`
        for field_info in getattr(part, "__metadata__", ()):
            rules += getattr(field_info, "metadata", ())
    return {name: bound for rule in rules for name in _BOUNDS if (bound := getattr(rule, name, None)) is not None}
