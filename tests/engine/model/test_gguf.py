"""GGUF files dequantise as the gguf package says, packed or not, and no hostile header costs more than a refusal."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from emulated_cuda import emulated
from gguf import GGMLQuantizationType as Kind
from gguf_models import HEAD_DIM, HIDDEN, UNWRITTEN_KINDS, VOCAB, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import settle

from headrace.engine.config import EngineConfig
from headrace.engine.errors import ModelRejected
from headrace.engine.life.build import build_kernels
from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.checkpoint.reread import rereading
from headrace.engine.model.checkpoint.weights import DecoderWeights, load_weights
from headrace.ops.cuda.codes.layout import CodeLayout
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.formats import Dense, Int4Groups, Stored
from headrace.ops.gguf_float4 import MXFP4
from headrace.ops.gguf_formats import BLOCK_KINDS, GgufBlocks, as_int4_groups

BIASES = {"blk.0.attn_q.bias": (256,), "blk.0.attn_k.bias": (128,), "blk.0.attn_v.bias": (128,)}
KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]


def load(path: Path, **options: Any) -> DecoderWeights:
    with GgufFile(path) as file:
        return load_weights(file, file.spec(), **{"dtype": torch.float32, "device": "cpu", **options})


def in_halves(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows of heads whose rotated pairs lie side by side, with each pair's elements half a head apart instead."""
    heads = rows.reshape(-1, HEAD_DIM // 2, 2, *rows.shape[1:])
    return np.concatenate([heads[:, :, 0], heads[:, :, 1]], axis=1).reshape(rows.shape)


def tensor_of(weight: object) -> torch.Tensor:
    assert isinstance(weight, Stored)
    return weight.dense(torch.float32)


PLAIN = (Kind.F32, Kind.F16, Kind.BF16)


def test_a_scale_that_is_no_number_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", Kind.MXFP4)
    data = bytearray((tmp_path / "tiny.gguf").read_bytes())
    with GgufFile(tmp_path / "tiny.gguf") as file:
        data[file.tensors["blk.0.ffn_up.weight"].offset + 17] = 255
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(ModelRejected, match=r"a scale of blk\.0\.ffn_up\.weight is 'nan'"):
        load(tmp_path / "bad.gguf", keep_packed=True)


@pytest.mark.parametrize("keep_packed", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, *UNWRITTEN_KINDS, Kind.MXFP4], ids=lambda kind: kind.name)
def test_every_kind_loads_as_the_package_dequantises_it(kind: Kind, keep_packed: bool, tmp_path: Path) -> None:
    expected = write_model(tmp_path / "tiny.gguf", kind)
    weights = load(tmp_path / "tiny.gguf", keep_packed=keep_packed)
    layer = weights.layers[0]
    q, k, v = (expected[f"blk.0.attn_{role}.weight"] for role in "qkv")
    wanted = {
        "qkv": np.concatenate([in_halves(q), in_halves(k), v]),
        "o": expected["blk.0.attn_output.weight"],
        "gate_up": np.concatenate([expected["blk.0.ffn_gate.weight"], expected["blk.0.ffn_up.weight"]]),
        "down": expected["blk.0.ffn_down.weight"],
    }
    for field, values in wanted.items():
        found = (layer.feed if field in layer.feed.matrices else layer.mixer).matrices[field]
        blocks = MXFP4 if kind is Kind.MXFP4 else GgufBlocks(kind)
        assert found.format == (blocks if keep_packed and kind not in PLAIN else Dense(torch.float32))
        assert np.array_equal(tensor_of(found).numpy(), values), field
    assert np.array_equal(weights.embedding_VE.numpy(), expected["token_embd.weight"])
    assert np.array_equal(layer.feed.vectors["norm_E"].numpy(), expected["blk.0.ffn_norm.weight"])
    assert weights.head.parts["values"] is weights.embedding_VE


