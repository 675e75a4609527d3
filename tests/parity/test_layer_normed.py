"""Models with layer norms: bugs that would change their logits, which test_families.py compares with transformers'."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from against_transformers import drawn_with_logits
from layer_normed_models import LAYER_NORMED
from planted_bugs import (
    Bug,
    attention,
    exchanged,
    feed,
    in_series,
    is_caught,
    misread,
    names,
    norms,
    plain_ropes,
    rms_norms,
    ropes,
    stored,
    whole,
    zeroed,
)
from torch import Tensor

from headrace.engine.model.rope import PositionTable


@cache
def reference(family: str) -> tuple[Any, list[int], Tensor]:
    """A model whose every parameter matters, a sequence, and its logits by transformers."""
    torch.manual_seed(5)
    model = LAYER_NORMED[family]().eval()
    for name, parameter in model.named_parameters():
        is_norm = ("norm" in name or "ln_" in name) and "bias" not in name
        mean, spread = (1.0, 0.2) if is_norm else (0.0, 0.3 if "bias" in name else 0.12)
        torch.nn.init.normal_(parameter, mean, spread)
    (ids,), (logits,) = drawn_with_logits(model, [64])
    return model, ids, logits


KEYS, VALUES = range(64, 128), range(128, 192)
WRONG: list[tuple[str, str, Bug]] = [
    ("starcoder2, window", "the other GELU", misread(feed(activation="gelu"))),
    ("starcoder2, window", "no window", misread(attention(window=None))),
    ("gpt2", "positions one off", misread(whole(positions=PositionTable(128, offset=1)))),
    ("gpt2", "the other GELU", misread(feed(activation="gelu"))),
    ("gpt2 with other options", "scaled scores", misread(attention(scale=None))),
    ("opt", "positions without the offset", misread(whole(positions=PositionTable(130)))),
    ("opt", "GELU", misread(feed(activation="gelu"))),
    ("falcon, new architecture", "heads as they lie", misread(names(grouped=False))),
    ("falcon, new architecture", "halves in series", misread(norms(placement="pre"))),
    ("falcon, a key a query, in series", "heads as they lie", misread(names(grouped=False))),
    ("falcon, a key a query, in series", "halves side by side", misread(norms(placement="parallel"))),
    ("cohere", "pairs half a head apart", misread(attention(interleaved=False))),
    ("cohere", "plain logits", misread(whole(logits_scale=1.0))),
    ("cohere2, window in the middle layer", "every layer rotated", misread(attention(rope=0))),
    ("cohere2, window in the middle layer", "no layer rotated", misread(attention(rope=1))),
    ("cohere2, window in the middle layer", "no window", misread(attention(window=None))),
    ("cohere2, window in the middle layer", "pairs half a head apart", misread(attention(interleaved=False))),
    *((family, "halves in series", misread(in_series)) for family in ("cohere", "phi", "stablelm, parallel")),
    ("gpt-neox", "heads as they lie", misread(names(grouped=False))),
    ("gpt-neox", "all of a head rotated", misread(attention(rotary_dim=None))),
    ("gpt-neox", "halves in series", misread(norms(placement="pre"))),
    ("phi", "another part of a head rotated", misread(attention(rotary_dim=4))),
    ("jais 2", "ReLU without its square", misread(feed(activation="relu"))),
    ("arcee, RMS norms, yarn", "ReLU without its square", misread(feed(activation="relu"))),
    ("arcee, RMS norms, yarn", "GELU", misread(feed(activation="gelu"))),
    ("arcee, RMS norms, yarn", "no magnitude", misread(ropes(magnitude=1.0))),
    ("arcee, RMS norms, yarn", "a rope that is not stretched", misread(plain_ropes)),
    ("stablelm with norms of heads", "heads with each other's norms", misread(exchanged("q_norm_0", "q_norm_1"))),
    ("stablelm, parallel", "all of a head rotated", misread(attention(rotary_dim=None))),
    ("gpt2", "keys for values", stored("c_attn.weight", lambda joined: joined[:, [*range(64), *VALUES, *KEYS]])),
    ("gpt2", "the output as in other models", misread(names(transposed=frozenset(("qkv", "up", "down"))))),
    *((family, "RMS norms", rms_norms) for family in ("starcoder2, window", "gpt2", "opt", "falcon, new architecture")),
    *((family, "RMS norms", rms_norms) for family in ("cohere", "gpt-neox", "phi", "jais 2", "stablelm")),
]


@pytest.mark.parametrize(("family", "bug", "planted"), WRONG)
def test_a_bug_would_change_the_logits(family: str, bug: str, planted: Bug, tmp_path: Path) -> None:
    model, ids, expected = reference(family)
    model.save_pretrained(tmp_path)
    assert not is_caught(misread(), tmp_path, ids, expected)
    assert is_caught(planted, tmp_path, ids, expected), bug


BIASED = {
    "starcoder2, window": ("layer_norm_bias_E", "qkv_bias", "o_bias", "up_bias", "down_bias", "final"),
    "gpt2": ("positions_PE", "layer_norm_bias_E", "qkv_bias", "o_bias", "up_bias", "down_bias"),
    "falcon, new architecture": ("layer_norm_bias_E", "qkv_bias", "o_bias", "up_bias", "down_bias"),
    "jais 2": ("layer_norm_bias_E", "qkv_bias", "o_bias", "up_bias", "down_bias", "final"),
    "arcee with every bias": ("qkv_bias", "o_bias", "up_bias", "down_bias"),
    "phi": ("head_bias_V", "layer_norm_bias_E"),
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in BIASED.items() for name in names])
def test_a_bias_left_out_would_change_the_logits(family: str, name: str, tmp_path: Path) -> None:
    model, ids, expected = reference(family)
    model.save_pretrained(tmp_path)
    assert is_caught(zeroed(name), tmp_path, ids, expected)
