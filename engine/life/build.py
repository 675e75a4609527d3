"""`open_engine`: turns a configuration into a loaded model behind a runner; the only module that sees every ring.

It runs in a thread and never on the event loop. Nothing imports it before an engine opens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from headrace.engine.config import EngineConfig
from headrace.engine.errors import DeviceUnavailable, InvalidParams, ModelRejected
from headrace.engine.intake.messages import Message
from headrace.engine.life.generation_defaults import from_generation_config, from_gguf_metadata
from headrace.engine.life.model_files import find_model
from headrace.engine.life.opened import CrossEncoder, Opened
from headrace.engine.model.checkpoint.embedding import read_embedding
from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.checkpoint.weights import Source
from headrace.engine.model.cpu.opening import open_cpu
from headrace.engine.model.cpu.sizing import runs_native
from headrace.engine.model.drafting.draft_model import Drafting, open_draft_model, refused_as_draft
from headrace.engine.model.drafting.heads.folder import head_folder
from headrace.engine.model.drafting.heads.vocabulary import check_tokenizer
from headrace.engine.model.encoder.opening import open_encoder
from headrace.engine.model.encoder.spec import encoder_from_hf, is_encoder
from headrace.engine.model.experts import routing_of
from headrace.engine.model.fallback.choice import check_native, fallback_for
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.network.foreign import ForeignModel
from headrace.engine.model.shared.device import BuiltKernels, Device
from headrace.engine.model.shared.find_gpu import find_gpu, means_cpu
from headrace.engine.model.spec import DecoderSpec
from headrace.engine.scheduling.pooling import Embedding
from headrace.engine.stats import EngineInfo
from headrace.engine.tokens.folder import generation_config
from headrace.engine.tokens.token_table import TokenTable
from headrace.engine.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headrace.engine.model.cuda.drafting.drafts import ChangeDrafts
    from headrace.engine.model.fallback.model import FallbackModel

__all__ = ["build_kernels", "open_engine"]

logger = logging.getLogger("headrace.engine")

_Files: TypeAlias = GgufFile | Path | Literal["random"]
"""An open GGUF file, a model's folder, or `"random"`."""


