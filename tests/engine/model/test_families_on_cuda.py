"""Families whose layers use other operations than Llama's give the right tokens on an emulated GPU, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import emulated_attention
import emulated_cuda
import pytest
from emulated_cuda import emulated
from emulated_kernels import attend
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, greedy, one_by_one, open_engine, together
from gpu.judge import Judge, Output
from gpu.quantised import check_mxfp4
from gpu.wearing import make, make_virtual
from torch import Tensor

from headrace.engine.model.cuda.listed import _WORDS, list_kernels
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.ops.cuda.arch import Arch

EXPERTS = (
    "qwen3 experts", "qwen2 experts", "mixtral", "phi experts", "gpt-oss", "olmoe experts",
    "granite experts", "granite shared experts", "ernie experts", "glm 4.5 experts",
    "solar experts",
)  # fmt: skip
LATENT = ("deepseek v2", "deepseek v3", "glm 4.7 flash")
REORDERED = ("phi-4-mini", "glm", "glm4", "ernie 4.5")
"""Families whose heads are put in another order as they are loaded."""
SMALL = {"max_context": 256, "max_batched_tokens": 256, "max_rows": 8}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("checkpoints"), "cuda")


LAYER_NORMED = [
    "starcoder2",
    "gpt2",
    "opt",
    "falcon",
    "falcon 40b",
    "cohere2",
    "command r+",
    "gpt neox",
    "phi",
    "jais 2",
    "arcee",
    "stablelm",
]
OTHERS = [
    "hunyuan", "ministral", "ministral3", "phi3", "granite", "granite 4", "smollm3", "seed-oss", "olmo2", "olmo3",
    "exaone4", "gemma", "gemma2", "gemma3", "helium", "cwm", "gemma4 unified",
]  # fmt: skip


@pytest.mark.rotated(6)
@pytest.mark.parametrize("family", [*REORDERED, *OTHERS, *LAYER_NORMED, *EXPERTS, *LATENT])
def test_tokens_alone_and_together(zoo: Zoo, family: str) -> None:
    async def run() -> list[Output]:
        async with open_engine(zoo.folder(family), "cuda", **SMALL) as engine:
            outputs = await one_by_one(engine, [draw(length, length) for length in (1, 45, 150)], 8)
            outputs += await together(engine, [draw(length, length) for length in (3, 17, 64, 127)], greedy(8))
            await at_rest(engine)
        return outputs

    with emulated():
        outputs = anyio.run(run)
    Judge(zoo.folder(family), "cpu", loose=8.0 if family in EXPERTS else 4.0).check(outputs, family)  # as `Zoo.judge`


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family",
    [
        "phi3",
        "olmo3",
        "hunyuan",
        "ministral3",
        "gemma2",
        *REORDERED,
        "gpt2",
        "falcon 40b",
        "gpt neox",
        "phi",
        "arcee",
        "stablelm",
        "qwen3 experts",
        "gpt-oss",
    ],
)
@pytest.mark.rotated(4)
def test_an_adapter_of_every_module(zoo: Zoo, family: str, tmp_path: Path) -> None:
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"] if family in EXPERTS else "all-linear"
    made = make(zoo.folder(family), tmp_path, family, {"r": 8, "target_modules": modules})

    async def run() -> list[Output]:
        async with open_engine(zoo.folder(family), "cuda", **SMALL, adapter_slots=1) as engine:
            await engine.adapters.load("one", made.folder)
            prompts = [draw(length, length) for length in (1, 45, 100)]
            found = [await engine.generate(list(prompt), greedy(8), adapter="one") for prompt in prompts]
            return [Output(prompt, each.choices[0].token_ids) for prompt, each in zip(prompts, found, strict=True)]

    with emulated():
        outputs = anyio.run(run)
    Judge(made.merged, "cpu").check(outputs, family)


@pytest.mark.rotated(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["olmo3", "hunyuan", *REORDERED])
def test_keys_and_values_of_a_prefix_are_kept_as_they_are(zoo: Zoo, family: str, tmp_path: Path) -> None:
    """OLMo 3 scales what it rotates, Hunyuan norms it, and the others order it; a prefix is given behind all that."""
    made = make_virtual(zoo.folder(family), tmp_path, "prefix")

    async def run() -> list[Output]:
        async with open_engine(zoo.folder(family), "cuda", **SMALL, adapter_slots=1) as engine:
            await engine.adapters.load("one", made.folder)
            prompts = [draw(length, length) for length in (1, 45, 100)]
            found = [await engine.generate(list(prompt), greedy(8), adapter="one") for prompt in prompts]
            return [Output(prompt, each.choices[0].token_ids) for prompt, each in zip(prompts, found, strict=True)]

    with emulated():
        outputs = anyio.run(run)
    assert made.gaps(outputs).max() < 0.2


@pytest.mark.parametrize(
    ("family", "fused"),
    [
        ("exaone4", {"product"}),
        ("gpt2", {"product"}),
        ("stablelm", {"product"}),
        ("olmo3", {"product"}),
        ("arcee", {_WORDS[each] for each in ("plain", "residual", "norm plain", "factors plain", "heads")}),
        ("gemma3", {"product", "norm, product"}),
        ("hunyuan", {"product", *(_WORDS[each] for each in ("residual", "norm gated", "factors gated", "gated"))}),
        ("smollm3", set(_WORDS.values()) - {_WORDS["logits"]}),
    ],
)
def test_kernels_list_names_the_fusions_that_a_model_has(zoo: Zoo, family: str, fused: set[str]) -> None:
    spec = from_hf(read_hf_config(zoo.folder(family)))
    lines = list_kernels(spec, Arch.named("sm_90"), rows=(1, 16)).lines
    assert {line.fused for line in lines} == fused | {_WORDS["logits"], "attention"}


WAYS = {"gemma2": ("fused", "fa2", "split"), "gpt-oss": ("fused", "even", "split")}
"""Kernels of decodes that bound scores, and those that have sinks."""


@pytest.mark.rotated(3)
@pytest.mark.parametrize(("family", "way"), [(family, way) for family, ways in WAYS.items() for way in ways])
def test_bounds_and_sinks_in_chunks_and_behind_prefixes(zoo: Zoo, family: str, way: str) -> None:
    """Prompts take several steps beside decodes, and follow-ups find their first pages."""
    options = {**SMALL, "max_batched_tokens": 24, "decode_attention": way}

    async def run() -> list[Output]:
        async with open_engine(zoo.folder(family), "cuda", **options) as engine:
            outputs = await together(engine, [draw(length, length) for length in (90, 3, 130, 41)], greedy(8))
            follow_ups = [[*prompt, *tokens, 5] for prompt, tokens in outputs[-2:]]
            outputs += await together(engine, follow_ups, greedy(8))
            assert engine.stats().cached_tokens >= 128
            await at_rest(engine)
        return outputs

    with emulated() as gpu:
        outputs = anyio.run(run)
        assert gpu.launches[f"decode: {way}"]
        assert gpu.launches["prefill: grouped" if family == "gpt-oss" else "prefill: FlashInfer"]
    Judge(zoo.folder(family), "cpu").check(outputs, f"{family}, {way}")


@pytest.mark.rotated(2)
@pytest.mark.parametrize("family", WAYS)
def test_bounds_and_sinks_with_a_cache_of_8_bits(zoo: Zoo, family: str) -> None:
    async def run() -> list[Output]:
        async with open_engine(zoo.folder(family), "cuda", **SMALL, kv_dtype="fp8") as engine:
            outputs = await together(engine, [draw(length, length) for length in (3, 17, 64, 127)], greedy(8))
            await at_rest(engine)
        return outputs

    with emulated():
        outputs = anyio.run(run)
    Judge(zoo.folder(family), "cpu", fp8=True).check(outputs, f"{family}, fp8")


def test_sinks_on_a_gpu_without_bulk_copies(zoo: Zoo) -> None:
    """Batches, which csrc/ attends for on newer ones, too."""

    async def run() -> list[Output]:
        async with open_engine(zoo.folder("gpt-oss"), "cuda", **SMALL) as engine:
            return await together(engine, [draw(length, length) for length in (3, 17, 64, 127, 30)], greedy(8))

    with emulated((8, 0)) as gpu:
        outputs = anyio.run(run)
        assert gpu.launches["decode: split"] and gpu.launches["prefill: grouped"]
    Judge(zoo.folder("gpt-oss"), "cpu").check(outputs, "gpt-oss on sm_80")


def test_experts_in_4_bit_floats_stay_in_their_bits(zoo: Zoo) -> None:
    with emulated() as gpu:
        check_mxfp4(zoo, "cuda", Judge(zoo.folder("gpt-oss dequantised"), "cpu"))
        assert gpu.launches["experts: vector"] and gpu.launches["experts: rows"]


@pytest.mark.parametrize("family", WAYS)
def test_the_judge_notices_scores_without_bounds_and_sinks(
    zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were bounds and sinks without effect on these checkpoints, the tests above would prove nothing."""

    def forgetful(*given: Any, cap: float | None = None, sinks_H: Tensor | None = None, **named: Any) -> Tensor:
        return attend(*given, **named)

    async def run() -> list[Output]:
        async with open_engine(zoo.folder(family), "cuda", **SMALL) as engine:
            return await together(engine, [draw(length, length) for length in (3, 17, 64, 127)], greedy(8))

    for module in (emulated_attention, emulated_cuda):
        monkeypatch.setattr(module, "attend", forgetful)
    with emulated():
        outputs = anyio.run(run)
    with pytest.raises(AssertionError, match="outputs are wrong"):
        Judge(zoo.folder(family), "cpu").check(outputs, family)
