"""`inspect_model`: all that is known of a model without opening it; what would refuse it is told, never raised.

It opens configs and headers by the code that an engine opens them with. Next to read: facts.py, devices.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar

from headrace.engine.config import EngineConfig
from headrace.engine.errors import HeadraceError
from headrace.engine.inspection.devices import devices_of, encoder_facts, facts_of
from headrace.engine.inspection.drafts import DraftTensors
from headrace.engine.inspection.facts import DeviceFacts, ModelFacts, ModelShape, Problem
from headrace.engine.inspection.shapes import shape_of_config, shape_of_decoder, shape_of_encoder, shape_of_header
from headrace.engine.life.model_files import find_model
from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.checkpoint.inventory import Inventory
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.checkpoint.weight_parts import parts_in_files
from headrace.engine.model.checkpoint.weights import open_files
from headrace.engine.model.encoder.opening import describe_encoder
from headrace.engine.model.encoder.spec import EncoderSpec, encoder_from_hf, is_encoder
from headrace.engine.model.experts import routing_of
from headrace.engine.model.fallback.choice import fallback_for
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.network.foreign import ForeignModel
from headrace.engine.model.spec import DecoderSpec
from headrace.engine.stats import WeightPart
from headrace.engine.tokens.folder import check_folder

__all__ = ["inspect_model"]

T = TypeVar("T")


class _Model(NamedTuple):
    """What the description of a model says."""

    shape: ModelShape
    spec: DecoderSpec | EncoderSpec | None
    """The spec; None where the description is refused."""
    foreign: ForeignModel | None = None
    """The model as transformers computes it; None where headrace's own code does."""


class _Held(NamedTuple):
    """What the files hold."""

    parts: tuple[WeightPart, ...] = ()
    """Formats and bytes of the weights that are read; empty where the model is not known."""
    nbytes: int = 0
    """Bytes of these weights, or of all where the model is not known."""
    source: Inventory | ForeignModel | Path | None = None
    """Where devices find the weights: the tensors of a decoder, another library's model, or the folder of an encoder;
    None where nothing is known of them."""
    unread: tuple[str, ...] = ()
    """Names of the other parts of a multimodal model."""
    unread_bytes: int = 0


