"""Keyword options of `Engine`, `LLM`, `EngineConfig` and `SamplingParams`, for editors and type checkers; checks none.

A key has the type that callers may write ("2GiB" for bytes, one stop string for a tuple of them). The models in
config.py and params.py define its final type and its allowed values. Tests keep keys, defaults and fields equal.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypedDict

from headrace.engine.response_format import ResponseFormat
from headrace.engine.scheduling.policy import Policy
from headrace.engine.speculation import Speculation

__all__ = ["ConfigOptions", "EngineOptions", "SamplingOptions", "VllmNames"]


class VllmNames(TypedDict, total=False):
    """vLLM's names of options, also accepted by the command line; each stands for an option of headrace."""

    block_size: int
    """Another name of `page_size`."""
    enable_prefix_caching: bool
    """Another name of `prefix_cache`."""
    kv_cache_dtype: Literal["auto", "fp8"]
    """Another name of `kv_dtype`."""
    kv_cache_memory_bytes: int | str | None
    """Another name of `kv_memory`."""
    max_lora_rank: int
    """Another name of `max_adapter_rank`."""
    max_loras: int
    """Another name of `adapter_slots`."""
    max_model_len: int | None
    """Another name of `max_context`."""
    max_num_batched_tokens: int | None
    """Another name of `max_batched_tokens`."""
    max_num_seqs: int | None
    """Another name of `max_rows`."""
    scheduling_policy: str | Mapping[str, Any] | Policy
    """Another name of `policy`."""


