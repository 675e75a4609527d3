"""A model is the same bit for bit however many threads load it; they change nothing else of torch, and say how far."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from leftovers import Threads
from safetensors.torch import load_file, save_file
from stored_weights import random_groups

from headrace.engine import ModelRejected
from headrace.engine.life.progress import LoggedProgress, weights_read
from headrace.engine.model.checkpoint.weights import LayerWeights, load_weights, open_weights
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.shared.load_threads import load_threads
from headrace.ops.cpu.linear import Int4Kernel


@pytest.mark.parametrize("count", [1, 2, 5])
def test_results_come_in_order_from_threads_of_one_thread_each(count: int) -> None:
    before, threads = torch.get_num_threads(), Threads("")
    everybody = threading.Barrier(count)

    def work(item: int) -> tuple[int, int]:
        if item < count:
            everybody.wait(20)  # so that all threads have a part
        return item * item, torch.get_num_threads()

    later: list[int] = []
    with load_threads(count) as each:
        assert list(each(work, range(40))) == [(item * item, 1) for item in range(40)]
        assert list(each(work, [])) == []
        other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert later == [before] and torch.get_num_threads() == before
    threads.check_ended()


def test_loads_at_once_leave_torch_its_number_of_threads() -> None:
    before, found = torch.get_num_threads(), list[int]()

    def load() -> None:
        everybody.wait(20)
        with load_threads(2) as each:
            list(each(lambda item: time.sleep(item / 1000), range(3)))
        found.append(torch.get_num_threads())

    try:
        torch.set_num_threads(3)
        for _ in range(40):
            everybody = threading.Barrier(3)
            loads = [threading.Thread(target=load) for _ in range(3)]
            for thread in loads:
                thread.start()
            for thread in loads:
                thread.join()
        assert found == [3] * 120
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 3])
def test_the_earliest_error_ends_a_load(count: int) -> None:
    before, done = torch.get_num_threads(), list[int]()

    def work(item: int) -> None:
        if item in (4, 5):
            raise ValueError(item)
        done.append(item)

    with pytest.raises(ValueError, match="^4$"), load_threads(count) as each:
        each(work, range(10_000))
    assert len(done) < 10_000 and torch.get_num_threads() == before


def tensors_of(layer: LayerWeights) -> dict[tuple[int, str], torch.Tensor]:
    found: dict[tuple[int, str], torch.Tensor] = {}
    for number, part in enumerate((layer.mixer, layer.feed)):
        found |= {(number, name): matrix.dense(torch.bfloat16) for name, matrix in part.matrices.items()}
        found |= {(number, name): vector for name, vector in part.vectors.items()}
    return found


def test_layers_read_one_by_one_are_those_of_a_whole_load(tmp_path: Path) -> None:
    folder = tiny_models.whole_folder(tmp_path)
    spec = from_hf(read_hf_config(folder))
    whole = load_weights(folder, spec, dtype=torch.bfloat16, device="cpu")
    told: list[tuple[int, int]] = []
    opened = open_weights(folder, spec, dtype=torch.bfloat16, progress=lambda *done: told.append(done))
    with load_threads(3) as each, opened as weights:
        layers = list(each(weights.layers.__getitem__, range(len(weights.layers))))
    assert len(layers) == spec.num_layers == len(whole.layers)
    for number, layer in enumerate(layers):
        found, expected = tensors_of(layer), tensors_of(whole.layers[number])
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert torch.equal(weights.embedding_VE, whole.embedding_VE)
    assert torch.equal(weights.head.dense(torch.bfloat16), whole.head.dense(torch.bfloat16))
    done = [first for first, _ in told]
    assert done == sorted(set(done)) and told[-1][0] == told[-1][1] == told[0][1]


def test_a_damaged_layer_is_refused_when_it_is_read(tmp_path: Path) -> None:
    folder = tiny_models.whole_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    spec = from_hf(read_hf_config(folder))
    with open_weights(folder, spec, dtype=torch.float32) as weights:
        _ = weights.layers[0]
        with pytest.raises(ModelRejected, match="not finite") as caught:
            _ = weights.layers[1]
    assert caught.value.field == "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("outs", [16, 48, 9600, 9616])
def test_a_weight_packed_in_parts_is_the_weight_packed_at_once(outs: int) -> None:
    torch.manual_seed(outs)
    weight = random_groups(outs, 64)
    values_OI, scale_OG, minimum_OG = (weight.parts[name] for name in ("values", "scale", "minimum"))
    product: Any = Int4Kernel().pack(weight, None, torch.bfloat16)
    whole = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values_OI.int(), 1)
    assert torch.equal(product._packed, whole)
    expected_OGg = values_OI.view(outs, 2, 32) * scale_OG[..., None] + minimum_OG[..., None]
    assert torch.equal(weight.dense(torch.bfloat16), expected_OGg.flatten(1).to(torch.bfloat16))


def test_a_long_load_tells_the_log_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("headrace.engine.life.progress.time.monotonic", lambda: now)
    progress = LoggedProgress(weights_read, seconds=3.0)
    with caplog.at_level(logging.INFO, "headrace.engine"):
        for step in range(101):  # ten seconds
            now = 100.0 + step / 10
            progress(152_000_000 * step, 15_200_000_000)
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("headrace.engine", f"loading weights: {percent} % of 15.2 GB") for percent in (30, 60, 90)
    ]
    assert weights_read(0, 91_000_000) == "loading weights: 0 % of 91 MB"
