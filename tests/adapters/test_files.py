"""What a stranger may have put into an adapter folder is refused with its reason, and nothing of it stays."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import BOTH, SIZES, lora_folder, lora_tensors, prompt_folder, write_folder
from hypothesis import given
from hypothesis import strategies as st
from leftovers import open_files, settle
from safetensors.torch import save_file

from headrace.adapters import files
from headrace.adapters.errors import AdapterRejected
from headrace.adapters.files import read_adapter
from headrace.adapters.layout import ModelShape
from headrace.adapters.loaded import LoadedAdapter

SHAPE = ModelShape(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48, vocab_size=96)
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = Q_A.replace("lora_A", "lora_B")
QKV_A = Q_A.replace("q_proj", "qkv_proj")


def read(folder: Path, **options: Any) -> LoadedAdapter:
    return read_adapter(folder, SHAPE, options.pop("dtype", torch.float32), max_rank=8, **options)


def with_tensors(**changes: Any) -> Callable[[Path], object]:
    """A folder whose first update has other tensors; None takes one away."""

    def make(folder: Path) -> object:
        tensors = lora_tensors(1, 4)
        for name, tensor in changes.items():
            key = {"a": Q_A, "b": Q_B}.get(name, name)
            tensors.pop(key, None)
            if tensor is not None:
                tensors[key] = tensor
        return write_folder(folder, CONFIG, tensors)

    return make


def with_config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: write_folder(folder, CONFIG | changes, lora_tensors(1, 4))


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def make(folder: Path) -> object:
        file = lora_folder(folder, 1) / "adapter_model.safetensors"
        return file.write_bytes(change(file.read_bytes()))

    return make


def with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def rewrite(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        changed = change(header)
        text = json.dumps(changed if changed is not None else header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return with_bytes(rewrite)


def only_pickle(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(folder / "run"),)

    lora_folder(folder, 1)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))


def as_link(folder: Path) -> None:
    lora_folder(folder, 1)
    file = folder / "adapter_model.safetensors"
    file.rename(folder / "elsewhere")
    file.symlink_to(folder / "elsewhere")


def as_pipe(folder: Path) -> None:
    lora_folder(folder, 1)
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


NAN = torch.full((4, 32), float("nan"))
REJECTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "NaN in A": (with_tensors(a=NAN), "not finite"),
    "infinity in B": (with_tensors(b=torch.full((32, 4), float("inf"))), "not finite"),
    "no B": (with_tensors(b=None), "its B beside it"),
    "no A": (with_tensors(a=None), "its A beside it"),
    "of a wider model": (with_tensors(a=torch.zeros(4, 64)), r"\(4, 32\)"),
    "of more outputs": (with_tensors(b=torch.zeros(64, 4)), r"\(32, 4\)"),
    "of another rank": (with_tensors(a=torch.zeros(5, 32), b=torch.zeros(32, 5)), r"\(4, 32\)"),
    "of one dimension": (with_tensors(a=torch.zeros(128)), "shape"),
    "unknown module": (with_tensors(**{"base_model.model.model.layers.0.self_attn.x.lora_A.weight": NAN}), "tensor"),
    "one module under two names": (
        with_tensors(**{Q_A.replace("model.layers", "layers"): torch.zeros(4, 32)}),
        "one of its module",
    ),
    "queries by themselves and joined": (
        with_tensors(**{QKV_A: torch.zeros(4, 32), QKV_A.replace("lora_A", "lora_B"): torch.zeros(64, 4)}),
        "qkv_proj.lora_B.weight.*one of its module",
    ),
    "joined modules of other sizes": (
        with_tensors(
            a=None, b=None, **{QKV_A: torch.zeros(4, 32), QKV_A.replace("lora_A", "lora_B"): torch.zeros(32, 4)}
        ),
        r"\(64, 4\)",
    ),
    "unknown layer": (with_tensors(**{Q_A.replace("s.0.", "s.2."): torch.zeros(4, 32)}), "layers.2"),
    "module elsewhere": (with_tensors(**{Q_A.replace("self_attn", "mlp"): torch.zeros(4, 32)}), "mlp.q_proj"),
    "a whole module": (with_tensors(**{"base_model.model.lm_head.weight": torch.zeros(97, 32)}), "lm_head.weight"),
    "int8": (with_tensors(a=torch.zeros(4, 32, dtype=torch.int8)), "dtype"),
    "float64": (with_tensors(a=torch.zeros(4, 32, dtype=torch.float64)), "dtype"),
    "nothing": (lambda folder: write_folder(folder, CONFIG, {}), "number of updates"),
    "rank 0": (with_config(r=0), "r is 0"),
    "rank too large": (with_config(r=9), r"1 to 8 \(max_adapter_rank\)"),
    "rank too large by pattern": (with_config(rank_pattern={"q_proj": 9}), "1 to 8"),
    "rank of text": (with_config(r="4"), "r is '4'"),
    "alpha of NaN": (with_config(lora_alpha="NaN"), "lora_alpha"),
    "slow pattern": (with_config(alpha_pattern={"(a+)+b": 2}), "repetitions"),
    "many patterns": (with_config(rank_pattern={f".*{n}": 4 for n in range(33)}), "32 expressions"),
    "broken pattern": (with_config(rank_pattern={"(": 2}), "repetitions"),
    "DoRA": (with_config(use_dora=True), "DoRA"),
    "biases": (with_config(bias="all"), "biases"),
    "modules_to_save": (with_config(modules_to_save=["lm_head"]), "all adapters share"),
    "changed base": (with_config(init_lora_weights="pissa_niter_4"), "changed base weights"),
    "code of its own": (with_config(auto_map={"a": "b"}), "no code"),
    "other kind": (with_config(peft_type="IA3"), "LORA"),
    "no kind": (with_config(peft_type=None), "LORA"),
    "empty file": (with_bytes(lambda data: b""), "8 bytes"),
    "truncated": (with_bytes(lambda data: data[:-1]), "truncated"),
    "longer": (with_bytes(lambda data: data + b"x"), "size"),
    "header of 2^63": (with_bytes(lambda data: struct.pack("<Q", 2**63) + data[8:]), "header's length"),
    "header of no JSON": (with_bytes(lambda data: data[:8] + b"\xff" * 40 + data[48:]), "JSON"),
    "duplicate tensor": (
        with_bytes(lambda data: struct.pack("<Q", len(TWICE)) + TWICE),
        "twice",
    ),
    "overlap": (with_header(lambda header: header[Q_B].update(data_offsets=header[Q_A]["data_offsets"])), "offset"),
    "shape of 2^62": (with_header(lambda header: header[Q_A].update(shape=[2**62, 2**62])), "shape|bytes apart"),
    "a name that cannot be sent": (with_header(lambda header: {"\ud800\n": {}}), r"\\ud800\\n"),
    "a name of megabytes": (with_header(lambda header: {"a" * 10**6: {}}), "aaa is {}"),
    "a key that cannot be sent": (with_config(rank_pattern={"\ud800" * 200: 99}), r"\\ud800"),
    "100,000 tensors": (
        with_header(
            lambda header: {str(n): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(10**5)}
        ),
        "header's length|number of tensors|size",
    ),
    "only a pickle": (only_pickle, "pickle"),
    "no config": (lambda folder: (lora_folder(folder, 1) / "adapter_config.json").unlink(), "missing"),
    "duplicate config key": (
        lambda folder: (lora_folder(folder, 1) / "adapter_config.json").write_text('{"r": 1, "r": 2}'),
        "twice",
    ),
    "huge config": (
        lambda folder: (lora_folder(folder, 1) / "adapter_config.json").write_text(" " * (2 << 20)),
        "size",
    ),
    "a pipe": (as_pipe, "regular"),
    "prompt of another model": (
        lambda folder: write_folder(
            folder,
            {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3},
            {"prompt_embeddings": torch.zeros(3, 33)},
        ),
        r"\(3, 32\)",
    ),
    "prompt of NaN": (
        lambda folder: write_folder(
            folder,
            {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3},
            {"prompt_embeddings": torch.full((3, 32), float("nan"))},
        ),
        "not finite",
    ),
}
TWICE = b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'


@pytest.mark.parametrize("case", REJECTED)
def test_it_is_refused_with_its_reason(case: str, tmp_path: Path) -> None:
    make, reason = REJECTED[case]
    make(tmp_path / "adapter")
    with pytest.raises(AdapterRejected, match=reason) as caught:
        read(tmp_path / "adapter")
    assert caught.value.field and "'adapter'" in str(caught.value) and len(str(caught.value)) < 1000
    assert (caught.value.field + str(caught.value)).isprintable() and len(caught.value.field) < 300
    caught = None  # type: ignore[assignment]  # its traceback holds the reader's frames
    assert not open_files(tmp_path)
    assert not (tmp_path / "adapter" / "run").exists(), "the pickle was run"


def test_what_overflows_once_scaled_is_refused(tmp_path: Path) -> None:
    tensors = lora_tensors(1, 4)
    tensors[Q_B] = torch.full((32, 4), 1e37)
    folder = write_folder(tmp_path / "a", CONFIG | {"lora_alpha": 4000}, tensors)
    with pytest.raises(AdapterRejected, match="not finite"):
        read(folder)
    tensors[Q_A], tensors[Q_B] = torch.full((4, 32), 1e37), torch.ones(32, 4)
    assert read(write_folder(tmp_path / "b", CONFIG | {"lora_alpha": 4000}, tensors)).nbytes, "only B is scaled"


def test_an_update_too_large_for_the_host_is_refused(tmp_path: Path) -> None:
    shape = replace(SHAPE, vocab_size=1 << 24)
    name = "base_model.model.lm_head.lora_"
    sizes = {"A": [1, shape.hidden_size], "B": [shape.vocab_size, 1]}
    write_folder(tmp_path / "a", CONFIG | {"r": 1}, {})
    header, end = {}, 0
    for half, size in sizes.items():
        start, end = end, end + 2 * size[0] * size[1]
        header[f"{name}{half}.weight"] = {"dtype": "F16", "shape": size, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "a" / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    settle()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), limits[1]))
    try:
        with pytest.raises(AdapterRejected, match="too little memory"):
            read_adapter(tmp_path / "a", shape, torch.float32, max_rank=8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_below_a_root_only_plain_names_and_no_links(tmp_path: Path) -> None:
    root = tmp_path / "root"
    lora_folder(root / "good", 1)
    lora_folder(tmp_path / "outside", 1)
    (root / "link").symlink_to(tmp_path / "outside")
    as_link(root / "file")
    (root / "plain").write_text("")
    assert read_adapter("good", SHAPE, torch.float32, max_rank=8, root=root).nbytes > 0
    for name in (
        "../outside",
        str(tmp_path / "outside"),
        "good/../../outside",
        ".",
        "..",
        "",
        "good\0",
        "\ud800",
        "link",
        "file",
    ):
        with pytest.raises(AdapterRejected):
            read_adapter(name, SHAPE, torch.float32, max_rank=8, root=root)
    for name, told in (("plain", "is no folder"), ("link", "links are not followed"), ("file", "'a link'")):
        with pytest.raises(AdapterRejected, match=told):
            read_adapter(name, SHAPE, torch.float32, max_rank=8, root=root)
    assert read(root / "link").digest == read(root / "good").digest, "an application may follow its own links"


def test_the_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    first = read(lora_folder(tmp_path / "a", 1))
    again = lora_tensors(1, 4)
    folder = write_folder(tmp_path / "b", CONFIG | {"base_model_name_or_path": "x"}, again)
    save_file(dict(reversed(again.items())), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    assert read(folder).digest == first.digest
    others = [
        read(lora_folder(tmp_path / "c", 2)),
        read(lora_folder(tmp_path / "d", 1, lora_alpha=5)),
        read(lora_folder(tmp_path / "e", 1), dtype=torch.bfloat16),
        read(prompt_folder(tmp_path / "f", 1)),
    ]
    assert len({first.digest, *(other.digest for other in others)}) == 5


@given(st.data())
def test_no_damage_to_a_file_escapes_the_typed_refusal(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    lora_folder(folder, 1, modules=BOTH if data.draw(st.booleans()) else SIZES)
    file = folder / data.draw(st.sampled_from(["adapter_model.safetensors", "adapter_config.json"]))
    damaged = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(damaged) - 1, 3000)))
        damaged[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    file.write_bytes(damaged)
    try:
        loaded = read(folder)
    except AdapterRejected:
        return
    assert torch.isfinite(loaded.block).all()


def test_files_that_did_not_change_are_read_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lora_folder(tmp_path / "a", 1)
    assert read(folder).stamp is None, "too young to tell a change by"
    monkeypatch.setattr(files, "_SETTLED_NS", -(10**12))
    first = read(folder)
    again = read(folder, stamp=first.stamp)
    assert torch.equal(again.block, first.block)
    assert (again.digest, again.stamp) == (first.digest, first.stamp)
    with monkeypatch.context() as patch:
        for name in ("described", "parse_description", "recipe_of", "_check_finite"):
            patch.setattr(files, name, lambda *_, **__: pytest.fail("checked again"))
        read(folder, stamp=first.stamp)


def test_a_stamp_does_not_outlive_a_change_that_leaves_size_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SETTLED_NS", -(10**12))
    folder = lora_folder(tmp_path / "a", 1)
    file = folder / "adapter_model.safetensors"
    stamp, times, data = read(folder).stamp, file.stat(), file.read_bytes()
    file.write_bytes(data[:-4] + struct.pack("<f", float("nan")))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(AdapterRejected, match="not finite"):
        read(folder, stamp=stamp)
    changed = bytes(byte ^ (1 if at == len(data) - 4 else 0) for at, byte in enumerate(data))
    file.write_bytes(changed)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert stamp is not None and read(folder, stamp=stamp).digest != stamp.digest


def test_what_changes_while_it_is_read_again_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_SETTLED_NS", -(10**12))
    folder = lora_folder(tmp_path / "a", 1)
    file, first = folder / "adapter_model.safetensors", read(folder)
    data = file.read_bytes()
    fill, changes = files._fill, [data[:-4] + struct.pack("<f", 5.0), data[:-4] + struct.pack("<f", float("nan"))]

    def meddled(*given: Any) -> None:
        if changes:
            file.write_bytes(changes.pop(0))
        fill(*given)

    monkeypatch.setattr(files, "_fill", meddled)
    with pytest.raises(AdapterRejected, match="not finite"):
        read(folder, stamp=first.stamp)
    file.write_bytes(data)
    stamp = read(folder).stamp
    changes.append(data[:-4] + struct.pack("<f", 5.0))
    assert stamp is not None and read(folder, stamp=stamp).digest != stamp.digest == first.digest


def test_what_is_written_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number may be finite, and some of them of the old weights, others of the new ones."""
    folder = lora_folder(tmp_path / "a", 1)
    file = folder / "adapter_model.safetensors"
    data, fill = file.read_bytes(), files._fill
    os.utime(file, (1, 1))  # times may be too coarse to tell two writes in a row

    def meddled(*given: Any) -> None:
        fill(*given)
        file.write_bytes(data)

    monkeypatch.setattr(files, "_fill", meddled)
    with pytest.raises(AdapterRejected, match="changed while"):
        read(folder)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_updates_are_scaled_and_rounded_once(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in lora_tensors(1, 3).items()}
    folder = write_folder(tmp_path / "a", CONFIG | {"r": 3, "lora_alpha": 2}, tensors)
    loaded = read(folder, dtype=dtype)
    layout = loaded.layout
    for _, module, row in layout.places():
        if module in ("q", "o"):
            layer = row // 7
            name = Q_B.replace("layers.0", f"layers.{layer}").replace("q_proj", f"{module}_proj")
            inputs, outputs = SHAPE.size(module)
            b, rank = int(layout.b[row]), int(layout.ranks[row])
            found = loaded.block[b : b + rank * outputs].view(rank, outputs)
            assert torch.equal(found[:3], (tensors[name].float() * (2 / 3)).to(dtype).T)
            assert not found[3:].any() and rank == 8
            a = loaded.block[int(layout.a[row]) :][: 3 * inputs].view(3, inputs)
            assert torch.equal(a, tensors[name.replace("lora_B", "lora_A")].to(dtype))