class _NoTokenizer:
    """The tokenizer of a model without one (`load_format="random"`): ids pass, text is refused, ids have no text."""

    eos_ids = ()
    chat_template = ""
    special_tokens: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.table = TokenTable([], frozenset())

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        raise InvalidParams(
            "prompt: this model was opened without a tokenizer; give token ids", field="prompt", value=text
        )

    def encode_chat(self, messages: Sequence[Message], *options: Any, **named: Any) -> list[int]:
        raise InvalidParams(
            "prompt: this model was opened without a tokenizer; give token ids", field="prompt", value=messages
        )

    encode_more, encode_reply = encode, encode_chat

    def start(self, max_context: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def open_engine(config: EngineConfig, *, change_drafts: ChangeDrafts | None = None) -> Opened:
    """Load the model that `config` names and return it with its runner.

    Args:
        config: Options of the engine.
        change_drafts: For benchmarks: changes how drafts are made on a GPU.

    Raises:
        ModelRejected: The model's files cannot be used.
        DeviceUnavailable: The device is not there.
        InvalidParams: An option does not fit the model or the device.
    """
    try:
        return _open(config, change_drafts)
    except ModelRejected as error:
        # The traceback's frames hold what was loaded so far, and an application may keep the error.
        refusal = error.with_traceback(None)
    raise refusal


def _open(config: EngineConfig, change_drafts: ChangeDrafts | None) -> Opened:
    path, name = find_model(config)
    if path.is_dir() and is_encoder(read_hf_config(path)):
        check_native(config, "encoders")
        _check_speculation(config, "encoders generate nothing")
        return _open_encoder(config, path, name)
    with ExitStack() as files:
        tokenizer: Tokenizer | _NoTokenizer
        source: _Files
        foreign: FallbackModel | None = None
        if path.suffix == ".gguf":
            check_native(config, "GGUF files")
            source = gguf = files.enter_context(GgufFile(path))
            spec, tokenizer = gguf.spec(), Tokenizer.from_gguf(gguf.metadata)
        else:
            source, described = "random" if config.load_format == "random" else path, read_hf_config(path)
            foreign = _fallback(config, described, path)
            spec = from_hf(described) if foreign is None else foreign.spec
            tokenizer = _NoTokenizer() if source == "random" else Tokenizer.from_folder(path)
        recommended = _recommended(config, source)
        weights = source if foreign is None else foreign
        draft = files.enter_context(open_draft_model(config, spec, tokenizer.table, _read_table))
        if (head := head_folder(config, spec, weights)) is not None:
            check_tokenizer(config, head, tokenizer.table, _read_table)
        device = _open_device(config, spec, weights, draft or head, change_drafts)
    embedding = None
    if "pooling" in device.abilities:
        embedding = read_embedding(path, spec.hidden_size, ("last", "mean"), default="last")
    routing = routing_of(spec)
    info = replace(
        _info(device, name, spec.architecture, embedding),
        generation_defaults=recommended,
        model_impl="native" if foreign is None else "transformers",
        draft_model="" if draft is None else draft.name,
        experts=0 if routing is None else routing.experts,
        experts_per_token=0 if routing is None else routing.top_k,
    )
    tokenizer.start(device.capacity.max_context)
    return Opened(
        device.runner,
        tokenizer,
        device.capacity,
        info,
        device.abilities,
        embedding,
        adapters=device.adapters,
        generates=spec.has_head,
    )


def _read_table(source: GgufFile | Path) -> TokenTable:
    """Return the tokens of a model."""
    made = Tokenizer.from_gguf(source.metadata) if isinstance(source, GgufFile) else Tokenizer.from_folder(source)
    return made.table


def _fallback(config: EngineConfig, described: Mapping[str, object], path: Path) -> FallbackModel | None:
    """Return the model as transformers computes it, tried on small weights; None where headrace's own code does."""
    model = fallback_for(config, described, "random" if config.load_format == "random" else path)
    if model is not None:
        from headrace.engine.model.cpu.trial import try_fallback  # imports transformers' models

        kinds = model.products
        if means_cpu(config.device):
            kinds = kinds | model.norms if runs_native(model.spec) else frozenset()
        model.taken = try_fallback(model, kinds)
        logger.info("transformers' module computes the layers of this model: %s", model.why)
        if left := kinds.difference(model.taken):
            found = "headrace's own products and norms were not found to work in place of these"
            logger.info("%s, which are left to torch: %s", found, ", ".join(sorted(left)))
    return model


def _open_encoder(config: EngineConfig, path: Path, name: str) -> Opened:
    """Open an encoder, which embeds texts or scores pairs of them."""
    spec, tokenizer = encoder_from_hf(read_hf_config(path)), Tokenizer.from_folder(path, is_exact=False)
    device = open_encoder(config, spec, path)
    embedding = scoring = None
    if spec.head is None:
        embedding = read_embedding(path, spec.hidden_size, ("mean", "cls", "last"), default="mean")
    else:
        scoring = CrossEncoder(tokenizer.encode_pair, spec.has_sigmoid)
    info = _info(device, name, spec.architecture, embedding)
    tokenizer.start(device.capacity.max_context)
    return Opened(
        device.runner,
        tokenizer,
        device.capacity,
        info,
        device.abilities,
        embedding,
        scoring,
        generates=False,
        has_pages=False,
    )


def _check_speculation(config: EngineConfig, why: str) -> None:
    """Refuse the option `speculation`.

    Raises:
        InvalidParams: It is given.
    """
    if config.speculation is not None:
        raise InvalidParams(
            f"speculation: {why}, got {config.speculation}; leave it out",
            field="speculation",
            value=config.speculation,
            limit=None,
        )


def _recommended(config: EngineConfig, source: _Files) -> Mapping[str, float]:
    """Return the sampling values that the model's files recommend; empty if they are not wanted."""
    if config.generation_defaults == "none" or source == "random":
        return {}
    if isinstance(source, GgufFile):
        return from_gguf_metadata(source.metadata)
    return from_generation_config(generation_config(source))


def _info(device: Device, model: str, architecture: str, embedding: Embedding | None) -> EngineInfo:
    return EngineInfo.of(
        device.capacity,
        model=model,
        architecture=architecture,
        dtype=device.dtype,
        device=device.name,
        page_bytes=device.page_bytes,
        embedding_size=0 if embedding is None else embedding.size,
        weights=device.weights,
    )


def build_kernels(config: EngineConfig) -> BuiltKernels:
    """Compile the GPU kernels for the model that `config` names and for its draft model, without loading weights.

    A folder needs its config.json alone, and the headers of its files where these say how weights are quantised. The
    weights of a trained draft head are read.

    Raises:
        ModelRejected: A model's description cannot be used, or says that weights are quantised that are not there.
        DeviceUnavailable: There is no such GPU, or a kernel cannot be compiled.
        InvalidParams: An option does not fit the model or the device.
    """
    gpu = find_gpu(config.device)
    from headrace.engine.model.cuda.opening import build_kernels

    with ExitStack() as files:
        spec, source = _described(config, files)
        draft = files.enter_context(open_draft_model(config, spec, None, None))
        if draft is not None:
            with refused_as_draft(draft.name):
                _, of_draft = _described(draft.config, files)
            assert not isinstance(of_draft, ForeignModel)  # a draft model has native code
            draft = replace(draft, source=of_draft)
        return build_kernels(config, spec, source, gpu, draft or head_folder(config, spec, source))


def _described(config: EngineConfig, files: ExitStack) -> tuple[DecoderSpec, _Files | ForeignModel]:
    """Return the model that `config` names, and what tells the formats of its weights; `files` closes it."""
    path = Path(config.model)
    if path.suffix != ".gguf":
        path, _ = find_model(config)
    if path.suffix == ".gguf":
        gguf = files.enter_context(GgufFile(path))
        return gguf.spec(), gguf
    described = read_hf_config(path)
    if (foreign := fallback_for(config, described, "random")) is not None:
        return foreign.spec, foreign
    if described.get("quantization_config") is None:
        return from_hf(described), "random"
    if not any(path.glob("*.safetensors")):
        raise ModelRejected(
            f"quantization_config: {path} says that its weights are quantised, and holds none that would tell which "
            "kernels they need; build from the whole folder"
        )
    return from_hf(described), path


def _open_device(
    config: EngineConfig,
    spec: DecoderSpec,
    source: Source | ForeignModel,
    draft: Drafting | None,
    change_drafts: ChangeDrafts | None,
) -> Device:
    if means_cpu(config.device):
        if change_drafts is not None:
            raise DeviceUnavailable("device: a benchmark changes how drafts are made on a GPU alone", field="device")
        return open_cpu(config, spec, source, draft)
    gpu = find_gpu(config.device)  # first, since the extra below takes several GB and is of no use without a GPU
    from headrace.engine.model.cuda.opening import open_cuda  # needs packages for machines with a GPU

    return open_cuda(config, spec, source, gpu, draft=draft, change_drafts=change_drafts)
