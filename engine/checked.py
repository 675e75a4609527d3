"""`Checked`: a frozen model of options whose every way of being made checks them; knows no option itself."""

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
    """Options that are checked when they are made and cannot change afterwards. Frozen, hashable, serialisable.

    Raises:
        InvalidParams: A value is out of its range; names field, value and limit. It is also a `ValueError`.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    known_names: ClassVar[Mapping[str, str]] = {}
    """What to say to names that are no options here: `advice_on` describes it."""

    def __init__(self, **options: Any) -> None:
        """Validate `options`, turning pydantic's error into `InvalidParams`."""
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise invalid_params(error, type(self)) from None

    if not TYPE_CHECKING:  # type checkers know a frozen class from its keyword, and would take this for leave to assign

        def __setattr__(self, name: str, value: object) -> None:
            """Refuse it: what was checked stays as it is."""
            copied = f"replace({name}=...)" if hasattr(self, "replace") else f"model_copy(update={{{name!r}: ...}})"
            told = f"{name}: {type(self).__name__} cannot change; make a copy with {copied}"
            raise InvalidParams(told, field=name, value=value)

    def _changed(self, changes: Mapping[str, Any]) -> Self:
        """Make a copy with `changes`, checked as a new one; what was never given counts as not given in it either."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with `update`, which is checked as `replace` checks it.

        Raises:
            InvalidParams: As the constructor does.
        """
        return super().model_copy(deep=deep) if update is None else self._changed(update)


def parameters_of(options: type, model: type[BaseModel]) -> list[Parameter]:
    """Return the fields of `model` as keyword parameters, with their defaults, for signatures that people read.

    Args:
        options: The `TypedDict` of the same options, whose annotations say what callers may write.
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
    """`value` as a message shows it: its start where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def invalid_params(error: ValidationError, model: type[BaseModel]) -> InvalidParams:
    """Turn the first complaint of a pydantic error about `model` into `InvalidParams` with field, value and limit."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidParams):  # raised by a validator of ours, which knows more
        return cause
    message = str(cause) if cause is not None else first["msg"]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        advice = advice_on(field, model.model_fields, getattr(model, "known_names", {}))
        message = "there is no such option" + (f" ({advice})" if advice else "")
    value = first["input"]
    context = first.get("ctx", {})
    limits = {name: context[name] for name in _LIMITS if name in context}
    if first["type"] == "finite_number":  # found before the bounds are looked at, so pydantic does not name them
        limits = _bounds(model, field)
        message += "".join(f", {_BOUNDS[name]} {bound}" for name, bound in limits.items())
    return InvalidParams(f"{field}: {message}, got {shown(value)}", field=field, value=value, limit=limits or None)


def _bounds(model: type[BaseModel], field: str) -> dict[str, Any]:
    """The bounds of a number among `model`'s fields, by pydantic's names; none where it has none."""
    info = model.model_fields.get(field)
    if info is None:
        return {}
    rules = list(info.metadata)
    for part in get_args(info.annotation):  # of `Annotated[...] | None`
        for field_info in getattr(part, "__metadata__", ()):
            rules += getattr(field_info, "metadata", ())
    return {name: bound for rule in rules for name in _BOUNDS if (bound := getattr(rule, name, None)) is not None}
