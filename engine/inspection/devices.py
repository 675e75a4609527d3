"""What a model takes on each device of this machine, by the code that sizes an engine; loads no weights."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import DeviceUnavailable, HeadraceError, InvalidParams
from headrace.engine.inspection.drafts import DraftTensors
from headrace.engine.inspection.facts import DeviceFacts, Fit, Problem
from headrace.engine.model.checkpoint.inventory import Inventory
from headrace.engine.model.checkpoint.weight_parts import stored_parts
from headrace.engine.model.checkpoint.weights import describe_weights
from headrace.engine.model.cpu.sizing import FREE_SHARE, CpuSizes, cpu_dtype, cpu_sizes
from headrace.engine.model.drafting.draft_model import quantised_as_draft
from headrace.engine.model.encoder.opening import describe_encoder, encoder_dtype
from headrace.engine.model.encoder.spec import EncoderSpec
from headrace.engine.model.experts import ExpertsBesideDense, ExpertsFeed
from headrace.engine.model.latent import has_latents, uniform_latents
from headrace.engine.model.network.foreign import ForeignModel
from headrace.engine.model.shared.device import Limits, fit
from headrace.engine.model.shared.find_gpu import find_gpu
from headrace.engine.model.shared.gpu_sizes import DTYPE, GRAPH_BYTES, PAGE_SIZE, bytes_for_pages, gpu_limits, kv_dtype
from headrace.engine.model.shared.gpu_sizes import FREE_SHARE as GPU_FREE_SHARE
from headrace.engine.model.shared.memory import free_host_bytes
from headrace.engine.model.spec import Attention, DecoderSpec, DenseFeed, FeedSpec, PlainFeed
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.stats import WeightPart
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.quantise import Method

__all__ = ["devices_of", "encoder_facts", "facts_of"]

_CONTEXTS = (1024, 4096, 16384, 65536)
_WORKSPACE_BYTES = 512 << 20
_USUAL_FEED = 12  # elements of activations for each of the hidden size, where nothing says how wide a feed is
_WHOLE = "Every request is counted with all its tokens; requests that share a prefix share its pages, so more fit."


def devices_of(config: EngineConfig) -> list[torch.device]:
    """Return the devices of this machine that `config` allows: all of them for "auto".

    Raises:
        DeviceUnavailable: There is no such GPU.
    """
    if config.device == "auto":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(gpus))]
    return [torch.device("cpu") if config.device == "cpu" else find_gpu(config.device)]


def facts_of(
    device: torch.device,
    config: EngineConfig,
    spec: DecoderSpec,
    source: Inventory | ForeignModel | None,
    draft: DraftTensors | None = None,
) -> DeviceFacts:
    """Return what a decoder takes on a device.

    Args:
        device: One of `devices_of`.
        config: The options of an engine.
        spec: The shape of the model.
        source: The model's tensors in its open files, or the model that another library computes; None where files are
            damaged, so that nothing is known of the weights.
        draft: The draft model, whose memory is counted with the model's; draft heads are not.
    """
    if device.type == "cpu":
        return _on_cpu(config, spec, source, draft)
    return _on_gpu(device, config, spec, source, draft)


def encoder_facts(device: torch.device, config: EngineConfig, spec: EncoderSpec, folder: Path) -> DeviceFacts:
    """Return what an encoder takes on a device; it keeps no keys and values."""
    dtype, weights, problem = encoder_dtype(config, device), tuple[WeightPart, ...](), None
    try:
        weights = describe_encoder(spec, folder, dtype)
    except HeadraceError as error:
        problem = Problem.of(error)
    free = free_host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    return _facts(device, dtype, weights, None, free, problem=problem)


def _on_cpu(
    config: EngineConfig, spec: DecoderSpec, source: Inventory | ForeignModel | None, draft: DraftTensors | None
) -> DeviceFacts:
    problem, sizes = None, None
    plain = config.model_copy(update={"kv_dtype": "auto"})
    try:
        sizes = _sizes(config, spec, source)
        sizes = sizes if draft is None or sizes is None else draft.beside(sizes)
    except HeadraceError as error:
        problem = Problem.of(error)
        if config.kv_dtype != "auto":  # a GPU's option: the rest is known
            sizes = _known_sizes(plain, spec, source)
    device, free = torch.device("cpu"), free_host_bytes()
    if sizes is None:
        dtype = cpu_dtype(plain)
        kv = spec.cached_elements * dtype.itemsize
        return _facts(device, dtype, (), kv, free, problem=problem)
    kv, capacity, advice = sizes.page_bytes // config.page_size, None, None
    if source is not None and problem is None:
        capacity, problem, advice = _room(
            sizes.capacity, lambda: _advice(config, free, lambda changed: cpu_sizes(changed, spec, source).weights)
        )
    told = (
        f"Pages take {FREE_SHARE:.1%} of the host memory that is free beside the weights, as an engine without "
        "kv_memory does.",
        _WHOLE,
    )
    return _facts(device, sizes.dtype, sizes.weights, kv, free, capacity, told, problem, advice)


def _sizes(config: EngineConfig, spec: DecoderSpec, source: Inventory | ForeignModel | None) -> CpuSizes | None:
    return None if source is None else cpu_sizes(config, spec, source)


def _known_sizes(config: EngineConfig, spec: DecoderSpec, source: Inventory | ForeignModel | None) -> CpuSizes | None:
    try:
        return _sizes(config, spec, source)
    except HeadraceError:
        return None


def _on_gpu(
    device: torch.device,
    config: EngineConfig,
    spec: DecoderSpec,
    source: Inventory | ForeignModel | None,
    draft: DraftTensors | None,
) -> DeviceFacts:
    free, weights = torch.cuda.mem_get_info(device)[0], tuple[WeightPart, ...]()
    capacity, problem, advice = None, None, None
    page_bytes = _gpu_page_bytes(config, spec)
    try:
        if source is not None:
            weights = _gpu_weights(config, spec, source)
            from headrace.engine.model.cuda.opening import checked_arch  # needs packages for machines with a GPU

            checked_arch(config, spec, device)
            if draft is not None:
                weights += _gpu_draft(config, spec, draft, weights)
                page_bytes += _gpu_page_bytes(draft.draft.config, draft.draft.spec)
    except HeadraceError as error:
        problem = Problem.of(error)
    if source is not None and problem is None:
        beside = free - sum(part.nbytes for part in weights)
        capacity, problem, advice = _room(
            lambda: _gpu_capacity(device, config, spec, beside, page_bytes),
            lambda: _advice(config, free, lambda changed: _gpu_weights(changed, spec, source)),
        )
    told = (
        f"Pages take {GPU_FREE_SHARE:.0%} of what weights, {GRAPH_BYTES >> 30} GiB for graphs and the largest step's "
        "activations leave free; an engine measures the activations, here they are estimated.",
        _WHOLE,
    )
    kv = page_bytes // PAGE_SIZE
    return _facts(device, DTYPE, weights, kv, free, capacity, told, problem, advice)


def _gpu_draft(
    config: EngineConfig, spec: DecoderSpec, draft: DraftTensors, target: tuple[WeightPart, ...]
) -> tuple[WeightPart, ...]:
    """Return the weights of a draft model beside those of its target.

    Raises:
        InvalidParams: A GPU takes no such draft model.
    """
    from headrace.engine.model.cuda.drafting.model_opening import check_draft_model  # needs packages for a GPU

    source, own = draft
    check_draft_model(config, spec, source.spec)
    with quantised_as_draft():
        weights = _gpu_weights(source.config, source.spec, own)
    return source.parts_beside(target, weights)


def _gpu_weights(
    config: EngineConfig, spec: DecoderSpec, source: Inventory | ForeignModel | Literal["random"]
) -> tuple[WeightPart, ...]:
    if isinstance(source, ForeignModel):
        return source.parts(DTYPE)
    weights = describe_weights(
        source,
        spec,
        dtype=DTYPE,
        layout=lambda weight: in_codes(weight, DTYPE),
        quantize=config.quantize,
        quantize_head=config.quantize_head,
    )
    return stored_parts(weights)


def _room(
    measure: Callable[[], Capacity], advise: Callable[[], str]
) -> tuple[Capacity | None, Problem | None, str | None]:
    """Return (what an engine would hold, why it would not open, what would run where memory is short)."""
    try:
        return measure(), None, None
    except DeviceUnavailable as error:
        return None, Problem.of(error), advise()
    except InvalidParams as error:
        return None, Problem.of(error), None


def _advice(config: EngineConfig, free: int, weigh: Callable[[EngineConfig], tuple[WeightPart, ...]]) -> str:
    """Return what would fit in `free` bytes: the first way to quantise whose weights do, or else another model."""
    for method in () if config.quantize or config.model_impl == "transformers" else get_args(Method):
        try:
            weights = weigh(config.model_copy(update={"quantize": method}))
        except HeadraceError:  # the checkpoint is quantised already
            break
        if (needed := sum(part.nbytes for part in weights)) < free:
            return f'With quantize="{method}" the weights take {needed:,} of the {free:,} bytes that are free.'
    return f"A smaller model would run, or a device with more than the {free:,} bytes that are free here."


def _gpu_capacity(
    device: torch.device, config: EngineConfig, spec: DecoderSpec, free: int, page_bytes: int
) -> Capacity:
    """Return what an engine on a GPU holds that has `free` bytes free beside the weights.

    Raises:
        DeviceUnavailable: The GPU has too little memory for the weights.
        InvalidParams: Not even one page fits, or the context is longer than the model was made for.
    """
    limits = gpu_limits(config, spec)
    room = bytes_for_pages(free, _activation_bytes(spec, limits), limits.rows, spec.vocab_size)
    if free < 0 or (room < page_bytes and config.kv_memory is None):
        raise DeviceUnavailable(
            f"device: {device} has too little memory for this model and its pages: beside the weights, {free} bytes",
            field="device",
            value=config.device,
        )
    return fit(config, spec, limits, page_bytes=page_bytes, free_bytes=room)


def _gpu_page_bytes(config: EngineConfig, spec: DecoderSpec) -> int:
    dtype = DTYPE if has_latents(spec) else kv_dtype(config)
    return spec.cached_elements * PAGE_SIZE * dtype.itemsize


def _activation_bytes(spec: DecoderSpec, limits: Limits) -> int:
    """Estimate what the largest step needs: a layer's widest tensors, the logits twice, and workspaces of kernels."""
    feed = max(map(_feed_elements, (layer.feed for layer in spec.layers))) or _USUAL_FEED * spec.hidden_size
    own = 0 if spec.per_layer is None else 3 * spec.num_layers * spec.per_layer.size
    of_token = (3 * spec.hidden_size + own + max(_head_elements(spec), feed)) * DTYPE.itemsize
    logits = 2 * limits.rows * spec.vocab_size * torch.float32.itemsize
    return limits.batched_tokens * of_token + logits + _WORKSPACE_BYTES


