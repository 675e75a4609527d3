"""Names of options in other tools, with what headrace calls them or advises instead; the only table of them.

A table maps a name either to an option here (a bare word) or to a sentence of advice. Names in `SYNONYMS` are accepted
as they are, in Python and as flags of the command line; all others are answered with the option or the advice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from headrace.engine.errors import InvalidParams

__all__ = [
    "ENGINE_NAMES",
    "LOAD_ADAPTER",
    "REQUEST",
    "SAMPLING_NAMES",
    "SYNONYMS",
    "advice_on",
    "all_names",
    "with_own_names",
]

Names = Mapping[str, str]

SYNONYMS: Final[Names] = {
    "block_size": "page_size",
    "enable_prefix_caching": "prefix_cache",
    "kv_cache_dtype": "kv_dtype",
    "kv_cache_memory_bytes": "kv_memory",
    "max_lora_rank": "max_adapter_rank",
    "max_loras": "adapter_slots",
    "max_model_len": "max_context",
    "max_num_batched_tokens": "max_batched_tokens",
    "max_num_seqs": "max_rows",
    "scheduling_policy": "policy",
}
"""vLLM's name of an option of `EngineConfig` -> the option, if both take the same values."""

_SAMPLING: Final = "it is an option of SamplingParams"
REQUEST: Final = "it is an argument of stream and generate"
_SERVER: Final = "it is an option of headrace serve and of ServerSettings"
_ALWAYS: Final = "it is always on; leave it out"
_ONE_DEVICE: Final = "a model runs on one device, which device names; leave it out"
_KV_SHARE: Final = 'say kv_memory="40GiB" instead; left out, it is a share of the memory that is free'
_NO_CODE: Final = "code of a model is never run; leave it out"
_FROM_FILES: Final = "it is read from the model's files; leave it out"
_NOT_BUILT: Final = "it is not built; leave it out"
LOAD_ADAPTER: Final = "give adapter_slots, and load the adapter with engine.adapters.load"
_FORMAT: Final = "say response_format=ResponseFormat.json_schema(...), .regex(...), .lark(...) or .choice(...)"