@pytest.mark.parametrize(
    ("kind", "name"), [(Kind.Q8_0, "int8-g32"), (Kind.Q4_0, "int4-g32"), (Kind.Q6_K, "int6-g16-factors")]
)
def test_a_gpu_keeps_blocks_in_codes(kind: Kind, name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", kind)
    plain = load(tmp_path / "tiny.gguf").layers[0]
    layer = load(tmp_path / "tiny.gguf", layout=lambda weight: in_codes(weight, torch.float32)).layers[0]
    for sublayer, dense in ((layer.mixer, plain.mixer), (layer.feed, plain.feed)):
        for field, matrix in sublayer.matrices.items():
            assert (matrix.format.name if isinstance(matrix.format, CodeLayout) else "dense") == name
            assert torch.equal(tensor_of(matrix), tensor_of(dense.matrices[field])), field


def test_a_gpu_keeps_weights_of_one_product_in_codes_of_their_own(tmp_path: Path) -> None:
    """As files have them whose values are in more bits than their queries and keys."""
    write_model(tmp_path / "tiny.gguf", Kind.Q4_K, kinds={"blk.0.attn_v.weight": Kind.Q6_K})
    (plain, layer) = (
        load(tmp_path / "tiny.gguf", **options).layers[0].mixer.matrices["qkv"]
        for options in ({}, {"layout": lambda weight: in_codes(weight, torch.float32)})
    )
    assert [piece.format.name for piece in layer.pieces()] == ["int4-g32-minima-factors", "int6-g16-factors"]
    assert torch.equal(tensor_of(layer), tensor_of(plain))


def test_only_the_llama_architecture_interleaves_pairs(tmp_path: Path) -> None:
    expected = write_model(tmp_path / "tiny.gguf", Kind.F32, "qwen2", {**BIASES, "output.weight": (VOCAB, HIDDEN)})
    weights = load(tmp_path / "tiny.gguf")
    layer = weights.layers[0]
    rows = np.concatenate([expected[f"blk.0.attn_{role}.weight"] for role in "qkv"])
    assert np.array_equal(tensor_of(layer.mixer.matrices["qkv"]).numpy(), rows)
    assert np.array_equal(layer.mixer.vectors["qkv_bias"].numpy(), np.concatenate([expected[name] for name in BIASES]))
    assert np.array_equal(tensor_of(weights.head).numpy(), expected["output.weight"])


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_a_gpu_keeps_the_numbers_of_every_kind(kind: Kind, tmp_path: Path) -> None:
    """Whether it keeps the blocks in codes or makes them dense."""
    write_model(tmp_path / "tiny.gguf", kind)
    plain = load(tmp_path / "tiny.gguf").layers[0]
    layer = load(tmp_path / "tiny.gguf", layout=lambda weight: in_codes(weight, torch.float32)).layers[0]
    for field, matrix in layer.feed.matrices.items():
        assert torch.allclose(tensor_of(matrix), tensor_of(plain.feed.matrices[field]), rtol=1e-2, atol=1e-3), field


def test_llama_biases_are_put_in_order_too(tmp_path: Path) -> None:
    expected = write_model(tmp_path / "tiny.gguf", Kind.Q4_1, extra=BIASES)
    q, k, v = (expected[name] for name in BIASES)
    layer = load(tmp_path / "tiny.gguf", keep_packed=True).layers[0]
    assert np.array_equal(layer.mixer.vectors["qkv_bias"].numpy(), np.concatenate([in_halves(q), in_halves(k), v]))


def test_qwen3_head_norms_are_found(tmp_path: Path) -> None:
    norms = {"blk.0.attn_q_norm.weight": (HEAD_DIM,), "blk.0.attn_k_norm.weight": (HEAD_DIM,)}
    expected = write_model(tmp_path / "tiny.gguf", Kind.F16, "qwen3", norms)
    layer = load(tmp_path / "tiny.gguf").layers[0]
    assert np.array_equal(layer.mixer.vectors["k_norm_D"].numpy(), expected["blk.0.attn_k_norm.weight"])


def test_stored_rope_divisors_reach_the_spec(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", Kind.F16, extra={"rope_freqs.weight": (HEAD_DIM // 2,)})
    load(tmp_path / "tiny.gguf")
    with GgufFile(tmp_path / "tiny.gguf") as file:
        (rope,) = file.spec().ropes
    plain = 10000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(rope.inverse_frequencies(HEAD_DIM, 64), plain / np.linspace(1, 8, 32), rtol=1e-6)


def test_metadata_comes_as_plain_values(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", Kind.F16)
    file = GgufFile(tmp_path / "tiny.gguf")
    file.close()
    assert file.metadata["tokenizer.ggml.tokens"] == ["<s>", "é"]
    assert file.metadata["tokenizer.ggml.token_type"] == [1, 2]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert type(file.metadata["llama.block_count"]) is int
    with pytest.raises(ValueError, match="closed"):
        list(file.blocks("token_embd.weight"))


def test_smollm2_agrees_with_the_package(smollm2: Path) -> None:
    """Its header is compared whole, its tensors in both forms for one layer and the embedding."""
    with GgufFile(smollm2) as file:
        spec = file.spec()
        weights = load_weights(file, spec, dtype=torch.float32, device="cpu")
        packed = load_weights(file, spec, dtype=torch.bfloat16, device="cpu", keep_packed=True)
    reader = gguf.GGUFReader(smollm2)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert {name: tensor.data_offset for name, tensor in tensors.items()} == {
        name: tensor.offset for name, tensor in file.tensors.items()
    }
    for key, value in file.metadata.items():
        assert reader.fields[key].contents() == value, key
    assert (spec.num_layers, spec.uniform_attention.head_dim, spec.tied_head) == (30, 64, True)

    def dequantised(name: str) -> np.ndarray[Any, Any]:
        return gguf.quants.dequantize(np.array(tensors[name].data), tensors[name].tensor_type)

    q, k, v = (dequantised(f"blk.29.attn_{role}.weight") for role in "qkv")
    qkv = np.concatenate([in_halves(q), in_halves(k), v])
    assert np.array_equal(tensor_of(weights.layers[29].mixer.matrices["qkv"]).numpy(), qkv)
    kept = packed.layers[29].mixer.matrices["qkv"]
    assert kept.format == GgufBlocks(Kind.Q4_1)
    assert np.array_equal(tensor_of(kept).numpy(), qkv)
    groups = as_int4_groups(kept)
    assert groups.format == Int4Groups(32) and torch.equal(groups.dense(torch.float32), kept.dense(torch.float32))
    assert int(groups.parts["values"].max()) == 15
    assert np.array_equal(weights.embedding_VE.numpy(), dequantised("token_embd.weight"))
    assert torch.equal(packed.embedding_VE, weights.embedding_VE.bfloat16())


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(*keys: bytes, tensors: tuple[bytes, ...] = (), data: int = 0, **counts: int) -> bytes:
    fields = struct.pack("<4sIQQ", b"GGUF", 3, counts.get("tensors_in", len(tensors)), counts.get("keys_in", len(keys)))
    start = fields + b"".join(keys) + b"".join(tensors)
    return start + bytes(-len(start) % 32) + bytes(data)


def tensor(name: bytes, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


HUGE = (1 << 64) - 1
STRING, ARRAY, U8 = struct.pack("<I", 8), struct.pack("<I", 9), struct.pack("<I", 0)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "magic": (b"GGML" + header()[4:], "the magic number"),
    "version": (b"GGUF" + struct.pack("<I", 1) + header()[8:], "the version"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + header()[8:], "the version"),
    "tensor count": (header(tensors_in=HUGE), "the number of tensors"),
    "key count": (header(keys_in=HUGE), "the number of metadata keys"),
    "key count past the end": (header(keys_in=60000), "the type of "),
    "key length": (header(struct.pack("<Q", HUGE)), "the length of metadata key 0"),
    "string length": (header(text(b"a") + STRING + struct.pack("<Q", HUGE)), "the length of a"),
    "string past the end": (header(text(b"a") + STRING + struct.pack("<Q", 1 << 20)), "the end of a"),
    "no UTF-8": (header(text(b"a") + STRING + text(b"\xff")), "UTF-8"),
    "value type": (header(text(b"a") + struct.pack("<I", 13)), "the type of a"),
    "array length": (header(text(b"a") + ARRAY + U8 + struct.pack("<Q", HUGE)), "the length of a"),
    "array past the end": (header(text(b"a") + ARRAY + U8 + struct.pack("<Q", 1 << 21)), "the end of a"),
    "strings past the end": (header(text(b"a") + ARRAY + STRING + struct.pack("<Q", 1 << 21)), "the end of "),
    "nested array": (header(text(b"a") + (ARRAY + ARRAY + struct.pack("<Q", 1)) * 50), "no nested arrays"),
    "bool": (header(text(b"a") + struct.pack("<IB", 7, 2)), "0 or 1"),
    "duplicate key": (header(*[text(b"a") + U8 + b"\0"] * 2), "each key once"),
    "alignment": (header(text(b"general.alignment") + struct.pack("<II", 4, 3)), "general.alignment"),
    "alignment type": (header(text(b"general.alignment") + STRING + text(b"32")), "general.alignment"),
    "duplicate tensor": (header(tensors=(tensor(b"t", [1]), tensor(b"t", [1], 0, 32))), "each name once"),
    "dimensions": (header(tensors=(tensor(b"t", [1] * 5),)), "the dimensions of t"),
    "no dimensions": (header(tensors=(tensor(b"t", []),)), "the shape of t"),
    "zero size": (header(tensors=(tensor(b"t", [4, 0]),)), "the shape of t"),
    "size": (header(tensors=(tensor(b"t", [HUGE]),)), "a size of t"),
    "product": (header(tensors=(tensor(b"t", [400] * 4),)), "the end of t"),
    **{
        f"unsupported kind {kind.name}": (
            header(tensors=(tensor(b"t", [256], kind),)),
            f"the type of t is '{kind.name}'; allowed: F32, F16, BF16, ",
        )
        for kind in (Kind.IQ2_XXS, Kind.IQ2_S, Kind.IQ3_S, Kind.IQ1_M, Kind.TQ1_0, Kind.TQ2_0, Kind.F64)
    },
    "unknown kind": (header(tensors=(tensor(b"t", [256], 999),)), "the type of t is 999"),
    "part of a block": (header(tensors=(tensor(b"t", [33], Kind.Q4_0),)), "the inner size of t"),
    "offset past the end": (header(tensors=(tensor(b"t", [1], 0, 1 << 62),), data=32), "the end of t"),
    "unaligned": (header(tensors=(tensor(b"t", [1], 0, 4),), data=32), "the offset of t"),
    "overlap": (header(tensors=(tensor(b"t", [9]), tensor(b"u", [1], 0, 32)), data=64), "the offset of u"),
}


@pytest.mark.parametrize(("data", "word"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers_are_refused_in_little_memory(data: bytes, word: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    settle()
    tracemalloc.start()
    try:
        with pytest.raises(ModelRejected) as caught:
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert word in str(caught.value) and str(caught.value).startswith("bad.gguf: ")


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelRejected, match="no (such|regular) file"):
            GgufFile(path)
    (tmp_path / "bare.gguf").write_bytes(header())
    with GgufFile(tmp_path / "bare.gguf") as file, pytest.raises(ModelRejected, match=r"general\.architecture"):
        file.spec()


def test_names_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", Kind.F16, extra={"blk.0.attn_extra.weight": (4,)})
    with pytest.raises(ModelRejected, match=r"tiny.gguf: the tensor blk\.0\.attn_extra\.weight is left over"):
        load(tmp_path / "tiny.gguf")
    write_model(tmp_path / "qwen3.gguf", Kind.F16, "qwen3")
    with pytest.raises(ModelRejected, match=r"attn_q_norm\.weight is missing"):
        load(tmp_path / "qwen3.gguf")


@pytest.mark.parametrize("keep_packed", [False, True])
def test_infinite_scales_are_refused(keep_packed: bool, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", Kind.Q4_0)
    with GgufFile(tmp_path / "tiny.gguf") as file:
        at = file.tensors["blk.0.ffn_up.weight"].offset
    with (tmp_path / "tiny.gguf").open("r+b") as raw:
        raw.seek(at)
        raw.write(np.float16(np.inf).tobytes())
    with pytest.raises(ModelRejected, match=r"blk\.0\.ffn_up\.weight is not finite"):
        load(tmp_path / "tiny.gguf", keep_packed=keep_packed)


def test_a_file_that_shrinks_while_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, Kind.F16)
    with GgufFile(path) as file:
        path.write_bytes(path.read_bytes()[:-2000])
        with pytest.raises(ModelRejected, match="the file ends inside"):
            load_weights(file, file.spec(), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    path = tmp_path_factory.mktemp("fuzzed") / "tiny.gguf"
    write_model(path, Kind.Q4_0, extra={"rope_freqs.weight": (HEAD_DIM // 2,)})
    with GgufFile(path) as file:
        end = min(tensor.offset for tensor in file.tensors.values())
    return path, path.read_bytes(), end


@settings(max_examples=250, deadline=2000)
@given(st.data())
def test_mutated_files_raise_only_what_they_should(fuzzed: tuple[Path, bytes, int], data: st.DataObject) -> None:
    path, original, end = fuzzed
    mutated = bytearray(original)
    change = st.tuples(st.integers(0, end + 64), st.integers(0, 255))
    for at, byte in data.draw(st.lists(change, min_size=1, max_size=4)):
        mutated[at] = byte
    path.write_bytes(mutated[: data.draw(st.none() | st.integers(0, len(mutated)))])
    try:
        load(path, keep_packed=True)
    except ModelRejected as error:
        assert error.field and str(error).startswith("tiny.gguf")


def test_a_file_is_read_again_only_if_it_describes_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, Kind.F32)
    with GgufFile(path) as file:
        again = rereading(file)
    data = path.read_bytes()
    path.write_bytes(data[:-4] + b"\0\0\0\0")  # other weights
    assert again() == path
    for key, old, new in (
        ("tokenizer.ggml.tokens", b"\2" + bytes(7) + "é".encode(), b"\2" + bytes(7) + "è".encode()),
        ("tokenizer.ggml.add_bos_token", b"add_bos_token\x07\0\0\0\x01", b"add_bos_token\x07\0\0\0\0"),
        (
            "llama.context_length",
            b"context_length" + struct.pack("<II", 4, 128),
            b"context_length" + struct.pack("<II", 4, 64),
        ),
    ):
        assert data.count(old) == 1
        path.write_bytes(data.replace(old, new))
        with pytest.raises(ModelRejected, match="is not what it was") as caught:
            again()
        assert caught.value.field == key


def test_gpu_kernels_are_built_for_a_file(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", Kind.F16)
    options = {"load_format": "random", "kv_memory": "1MiB", "max_rows": 2, "max_batched_tokens": 64}
    with emulated():
        assert build_kernels(EngineConfig(model=tmp_path / "model.gguf", device="cuda", **options)).formats == (
            "dense",
        )