class EngineOptions(VllmNames, total=False):
    """Options of `Engine` besides the model."""

    file: str | None
    """Name or pattern, such as "*Q4_K_M.gguf", of the one GGUF file to open in the model's folder or hub repository;
    upper and lower case count as equal. Default: None."""
    device: str
    """`auto`, `cpu`, `cuda` or `cuda:N`; `auto` takes a GPU if there is one, and the CPU otherwise. Default: "auto"."""
    dtype: Literal["auto", "float32", "bfloat16"]
    """Arithmetic of the model. `float32` uses no reduced precision anywhere; `auto` is the fastest for the device.
    Default: "auto"."""
    load_format: Literal["auto", "random"]
    """`random` needs only a config.json (a folder, or the file itself) and invents weights: for benchmarks.
    Default: "auto"."""
    model_impl: Literal["auto", "native", "transformers"]
    """`native` is headrace's own code of the model's family; `transformers` lets the module of the transformers library
    compute the layers, over headrace's pages and in its batches, which is slower and knows more families; `auto`
    is native where there is such a family. Default: "auto"."""
    quantize: Literal["fp8", "int8", "int4"] | None
    """Quantise the matrices of the layers while they are loaded, one after the other: `fp8` and `int8` with a scale for
    each output, `int4` in groups of 128. Embeddings, norms and the output head stay as they are; a checkpoint that is
    quantised already is refused. Default: None."""
    quantize_head: bool
    """Quantise the output head, too, as `quantize` says. A head that is tied to the embedding becomes a matrix of its
    own beside the embedding, which stays as it is. A GPU unpacks a quantised head slice by slice in steps of
    more than a few rows, which spares memory and costs time. Default: False."""
    allow_download: bool
    """Fetch a hub id that is not on this machine from the hub. Default: False."""
    generation_defaults: Literal["model", "none"]
    """`model`: what a request's `SamplingParams` leave out of temperature, top-k, top-p, min-p and repetition penalty
    is what the model's files recommend; `none`: the defaults of `SamplingParams`. Default: "model"."""
    kv_memory: int | str | None
    """Bytes of keys and values, or text such as "2GiB"; None takes a share of what is free. Default: None."""
    kv_dtype: Literal["auto", "fp8"]
    """Type of keys and values: `auto` is `dtype`; `fp8` (e4m3, on GPUs) halves their memory and traffic.
    Default: "auto"."""
    swap_memory: int | str
    """Bytes of host memory, or text, for pages that the device has no room for; 0 computes them again. Default: 0."""
    page_size: int
    """Tokens in a page. Default: 16."""
    max_batched_tokens: int | None
    """Tokens in one step, prefill and decode together; None is chosen for the device. Default: None."""
    max_rows: int | None
    """Requests in one step; None is chosen for the device. Default: None."""
    max_context: int | None
    """Tokens of prompt and completion together; None is what the model was made for. Default: None."""
    max_unread_tokens: int
    """Tokens that a reader may leave unread before its request pauses. Default: 512."""
    prefix_cache: bool
    """Keep the pages of past prompts and completions for requests that start the same way. Default: True."""
    speculation: str | Speculation | None
    """How to guess tokens, several of which a step then verifies at once, such as `Ngram(k=4)`, "ngram:k=4",
    `DraftModel("path/to/model")` or `Eagle("path/to/head")`; answers stay the same. docs/speculation.md has
    more. Default: None."""
    policy: str | Mapping[str, Any] | Policy
    """Who is served first: a name, `{"name": "fair_share", "weights": {"a": 2.0}}`, or a `Policy` of the application's
    own, for one engine. docs/scheduling.md describes each. Default: "first_come"."""
    itl_target_ms: float | None
    """Milliseconds between tokens to aim at: prompts get what that leaves of a step; None gives them all of it.
    Default: None."""
    launch_ahead: int | None
    """Steps that may be launched and not yet committed; a cancelled request returns its pages within as many. None is
    2, and on a GPU up to 8 that take 5 ms together, as long as every request that runs goes on and nobody waits.
    Default: None."""
    decode_attention: Literal["auto", "fused", "even", "fa2", "xqa", "split"]
    """Kernel of decode attention on a GPU; `auto` chooses by batch and context, as measured. Default: "auto"."""
    kernel_cache: str | os.PathLike[str] | None
    """Folder that keeps compiled GPU kernels; None is one in the user's cache. docs/kernels.md describes it.
    Default: None."""
    cpu_threads: int | None
    """Threads of a CPU step; None takes one less than torch would, so that a core is left to the event loop.
    Default: None."""
    adapter_slots: int
    """Adapters on the device at a time; 0 takes none. docs/adapters.md describes all options for adapters.
    Default: 0."""
    adapter_memory: int | str | None
    """Bytes of the device, or text, for adapters; None is room for as many of rank 16 on every module as there are
    slots, and for one of `max_adapter_rank`. Default: None."""
    adapter_host_memory: int | str
    """Bytes of host memory, or text, for adapters that are loaded; those used least recently are read from disk again.
    For a GPU they are taken when the engine opens. Default: 2147483648."""
    max_adapters: int
    """Adapters that may be loaded. Default: 1024."""
    max_adapter_rank: int
    """Largest rank of a module's update. Default: 64."""
    max_step_adapters: int | None
    """Different adapters in one step; None is as many as there are slots. Default: None."""
    max_step_adapter_memory: int | str | None
    """Bytes, or text, of different adapters in one step, which each step reads; one adapter alone may be larger.
    Default: None."""
    hook_seconds: float
    """Seconds that one call of a hook may take before its stream fails. Default: 1.0."""
    hang_seconds: float | None
    """Seconds for which a step, or a change of memory, may be waited for (`sleep` and `wake` for ten times as long);
    what takes longer ends the engine with `EngineCrashed`. Default: 300.0."""
    seed: int
    """Seed of requests that name none: the same requests in the same order give the same tokens. Default: 0."""


class _Model(TypedDict):
    model: str | os.PathLike[str]
    """A folder in Hugging Face layout, a `.gguf` file, or a hub id such as "owner/name" that is in the hub's cache on
    this machine or, with `allow_download`, at the hub."""


class ConfigOptions(EngineOptions, _Model):
    """Options of `EngineConfig`: the model and the options of `Engine`."""