ENGINE_NAMES: Final[Mapping[str, Names]] = {
    "vLLM": {
        "gpu_memory_utilization": _KV_SHARE,
        "swap_space": 'say swap_memory="4GiB" instead',
        "enforce_eager": "a GPU runs CUDA graphs and the CPU runs none; leave it out",
        "enable_chunked_prefill": _ALWAYS,
        "max_seq_len_to_capture": "graphs are captured for every length; leave it out",
        "num_gpu_blocks_override": 'say kv_memory="40GiB" instead',
        "enable_lora": "say how many with adapter_slots",
        "max_cpu_loras": 'say adapter_host_memory="2GiB" instead; max_adapters bounds how many are loaded',
        "lora_modules": LOAD_ADAPTER,
        "generation_config": 'say generation_defaults="model" or "none"',
        "override_generation_config": "give the values to SamplingParams",
        "tensor_parallel_size": _ONE_DEVICE,
        "pipeline_parallel_size": _ONE_DEVICE,
        "data_parallel_size": _ONE_DEVICE,
        "distributed_executor_backend": _ONE_DEVICE,
        "cpu_offload_gb": _NOT_BUILT,
        "speculative_config": 'say speculation="ngram:k=4", "draft:MODEL,k=3" or "eagle:FOLDER,k=3"',
        "limit_mm_per_prompt": _NOT_BUILT,
        "compilation_config": _NOT_BUILT,
        "quantization": 'it is read from the model\'s files; quantize="fp8", "int8" or "int4" quantises others',
        "tokenizer": _FROM_FILES,
        "tokenizer_mode": _FROM_FILES,
        "hf_overrides": _FROM_FILES,
        "rope_scaling": _FROM_FILES,
        "chat_template": _FROM_FILES,
        "trust_remote_code": _NO_CODE,
        "revision": "the hub's main branch is opened; fetch another with huggingface_hub and give its folder",
        "download_dir": "the hub's cache is used; set HF_HOME",
        "hf_token": "set HF_TOKEN",
        "disable_log_stats": "engine.stats() gives figures when asked; leave it out",
        "served_model_name": _SERVER,
        "api_key": _SERVER,
        "host": _SERVER,
        "port": _SERVER,
        "enable_auto_tool_choice": "tools are read where the chat template teaches them; leave it out",
        "disable_log_requests": "say --log-format off",
    },
    "SGLang": {
        "context_length": "max_context",
        "mem_fraction_static": _KV_SHARE,
        "max_running_requests": "max_rows",
        "chunked_prefill_size": "max_batched_tokens",
        "disable_radix_cache": "say prefix_cache=False",
        "schedule_policy": "policy",
        "sampling_defaults": 'say generation_defaults="model" or "none"',
        "model_path": "model",
        "tp_size": _ONE_DEVICE,
    },
    "TensorRT-LLM": {
        "max_batch_size": "max_rows",
        "max_num_tokens": "max_batched_tokens",
        "max_seq_len": "max_context",
        "free_gpu_memory_fraction": _KV_SHARE,
    },
    "llama-cpp-python": {
        "n_ctx": "max_context",
        "ctx_size": "max_context",
        "n_batch": "max_batched_tokens",
        "n_ubatch": "max_batched_tokens",
        "n_parallel": "max_rows",
        "n_seq_max": "max_rows",
        "n_threads": "cpu_threads",
        "n_threads_batch": "cpu_threads",
        "n_gpu_layers": 'all layers are on one device: say device="cuda" or device="cpu"',
        "main_gpu": 'say device="cuda:0"',
        "split_mode": _ONE_DEVICE,
        "tensor_split": _ONE_DEVICE,
        "type_k": "kv_dtype",
        "type_v": "kv_dtype",
        "flash_attn": _ALWAYS,
        "offload_kqv": "keys and values are where the model is; leave it out",
        "use_mmap": "weights are read once and packed; leave it out",
        "use_mlock": "weights are read once and packed; leave it out",
        "lora_path": LOAD_ADAPTER,
        "chat_format": _FROM_FILES,
        "rope_freq_base": _FROM_FILES,
        "rope_freq_scale": _FROM_FILES,
        "logits_all": "say SamplingParams(prompt_logprobs=0)",
        "embedding": "every model that can embed does: await engine.embed(texts)",
        "draft_model": 'say speculation="ngram:k=4", or "draft:MODEL,k=3" for a smaller model',
        "verbose": "headrace logs to the logger headrace; leave it out",
        "filename": "file",
        "repo_id": "model",
        "hf_repo": "model",
        "hf_file": "file",
    },
    "transformers": {
        "torch_dtype": "dtype",
        "device_map": "device",
        "attn_implementation": "decode_attention",
        "load_in_4bit": "4-bit weights run from GGUF files; leave it out",
        "load_in_8bit": "8-bit weights run from GGUF files; leave it out",
        "local_files_only": "nothing is fetched unless allow_download=True; leave it out",
        "pretrained_model_name_or_path": "model",
    },
    "headrace": {
        **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop"), _SAMPLING),
        **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _SAMPLING),
        **dict.fromkeys(("adapter", "tenant", "priority", "deadline", "stop_when"), REQUEST),
        **dict.fromkeys(("tool_call_parser", "adapter_folder", "adapters"), _SERVER),
    },
}
"""Name of a tool -> its names of options -> the option of `EngineConfig`, or advice."""

