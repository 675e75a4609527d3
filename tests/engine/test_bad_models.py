"""A model that cannot be used is refused by a typed error that says why; nothing stays behind, others open."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tokenizer_files
from leftovers import Threads, open_files

from headrace.engine import Engine, EngineStopped, HeadraceError, InvalidParams, ModelRejected, SamplingParams

pytestmark = pytest.mark.anyio

SMALL: dict[str, Any] = {"dtype": "float32", "kv_memory": 32 * tiny_models.PAGE_BYTES}


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, object]]:
    """One event loop: which files are refused does not depend on it."""
    return "asyncio", {}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.whole_folder(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.whole_folder(tmp_path_factory.mktemp("sharded"), max_shard_size="20KB")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No thread outlives its test, and no file of a model stays open."""
    models = tmp_path_factory.getbasetemp()
    threads, files = Threads(), open_files(models)
    yield
    threads.check_ended()
    assert open_files(models) <= files


async def refused(model: Path | str, kind: type[HeadraceError] = ModelRejected, **options: Any) -> Any:
    """Open `model`, which must fail; its engine is then as good as never opened."""
    engine = Engine(model, **(SMALL | options))
    with pytest.raises(kind) as caught:
        async with engine:
            pytest.fail("it opened")
    with pytest.raises(EngineStopped):
        engine.stream([1])
    with pytest.raises(EngineStopped):
        engine.stats()
    await engine.aclose()
    return caught.value


