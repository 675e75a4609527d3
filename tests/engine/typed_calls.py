"""Calls of the public constructors for type checkers to judge, never run: a line marked `wrong` has to be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

from headrace.engine import (
    LLM,
    AdapterInfo,
    Completion,
    Engine,
    EngineConfig,
    HeadraceError,
    ResponseFormat,
    SamplingParams,
)
from headrace.engine.testing import ScriptedEngine

given: dict[str, Any] = {}
greedy = SamplingParams(temperature=0, max_tokens=8)

Engine(Path("model"), kv_memory="2GiB", swap_memory=1 << 30, policy={"name": "fair_share"}, kernel_cache=Path("kept"))
Engine("owner/model", file="*Q4_K_M.gguf", allow_download=True, generation_defaults="none", **given)
Engine("model", max_model_len=8192, max_num_seqs=8, enable_prefix_caching=False)
Engine("model", devise="cpu")  # wrong: devise
Engine("model", gpu_memory_utilization=0.9)  # wrong: gpu_memory_utilization
Engine("model", max_rows="8")  # wrong: max_rows
Engine("model", dtype="float16")  # wrong: dtype
Engine("model", max_model_len="8k")  # wrong: max_model_len
Engine(model_path="model")  # wrong: model
Engine("model", "cpu")  # wrong: positional

LLM("model", device="cpu", max_rows=4)
LLM(Engine("model"))
LLM("model", n_ctx=2048)  # wrong: n_ctx
LLM("model", kv_memory=1.5)  # wrong: kv_memory

EngineConfig(model=Path("model"), max_context=4096)
EngineConfig(max_context=4096)  # wrong: model
EngineConfig(model="model", max_contxt=4096)  # wrong: max_contxt
EngineConfig(model="model", prefix_cache="yes")  # wrong: prefix_cache

SamplingParams(top_k=-1, stop="\n", stop_token_ids={1, 2}, logit_bias={"7": 1.5}, early_stopping="never")
SamplingParams(logit_bias=[(7, 1.5)], response_format={"type": "json_object"}, allowed_token_ids=range(9), **given)
SamplingParams(response_format=ResponseFormat.regex("[0-9]+"), bad_words=["word"], logit_bias={7: 1})
SamplingParams(temprature=0.5)  # wrong: temprature
SamplingParams(max_completion_tokens=8)  # wrong: max_completion_tokens
SamplingParams(temperature="cold")  # wrong: temperature
SamplingParams(stop=7)  # wrong: stop
SamplingParams(0.5)  # wrong: positional

greedy.replace(seed=1, n=2)
greedy.replace(sed=1)  # wrong: sed
greedy.replace(seed="one")  # wrong: seed
greedy.seed = 1  # wrong: seed
sampled: SamplingParams = greedy.replace(temperature=1.0)


def right_and_wrong_calls_of_an_llm(llm: LLM) -> None:
    chat = [{"role": "user", "content": "Hi."}]
    assert_type(llm.generate("Hi."), Completion)
    assert_type(llm.chat(chat, greedy, tools=[], template_kwargs={"enable_thinking": False}), Completion)
    assert_type(llm.chat([chat, chat]), list[Completion])
    assert_type(llm.chat([chat], return_errors=True), list[Completion | HeadraceError])
    assert_type(llm.adapters.load("name", Path("folder"), pinned=True), AdapterInfo)
    llm.stream(chat, greedy, deadline=5, tenant="a").send("More.", priority=1)
    llm.embed(["a", "b"], pooling="mean", adapter=["one", None])
    llm.stream([{"role": "user", "content": "Hi."}, {"role": "assistant", "content": None, "tool_calls": []}])
    llm.chat(chat, adaptr="a")  # wrong: chat
    llm.chat(chat, template_kwargs=7)  # wrong: chat
    llm.stream("Hi.", deadlin=5)  # wrong: deadlin
    llm.embed("Hi.", pooling="max")  # wrong: pooling
    llm.score("Hi.", ["a"], tenat="a")  # wrong: tenat
    llm.tokenize("Hi.", tols=[])  # wrong: tols
    llm.hidden_states("Hi.", adaptr="a")  # wrong: adaptr
    llm.adapters.load("name", "folder", pin=True)  # wrong: pin
    llm.sleep(3)  # wrong: sleep


ScriptedEngine(answers={"Hi.": "Hello."}, max_context=64)
ScriptedEngine(answer=lambda prompt: prompt.upper(), max_model_len=64)
ScriptedEngine(max_contxt=64)  # wrong: max_contxt
ScriptedEngine(answers=["Hello."])  # wrong: answers
