"""`open_cuda`: opens a model on a GPU. Next to read: shared/gpu_sizes.py, runner.py."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import DeviceUnavailable, InvalidParams, ModelRejected
from headrace.engine.life.progress import LoggedProgress, weights_read
from headrace.engine.model.checkpoint.reread import rereading
from headrace.engine.model.checkpoint.weight_parts import stored_parts
from headrace.engine.model.checkpoint.weights import DecoderWeights, Source, load_weights
from headrace.engine.model.drafting.draft_model import Drafting, DraftSource
from headrace.engine.model.latent import has_latents
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.network.foreign import ForeignModel
from headrace.engine.model.shared.adapter_device import adapter_device, adapter_granules, adapter_shape, host_room
from headrace.engine.model.shared.device import BuiltKernels, Device, Limits, fit, within_context
from headrace.engine.model.shared.gpu_sizes import DTYPE, PAGE_SIZE, bytes_for_pages, gpu_limits, kv_dtype
from headrace.engine.model.shared.heads import attention_kinds, head_shape
from headrace.engine.model.shared.kv_layout import kv_layout
from headrace.engine.model.shared.memory import return_device_memory
from headrace.engine.model.spec import DecoderSpec, MixerSpec
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.speculation import Ngram
from headrace.engine.stats import WeightPart

try:
    from headrace.engine.model.cuda.adapters import CudaBank
    from headrace.engine.model.cuda.drafting.beside import DraftOpening
    from headrace.engine.model.cuda.drafting.drafts import ChangeDrafts, OpenDrafts, most_lines
    from headrace.engine.model.cuda.drafting.model_opening import OpenModel
    from headrace.engine.model.cuda.drafting.ngram import NgramDrafts
    from headrace.engine.model.cuda.drafting.opening import CudaHead, check_drafts
    from headrace.engine.model.cuda.operations import CudaDecoder, cuda_ops, is_decode, kinds_of, positions_of
    from headrace.engine.model.cuda.runner import CudaRunner
    from headrace.engine.model.cuda.sleep import Weights
    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.block import CudaOps
    from headrace.ops.cuda.codes.packing import in_codes
    from headrace.ops.cuda.compiling.cache import cache, check_compilers, count_kernels, use_cache
    from headrace.ops.cuda.compiling.toolkit import CannotCompile
    from headrace.ops.cuda.kernels import KERNELS, Kernels
    from headrace.ops.cuda.memory.weights import WeightMemory
except ImportError as error:
    raise DeviceUnavailable(
        f"device: a GPU is there, but not what the extra headrace[cuda] installs for it ({error}); install that, or "
        "choose device='cpu'",
        field="device",
    ) from error

__all__ = ["build_kernels", "checked_arch", "open_cuda"]

_opening = threading.Lock()
"""Lock held while an engine opens: only one opens at a time, since each measures the memory that is left, and
calls such as loading a kernel may end the capture of a graph in another thread."""


class _Loaded(NamedTuple):
    """A model on the GPU."""

    decoder: CudaDecoder
    ops: dict[MixerSpec, CudaOps]
    reload: Callable[[], object]
    """Reads the weights once more, into the same memory."""
    parts: tuple[WeightPart, ...]
    drafting: CudaHead | OpenModel | None = None
    """What drafts, where that is no n-grams."""


def open_cuda(
    config: EngineConfig,
    spec: DecoderSpec,
    source: Source | ForeignModel,
    device: torch.device,
    *,
    installed_kernels: bool = True,
    kernels: Kernels = KERNELS,
    blank: bool = False,
    draft: Drafting | None = None,
    change_drafts: ChangeDrafts | None = None,
) -> Device:
    """Load the weights on the GPU `device`, measure what is left, and make a runner that has captured its graphs.

    Kernels are compiled unless `config.kernel_cache` keeps them, or a wheel, unless `installed_kernels` is False. With
    `blank`, weights are zeros in the formats of `source`. A `draft` model, or the head in the folder `draft`, is
    loaded beside the model. A benchmark may change how drafts are made by `change_drafts`.

    Raises:
        ModelRejected: The weights cannot be used.
        DeviceUnavailable: The GPU cannot run the model, has too little memory for it, or lacks a kernel that is not
            compiled yet and cannot be.
        InvalidParams: An option does not fit the model or the device.
    """
    arch = checked_arch(config, spec, device, kernels)
    kernels = kernels.to_latents() if has_latents(spec) else kernels
    refusal: DeviceUnavailable | ModelRejected
    try:
        with _opening, torch.cuda.device(device), torch.inference_mode():
            use_cache(config.kernel_cache, installed=installed_kernels)
            check_compilers()
            return _open(config, spec, source, device, arch, kernels, blank, draft, change_drafts)
    except (torch.OutOfMemoryError, CannotCompile) as error:
        failure = str(error)
        if not isinstance(error, CannotCompile):
            failure = f"{device} has too little memory for this model and its pages: {failure}"
        traceback.clear_frames(error.__traceback__)  # the frames hold what was loaded so far
        refusal = DeviceUnavailable(f"device: {failure}")
    except ModelRejected as error:
        refusal = error.with_traceback(None)
    return_device_memory()
    raise refusal


def _open(
    config: EngineConfig,
    spec: DecoderSpec,
    source: Source | ForeignModel,
    device: torch.device,
    arch: Arch,
    kernels: Kernels,
    blank: bool,
    draft: Drafting | None,
    change_drafts: ChangeDrafts | None,
) -> Device:
    limits = gpu_limits(config, spec)
    spec = within_context(spec, limits.context)
    drafting, memory = DraftOpening.of(config, spec, draft), WeightMemory(device)
    if isinstance(source, ForeignModel):
        loaded = _load_foreign(config, source, memory, device, arch, kernels, blank, drafting)
    else:
        loaded = _load(config, spec, source, memory, device, arch, kernels, blank, drafting)
    decoder, ops = loaded.decoder, loaded.ops
    bank = _make_bank(config, spec, ops, limits)
    drafts = _drafts(config) if loaded.drafting is None else loaded.drafting.drafts(config)
    if drafts is not None and change_drafts is not None:
        drafts = change_drafts(drafts)
    page_bytes = kv_layout(spec, ops, () if drafts is None else drafts.pages).page_bytes(kv_dtype(config))
    free = 0 if config.kv_memory is not None else _free_for_pages(config, decoder, ops, limits, device, kernels, drafts)
    capacity = fit(config, spec, limits, page_bytes=page_bytes, free_bytes=free)
    capacity = draft.within_windows(capacity) if isinstance(draft, DraftSource) else capacity
    runner = CudaRunner(
        decoder, ops, capacity, attention=config.decode_attention, device=device, bank=bank,
        weights=Weights(memory, loaded.reload), speculation=drafts, kernels=kernels,
    )  # fmt: skip
    try:
        runner.warm_up()
    except BaseException:
        runner.close()
        raise
    adapters = None
    if bank is not None:
        adapters = adapter_device(
            config, spec, bank, dtype=DTYPE, granule_bytes=CudaBank.granule_bytes, take=bank.memory
        )
    name = str(DTYPE).removeprefix("torch.")
    return Device(runner, capacity, str(device), name, page_bytes, runner.abilities, adapters, loaded.parts)


def _drafts(config: EngineConfig) -> OpenDrafts | None:
    """Return how drafts are made without weights, if rows may speculate."""
    wanted = config.speculation
    if wanted is None:
        return None
    assert isinstance(wanted, Ngram)
    longest = wanted.longest
    return OpenDrafts(lambda table: NgramDrafts(table, longest), wanted.k)


def _load(
    config: EngineConfig,
    spec: DecoderSpec,
    source: Source,
    memory: WeightMemory,
    device: torch.device,
    arch: Arch,
    kernels: Kernels,
    blank: bool,
    drafting: DraftOpening,
) -> _Loaded:
    """Load a model, and what drafts for it, into `memory`."""
    again = rereading(source)  # an open file is closed by then

    def load(source: Source) -> DecoderWeights:
        progress = LoggedProgress(weights_read)
        weights = load_weights(
            source, spec, dtype=DTYPE, device=device, seed=config.seed, progress=progress, empty=memory.empty,
            layout=lambda weight: in_codes(weight, DTYPE), quantize=config.quantize, quantize_head=config.quantize_head,
            blank=blank,
        )  # fmt: skip
        drafting.load(device, memory.empty, blank=blank)
        return weights

    weights = load(source)
    torch.cuda.empty_cache()  # packing leaves free blocks of its own sizes, a gigabyte behind a large table
    ops = cuda_ops(
        spec, page_size=config.page_size, max_positions=gpu_limits(config, spec).context, dtype=DTYPE,
        kv_dtype=kv_dtype(config), kv_scales=weights.kv_scales, device=device, arch=arch, kernels=kernels,
        codes=kinds_of(weights),
    )  # fmt: skip
    decoder: CudaDecoder = Decoder(spec, weights, ops)
    made = drafting.made(decoder, ops, kernels)
    return _Loaded(decoder, ops, lambda: load(again()), drafting.beside(stored_parts(weights)), made)


def _load_foreign(
    config: EngineConfig,
    model: ForeignModel,
    memory: WeightMemory,
    device: torch.device,
    arch: Arch,
    kernels: Kernels,
    blank: bool,
    drafting: DraftOpening,
) -> _Loaded:
    """Load a model whose layers another library computes into `memory`; they use our products and attention."""
    ops = cuda_ops(
        model.spec,
        page_size=config.page_size,
        max_positions=gpu_limits(config, model.spec).context,
        dtype=DTYPE,
        kv_dtype=kv_dtype(config),
        kv_scales={},
        device=device,
        arch=arch,
        kernels=kernels,
    )
    decoder: CudaDecoder = model.open(
        ops, positions_of, dtype=DTYPE, device=device, empty=memory.empty, activations=DTYPE,
        fuses=is_decode if device.type == "cuda" else None,
    )  # fmt: skip
    drafting.load(device, memory.empty, blank=blank)
    made = drafting.made(decoder, ops, kernels)

    def reload() -> None:
        model.reload(dtype=DTYPE, device=device, empty=memory.empty)
        drafting.load(device, memory.empty)

    return _Loaded(decoder, ops, reload, drafting.beside(model.parts(DTYPE)), made)


def _make_bank(
    config: EngineConfig, spec: DecoderSpec, ops: Mapping[MixerSpec, CudaOps], limits: Limits
) -> CudaBank | None:
    """Allocate room for adapters, if the engine takes any."""
    if not config.adapter_slots:
        return None
    granules, most = adapter_granules(config, spec, DTYPE, CudaBank.granule_bytes), CudaBank.most_granules
    if granules > most:
        memory = granules * CudaBank.granule_bytes
        raise InvalidParams(
            f"adapter_memory: adapters take at most {most * CudaBank.granule_bytes} bytes of a GPU, got {memory}",
            field="adapter_memory",
            value=memory,
            limit=most * CudaBank.granule_bytes,
        )
    return CudaBank(
        adapter_shape(spec), ops, slots=config.adapter_slots, granules=granules,
        max_rows=_lines(config, limits), max_tokens=limits.batched_tokens, host=host_room(config),
        plain=spec.has_pre_norms_alone and not spec.has_biases,
    )  # fmt: skip


def build_kernels(
    config: EngineConfig,
    spec: DecoderSpec,
    source: Source | ForeignModel,
    device: torch.device,
    draft: Drafting | None = None,
) -> BuiltKernels:
    """Compile every kernel that an engine of `config` may use for weights in the formats of `source`, and of `draft`.

    Raises:
        DeviceUnavailable: A kernel cannot be compiled.
        InvalidParams: An option does not fit the model or the device.
        ModelRejected: The weights cannot be used.
    """
    opened = open_cuda(config, spec, source, device, installed_kernels=False, blank=True, draft=draft)
    try:
        assert isinstance(opened.runner, CudaRunner)
        opened.runner.warm_up(everything=True)
        formats = opened.runner.formats or ("dense",)  # of products that another library computes
    except CannotCompile as error:
        raise DeviceUnavailable(f"device: {error}") from error
    finally:
        opened.runner.close()
    folder = cache().own
    return BuiltKernels(folder, count_kernels(folder), formats)


def checked_arch(config: EngineConfig, spec: DecoderSpec, device: torch.device, kernels: Kernels = KERNELS) -> Arch:
    """Return the abilities of a GPU that can run a model with the options of `config`.

    Raises:
        DeviceUnavailable: The GPU cannot run any model.
        ModelRejected: No kernel computes the attention of a layer.
        InvalidParams: An option does not fit the model or the device.
    """
    arch = _arch(config, device)
    _check_attention(config, spec, arch, kernels)
    for field, value, limit in (("dtype", config.dtype, "bfloat16"), ("page_size", config.page_size, PAGE_SIZE)):
        if value not in ("auto", limit):
            raise InvalidParams(f"{field}: a GPU takes {limit}, got {value}", field=field, value=value, limit=limit)
    return arch


def _arch(config: EngineConfig, device: torch.device) -> Arch:
    """Return the GPU's abilities; refuse a GPU without bfloat16, and an 8-bit cache that it cannot convert."""
    try:
        arch, name = Arch.of(device), torch.cuda.get_device_name(device)
    except ValueError as error:
        raise DeviceUnavailable(f"device: {error}") from None
    if (why := arch.lacks("bf16")) is not None:
        raise DeviceUnavailable(
            f"device: {name} cannot run this engine: {why}; "
            "take a GPU of compute capability 8.0 or newer (A100, RTX 30 series, L4, H100), or device='cpu'"
        )
    if config.kv_dtype == "fp8" and (why := arch.lacks("fp8")) is not None:
        raise InvalidParams(
            f"kv_dtype: fp8 cannot run on {name}: {why}; auto keeps keys and values in 16 bits",
            field="kv_dtype",
            value="fp8",
            limit="auto",
        )
    return arch