def edit(path: Path, **changes: Any) -> None:
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def truncate(path: Path, share: float) -> None:
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, str, str]] = {
    "empty folder": (lambda f: shutil.rmtree(f) or f.mkdir(), "config.json", "config.json"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json", "no such file"),
    "config is no json": (lambda f: (f / "config.json").write_text("{"), "config.json", "JSON"),
    "unknown architecture": (
        lambda f: edit(f / "config.json", architectures=["MambaForCausalLM"], model_type="mamba"),
        "architectures",
        "LlamaForCausalLM",
    ),
    "no name of an architecture": (
        lambda f: edit(f / "config.json", architectures=[["LlamaForCausalLM"]]),
        "architectures",
        "supported",
    ),
    "code of its own": (
        lambda f: edit(f / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"}),
        "auto_map",
        "auto_map",
    ),
    "tokenizer code of its own": (
        lambda f: (f / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.T", null]}}'),
        "auto_map",
        "auto_map",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer", "tokenizer.json"),
    "damaged tokenizer": (lambda f: truncate(f / "tokenizer.json", 0.5), "tokenizer", "could not be read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors", "model.safetensors"),
    "a pickle": (only_pickle, "pytorch_model.bin", "pickle"),
    "empty weights": (lambda f: truncate(f / "model.safetensors", 0), "size", "8 bytes"),
    "truncated weights": (lambda f: truncate(f / "model.safetensors", 0.7), "size", "truncated"),
    "truncated header": (lambda f: truncate(f / "model.safetensors", 0.001), "length", "at most"),
    "endless header": (
        lambda f: overwrite(f / "model.safetensors", 0, struct.pack("<Q", 2**63)),
        "length",
        "at most",
    ),
    "header is no json": (lambda f: overwrite(f / "model.safetensors", 8, b"\xff"), "header", "JSON"),
    "another shape": (lambda f: edit(f / "config.json", hidden_size=64), "weight", "shape"),
    "layers too many": (lambda f: edit(f / "config.json", num_hidden_layers=3), "layers.2", "missing"),
    "layers too few": (lambda f: edit(f / "config.json", num_hidden_layers=1), "layers.1", "left over"),
    "an impossible size": (lambda f: edit(f / "config.json", vocab_size=2**40), "vocab_size", "vocab_size"),
}


@pytest.mark.parametrize(("damage", "field", "word"), DAMAGES.values(), ids=DAMAGES)
async def test_damaged_folders_are_refused_and_others_open(
    folder: Path, whole: Path, damage: Damage, field: str, word: str
) -> None:
    damage(folder)
    error = await refused(folder)
    assert field in str(error.field) and word in str(error)
    await opens(whole)


async def opens(model: Path) -> None:
    async with Engine(model, **SMALL) as engine:
        assert len((await engine.generate([1, 2], SamplingParams(max_tokens=2))).choices[0].token_ids) == 2


async def test_a_missing_shard_is_named(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    await opens(folder)
    shard = sorted(folder.glob("*.safetensors"))[1]  # noqa: ASYNC240
    shard.unlink()
    error = await refused(folder)
    assert error.field == shard.name and "missing" in str(error)


@pytest.mark.parametrize(
    "path", ["/nowhere/model", "./nowhere", "~/no such model", "nowhere.gguf", "owner/name", "a/b/c"]
)
async def test_what_is_not_there_is_refused(path: str) -> None:
    error = await refused(path)
    assert error.field


async def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("hello")
    await refused(tmp_path / "model.txt")


def damaged_gguf(path: Path, change: Callable[[bytearray], object]) -> Path:
    """The first 4 MiB of the real file, its header and some tensors, changed."""
    with tokenizer_files.smollm2_path().open("rb") as file:
        data = bytearray(file.read(4 << 20))
    change(data)
    path.write_bytes(data)
    return path


def put(at: int, form: str, value: int) -> Callable[[bytearray], object]:
    return lambda data: struct.pack_into(form, data, at, value)


GGUF_DAMAGES: dict[str, tuple[Callable[[bytearray], object], str]] = {
    "truncated tensors": (lambda data: None, "truncated"),
    "truncated header": (lambda data: data.__delitem__(slice(5000, None)), "bytes"),
    "empty": (lambda data: data.clear(), "empty"),
    "another kind of file": (put(0, "<I", 0x04034B50), "magic"),
    "another version": (put(4, "<I", 1), "version"),
    "tensors without end": (put(8, "<Q", 2**64 - 1), "number of tensors"),
    "keys without end": (put(16, "<Q", 2**40), "number of metadata keys"),
    "a key without end": (put(24, "<Q", 2**63), "metadata key 0"),
}


@pytest.mark.parametrize(("change", "word"), GGUF_DAMAGES.values(), ids=GGUF_DAMAGES)
async def test_damaged_gguf_files_are_refused(
    change: Callable[[bytearray], object], word: str, tmp_path: Path, whole: Path
) -> None:
    error = await refused(damaged_gguf(tmp_path / "model.gguf", change))
    assert word in str(error) and error.field
    await opens(whole)


@pytest.mark.parametrize(
    ("options", "field", "limit"),
    [({"max_context": 257}, "max_context", 256), ({"kv_memory": 4095}, "kv_memory", 4096)],
    ids=["context", "memory"],
)
async def test_options_the_model_cannot_meet_are_refused(
    whole: Path, options: dict[str, int], field: str, limit: int
) -> None:
    error = await refused(whole, InvalidParams, **options)
    assert (error.field, error.value, error.limit) == (field, options[field], limit)
    await opens(whole)


@pytest.mark.parametrize("text", ["lots", "-1GiB", "1 TB", "1e3", "GiB", "1GiBB", "0", "", "nan", "٣x"])
async def test_sizes_that_are_none_are_refused_at_once(text: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        Engine("model", kv_memory=text)
    assert caught.value.field == "kv_memory"


async def test_sizes_with_units_are_understood() -> None:
    for text, size in {"2GiB": 2 << 30, "512 MB": 512 * 10**6, "1.5kib": 1536, " 7 ": 7, "10b": 10}.items():
        assert Engine("model", kv_memory=text).config.kv_memory == size


async def test_an_engine_that_failed_to_open_may_try_again(whole: Path, tmp_path: Path) -> None:
    """The files may have arrived meanwhile."""
    engine = Engine(tmp_path / "late", **SMALL)
    with pytest.raises(ModelRejected):
        await engine.__aenter__()
    shutil.copytree(whole, tmp_path / "late")
    async with engine:
        assert engine.info.vocab_size == 96


async def test_one_engine_serves_while_others_fail_to_open(whole: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    async with Engine(whole, **SMALL) as engine:
        expected = (await engine.generate([5], params)).choices[0].token_ids
        async with engine.stream([5], params) as stream:
            first = await anext(aiter(stream))
            await refused(tmp_path / "nothing")
            assert [first.id, *[token.id async for token in stream]] == expected