class _Found:
    """Facts as they are found, and the errors on the way, each once."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def attempt(self, look: Callable[[], T]) -> T | None:
        """Return what `look` returns; None where it raises a typed error, which is kept."""
        try:
            return look()
        except HeadraceError as error:
            self.problems.append(Problem.of(error))
            return None


def inspect_model(config: EngineConfig) -> ModelFacts:
    """Return what is known of the model that `config` names, with its options; read no weights, and open no tokenizer.

    The problems are the errors that opening the model would raise, as far as headers and configs tell.
    """
    found = _Found()
    with ExitStack() as files:
        located = found.attempt(lambda: find_model(config))
        path = None if located is None else located.path
        source: GgufFile | Path | None = path
        if path is not None and path.suffix == ".gguf":
            source = found.attempt(lambda: files.enter_context(GgufFile(path)))
        model = None if source is None else _described(source, config, found)
        spec, foreign = (None, None) if model is None else (model.spec, model.foreign)
        held = _Held() if source is None else found.attempt(lambda: _held(source, spec, foreign, files)) or _Held()
        if isinstance(source, Path) and spec is not None:
            found.attempt(lambda: check_folder(source))
        draft = None
        if isinstance(spec, DecoderSpec):
            draft = found.attempt(lambda: DraftTensors.of(config, spec, files))
        devices = _devices(config, spec, held.source, draft, found)
    return ModelFacts(
        model=config.model,
        path=None if path is None else str(path),
        shape=None if model is None else model.shape,
        fallback=None if foreign is None else foreign.why,
        stored=held.parts,
        stored_bytes=held.nbytes,
        active_bytes=_active(held, spec),
        unread=held.unread,
        unread_bytes=held.unread_bytes,
        devices=tuple(devices),
        problems=tuple(dict.fromkeys(found.problems)),
    )


def _described(source: GgufFile | Path, options: EngineConfig, found: _Found) -> _Model | None:
    """Return what the header of a GGUF file, or the config.json of a folder, says; None if it cannot be read."""
    if isinstance(source, GgufFile):
        spec = found.attempt(source.spec)
        family = source.metadata.get("general.architecture")
        shape = shape_of_header(source.metadata) if spec is None else shape_of_decoder(spec, family)
        return _Model(shape, spec)
    config = found.attempt(lambda: read_hf_config(source))
    if config is None:
        return None
    family = config.get("model_type")
    if is_encoder(config):
        encoder = found.attempt(lambda: encoder_from_hf(config))
        return _Model(shape_of_config(config) if encoder is None else shape_of_encoder(encoder, family), encoder)
    problems = len(found.problems)
    foreign = found.attempt(lambda: fallback_for(options, config, source))
    decoder = None if foreign is None else foreign.spec
    if foreign is None and len(found.problems) == problems:
        decoder = found.attempt(lambda: from_hf(config))
    shape = shape_of_config(config) if decoder is None else shape_of_decoder(decoder, family)
    return _Model(shape, decoder, foreign)


def _held(
    source: GgufFile | Path, spec: DecoderSpec | EncoderSpec | None, foreign: ForeignModel | None, opened: ExitStack
) -> _Held:
    """Return what the files hold of a model's weights; `opened` closes them. Of an unknown model, the bytes alone.

    Raises:
        ModelRejected: A file is missing or damaged, or a tensor is missing, left over or of another shape.
    """
    files = open_files(source, opened)
    total = sum(map(files.nbytes, files.shapes))
    if foreign is not None and isinstance(files, SafetensorsFolder):
        return _Held(foreign.parts(files.weight_dtype(next(iter(files.shapes)))), total, foreign)
    if not isinstance(spec, DecoderSpec):
        return _Held(_of_encoder(files, spec), total, source if isinstance(source, Path) else None)
    inventory = Inventory(files, spec)
    parts = parts_in_files(inventory, spec)
    names = {name.removeprefix("model.").partition(".")[0] for name in inventory.others}
    unread = tuple(part for part in spec.names.others if part in names)
    return _Held(parts, sum(part.nbytes for part in parts), inventory, unread, sum(map(files.nbytes, inventory.others)))


def _active(held: _Held, spec: DecoderSpec | EncoderSpec | None) -> int:
    """Return the bytes of the weights that compute one token."""
    routing = routing_of(spec) if isinstance(spec, DecoderSpec) else None
    if routing is None:
        return held.nbytes
    experts = sum(part.nbytes for part in held.parts if part.part == "experts")
    return held.nbytes - experts + experts * routing.top_k // routing.experts


def _of_encoder(files: GgufFile | SafetensorsFolder, spec: EncoderSpec | None) -> tuple[WeightPart, ...]:
    """Return formats and bytes of an encoder, whose tensors have one dtype; nothing of an unknown model."""
    if spec is None or not isinstance(files, SafetensorsFolder):
        return ()
    return describe_encoder(spec, files.path, files.weight_dtype(next(iter(files.shapes))))


def _devices(
    config: EngineConfig,
    spec: DecoderSpec | EncoderSpec | None,
    source: Inventory | ForeignModel | Path | None,
    draft: DraftTensors | None,
    found: _Found,
) -> Sequence[DeviceFacts]:
    devices = found.attempt(lambda: devices_of(config)) or []
    if isinstance(spec, DecoderSpec) and not isinstance(source, Path):
        return [facts_of(device, config, spec, source, draft) for device in devices]
    if isinstance(spec, EncoderSpec) and isinstance(source, Path):
        return [encoder_facts(device, config, spec, source) for device in devices]
    return []