class SamplingOptions(TypedDict, total=False):
    """Options of `SamplingParams`."""

    n: int
    """Independent choices for the prompt; its pages are computed once and shared. Default: 1."""
    best_of: int | None
    """Generate so many choices and return the `n` of the highest mean log-probability; None is `n`. Not streamed.
    Default: None."""
    beam_width: int | None
    """Search for the likeliest sequences with so many beams instead of sampling; they come when the search is over.
    Default: None."""
    length_penalty: float
    """A beam's score is the sum of its log-probabilities divided by its length to this power. Default: 1.0."""
    early_stopping: bool | Literal["never"]
    """End a search at the first `beam_width` ended sequences; False when the best beam is unlikely to end better than
    the worst of them; "never" when no beam can. Default: False."""
    temperature: float
    """0 is greedy. Sampling divides the logits by it. Left out, it is what the model's files recommend, or the default
    (see `generation_defaults` of `Engine`). Default: 1.0."""
    top_k: int
    """Sample among this many most likely tokens; 0 or -1 is all of them. Left out, as `temperature`. Default: 0."""
    top_p: float
    """Sample among the fewest most likely tokens whose probabilities reach this sum (after `top_k`). Left out, as
    `temperature`. Default: 1.0."""
    min_p: float
    """Drop tokens less likely than this fraction of the most likely one. Left out, as `temperature`. Default: 0.0."""
    presence_penalty: float
    """Subtracted from the logit of each token that the completion holds. Default: 0.0."""
    frequency_penalty: float
    """Subtracted from a token's logit once for each time that the completion holds it. Default: 0.0."""
    repetition_penalty: float
    """Divides the positive logits, and multiplies the negative ones, of tokens in the prompt or the completion. Left
    out, as `temperature`. Default: 1.0."""
    logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]
    """Added to the logits of these token ids; the keys of a mapping may be digits, as in JSON. Default: ()."""
    allowed_token_ids: Collection[int] | None
    """The only tokens that may be chosen; one that ends the choice must be among them to do so. None is all.
    Default: None."""
    forbidden_token_ids: Collection[int]
    """Tokens that are never chosen. Default: ()."""
    bad_words: str | Sequence[str]
    """Strings whose tokens, with a space before them or without, are never completed in this order; together of at most
    1024 characters. Default: ()."""
    response_format: ResponseFormat | Mapping[str, Any] | None
    """What the text must be: JSON, by a schema or not, or of a grammar. It is that where the choice ends by itself.
    Default: None."""
    seed: int | None
    """Seed of the noise, which then is the same whatever else runs. None draws one from the engine's seed.
    Default: None."""
    deterministic: bool
    """Same seed, same tokens and log-probabilities to the last bit, whatever else runs, is cached or was preempted; it
    computes in steps of its own, which is slower for it and for whoever waits meanwhile. Default: False."""
    speculate: bool
    """Let steps verify guesses of the tokens to come, if the engine has `speculation`. It changes no token.
    Default: True."""
    max_tokens: int | None
    """Tokens of a choice at most; None runs to the limit of the context or of the page pool and ends with `length`.
    Default: None."""
    min_tokens: int
    """Until the choice has so many tokens nothing that would stop it is chosen, and no stop string is looked for.
    Default: 0."""
    stop: str | Sequence[str]
    """Strings that end the choice; the text is cut just before the first of them. Default: ()."""
    stop_token_ids: Collection[int]
    """Token ids that end the choice, besides the model's own end-of-sequence ids. Default: ()."""
    include_stop_str_in_output: bool
    """Keep the stop string, or the text of the stop token, at the end of the choice's text. Default: False."""
    ignore_eos: bool
    """Run past the model's end-of-sequence ids. Default: False."""
    skip_special_tokens: bool
    """Leave control tokens out of the text; their ids are in the items either way. Default: True."""
    spaces_between_special_tokens: bool
    """Set special tokens that are shown off from their neighbours by a space. Default: False."""
    logprobs: int | None
    """Log-probabilities of each token and of so many likeliest ones, before any option here changed them.
    Default: None."""
    prompt_logprobs: int | None
    """The same as `logprobs` for each token of the prompt but the first. Default: None."""
