"""On a CPU, an answer is the same alone, in a batch, behind a prefix hit and in chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from gpu.quantised import write_mixture
from quantised_checkpoints import CASES, write_checkpoint
from quantised_checkpoints import CONFIG as CHECKPOINT

from headrace.engine import Engine, SamplingParams
from headrace.ops.cpu.native.library import library

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no C compiler, or a processor without AVX2"),
    pytest.mark.xdist_group("precision"),
]

PROMPTS = [[(7 * row + 13 * at) % 49_000 + 100 for at in range(20 + 30 * row)] for row in range(5)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip

Answer = list[tuple[int, float, list[float]]]


async def answer(engine: Engine, prompt: list[int]) -> Answer:
    """The tokens of an answer with their log-probabilities and those of the second best, as exact floats."""
    completion = await engine.generate(prompt, PARAMS)
    found = completion.choices[0].logprobs
    assert found is not None
    return [(each.id, each.logprob, [other.logprob for other in each.top_logprobs]) for each in found]


async def answers(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    """The answers to all prompts at once."""
    found: dict[int, Answer] = {}

    async def one(index: int) -> None:
        found[index] = await answer(engine, prompts[index])

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    return [found[index] for index in range(len(prompts))]


def check_company(model: Path, prompts: list[list[int]], **options: Any) -> None:
    """Assert that answers are the same alone, behind a prefix hit, side by side, and in chunks on two threads."""
    options["kv_memory"] = "64MiB"

    async def run() -> None:
        async with Engine(model, cpu_threads=1, **options) as engine:
            alone = [await answer(engine, prompt) for prompt in prompts]
            behind_a_hit = [await answer(engine, prompt) for prompt in prompts]
            assert behind_a_hit == alone
            assert engine.stats().cached_tokens > 0
            assert await answers(engine, prompts) == alone
        async with Engine(model, cpu_threads=2, max_batched_tokens=24, max_rows=8, **options) as engine:
            assert await answers(engine, prompts) == alone

    anyio.run(run)


def test_an_answer_has_the_same_bits_in_every_company(smollm2: Path) -> None:
    check_company(smollm2, PROMPTS)


@pytest.mark.parametrize(
    "options",
    [{"quantize": "int8"}, {"quantize": "int4"}, {"dtype": "bfloat16"}, {"dtype": "float32"}],
    ids=lambda options: next(iter(options.values())),
)
def test_so_have_models_quantised_while_they_are_loaded_and_dense_ones(options: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    prompts = [[id % 500 for id in prompt] for prompt in PROMPTS]
    check_company(tmp_path, prompts, load_format="random", device="cpu", **options)


def check_crowd(model: Path, vocabulary: int) -> None:
    """Assert that an answer is the same alone, among 64 rows, and in another engine."""
    prompts = [[(5 * row + 11 * at) % (vocabulary - 8) + 8 for at in range(3 + row % 20)] for row in range(64)]

    async def run() -> None:
        found = []
        for _ in range(2):
            async with Engine(model, device="cpu", cpu_threads=1, kv_memory="16MiB", max_rows=64) as engine:
                alone = await answer(engine, prompts[21])
                crowd = await answers(engine, prompts)
                assert crowd[21] == alone
                found.append(crowd)
        assert found[0] == found[1]

    anyio.run(run)


@pytest.mark.parametrize("name", ["compressed int4 groups with zeros", "gptq v2 in an order"])
def test_so_have_quantised_checkpoints_among_64_rows(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES[name])
    check_crowd(tmp_path, CHECKPOINT["vocab_size"])


def test_so_have_gguf_files_among_64_rows(tmp_path: Path) -> None:
    write_mixture(tmp_path / "model.gguf", tied=False)
    check_crowd(tmp_path / "model.gguf", 512)


GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "n_embd": 256, "n_inner": 500, "n_layer": 3, "n_head": 4, "vocab_size": 512,
    "n_positions": 512, "activation_function": "gelu_new", "torch_dtype": "bfloat16",
}  # fmt: skip
NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "hidden_size": 250, "intermediate_size": 500, "num_hidden_layers": 3,
    "num_attention_heads": 5, "vocab_size": 512, "max_position_embeddings": 512, "hidden_act": "gelu",
    "rotary_pct": 0.4, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("config", [GPT2, NEOX], ids=["gpt2", "gpt-neox"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_so_have_models_with_layer_norms_and_feeds_without_a_gate(
    dtype: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """Their norms, and GELU by the error function, are torch's; a feed's width is no multiple of a vector's."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = [[id % 500 for id in prompt] for prompt in PROMPTS]
    check_company(tmp_path, prompts, load_format="random", device="cpu", dtype=dtype)


LATENT_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 8, "kv_lora_rank": 128, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 48, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 96, "first_k_dense_replace": 1, "vocab_size": 512, "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.rotated(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_so_have_models_with_latent_vectors_in_the_cache(dtype: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LATENT_CONFIG))
    prompts = [[id % 500 for id in prompt] for prompt in PROMPTS]
    check_company(tmp_path, prompts, load_format="random", device="cpu", dtype=dtype)
