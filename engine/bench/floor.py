"""The least that a model must move and compute, and the speed of this machine at either; opens no engine.

A decode step reads every weight once (the output head too, the embedding table only where it is the head) and the keys
and values of every position, and writes one position a row. A prompt costs the products' arithmetic and its causal
attention. No step can be shorter than its bytes at the speed of a copy, or its arithmetic at the speed of one large
product, both measured here. Of experts, those are read that a step was seen to choose (chosen.py). Where none was seen,
they are those that independent choices, all equally likely, may be expected to hit: of X experts, N tokens that choose
k each leave X (1 - k / X)^N unread. Launches, norms, sampling and the embedding rows are left out: a floor, not an
estimate. On CPUs, where a write costs a read as well, a step that only reads can beat a copy by a third.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from headrace.engine import EngineInfo
from headrace.engine.bench.shapes import spec_of
from headrace.engine.model.checkpoint.inventory import Inventory
from headrace.engine.model.checkpoint.plan import all_parts
from headrace.engine.model.checkpoint.weights import open_files
from headrace.engine.model.experts import routing_of
from headrace.engine.model.latent import has_latents, uniform_latents
from headrace.engine.model.spec import Attention, DecoderSpec
from headrace.ops.formats import Dense
from headrace.ops.quantise import Method, format_for

__all__ = ["Cost", "Speed", "cost_of", "measure", "model_cost", "stored_bytes"]

_COPIED = {"cuda": 1 << 30, "cpu": 1 << 28}
_PRODUCT = {"cuda": 8192, "cpu": 1024}
_REPEATS = {"cuda": 30, "cpu": 7}


class Speed(NamedTuple):
    """Speeds that the machine reached in this run."""

    bytes_per_second: float
    """Bytes a second of a large copy, read and write counted."""
    flops_per_second: float
    """Operations a second of one large product in bfloat16."""

    def describe(self) -> dict[str, str]:
        """Return the speeds for the conditions of a table."""
        return {
            "copy": f"{self.bytes_per_second / 1e12:.3f} TB/s",
            "product": f"{self.flops_per_second / 1e12:.2f} TFLOP/s",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes and arithmetic of one model."""

    weight_bytes: int
    """Bytes of weights, which every step reads but for experts that nobody chooses."""
    kv_bytes: float
    """Bytes of keys and values of one position, over all layers."""
    linear_params: int
    """Weights of the layers' products, of all experts."""
    head_params: int
    """Weights of the output head, which only sampled positions pass."""
    attention_flops: int
    """Operations of one token for each position that it attends to, over all layers."""
    windows: tuple[int | None, ...]
    """Attention window of each layer, in positions; None for all."""
    expert_bytes: int = 0
    """Bytes of the experts' weights among `weight_bytes`."""
    expert_params: int = 0
    """Weights of the experts' products among `linear_params`."""
    chosen: float = 1.0
    """Share of the experts that a token chooses."""
    experts: int = 0
    """Experts of a layer that tokens choose from; 0 without experts."""

    def read_share(self, tokens: int) -> float:
        """Return the share of the experts that so many tokens may be expected to choose."""
        return 1.0 - (1.0 - self.chosen) ** tokens

    def expected_experts(self, tokens: int) -> float:
        """Return the distinct experts of a layer that so many tokens may be expected to choose."""
        return self.experts * self.read_share(tokens)

    def expert_bytes_read(self, tokens: int, experts: float | None = None) -> float:
        """Return the bytes of experts that a step reads.

        Args:
            tokens: Tokens of the step.
            experts: Distinct experts that it chooses, on average over the layers with experts; None for as many as may
                be expected.
        """
        return self.expert_bytes * (self.read_share(tokens) if experts is None else experts / self.experts)

    def _read(self, tokens: int, experts: float | None = None) -> float:
        """Return the bytes of weights that a step reads; arguments are those of `expert_bytes_read`."""
        return self.weight_bytes - self.expert_bytes + self.expert_bytes_read(tokens, experts)

    @property
    def _passed(self) -> float:
        """Weights of the products that each token passes."""
        return self.linear_params - self.expert_params * (1.0 - self.chosen)

    def _seen(self, context: int) -> float:
        """Return the positions that a token at the end of `context` attends to, on average over the layers."""
        seen = [context if window is None else min(context, window) for window in self.windows]
        return sum(seen) / len(seen)

    def decode_bytes(self, contexts: Sequence[int], experts: float | None = None) -> float:
        """Return the bytes that one decode step reads and writes; arguments are those of `decode_seconds`."""
        seen = sum(map(self._seen, contexts))
        return self._read(len(contexts), experts) + self.kv_bytes * (seen + len(contexts))

    def decode_seconds(self, contexts: Sequence[int], speed: Speed, experts: float | None = None) -> float:
        """Return the floor of one decode step.

        Args:
            contexts: Tokens of each row, the new one included.
            speed: Speeds of the machine.
            experts: Distinct experts that the step was seen to choose, on average over the layers with experts; None
                for as many as may be expected.
        """
        seen = sum(map(self._seen, contexts))
        flops = 2 * (self._passed + self.head_params) * len(contexts) + self.attention_flops * seen
        return max(self.decode_bytes(contexts, experts) / speed.bytes_per_second, flops / speed.flops_per_second)

    def prefill_seconds(self, prompts: Sequence[int], speed: Speed) -> float:
        """Return the floor of computing prompts of `prompts` tokens each, all in one step."""
        flops = 0.0
        for tokens in prompts:
            flops += 2 * (self._passed * tokens + self.head_params)
            flops += (
                self.attention_flops
                * sum(self._attended(tokens, window) for window in self.windows)
                / len(self.windows)
            )
        return max(flops / speed.flops_per_second, self._read(sum(prompts)) / speed.bytes_per_second)

    @staticmethod
    def _attended(tokens: int, window: int | None) -> float:
        """Return the pairs of positions in the causal attention of a prompt."""
        if window is None or window >= tokens:
            return tokens * (tokens + 1) / 2
        return window * (window + 1) / 2 + (tokens - window) * window

    def workload_seconds(self, prompts: Sequence[int], outputs: Sequence[int], speed: Speed) -> float:
        """Return the floor of requests that start together, each decoding to its end: no order can be faster."""
        seconds = self.prefill_seconds(prompts, speed)
        for step in range(1, max(outputs)):
            contexts = [prompt + step for prompt, output in zip(prompts, outputs, strict=True) if output > step]
            seconds += self.decode_seconds(contexts, speed)
        return seconds


