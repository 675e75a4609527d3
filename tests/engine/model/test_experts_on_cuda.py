"""Experts on an emulated GPU: where their weights lie, what is launched for them, and what the list says of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from emulated_cuda import emulated
from expert_models import expert_folder
from torch import Tensor

from headrace.engine import Engine, SamplingParams
from headrace.engine.bench.floor import Speed, cost_of, stored_bytes
from headrace.engine.bench.shapes import SHAPES
from headrace.engine.model.checkpoint.weights import describe_weights, load_weights
from headrace.engine.model.cuda.listed import list_kernels
from headrace.engine.model.experts import ExpertsFeed, down_of, gate_up_of
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.codes.kinds import E2M1, E4M3, INT4, Kind
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.cuda.experts.arena import arena_of
from headrace.ops.cuda.experts.kernels import EXPERTS
from headrace.ops.cuda.experts.registry import ExpertShape, resolve_experts
from headrace.ops.routing import Routing

WIDE: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 64, "num_attention_heads": 2}
PROMPTS = [[5, 6, 7], [9] * 17, list(range(40))]


class Bump:
    """Tensors one behind another, as `WeightMemory` hands them out."""

    def __init__(self) -> None:
        self.bytes, self.used = torch.zeros(1 << 24, dtype=torch.uint8), 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        start = -(-self.used // 256) * 256
        self.used = start + math.prod(shape) * dtype.itemsize
        return self.bytes[start : self.used].view(dtype).view(*shape)

    def has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.bytes.untyped_storage().data_ptr()


@pytest.mark.parametrize("quantize", [None, "fp8", "int8", "int4"])
def test_the_weights_of_experts_stay_where_they_were_loaded(quantize: Any, tmp_path: Path) -> None:
    spec, memory = from_hf(read_hf_config(expert_folder(tmp_path, **WIDE))), Bump()
    weights = load_weights(
        tmp_path, spec, dtype=torch.bfloat16, device="cpu", empty=memory.empty, quantize=quantize,
        layout=lambda weight: in_codes(weight, torch.bfloat16),
    )  # fmt: skip
    matrices = weights.layers[1].feed.matrices
    for name in (gate_up_of, down_of):
        arena = arena_of([matrices[name(expert)] for expert in range(8)], torch.bfloat16)
        assert (arena.kind is None) == (quantize is None)
        assert all(memory.has(tensor) for tensor in arena.kept), "a copy beside the weights would never be released"


def test_kinds_that_differ_become_values(tmp_path: Path) -> None:
    spec = from_hf(read_hf_config(expert_folder(tmp_path, **WIDE)))
    kept = [
        load_weights(
            tmp_path, spec, dtype=torch.bfloat16, device="cpu", quantize=method,
            layout=lambda weight: in_codes(weight, torch.bfloat16),
        ).layers[0].feed.matrices
        for method in ("int4", "int8")
    ]  # fmt: skip
    weights = [kept[expert % 2][gate_up_of(expert)] for expert in range(8)]
    arena = arena_of(weights, torch.bfloat16)
    assert isinstance(arena.first, Tensor) and isinstance(arena.pitch, int)
    for expert, weight in enumerate(weights):
        found = torch.as_strided(arena.first, weight.shape, (weight.shape[1], 1), expert * arena.pitch)
        assert torch.equal(found, weight.dense(torch.bfloat16))


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_an_engine_computes_experts_in_steps_of_any_size(quantize: Any, tmp_path: Path) -> None:
    folder = expert_folder(tmp_path, "Qwen2Moe", **{**WIDE, "shared_expert_intermediate_size": 64})

    async def run() -> tuple[list[list[int]], list[list[int]]]:
        greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        found: list[list[list[int]]] = [[], []]
        async with Engine(folder, device="cuda", max_rows=8, max_context=128, quantize=quantize) as engine:
            for place in range(2):
                for prompt in PROMPTS:
                    result = await engine.generate(prompt, greedy)
                    found[place].append(list(result.choices[0].token_ids))
                await engine.sleep()
                await engine.wake()
        return found[0], found[1]

    with emulated() as gpu:
        first, second = anyio.run(run)
    assert first == second, "a sleep changed the experts"
    assert {"experts: vector", "experts: rows" if quantize else "experts: tiles"} <= gpu.launches.keys()


@pytest.mark.parametrize(
    ("family", "changes", "shown"),
    [("Qwen3Moe", {}, {"experts"}), ("Qwen2Moe", {"mlp_only_layers": [0]}, {"experts", "gate_up", "shared_gate_up"})],
)
def test_the_list_has_lines_for_experts(family: str, changes: Any, shown: set[str], tmp_path: Path) -> None:
    spec = from_hf(read_hf_config(expert_folder(tmp_path, family, **WIDE, **changes)))
    listed = list_kernels(spec, Arch.named("sm_90"), rows=(1, 4, 5, 64, 4096))
    lines = {line.what: line for line in listed.lines}
    assert shown <= lines.keys()
    assert lines["experts"].kernels == ("vector", "vector", "tiles", "tiles", "dense")


def test_the_list_names_formats_that_are_unpacked(tmp_path: Path) -> None:
    spec = from_hf(read_hf_config(expert_folder(tmp_path, moe_intermediate_size=24)))  # too narrow for codes
    weights = describe_weights(tmp_path, spec, dtype=torch.bfloat16, quantize="int8", keep_packed=True)
    listed = list_kernels(spec, Arch.named("sm_90"), weights=weights)
    reasons = {each.why for each in listed.refusals if each.where == "experts" and each.kernel == "those for codes"}
    assert any("multiples of 8 outputs and 64 inputs" in why for why in reasons)


def test_every_number_of_tokens_has_a_kernel() -> None:
    shape = ExpertShape(Routing(8, 2), 64, 32)
    for arch in ("sm_80", "sm_120"):
        table = resolve_experts(EXPERTS, Arch.named(arch), shape).kernels
        assert [table[rows].name for rows in (1, 4, 5, 1 << 20)] == ["vector", "vector", "tiles", "tiles"]
    hopper, mxfp4 = Arch.named("sm_90"), Kind(E2M1, 32, scales="e8m0")
    refused = dict(resolve_experts(EXPERTS, hopper, shape._replace(dtype=torch.float16)).refused)
    assert refused == {
        **dict.fromkeys(("vector", "tiles"), "takes bfloat16, not float16"),
        "rows": "takes weights in codes",
        "dense": "takes multiples of 64 inputs, not (64, 32)",
    }
    wide = shape._replace(size=64)
    table = resolve_experts(EXPERTS, hopper, wide).kernels
    assert [table[rows].name for rows in (4, 5, 255, 256, 1 << 20)] == ["vector", "tiles", "tiles", "dense", "dense"]
    assert "sm_90" not in resolve_experts(EXPERTS, Arch.named("sm_80"), wide).refused["dense"]
    for kind, last in ((mxfp4, "rows"), (Kind(INT4, 64), "rows"), (Kind(E4M3), "tiles"), (Kind(INT4, 16), "tiles")):
        coded = shape._replace(size=64, gate_up=kind, down=kind)
        table = resolve_experts(EXPERTS, hopper, coded).kernels
        few = "tiles" if kind.group == 16 else "rows"
        assert [table[rows].name for rows in (4, 5, 64, 1 << 20)] == ["vector", few, few, last], kind.name
        assert resolve_experts(EXPERTS, hopper, coded._replace(size=96)).refused["rows"].startswith("takes")
        assert "rows" in resolve_experts(EXPERTS, Arch.named("sm_80"), coded).refused
        assert resolve_experts(EXPERTS, hopper, coded).refused["dense"] == "takes dense weights"


def test_a_floor_counts_the_experts_that_are_likely_read() -> None:
    """Of 128 experts, 16 tokens of 8 each hit 82.4 in expectation, and one token hits 8."""
    spec = from_hf(SHAPES["qwen3-30b-a3b"])
    total, experts = stored_bytes(None, spec, torch.bfloat16)
    routing = next(layer.feed.routing for layer in spec.layers if isinstance(layer.feed, ExpertsFeed))
    assert experts == 48 * 128 * 3 * 2048 * 768 * 2 and routing.experts == 128
    cost = cost_of(spec, weight_bytes=total, kv_size=2, expert_bytes=experts)
    assert 128 * cost.read_share(16) == pytest.approx(82.4, abs=0.05)
    speed = Speed(4e12, 1e18)
    for rows, hit in ((1, 8), (16, 82.4), (4096, 128)):
        moved = total - experts * (1 - hit / 128) + cost.kv_bytes * rows * 2
        assert cost.decode_seconds([1] * rows, speed) == pytest.approx(moved / 4e12, rel=1e-3)
    flops = cost.prefill_seconds([16], Speed(1e18, 1e12)) * 1e12 - 2 * cost.head_params
    assert flops / 16 == pytest.approx(2 * (cost.linear_params - experts / 2 * 120 / 128), rel=0.01)
