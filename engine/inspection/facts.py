"""`ModelFacts`: what is known of a model before it is opened, as plain values; finds nothing out by itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from headrace.engine.errors import HeadraceError
from headrace.engine.stats import WeightPart

__all__ = ["DeviceFacts", "Fit", "ModelFacts", "ModelShape", "Problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A reason why a model cannot be opened: the error that opening it would raise."""

    error: str
    """Name of the error's class in `headrace.engine`."""
    message: str
    field: str | None
    """Field, file or tensor that the error names."""

    @classmethod
    def of(cls, error: HeadraceError) -> Self:
        """Return the description of an error."""
        return cls(error=type(error).__name__, message=str(error), field=getattr(error, "field", None))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Architecture of a model; a size is None where its files do not say it, as of an architecture that is not read."""

    kind: Literal["decoder", "encoder", "unknown"]
    architecture: str
    family: str | None
    """Name of the family, as `model_type` in a config.json and `general.architecture` in a GGUF file."""
    layers: int | None
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    """Heads of keys and values, which groups of query heads share."""
    head_size: int | None
    vocab_size: int | None
    max_context: int | None
    """Most tokens of prompt and completion together; of an encoder, of a text."""
    experts: int | None = None
    """Experts of each layer that has any, a shared one not counted; None for a model without."""
    experts_per_token: int | None = None
    """Experts that a router chooses for each token in such a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How many requests of one length a device holds at once."""

    context: int
    """Tokens of each request, prompt and completion together."""
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What a model would take on a device of this machine, and what would fit beside it now."""

    device: str
    """Name as in `EngineConfig.device`."""
    name: str
    """Name of the chip."""
    dtype: str | None
    """Dtype of the arithmetic."""
    weights: tuple[WeightPart, ...]
    """Formats of the weights and their bytes as the device keeps them, equal to `EngineInfo.weights`."""
    weight_bytes: int
    kv_bytes_per_token: int | None
    """Bytes of the keys and values of one token, over all layers; None for an encoder, which keeps none."""
    free_bytes: int
    """Memory of the device that is free now."""
    pages: int
    """Pages that an engine would take now; 0 where it would not open."""
    fits: tuple[Fit, ...]
    assumptions: tuple[str, ...]
    """Sentences that say what the numbers of `fits` rest on."""
    problem: Problem | None
    """Why an engine would not open on the device; None where it would."""
    advice: str | None
    """Sentence that says what would run where memory is short; None elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """All that headers and configs say of a model, and what that means on this machine."""

    model: str
    """The model as it was named."""
    path: str | None
    """Folder or file that the name stands for; None where there is none."""
    shape: ModelShape | None
    fallback: str | None
    """Sentence that says why transformers' module computes the layers; None where headrace's own code does."""
    stored: tuple[WeightPart, ...]
    """Formats of the weights and their bytes as the files hold them."""
    stored_bytes: int
    """Bytes of all weights in the files."""
    active_bytes: int
    """Bytes of those that compute one token: of the experts, those that are chosen, and all others."""
    unread: tuple[str, ...]
    """Names of the parts of a multimodal model that are left unread, those for images or sound."""
    unread_bytes: int
    """Bytes of the weights of these parts, which `stored_bytes` leaves out."""
    devices: tuple[DeviceFacts, ...]
    problems: tuple[Problem, ...]
    """Why the model would not open on any device."""

    @property
    def runs(self) -> bool:
        """Whether some device of this machine would open the model."""
        return not self.problems and any(device.problem is None for device in self.devices)

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as objects, lists, strings and numbers, for JSON."""
        return {**asdict(self), "runs": self.runs}