def _check_attention(config: EngineConfig, spec: DecoderSpec, arch: Arch, kernels: Kernels) -> None:
    """Refuse a way of decoding that the GPU or the model's heads rule out, and 8 bits for latent vectors."""
    if has_latents(spec):
        _check_latents(config)
        return
    shapes = [
        head_shape(each, page_size=PAGE_SIZE, dtype=DTYPE, kv_dtype=kv_dtype(config)) for each in attention_kinds(spec)
    ]
    if config.speculation is not None:
        check_drafts(config, kernels)
    way = config.decode_attention
    named = [kernel for kernel in kernels.decodes if kernel.name == way]
    reasons = (kernel.refuses(shape, arch) for kernel in named for shape in shapes)
    if (why := next(filter(None, reasons), None)) is not None:
        raise InvalidParams(
            f"decode_attention: {way} cannot run here: {why}; auto picks one that can",
            field="decode_attention",
            value=way,
            limit="auto",
        )


def _check_latents(config: EngineConfig) -> None:
    """Refuse what models with latent attention leave no choice of."""
    told = {
        "kv_dtype": (config.kv_dtype, "latent vectors are kept in 16 bits"),
        "decode_attention": (config.decode_attention, "one kernel alone attends to latent vectors"),
    }
    for field, (value, why) in told.items():
        if value != "auto":
            raise InvalidParams(f"{field}: {why}, which is auto; got {value}", field=field, value=value, limit="auto")


def _free_for_pages(
    config: EngineConfig,
    decoder: CudaDecoder,
    ops: Mapping[MixerSpec, CudaOps],
    limits: Limits,
    device: torch.device,
    kernels: Kernels,
    drafts: OpenDrafts | None,
) -> int:
    """Return the bytes left for pages beside weights, graphs and the largest prefill, which runs once to measure it."""
    small = Capacity(
        num_pages=1,
        page_size=config.page_size,
        max_rows=limits.rows,
        max_batched_tokens=limits.batched_tokens,
        max_context=limits.context,
        vocab_size=decoder.spec.vocab_size,
    )
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    trial = CudaRunner(
        decoder, ops, small, attention=config.decode_attention, device=device, speculation=drafts, kernels=kernels
    )
    try:
        trial.rehearse()
        needed = torch.cuda.max_memory_allocated(device) - before
    finally:
        trial.close()
    lines = _lines(config, limits)
    return bytes_for_pages(torch.cuda.mem_get_info(device)[0], needed, lines, decoder.spec.vocab_size)


def _lines(config: EngineConfig, limits: Limits) -> int:
    """Return how many tokens the largest decode step computes, drafts included."""
    return most_lines(limits.rows, 0 if config.speculation is None else config.speculation.k)
