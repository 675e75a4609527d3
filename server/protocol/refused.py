"""Fields that would change an answer and are not built: one table for all endpoints, and the check; knows no shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from headrace.server.errors import ApiError

__all__ = ["REFUSED", "check_refused"]

_ZERO: Final = (0, 0.0)
_ONE: Final = (1, 1.0)

REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "ban_eos_token": (False,),
    "cfg_scale": _ONE,
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "do_sample": (True,),
    "documents": (),
    "dry_multiplier": _ZERO,
    "dynatemp_range": _ZERO,
    "ebnf": ("",),
    "echo": (False,),
    "enable_thinking": (),
    "encoder_repetition_penalty": _ONE,
    "epsilon_cutoff": _ZERO,
    "eta_cutoff": _ZERO,
    "function_call": ("none",),
    "functions": ([],),
    "grammar": ("",),
    "guidance_scale": _ONE,
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "json_schema": ({},),
    "logits_processors": (),
    "max_new_tokens": (),
    "mirostat": _ZERO,
    "mirostat_mode": _ZERO,
    "modalities": (["text"],),
    "n_predict": (-1,),
    "negative_prompt": ("",),
    "no_repeat_ngram_size": _ZERO,
    "num_beams": (1,),
    "parallel_tool_calls": (True,),
    "penalty_alpha": _ZERO,
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning": ({},),
    "reasoning_effort": (),
    "regex": ("",),
    "repeat_penalty": _ONE,
    "separate_reasoning": (True,),
    "smoothing_factor": _ZERO,
    "structural_tag": (),
    "suffix": ("",),
    "tfs": _ONE,
    "tfs_z": _ONE,
    "thinking": (),
    "thinking_budget": (),
    "thinking_token_budget": (),
    "top_a": _ZERO,
    "top_logprobs": (0,),
    "top_n_sigma": (-1, -1.0, *_ZERO),
    "truncate_prompt_tokens": (),
    "typical": _ONE,
    "typical_p": _ONE,
    "verbosity": ("medium",),
    "web_search_options": (),
    "xtc_probability": _ZERO,
}
"""Fields that change an answer, each with the values that, like null, ask for nothing. An endpoint whose own shape has
the field takes it. A field that only shapes one of these, such as `mirostat_tau`, is ignored like any unknown field."""

_OURS: Final = {
    "ebnf": "guided_grammar",
    "grammar": "guided_grammar",
    "json_schema": "response_format",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "regex": "guided_regex",
    "repeat_penalty": "repetition_penalty",
}
"""Refused field -> the name of the same field here."""


def check_refused(
    shape: type[BaseModel], body: Mapping[str, Any], own: Mapping[str, tuple[Any, ...]] | None = None
) -> frozenset[str]:
    """Refuse a field that is not built, and return the names of all such fields.

    Args:
        shape: Fields of the endpoint, which may include some of `REFUSED`.
        body: The body as the client sent it.
        own: Further fields that this endpoint refuses, whatever its shape has.

    Raises:
        ApiError: A field asks for something; the error names the first one by the alphabet.
    """
    own = own or {}
    refused = {**{name: REFUSED[name] for name in REFUSED.keys() - shape.model_fields.keys()}, **own}
    for name in sorted(body.keys() & refused.keys()):
        if not _asks_nothing(body[name], refused[name]):
            message = f"{name}: this server does not support it"
            if name in _OURS and _OURS[name] in shape.model_fields:
                message += f"; use {_OURS[name]}"
            raise ApiError(400, "unsupported_parameter", message, param=name)
    return frozenset(refused)


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is None or any(type(value) is type(each) and value == each for each in neutral)
