"""`split_head`: cuts a transformers model into what makes hidden states and what makes logits of them.

The second part is the model's own `forward` with a stand-in for the first, so that whatever the model does with its
logits (a scale, a bound, a bias) is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from headrace.engine.errors import ModelRejected

__all__ = ["Head", "split_head"]

Head: TypeAlias = Callable[[Tensor], Tensor]
"""Makes logits [1, N, V] of hidden states [1, N, E]."""


@dataclass
class _Hidden(ModelOutput):
    """Hidden states, with the other fields that models read from what makes theirs."""

    last_hidden_state: Tensor | None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None


class _Given(nn.Module):
    """Stands where the model would compute hidden states, and returns those that it is given as embeddings."""

    @property
    def decoder(self) -> _Given:
        """Return this module: OPT's head asks a part of its model for hidden states, past the model itself."""
        return self

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> _Hidden:
        """Return `inputs_embeds` as the last hidden states."""
        return _Hidden(last_hidden_state=inputs_embeds)


def split_head(model: PreTrainedModel, *, has_head: bool) -> tuple[PreTrainedModel, Head | None]:
    """Return the model without its head, and its head; None for a model that has none. `model` is changed.

    Raises:
        ModelRejected: The model is not made of these two parts.
    """
    if not has_head:
        return model, None
    base, prefix = model.base_model, model.base_model_prefix
    if base is model or not isinstance(base, PreTrainedModel) or getattr(model, prefix, None) is not base:
        name = type(model).__name__
        raise ModelRejected(
            f"architectures: transformers' {name} is not a model with a head behind it",
            field="architectures",
            value=name,
        )
    setattr(model, prefix, _Given())

    def head(hidden_1NE: Tensor) -> Tensor:
        logits: Tensor = model(inputs_embeds=hidden_1NE, use_cache=False).logits
        return logits

    return base, head