def cost_of(spec: DecoderSpec, *, weight_bytes: int, kv_size: float, expert_bytes: int = 0) -> Cost:
    """Return the cost of a model with `weight_bytes` of weights to read and `kv_size` bytes a cached element.

    Of the weights, `expert_bytes` are of experts.
    """
    routing = routing_of(spec)
    products = [(part, math.prod(shape)) for part, shape in all_parts(spec) if len(shape) == 2]
    linear = sum(size for part, size in products if part.layer is not None)
    head = spec.hidden_size * spec.vocab_size
    return Cost(
        weight_bytes=weight_bytes,
        kv_bytes=spec.cached_elements * kv_size,
        linear_params=linear,
        head_params=head,
        attention_flops=_attention_flops(spec),
        windows=spec.windows,
        expert_bytes=expert_bytes,
        expert_params=sum(size for part, size in products if part.expert is not None),
        chosen=1.0 if routing is None else routing.top_k / routing.experts,
        experts=0 if routing is None else routing.experts,
    )


def _attention_flops(spec: DecoderSpec) -> int:
    """Return the operations of one query and one key with its value, in all heads of all layers."""
    if has_latents(spec):
        mixer = uniform_latents(spec)
        return 2 * spec.num_layers * mixer.heads * (mixer.cached_dim + mixer.latent_dim)
    mixers = (layer.mixer for layer in spec.layers)
    return sum(4 * mixer.heads * mixer.head_dim for mixer in mixers if isinstance(mixer, Attention))


def model_cost(path: str, info: EngineInfo, quantize: Method | None = None, *, quantize_head: bool = False) -> Cost:
    """Return the cost of the model at `path` as the engine opened it, quantised or as it is stored.

    Raises:
        ModelRejected: The file is gone or not a model.
    """
    spec = spec_of(path)
    positions = spec.cached_elements
    weights, experts = stored_bytes(path, spec, getattr(torch, info.dtype), quantize, quantize_head=quantize_head)
    kv_size = info.page_bytes / info.page_size / positions
    return cost_of(spec, weight_bytes=weights, kv_size=kv_size, expert_bytes=experts)


def stored_bytes(
    path: str | None,
    spec: DecoderSpec,
    dtype: torch.dtype,
    quantize: Method | None = None,
    *,
    quantize_head: bool = False,
) -> tuple[int, int]:
    """Return the bytes of all weights that a decode step may read, and those of experts among them.

    Each part of each weight counts as it is stored.

    Args:
        path: A `.gguf` file or a model folder. Where a folder has no weights, or for None, all are dense.
        spec: The model's shape.
        dtype: The dtype of weights that the checkpoint holds as plain numbers; others count as in the files.
        quantize: Way in which plain matrices of the layers are quantised.
        quantize_head: Whether the output head is quantised so, too.

    Raises:
        ModelRejected: The files are gone, or not those of the model.
    """
    with ExitStack() as opened:
        found = None
        if path is not None and (path.endswith(".gguf") or any(Path(path).glob("*.safetensors"))):
            found = Inventory(open_files(path, opened), spec)
        total = experts = 0
        for part, shape in all_parts(spec):
            if len(shape) == 1 or part.role == "positions.weight":
                continue
            if part.role == "embedding.weight" and not spec.tied_head:
                continue
            if found is None or found.is_plain(part):
                is_dense = quantize is None or (part.layer is None and not quantize_head)
                format = None if quantize is None or is_dense else format_for(quantize, shape[-1])
                size = sum(each.nbytes for each in (format or Dense(dtype)).parts(shape).values())
            else:
                size = found.of(part).nbytes(found.files)
            total += size
            experts += 0 if part.expert is None else size
        return total, experts


def measure(device: str) -> Speed:
    """Time a copy and a bfloat16 product on `device` ("cuda" or "cpu") and free what they took."""
    kind = torch.device(device).type
    speed = Speed(
        2 * _COPIED[kind] / _copy_seconds(device, kind), 2 * _PRODUCT[kind] ** 3 / _product_seconds(device, kind)
    )
    if kind == "cuda":
        torch.cuda.empty_cache()
    return speed


def _copy_seconds(device: str, kind: str) -> float:
    source = torch.empty(_COPIED[kind] // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    return _seconds(lambda: target.copy_(source), kind)


def _product_seconds(device: str, kind: str) -> float:
    side = _PRODUCT[kind]
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return _seconds(lambda: torch.mm(left, right, out=out), kind)


def _seconds(work: Callable[[], object], kind: str) -> float:
    """Return the median seconds of `work`, the first calls left out."""
    timed = _timed_on_gpu if kind == "cuda" else _timed_on_host
    for _ in range(3):
        work()
    return median(timed(work) for _ in range(_REPEATS[kind]))


def _timed_on_gpu(work: Callable[[], object]) -> float:
    event: Any = torch.cuda.Event  # its constructor has no types
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _timed_on_host(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
