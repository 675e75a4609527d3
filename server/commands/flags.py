"""Flags of the command line and the options that they set: names flags in errors, and answers flags of other tools."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperCommand

from headrace.engine import EngineConfig, InvalidParams, SamplingParams
from headrace.engine.known_names import ENGINE_NAMES, LOAD_ADAPTER, REQUEST, SAMPLING_NAMES, SYNONYMS, all_names

__all__ = ["AnsweringCommand", "flags_named"]

_FLAGS = {
    "max_context": "--max-model-len",
    "max_rows": "--max-num-seqs",
    "max_batched_tokens": "--max-num-batched-tokens",
    "kv_memory": "--kv-cache-memory-bytes",
    "kv_dtype": "--kv-cache-dtype",
    "page_size": "--block-size",
    "prefix_cache": "--enable-prefix-caching",
    "adapter_slots": "--max-loras",
    "max_adapter_rank": "--max-lora-rank",
    "policy": "--scheduling-policy",
    "speculation": "--speculate",
    "drain_seconds": "--shutdown-timeout",
    "api_keys": "--api-key",
    "admin_keys": "--admin-api-key",
    "metrics_key": "--metrics-api-key",
    "adapters": "--lora-modules",
}
"""Field -> the flag that sets it, where that has another name."""


@contextmanager
def flags_named() -> Iterator[None]:
    """Add to an `InvalidParams` a note that names the flag of its field, or of the one that its field is a part of."""
    try:
        yield
    except InvalidParams as error:
        if (flag := _FLAGS.get((error.field or "").partition(".")[0])) is not None:
            error.add_note(f"({flag})")
        raise


class AnsweringCommand(TyperCommand):
    """A command that answers flags of other tools with its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args` as any command does; refuse an unknown flag with advice on what stands for it here."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            flag = getattr(error, "option_name", None)  # set by an exception that typer does not export
            own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
            if flag is None or flag in own or not (advice := _advice_on(flag, own)):
                raise
            from typer import BadParameter

            raise BadParameter(f"{flag}: there is no such flag ({advice})") from None


def _advice_on(flag: str, own: set[str]) -> str:
    """Return advice on which of the flags `own`, or which option, stands for `flag`; empty where no tool has it."""
    name = flag.lstrip("-").replace("-", "_")
    others = {**all_names(SAMPLING_NAMES), **SYNONYMS, **all_names(ENGINE_NAMES)}
    meant = name if name in EngineConfig.model_fields else others.get(name, name)
    if meant == "model":
        return "give the model as the argument"
    ours = "--" + (name if "--" + name.replace("_", "-") in own else meant).replace("_", "-")
    if ours in own:
        return f"it is {ours} here"
    if meant in EngineConfig.model_fields:
        return f"say --set {meant}=VALUE" if "--set" in own else ""
    if name in SamplingParams.model_fields or meant == REQUEST or name in all_names(SAMPLING_NAMES):
        return "each request says it, in its body" if "--port" in own else ""
    if meant == LOAD_ADAPTER and "--lora-modules" in own:
        return "say --lora-modules NAME=FOLDER"
    return "" if meant == name else _in_flags(meant, own)


def _in_flags(sentence: str, own: set[str]) -> str:
    """Return advice with the flags `own` in the places of the options of an engine that it names."""

    def flag_of(found: re.Match[str]) -> str:
        name, value = found["name"], (found["value"] or "").strip('"')
        flag = "--" + name.replace("_", "-")
        no_flag = "--no-" + flag.removeprefix("--")
        if value == "False" and no_flag in own:
            return no_flag
        if name not in EngineConfig.model_fields:
            return found[0]
        if flag not in own:
            return f"--set {name}={value}" if value and "--set" in own else found[0]
        return flag if value in ("", "True") else f"{flag} {value}"

    return re.sub(r"\b(?P<name>[a-z]+(?:_[a-z]+)+(?!\w)|[a-z]+(?==))(?:=(?P<value>\"[^\"]*\"|\w+))?", flag_of, sentence)
