"""Tiny models and draft heads for them, and what engines are asked with them; holds no tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from draft_driver import states_of
from draft_heads import SIZE, Eagle3Head, EagleHead, Head, MedusaHead
from numpy.typing import NDArray
from tiny_models import CONFIG, chat_folder, configured

from headrace.engine import Completion, Engine, SamplingParams
from headrace.engine.model.cpu.drafts import CpuDrafts
from headrace.engine.model.cpu.heads import DraftAsk
from headrace.engine.scheduling.speculation.depth import DepthRule
from headrace.engine.speculation import Eagle, Medusa

__all__ = [
    "ASKED",
    "HEADS",
    "PROMPTS",
    "TOKENS",
    "always_deep",
    "answers_alone",
    "ask_all",
    "chained_folder",
    "check_drafts",
    "cuda_options",
    "fit",
    "gemma4_folder",
    "recorded",
    "small_folder",
    "talk",
    "told",
    "told_tokens",
]

TOKENS = 257

PROMPTS = [
    "one two three one two three one two",
    "the cat sat on the mat and the cat sat on the",
    "a",
    "x y x y x y x y x y x y x y x y x y",
    "the cat sat on the mat and looked",
]

ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5, "top_k": 8, "logprobs": 2},
    {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.3},
    {"temperature": 0.0, "stop_token_ids": list(range(100, 110))},
    {"temperature": 1.0, "seed": 12, "n": 2},
    {"temperature": 1.0, "seed": 13, "speculate": False},
    {"temperature": 1.0, "seed": 11, "response_format": {"type": "json_object"}, "max_tokens": 12},
]


def fit(head: Head, tokens: int = TOKENS) -> Head:
    """The head for a target of two layers and more tokens."""
    head.config["vocab_size"] = tokens
    head.tensors.pop("embed_tokens.weight", None)
    if isinstance(head, Eagle3Head):
        head.taps = (0, 1, 2)
        head.config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
        ids = head.tensors["d2t"] + torch.arange(head.vocabulary)
        head.tensors["t2d"] = torch.zeros(tokens, dtype=torch.bool).index_fill(0, ids, True)
    if isinstance(head, MedusaHead):
        for number in range(head.heads):
            size = len(head.tensors[f"{number}.0.linear.bias"])
            head.tensors[f"{number}.1.weight"] = torch.randn(tokens, size) * 0.3
    return head


HEADS: dict[str, tuple[Callable[[], Head], type[Eagle | Medusa]]] = {
    "EAGLE": (EagleHead, Eagle),
    "EAGLE-3": (Eagle3Head, Eagle),
    "Medusa": (MedusaHead, Medusa),
}


def always_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DepthRule, "choose", lambda self, rows, context: self._most)


async def ask_all(engine: Engine, asked: Sequence[dict[str, Any]] = ASKED) -> list[Completion]:
    found: dict[int, Completion] = {}

    async def one(index: int) -> None:
        params = SamplingParams(**({"max_tokens": 24} | asked[index]))
        found[index] = await engine.generate(PROMPTS[index % len(PROMPTS)], params)

    async with anyio.create_task_group() as group:
        for index in range(len(asked)):
            group.start_soon(one, index)
    return [found[index] for index in range(len(asked))]


async def talk(engine: Engine) -> list[list[int]]:
    """The tokens of conversations of two turns, and of streams that fork after some tokens."""
    heard: list[list[int]] = []
    for seed in range(3):
        params = SamplingParams(temperature=1.2, seed=seed, max_tokens=30, stop=["e", "a", "i"])
        async with engine.stream("once upon a time", params) as stream:
            heard.append([token.id async for token in stream])
            await stream.send(" and then")
            heard.append([token.id async for token in stream])
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True)
        async with engine.stream("once upon", params) as stream:
            for _ in range(5 * seed + 1):
                await anext(stream)
            async with stream.fork(seed=seed) as branch:
                heard.append([token.id async for token in branch])
            heard.append([token.id async for token in stream])
    return heard


def told(answers: Sequence[Completion]) -> list[Any]:
    return [(answer.choices, answer.usage.completion_tokens) for answer in answers]


def told_tokens(answers: Sequence[Completion]) -> list[Any]:
    return [[(choice.token_ids, choice.finish_reason) for choice in answer.choices] for answer in answers]


def answers_alone(
    model: Path,
    asked: Sequence[dict[str, Any]] = ASKED,
    tell: Callable[[Sequence[Completion]], list[Any]] = told,
    **options: Any,
) -> list[Any]:
    """What an engine without speculation answers."""

    async def run() -> list[Any]:
        async with Engine(model, **options) as engine:
            return tell(await ask_all(engine, asked))

    return anyio.run(run)


def cuda_options(**more: Any) -> dict[str, Any]:
    """Options of an engine on an emulated GPU."""
    sizes = {"kv_memory": "4MiB", "max_rows": 8, "max_context": 256, "max_batched_tokens": 256}
    return {"device": "cuda", "seed": 3} | sizes | more


def chained_folder(folder: Path, family: str = "Llama") -> Path:
    """A model whose next token depends on the latest one alone: its layers add nothing."""
    import transformers

    chat_folder(folder)
    torch.manual_seed(9)
    sizes: dict[str, Any] = {
        "vocab_size": TOKENS, "hidden_size": SIZE, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None,
        "eos_token_id": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    if family == "Glm4Moe":
        sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
                  "topk_group": 1, "first_k_dense_replace": 0, "head_dim": 8, "pad_token_id": None}  # fmt: skip
    config, kind = (getattr(transformers, f"{family}{end}") for end in ("Config", "ForCausalLM"))
    made = kind(config(**sizes))
    for name, parameter in made.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            torch.nn.init.zeros_(parameter)
    made.save_pretrained(folder)
    return folder


def gemma4_folder(folder: Path) -> Path:
    """Gemma 4 with pages of two shapes, layers that read the pages of others, and embeddings of each layer."""
    import transformers

    chat_folder(folder)
    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "vocab_size": TOKENS, "vocab_size_per_layer_input": TOKENS, "hidden_size": SIZE, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "global_head_dim": 16, "max_position_embeddings": 2048, "sliding_window": 20, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 16,
        "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None,
    }  # fmt: skip
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes))
    for name, parameter in model.named_parameters():
        if "norm" not in name and "scal" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def small_folder(folder: Path, family: str = "Llama", model: str = "ForCausalLM", **changes: Any) -> Path:
    """A model of one narrow layer with the tokenizer of `chat_folder`."""
    import transformers

    chat_folder(folder)
    torch.manual_seed(9)
    sizes = CONFIG | {
        "vocab_size": TOKENS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 2048, "eos_token_id": 256, "bos_token_id": None,
    }  # fmt: skip
    config, kind = (getattr(transformers, f"{family}{end}") for end in ("Config", model))
    made = kind(configured(config, sizes, **changes))
    for name, parameter in made.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.4)
    made.save_pretrained(folder)
    return folder


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[DraftAsk, list[int]]]:
    """What engines ask for from now on, and the drafts that they get."""
    found: list[tuple[DraftAsk, list[int]]] = []
    guess = CpuDrafts._guess

    def spied(self: CpuDrafts, asked: Sequence[DraftAsk], tokens_RN: NDArray[Any]) -> list[list[int]]:
        drafts = guess(self, asked, tokens_RN)
        for ask, each in zip(asked, drafts, strict=True):
            if ask.most:
                found.append((ask, each))
        return drafts

    monkeypatch.setattr(CpuDrafts, "_guess", spied)
    return found


def check_drafts(drafts: Sequence[tuple[DraftAsk, list[int]]], head: Head, model: Path) -> None:
    """Check that all drafts are those of the definition."""
    import transformers

    reference = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for ask, each in drafts:
        tokens, sampling = ask.work.request.tokens[: ask.length], ask.work.request.asked.sampling
        assert each == head.drafts(states_of(reference, tokens), tokens[1:], len(each), sampling), tokens