SAMPLING_NAMES: Final[Mapping[str, Names]] = {
    "OpenAI": {
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "top_logprobs": "logprobs",
        "stream": "engine.stream gives tokens as they come, engine.generate the whole answer",
        "echo": "say prompt_logprobs=0 for the prompt's tokens",
        "user": "say tenant= to stream and generate",
        "messages": "give the chat to stream or generate as the prompt",
        "prompt": "give it to stream or generate",
        "model": "the engine has one model; adapter= of stream and generate names an adapter",
        "tools": "engine.tokenize(chat, tools=...) offers tools; docs/embedding.md shows the rest",
        "tool_choice": _FORMAT,
        "suffix": _NOT_BUILT,
        "reasoning_effort": "the chat template reads it: engine.tokenize(chat, template_kwargs={...}), or the server",
    },
    "Anthropic": {"max_tokens_to_sample": "max_tokens", "stop_sequences": "stop"},
    "vLLM": {
        "use_beam_search": "beam_width",
        "guided_decoding": _FORMAT,
        "structured_outputs": _FORMAT,
        "guided_json": _FORMAT,
        "guided_regex": _FORMAT,
        "guided_choice": _FORMAT,
        "guided_grammar": _FORMAT,
        "logits_processors": "give logits_processor= to stream or generate",
        "detokenize": "texts come as they are read; leave it out",
        "output_kind": "engine.stream gives tokens, stream.chunks() what came meanwhile, engine.generate it all",
        "truncate_prompt_tokens": "cut the token ids that you give as the prompt",
    },
    "SGLang": {"json_schema": _FORMAT, "regex": _FORMAT, "ebnf": _FORMAT, "min_new_tokens": "min_tokens"},
    "llama-cpp-python": {
        "temp": "temperature",
        "n_predict": "max_tokens",
        "repeat_penalty": "repetition_penalty",
        "present_penalty": "presence_penalty",
        "grammar": _FORMAT,
        "typical_p": _NOT_BUILT,
        "tfs_z": _NOT_BUILT,
        "mirostat": _NOT_BUILT,
        "mirostat_mode": _NOT_BUILT,
        "mirostat_tau": _NOT_BUILT,
        "mirostat_eta": _NOT_BUILT,
        "dry_multiplier": _NOT_BUILT,
        "xtc_probability": _NOT_BUILT,
    },
    "transformers": {
        "max_new_tokens": "max_tokens",
        "max_length": "max_tokens",
        "num_return_sequences": "n",
        "num_beams": "beam_width",
        "do_sample": "say temperature=0 for the likeliest tokens",
        "eos_token_id": "stop_token_ids",
        "stop_strings": "stop",
        "bad_words_ids": "bad_words",
        "suppress_tokens": "forbidden_token_ids",
        "sequence_bias": "logit_bias",
        "no_repeat_ngram_size": _NOT_BUILT,
    },
    "headrace": {
        **dict.fromkeys(("adapter", "tenant", "cache_salt", "priority"), REQUEST),
        **dict.fromkeys(("deadline", "stop_when", "logits_processor"), REQUEST),
        **dict.fromkeys(("max_context", "kv_memory", "device", "max_rows", "dtype"), "it is an option of Engine"),
    },
}
"""Name of a tool -> its names of options -> the option of `SamplingParams`, or advice."""


def all_names(table: Mapping[str, Names]) -> Names:
    """Return the names of all tools in `table`."""
    return {name: meant for names in table.values() for name, meant in names.items()}


def advice_on(name: str, options: Iterable[str], known: Names) -> str:
    """Return advice for `name`, which is no option: by its meaning, else by its spelling, else an empty string.

    Args:
        name: Name as it was given.
        options: Names of the options that exist.
        known: Names of other tools, each with the option or a sentence.
    """
    from difflib import get_close_matches  # not needed elsewhere

    options = list(options)
    asked = name.lower().replace("-", "_")
    if asked not in known and asked not in options:
        close = get_close_matches(asked, [*options, *known], 1)
        if not close:
            return ""
        asked = close[0]
    if asked in options:
        return f"did you mean {asked}?"
    return f"it is {known[asked]} here" if known[asked] in options else known[asked]


def with_own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `EngineConfig` with headrace's names in place of `SYNONYMS`.

    Raises:
        InvalidParams: An option is given under both of its names.
    """
    for name, ours in SYNONYMS.items():
        if name in options and ours in options:
            raise InvalidParams(f"{name}: is another name of {ours}, which is given too", field=name)
    return {SYNONYMS.get(name, name): value for name, value in options.items()}