def _head_elements(spec: DecoderSpec) -> int:
    """Return the elements that a token has in a mixer at once."""
    if has_latents(spec):
        mixer = uniform_latents(spec)
        own = mixer.plain_dim + mixer.rotated_dim + mixer.value_dim
        return mixer.heads * (own + mixer.cached_dim + mixer.latent_dim)
    kinds = (kind for kind in spec.mixer_kinds if isinstance(kind, Attention))
    return max((2 * kind.heads + 2 * kind.kv_heads) * kind.head_dim for kind in kinds)


def _feed_elements(feed: FeedSpec) -> int:
    """Return the elements that a token has in a feed at once: of each of its experts gate, up and their product."""
    if isinstance(feed, ExpertsFeed):
        shared = 0 if feed.shared is None else feed.shared.size
        dense = feed.dense.size if isinstance(feed, ExpertsBesideDense) else 0
        return 3 * (feed.routing.top_k * feed.size + shared + dense)
    if isinstance(feed, PlainFeed):  # what the activation reads and what it gives
        return 2 * feed.size
    return 3 * feed.size if isinstance(feed, DenseFeed) else 0


def _facts(
    device: torch.device,
    dtype: torch.dtype | None,
    weights: tuple[WeightPart, ...],
    kv_bytes: int | None,
    free: int,
    capacity: Capacity | None = None,
    assumptions: Sequence[str] = (),
    problem: Problem | None = None,
    advice: str | None = None,
) -> DeviceFacts:
    is_cpu = device.type == "cpu"
    return DeviceFacts(
        device=str(device),
        name=_processor() if is_cpu else torch.cuda.get_device_name(device),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        weights=weights,
        weight_bytes=sum(part.nbytes for part in weights),
        kv_bytes_per_token=kv_bytes,
        free_bytes=free,
        pages=0 if capacity is None else capacity.num_pages,
        fits=() if capacity is None else tuple(_fits(capacity)),
        assumptions=() if capacity is None else tuple(assumptions),
        problem=problem,
        advice=advice,
    )


def _fits(capacity: Capacity) -> list[Fit]:
    """Return how many rows of several lengths have pages at the same time."""
    contexts = [*(context for context in _CONTEXTS if context < capacity.max_context), capacity.max_context]
    pages = {context: -(-context // capacity.page_size) for context in contexts}
    return [Fit(context=each, rows=min(capacity.max_rows, capacity.num_pages // pages[each])) for each in contexts]


def _processor() -> str:
    """Return the name of the processor, as Linux knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
