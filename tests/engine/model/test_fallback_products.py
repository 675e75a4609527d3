"""A CPU's products and norms take the place of a module's, kind by kind, where a trial shows that it works so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from against_transformers import greedily
from fallback_models import described, generated, made, saved
from model_driver import ModelUnderTest, capacity
from torch import Tensor, nn
from transformers.models.afmoe import modeling_afmoe
from transformers.models.arcee import modeling_arcee
from transformers.models.flint import modeling_flint

from headrace.engine.model.cpu import trial
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.cpu.trial import try_fallback
from headrace.engine.model.fallback.inner import inner_modules
from headrace.engine.model.fallback.model import FallbackModel
from headrace.engine.model.fallback.norms import Norm, replace_norms
from headrace.engine.model.fallback.small import small_model
from headrace.engine.model.families.registry import read_hf_config
from headrace.engine.model.shared.kv_layout import kv_layout
from headrace.ops.cpu.kv import CpuKv
from headrace.ops.cpu.native.library import Context, library

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what transformers warns of is not ours to fix
    pytest.mark.skipif(library() is None, reason="no compiled kernels"),
]

HUNYUAN = "hunyuan_v1_moe, a rope that is stretched by alpha"


@pytest.mark.parametrize(
    ("family", "unpacked", "norms"),
    [
        ("olmo", set(), 0),  # whose norms have no weights
        ("gemma", {"lm_head.linear.weight"}, 7),  # its table of embeddings multiplies, too
        ("arcee", set(), 7),
        ("flex_olmo", {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"}, 0),
        (HUNYUAN, {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.wg.weight"}, 0),
    ],
)
def test_linear_layers_and_norms_are_those_of_the_cpu(
    family: str, unpacked: set[str], norms: int, tmp_path: Path
) -> None:
    """In bfloat16, so that logits are those of a rounded model, and no second copy of a matrix stays."""
    model = made(family).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    fallback = FallbackModel.read(read_hf_config(tmp_path), tmp_path)
    kinds = fallback.products | fallback.norms
    fallback.taken = try_fallback(fallback, kinds)
    assert kinds - fallback.taken == ({"layers.*.mlp.gate.wg"} if family == HUNYUAN else set())
    size = capacity(fallback.spec.vocab_size)
    sizes = {"page_size": size.page_size, "max_positions": size.max_context}
    ops = cpu_ops(fallback.spec, **sizes, dtype=torch.bfloat16, context=Context(1))
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "activations": torch.float32}
    decoder = fallback.open(ops, lambda step: step.positions_N, **options)
    kv = CpuKv.allocate(kv_layout(fallback.spec, ops), size.num_pages, torch.bfloat16)
    ids = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(1))
    (found_NV,) = ModelUnderTest(decoder, ops, kv, size).logits([ids.tolist()], 16)
    with torch.inference_mode():
        wanted_NV = model.float()(ids[None], use_cache=False).logits[0]
    error_N = (found_NV - wanted_NV).abs().amax(1) / wanted_NV.abs().max()
    assert error_N.median() < 0.02 and found_NV.dtype == torch.float32
    kept = {
        name
        for root in (decoder.base, decoder.model)
        for name, parameter in root.named_parameters()
        if parameter.dim() > 1 and "embed" not in name
    }
    assert {name.split(".", 2)[-1] if "layers" in name else name for name in kept} == unpacked
    assert sum(isinstance(module, Norm) for module in decoder.base.modules()) == norms


def reading_the_weight(kind: type[nn.Module], name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A module that reads the weight of a product or norm within it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        plain = kind.forward

        def forward(self: Any, *given: Any, **named: Any) -> Any:
            assert self.get_submodule(name).weight.dim()
            return plain(self, *given, **named)

        patch.setattr(kind, "forward", forward)

    return plant


@pytest.mark.parametrize(
    ("plant", "odd"),
    [
        (reading_the_weight(modeling_arcee.ArceeMLP, "up_proj"), "layers.*.mlp.up_proj"),
        (reading_the_weight(modeling_arcee.ArceeDecoderLayer, "input_layernorm"), "layers.*.input_layernorm"),
    ],
)
def test_a_product_or_norm_that_a_module_needs_itself_stays_alone(
    plant: Callable[[pytest.MonkeyPatch], None], odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    plant(monkeypatch)
    model = made("arcee")
    saved(model, tmp_path)
    plain, kept = FallbackModel.open, set[str]()

    def opened(self: FallbackModel, *given: Any, **named: Any) -> Any:
        decoder: Any = plain(self, *given, **named)
        replaced = nn.Linear, modeling_arcee.ArceeRMSNorm
        kept.update(
            each.kind for each in inner_modules(decoder.base, decoder.model) if isinstance(each.module, replaced)
        )
        return decoder

    monkeypatch.setattr(FallbackModel, "open", opened)
    with caplog.at_level(logging.INFO, "headrace.engine"):
        found = anyio.run(lambda: generated(tmp_path, [5, 6, 7], model_impl="transformers"))
    assert found == greedily(model, [5, 6, 7], found)
    assert f"not found to work in place of these, which are left to torch: {odd}\n" in caplog.text
    assert kept == {odd}


AFMOE = "afmoe, window in the middle layer"


def test_a_trial_has_layers_of_experts_behind_many_dense_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields that count the dense layers would leave none of two layers to experts."""
    reading_the_weight(modeling_afmoe.AfmoeTokenChoiceRouter, "gate")(monkeypatch)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    model = FallbackModel.read(described(AFMOE, num_dense_layers=2, layer_types=kinds), "random")
    tried = try_fallback(model, model.products)
    assert model.products - tried == {"layers.*.mlp.router.gate"} and "layers.*.mlp.shared_experts.up_proj" in tried
    with torch.inference_mode():
        listed = {"mlp_layer_types": ["dense", "dense", "sparse"], "num_attention_heads_per_layer": [4, 6, 6]}
        model = FallbackModel.read(described("laguna, more heads in the middle layer", **listed), "random")
        assert "layers.*.mlp.shared_experts.up_proj" in small_model(model).kinds


