"""`open_engine`: turns a configuration into a loaded model behind a runner; the one place that sees every ring.

Runs in a thread and never on the event loop. Nothing imports it before an engine opens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidParams, ModelRejected
from headrace.engine.model.cpu_runner import CpuRunner, cpu_ops
from headrace.engine.model.decoder import Decoder
from headrace.engine.model.gguf import GgufFile
from headrace.engine.model.memory import free_host_bytes
from headrace.engine.model.spec import DecoderSpec, from_hf, read_hf_config
from headrace.engine.model.weights import load_weights
from headrace.engine.opened import Opened
from headrace.engine.prompts import TokenizerLike
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.stats import EngineInfo
from headrace.engine.text import TokenTable
from headrace.engine.tokenizer import Tokenizer
from headrace.ops.cpu import CpuOps

__all__ = ["open_engine"]

_CPU_ROWS = 64
_CPU_BATCHED_TOKENS = 512
_FREE_SHARE = 0.125  # of free host memory: the application lives here too


class _NoTokenizer:
    """Stands in where a model has none (`load_format="random"`): ids pass, text is refused, ids have no text."""

    eos_ids = ()

    def __init__(self) -> None:
        self.table = TokenTable([], frozenset())

    def encode(self, text: str) -> list[int]:
        raise InvalidParams(
            "prompt: this model was opened without a tokenizer; give token ids", field="prompt", value=text
        )

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise InvalidParams(
            "prompt: this model was opened without a tokenizer; give token ids", field="prompt", value=messages
        )


def open_engine(config: EngineConfig) -> Opened:
    """Load the model that `config` names and make its runner.

    Raises:
        ModelRejected: The model's files cannot be used.
        DeviceUnavailable: The device is not there.
        InvalidParams: An option does not fit the model.
    """
    path = _locate(config)
    with ExitStack() as files:
        tokenizer: TokenizerLike
        if config.load_format == "random":
            spec, tokenizer, name = from_hf(read_hf_config(path)), _NoTokenizer(), path.name
        elif path.suffix == ".gguf":
            gguf = files.enter_context(GgufFile(path))
            spec, tokenizer, name = gguf.spec(), Tokenizer.from_gguf(gguf.metadata), path.stem
        else:
            spec, tokenizer, name = from_hf(read_hf_config(path)), Tokenizer.from_folder(path), path.name
        dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        ops, capacity = _plan_memory(config, spec, dtype)
        source = "random" if config.load_format == "random" else gguf if path.suffix == ".gguf" else path
        weights = load_weights(
            source, spec, dtype=dtype, device="cpu", keep_packed=config.dtype == "auto", seed=config.seed
        )
        decoder = Decoder(spec, weights, ops)
    any_ops = ops[spec.windows[0]]
    runner = CpuRunner(decoder, ops, capacity, config.cpu_threads or _default_threads())
    info = EngineInfo(
        model=name,
        architecture=spec.architecture,
        max_context=capacity.max_context,
        vocab_size=spec.vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        device="cpu",
        num_pages=capacity.num_pages,
        page_size=capacity.page_size,
        page_bytes=any_ops.page_bytes(spec.num_layers),
        max_rows=capacity.max_rows,
        max_batched_tokens=capacity.max_batched_tokens,
    )
    return Opened(runner, tokenizer, capacity, info)


def _default_threads() -> int:
    """All that torch would use but one: the application's event loop needs a core, and so do the engine's threads."""
    return max(1, torch.get_num_threads() - 1)


def _locate(config: EngineConfig) -> Path:
    """The model's folder or file on this machine.

    Raises:
        ModelRejected: There is none.
    """
    path = Path(config.model).expanduser()
    if path.exists():
        return path.parent if config.load_format == "random" and path.is_file() else path
    if not config.allow_download or config.model.count("/") > 1 or config.model.startswith((".", "/", "~")):
        hint = "" if config.allow_download else "; a hub id needs allow_download=True"
        raise ModelRejected(f"model: no such folder or file: {config.model}{hint}", field="model", value=config.model)
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
    try:
        return Path(snapshot_download(config.model, allow_patterns=wanted))
    except Exception as error:
        raise ModelRejected(
            f"model: the hub did not give {config.model}: {error}", field="model", value=config.model
        ) from error


def _plan_memory(
    config: EngineConfig, spec: DecoderSpec, dtype: torch.dtype
) -> tuple[dict[int | None, CpuOps], Capacity]:
    """The operations for this model and what the device can hold."""
    context = spec.max_context
    if config.max_context is not None:
        if config.max_context > context:
            raise InvalidParams(
                f"max_context: this model was made for {context}, got {config.max_context}",
                field="max_context",
                value=config.max_context,
                limit=context,
            )
        context = config.max_context
    rows = config.max_rows or min(_CPU_ROWS, config.max_batched_tokens or _CPU_ROWS)
    ops = cpu_ops(spec, page_size=config.page_size, max_positions=context, dtype=dtype)
    page_bytes = ops[spec.windows[0]].page_bytes(spec.num_layers)
    useful = rows * -(-context // config.page_size)
    if config.kv_memory is None:
        pages = min(useful, int(free_host_bytes() * _FREE_SHARE) // page_bytes)
    else:
        pages = config.kv_memory // page_bytes
    if pages < 1:
        raise InvalidParams(
            f"kv_memory: one page takes {page_bytes} bytes, got {config.kv_memory}",
            field="kv_memory",
            value=config.kv_memory,
            limit=page_bytes,
        )
    capacity = Capacity(
        num_pages=pages,
        page_size=config.page_size,
        max_rows=rows,
        max_batched_tokens=config.max_batched_tokens or max(_CPU_BATCHED_TOKENS, rows),
        max_context=context,
        vocab_size=spec.vocab_size,
    )
    return ops, capacity
