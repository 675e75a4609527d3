"""Compiled layers of transformers' modules are used where they compute the same, and nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fallback_models import made
from torch import Tensor, nn

from headrace.engine.model.fallback.fusing import FusedLayers
from headrace.engine.model.fallback.interface import ATTENTION, attach
from headrace.engine.model.fallback.model import FallbackModel

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers and torch warn of is not ours to fix

WIDTH = 4 * 24  # of all query heads
IDS = torch.arange(5)[None]


class Counted:
    """A compiler that leaves code as it is, or makes what comes out of it wrong, and counts what it runs."""

    def __init__(self, wrong: float = 0.0) -> None:
        self.runs, self.wrong = 0, wrong

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            self.runs += 1
            return tuple(
                each + self.wrong if isinstance(each, Tensor) and each.is_floating_point() else each
                for each in graph(*given)
            )

        return run


@pytest.fixture
def arcee() -> tuple[nn.Module, tuple[str, ...]]:
    """A module without a head, and the names of what attends in it."""
    torch.compiler.reset()
    model = made("arcee")
    described = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    fallback = FallbackModel.read(described, "random")
    model.set_attn_implementation(ATTENTION)
    return model.base_model, fallback.traced.modules


def hidden(base: nn.Module) -> Tensor:
    with torch.inference_mode():
        found: Tensor = base(input_ids=IDS, position_ids=IDS, use_cache=False).last_hidden_state
        return found


def attention(qkv_NX: Tensor, width: int) -> Tensor:
    assert width == WIDTH
    return qkv_NX[:, :width] + qkv_NX[:, -width:].sin()


def test_compiled_layers_run_where_they_are_asked_for(arcee: tuple[nn.Module, tuple[str, ...]]) -> None:
    base, names = arcee
    compiler = Counted()
    layers = FusedLayers(base, names, backend=compiler)
    with torch.inference_mode():
        assert layers.agree()
    attach([base.get_submodule(name) for name in names], attention)
    before = compiler.runs
    plain = hidden(base)
    assert compiler.runs == before, "not asked for"
    with layers.used():
        fused = hidden(base)
    assert compiler.runs > before + len(names), "each layer is cut in two by its attention"
    torch.testing.assert_close(fused, plain, rtol=0, atol=1e-6)


def test_layers_that_compute_something_else_are_left_alone(
    arcee: tuple[nn.Module, tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "headrace.engine"), torch.inference_mode():
        assert not FusedLayers(*arcee, backend=Counted(wrong=0.3)).agree()
    assert "not compiled, and slower: ArithmeticError: a compiled layer differs by" in caplog.text


def test_layers_that_cannot_be_compiled_are_left_alone(
    arcee: tuple[nn.Module, tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    def compiler(_: torch.fx.GraphModule, __: list[Tensor]) -> Callable[..., Any]:
        raise RuntimeError("no compiler")

    base, names = arcee
    with caplog.at_level(logging.WARNING, "headrace.engine"), torch.inference_mode():
        assert not FusedLayers(base, names, backend=compiler).agree()
    assert "not compiled, and slower: " in caplog.text and "no compiler" in caplog.text
    attach([base.get_submodule(name) for name in names], attention)
    assert hidden(base).isfinite().all()