def test_what_no_trial_saw_is_left_to_torch() -> None:
    """Here layers by whose numbers two of them are dense, so that a model of two layers has no experts."""
    name = "flint, sinks and a window in the middle layer"
    model = FallbackModel.read(described(name, mlp_only_layers=[0, 1]), "random")
    unseen = {kind for kind in model.products if "expert" in kind}
    tried = try_fallback(model, model.products)
    assert unseen and not unseen & tried and "layers.*.self_attn.q_proj" in tried


def test_a_device_that_takes_nothing_is_not_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU, models with sinks leave all to torch, whatever would work."""
    reading_the_weight(modeling_flint.FlintDecoderLayer, "input_layernorm")(monkeypatch)
    saved(made("flint, sinks and a window in the middle layer"), tmp_path)
    tries: list[object] = []
    monkeypatch.setattr(trial, "_works", lambda *given: tries.append(given))
    with caplog.at_level(logging.INFO, "headrace.engine"):
        assert anyio.run(generated, tmp_path, [5, 6, 7])
    assert not tries and "computes the layers" in caplog.text and "left to torch" not in caplog.text


class Scaled(nn.Module):
    """An RMS norm with a name of its own for everything, or nearly one."""

    def __init__(self, epsilon: float, added: float = 0.0, mean: float = 0.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(0.3 * torch.randn(32), requires_grad=False)
        self.planted, self.tiny, self.added, self.mean = 0.5, epsilon, added, mean

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x minus a part of its mean."""
        x = x - self.mean * x.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + self.tiny).rsqrt() * (self.added + self.factor)


def test_norms_are_known_by_what_they_compute() -> None:
    spec = FallbackModel.read(described(), "random").spec
    ops = next(iter(cpu_ops(spec, page_size=4, max_positions=4, dtype=torch.float32, context=Context(1)).values()))
    alike: list[nn.Module] = [Scaled(1e-5), Scaled(1e-6), Scaled(1e-6, added=1.0), nn.RMSNorm(32, eps=1e-5)]
    others = [Scaled(1e-6, added=2.0), Scaled(1e-6, mean=0.01), nn.LayerNorm(32, bias=False), nn.PReLU(32)]
    for module in alike[3:]:
        nn.init.normal_(module.weight)  # type: ignore[arg-type]
    modules = nn.ModuleList([*alike, *others, Scaled(1e-6).bfloat16(), Scaled(1e-5)]).requires_grad_(False)
    x_1NHD = torch.randn(1, 5, 3, 32) * torch.tensor([1.0, 1e-3, 1e3])[:, None]
    with torch.inference_mode():
        expected = [module(x_1NHD.transpose(1, 2)) for module in modules[:-2] if not isinstance(module, nn.PReLU)]
        replace_norms(modules, ops, {str(number) for number in range(len(modules) - 1)})
        found = [module(x_1NHD.transpose(1, 2)) for module in modules[:-2] if not isinstance(module, nn.PReLU)]
    assert [isinstance(module, Norm) for module in modules] == [True] * 4 + [False] * 6
    for wanted, got in zip(expected, found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
