"""headrace.engine: a model within your own event loop, as streams of tokens; imports neither torch nor transformers."""

from __future__ import annotations

from headrace.engine.adapters import AdapterInfo, Adapters
from headrace.engine.config import EngineConfig, spell_out_options
from headrace.engine.delivery.kv_events import KvEvent, KvEvents, KvLoad, KvReset
from headrace.engine.engine import Engine, Message, Prompt
from headrace.engine.errors import (
    AdapterRejected,
    AdapterUnavailable,
    DeviceUnavailable,
    EngineCrashed,
    EngineStopped,
    GrammarRejected,
    HeadraceError,
    HookFailed,
    InvalidParams,
    LoadFailed,
    ModelRejected,
    NonFiniteLogits,
    NoTokenLeft,
    OutOfMemory,
    Overloaded,
    PromptTooLong,
    Rejected,
    RequestFailed,
    TokenizerFailed,
    UnknownAdapter,
)
from headrace.engine.events import Choice, Chunk, Completion, FinishReason, Logprob, Token, TokenLogprobs, Usage
from headrace.engine.intake.prompt_ids import TokenizeOptions, TokenizerInfo
from headrace.engine.intake.prompts import Charge
from headrace.engine.many.embeddings import Embeddings
from headrace.engine.many.scoring import Scores
from headrace.engine.offline import LLM
from headrace.engine.params import SamplingParams
from headrace.engine.response_format import ResponseFormat
from headrace.engine.scheduling.memory.page_log import PageRemoved, PageStored
from headrace.engine.stats import EngineInfo, EngineStats, ModelPart, WeightPart
from headrace.engine.stream import TokenStream

__all__ = [
    "LLM",
    "AdapterInfo",
    "AdapterRejected",
    "AdapterUnavailable",
    "Adapters",
    "Choice",
    "Charge",
    "Chunk",
    "Completion",
    "DeviceUnavailable",
    "Embeddings",
    "Engine",
    "EngineConfig",
    "EngineCrashed",
    "EngineInfo",
    "EngineStats",
    "EngineStopped",
    "FinishReason",
    "GrammarRejected",
    "HeadraceError",
    "HookFailed",
    "InvalidParams",
    "KvEvent",
    "KvEvents",
    "KvLoad",
    "KvReset",
    "LoadFailed",
    "Logprob",
    "Message",
    "ModelPart",
    "ModelRejected",
    "NoTokenLeft",
    "NonFiniteLogits",
    "OutOfMemory",
    "Overloaded",
    "PageRemoved",
    "PageStored",
    "Prompt",
    "PromptTooLong",
    "Rejected",
    "RequestFailed",
    "ResponseFormat",
    "SamplingParams",
    "Scores",
    "Token",
    "TokenLogprobs",
    "TokenStream",
    "TokenizeOptions",
    "TokenizerFailed",
    "TokenizerInfo",
    "UnknownAdapter",
    "Usage",
    "WeightPart",
]

for constructor in (Engine.__init__, LLM.__init__):
    spell_out_options(constructor)
