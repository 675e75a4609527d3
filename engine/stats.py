"""`EngineInfo` and `EngineStats` describe an engine to its users; never measures and never changes what runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self, TypeAlias

from headrace.engine.scheduling.plan import Capacity

__all__ = ["EngineInfo", "EngineStats", "ModelPart", "WeightPart"]

ModelPart: TypeAlias = Literal[
    "embedding", "attention", "feed-forward", "experts", "head", "other", "draft head", "draft model"
]
"""Part of a model; `feed-forward` are dense feeds and shared experts, and `other` are norms, biases and routers. A
`draft head` or a `draft model` is what the option `speculation` loads beside the model."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """The weights of one part of a model that lie in one format on the device."""

    part: ModelPart
    format: str
    """Name of the format, such as `bfloat16`, `fp8` or `int4-g128-zeros`; a part with several has an element for each.
    A CPU's kernels may keep a matrix twice: in 4 bits for a few rows and dense for more."""
    nbytes: int
    """Bytes on the device, scales included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Model, device and limits of an open engine."""

    model: str
    """Name of the model."""
    architecture: str
    max_context: int
    """Maximum number of tokens of prompt and completion together."""
    vocab_size: int
    """Width of the logits; token ids are below it."""
    dtype: str
    device: str
    num_pages: int
    page_size: int
    """Tokens in a page."""
    page_bytes: int
    """Bytes of one page, over all layers."""
    max_rows: int
    max_batched_tokens: int
    model_impl: Literal["native", "transformers"] = "native"
    """What computes the layers: headrace's own code, or the module of the transformers library."""
    embedding_size: int = 0
    """Elements of a vector of `embed`; 0 if the model does not embed."""
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    """Values that the model's files recommend for `SamplingParams` that leave them out."""
    weights: tuple[WeightPart, ...] = ()
    """Formats of the weights and their bytes, part by part; a head that shares the embedding's memory has none."""
    draft_model: str = ""
    """Name of the smaller model that drafts (`DraftModel`); empty without one."""
    experts: int = 0
    """Experts of each layer that has any, a shared one not counted; 0 for a model without."""
    experts_per_token: int = 0
    """Experts that a router chooses for each token in such a layer."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on the device."""
        return sum(each.nbytes for each in self.weights)

    @property
    def active_weight_bytes(self) -> int:
        """Bytes of the weights that compute one token: of the experts, those that are chosen, and all others."""
        experts = sum(each.nbytes for each in self.weights if each.part == "experts")
        return self.weight_bytes - experts + experts * self.experts_per_token // max(self.experts, 1)

    @classmethod
    def of(
        cls,
        capacity: Capacity,
        *,
        model: str,
        architecture: str,
        dtype: str,
        device: str,
        page_bytes: int,
        embedding_size: int = 0,
        weights: tuple[WeightPart, ...] = (),
    ) -> Self:
        """Describe a model on a device with the limits of `capacity`."""
        return cls(
            model=model,
            architecture=architecture,
            max_context=capacity.max_context,
            vocab_size=capacity.vocab_size,
            dtype=dtype,
            device=device,
            num_pages=capacity.num_pages,
            page_size=capacity.page_size,
            page_bytes=page_bytes,
            max_rows=capacity.max_rows,
            max_batched_tokens=capacity.max_batched_tokens,
            embedding_size=embedding_size,
            weights=weights,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Snapshot of an engine at one moment."""

    waiting: int
    running: int
    paused: int
    swapped: int
    """Requests that wait or pause with their pages in host memory."""
    pages: int
    """Pages in the pool."""
    pages_held: int
    """Pages that requests hold."""
    pages_cached: int
    """Unreferenced pages kept for their prefix."""
    host_pages: int
    """Pages that fit in host memory."""
    host_pages_used: int
    """Pages in host memory that swapped requests hold, or that are kept for their prefix."""
    live_tokens: int
    """Distinct tokens in held pages."""
    prompt_tokens: int
    """Prompt tokens of all admitted requests."""
    cached_tokens: int
    """Prompt tokens that the prefix cache spared."""
    generated_tokens: int
    preemptions: int
    swaps: int
    """Preemptions whose pages went to host memory, to come back."""
    memory_retries: int
    """Steps that ran out of memory and whose requests were tried again in smaller steps."""
    speculation_depth: int
    """Most drafts that a request has in one step, as the latest step with decodes chose; 0 before there was one, and
    without speculation."""
    draft_runs: int
    """Runs of drafts that steps verified: one for each request and step that had any."""
    drafted_tokens: int
    """Drafts in these runs."""
    accepted_tokens: int
    """Drafts that were right, and so became tokens."""
    drafted_by_position: tuple[int, ...]
    """Verified drafts by their position in the run, from the first on: steps differ in how many drafts they verify."""
    accepted_by_position: tuple[int, ...]
    """Right drafts by their position in the run; a draft behind a wrong one is not right."""
    sleep_level: int
    """Level of sleep: 0 while the engine is awake; above 0, requests wait and there are no pages."""
    steps: int
    """Committed steps; grows while anything runs, so that a readiness check can see a stall."""
    steps_in_flight: int
    tokens_per_second: float
    """Generated tokens per second, over the last seconds."""
    step_seconds: float
    """Seconds from commit to commit, averaged over the last seconds."""
    busy_seconds: float
    """Seconds for which a step was in flight since the engine opened; their growth is the device's utilisation."""

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a run of drafts yields on average, with the one that every step gives; 1 without any run."""
        return 1.0 + self.accepted_tokens / max(1, self.draft_runs)
