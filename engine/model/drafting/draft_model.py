"""`DraftSource`: the draft model that an engine's options name, checked against its target; reads no weights.

A draft model guesses for a target of the same tokenizer. Everything that makes it unfit is an error here, before any
memory is taken for weights. Next to read: ../cpu/draft_model.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, NoReturn, TypeAlias

from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidParams, ModelRejected
from headrace.engine.life.model_files import ModelFiles, find_model
from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.spec import DecoderSpec
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.speculation import DraftModel
from headrace.engine.stats import WeightPart
from headrace.engine.tokens.token_table import TokenTable

__all__ = [
    "DraftFiles",
    "DraftSource",
    "Drafting",
    "check_vocabularies",
    "open_draft_model",
    "quantised_as_draft",
    "refused_as_draft",
]

logger = logging.getLogger("headrace.engine")

DraftFiles: TypeAlias = GgufFile | Path | Literal["random"]
"""An open GGUF file, a model's folder, or `"random"`."""
_PATH: Final = "speculation.path"
_LARGER: Final = 1.1
"""Times the bytes of its target from which a draft model counts as larger: what computes them may differ."""


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model that fits its target."""

    name: str
    config: EngineConfig
    """Options of the engine, with those of the draft model in place of the target's."""
    spec: DecoderSpec
    source: DraftFiles
    tokens: int
    """Number of tokens that it may guess: ids below it are tokens of both models."""

    def parts_beside(self, target: Sequence[WeightPart], own: Sequence[WeightPart]) -> tuple[WeightPart, ...]:
        """Return the weights of the draft model by format; log a warning if it is larger than its target.

        Args:
            target: Weights of the target.
            own: Weights of the draft model.
        """
        small, large = (sum(part.nbytes for part in parts) for parts in (own, target))
        if small > _LARGER * large:
            told = "the draft model %s takes %d bytes, more than the model that it drafts for, which takes %d"
            logger.warning(told, self.name, small, large)
        by_format: dict[str, int] = {}
        for part in own:
            by_format[part.format] = by_format.get(part.format, 0) + part.nbytes
        return tuple(WeightPart("draft model", name, nbytes) for name, nbytes in by_format.items())

    def within_windows(self, capacity: Capacity) -> Capacity:
        """Return the capacity of an engine that keeps the pages which either model reads."""
        windows = self.spec.windows
        longest = max((window or 0 for window in windows), default=0)
        if capacity.window is None or None in windows:
            return replace(capacity, window=None)
        return replace(capacity, window=max(capacity.window, longest))


Drafting: TypeAlias = DraftSource | ModelFiles
"""What drafts with weights of its own: a draft model, or the folder of a head."""


@contextmanager
def open_draft_model(
    config: EngineConfig,
    target: DecoderSpec,
    table: TokenTable | None,
    read_table: Callable[[GgufFile | Path], TokenTable] | None,
) -> Iterator[DraftSource | None]:
    """Yield the draft model that `config` names; None if it names none.

    Args:
        config: Options of the engine.
        target: The model that is to be drafted for.
        table: Its tokens; not looked at where weights are random. None, with `read_table`, compares no tokens.
        read_table: Returns the tokens of a model.

    Raises:
        ModelRejected: The draft model's files cannot be used, it is no causal language model with native code, or its
            tokenizer is another one.
        InvalidParams: The target generates nothing.
    """
    asked = config.speculation
    if not isinstance(asked, DraftModel):
        yield None
        return
    if not target.has_head:
        raise InvalidParams(
            f"speculation: a model without an output head generates nothing, got {asked}; leave it out",
            field="speculation",
            value=asked,
        )
    with ExitStack() as files:
        with refused_as_draft(str(asked.path)):
            found = _opened(config, asked, files)
            if found.source == "random":
                _check_sizes(found, target)
            elif table is not None and read_table is not None:
                assert not isinstance(found.source, str)
                check_vocabularies(found.name, read_table(found.source), table)
        if found.spec.max_context < min(target.max_context, config.max_context or target.max_context):
            logger.info("%s drafts behind %d tokens at most, its own context", found.name, found.spec.max_context)
        yield DraftSource(
            found.name, found.config, found.spec, found.source, min(found.spec.vocab_size, target.vocab_size)
        )


@contextmanager
def refused_as_draft(path: str, what: str = "draft model") -> Iterator[None]:
    """Say of each `ModelRejected` in the block that it is about the draft model, or the `what`, at `path`.

    A refusal to quantise is changed as by `quantised_as_draft`.
    """
    try:
        with quantised_as_draft():
            yield
    except ModelRejected as error:
        if error.field == _PATH:
            raise
        told = f"{_PATH}: the {what} {path} cannot be used: {error}"
        raise ModelRejected(told, field=_PATH, value=path, limit=error.limit) from error


@contextmanager
def quantised_as_draft() -> Iterator[None]:
    """Say of a refusal to quantise in the block that it is about the option of `speculation`."""
    try:
        yield
    except InvalidParams as error:
        if error.field != "quantize":
            raise
        raise InvalidParams(f"speculation.{error}", field="speculation.quantize", value=error.value) from error


def _opened(config: EngineConfig, asked: DraftModel, files: ExitStack) -> DraftSource:
    """Return a draft model whose description has been read, and which may guess all of its own tokens."""
    own = config.model_copy(
        update={
            "model": os.path.expanduser(os.fspath(asked.path)),
            "file": asked.file,
            "model_impl": "native",
            "quantize": asked.quantize,
            "quantize_head": False,
            "max_context": None,
            "speculation": None,
        }
    )
    path, name = find_model(own)
    source: DraftFiles
    if path.suffix == ".gguf":
        source = gguf = files.enter_context(GgufFile(path))
        spec = gguf.spec()
    else:
        source = "random" if config.load_format == "random" else path
        spec = from_hf(read_hf_config(path))
    if not spec.has_head:
        _refuse(name, "has no output head, so it is no causal language model", "a causal language model")
    return DraftSource(name, own, spec, source, spec.vocab_size)


def check_vocabularies(name: str, table: TokenTable, target: TokenTable) -> None:
    """Refuse a draft model or a draft head whose ids stand for other tokens than the target's.

    One of the two may have more tokens than the other, and special tokens may have other names, as models do that were
    trained further: drafts are verified, so such a token costs a draft at most.

    Args:
        name: Name of the draft model or of the head.
        table: Its tokens.
        target: Tokens of the model that it is to draft for.

    Raises:
        ModelRejected: An id stands for two tokens.
    """
    special = table.special_ids | target.special_ids
    for index, (own, wanted) in enumerate(zip(table.pieces, target.pieces, strict=False)):
        if own != wanted and own and wanted and index not in special:
            told, meant = (each.decode(errors="replace") for each in (own, wanted))
            what = f"reads the id {index} as {told!r}, the model as {meant!r}: it has another tokenizer"
            _refuse(name, what, "a model with the same tokenizer")


def _check_sizes(found: DraftSource, target: DecoderSpec) -> None:
    """Refuse a draft model with random weights whose vocabulary has another size; there are no tokens to compare."""
    own, wanted = found.spec.vocab_size, target.vocab_size
    if own != wanted:
        _refuse(found.name, f"has a vocabulary of {own} tokens, the model one of {wanted}", f"{wanted} tokens")


def _refuse(name: str, what: str, limit: str) -> NoReturn:
    raise ModelRejected(f"{_PATH}: {name} {what}", field=_PATH, value=name, limit=limit)
