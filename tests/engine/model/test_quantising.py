"""Quantised copies: the weights that an engine would make itself, or better ones by data, whatever interrupts a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints
import torch
import transformers
from quantising import Told, contents, copied, dense_folder, sequences
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from headrace.engine import InvalidParams, ModelRejected
from headrace.engine.model.checkpoint.weight_parts import stored_parts
from headrace.engine.model.checkpoint.weights import DecoderWeights, load_weights
from headrace.engine.model.families.hf import HF_NAMES
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.quantising.own_texts import OwnTexts
from headrace.engine.model.quantising.selected import select
from headrace.engine.model.roles import Fused, matrix
from headrace.engine.model.spec import Attention, DenseFeed, FeedSpec, LayerSpec, Norms
from headrace.ops.formats import Dense, Stored
from headrace.ops.gptq import Hessian, gptq
from headrace.ops.quantise import Method, quantise

METHODS: list[Method] = ["fp8", "int8", "int4"]


def load(folder: Path, *, quantize: Method | None = None) -> DecoderWeights:
    spec = from_hf(read_hf_config(folder))
    return load_weights(folder, spec, dtype=torch.float32, device="cpu", keep_packed=True, quantize=quantize)


def matrices(weights: DecoderWeights) -> dict[str, Stored]:
    found = {"head": weights.head}
    for number in range(len(weights.layers)):
        layer = weights.layers[number]
        for sublayer in (layer.mixer, layer.feed):
            found |= {f"{number} {name}": each for name, each in sublayer.matrices.items()}
    return found


def check_equal(found: DecoderWeights, wanted: DecoderWeights) -> None:
    """Assert that all parameters are equal in format and bits."""
    assert torch.equal(found.embedding_VE, wanted.embedding_VE)
    assert torch.equal(found.final_norm["norm_E"], wanted.final_norm["norm_E"])
    pairs = [(matrices(found)[name], each) for name, each in matrices(wanted).items()]
    for one, other in pairs:
        assert one.format == other.format
        assert all(torch.equal(one.parts[part], other.parts[part]) for part in other.parts)
    for number in range(len(wanted.layers)):
        for one, other in zip(vectors(found, number), vectors(wanted, number), strict=True):
            assert torch.equal(one, other)


def vectors(weights: DecoderWeights, number: int) -> list[Tensor]:
    layer = weights.layers[number]
    return [*layer.mixer.vectors.values(), *layer.feed.vectors.values()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense_folder(tmp_path_factory.mktemp("models") / "model")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.bfloat16, {}),
        (torch.float16, {"tie_word_embeddings": True}),
        (torch.float32, {"intermediate_size": 176, "attention_bias": True}),
        (torch.bfloat16, {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 384}),
        (torch.bfloat16, {"architecture": "Helium", "head_dim": 64}),
    ],
    ids=["a head", "no head", "inputs that are no whole groups", "one group", "reordered rows"],
)
def test_weights_are_those_that_an_engine_makes(
    method: Method, dtype: torch.dtype, changes: Mapping[str, Any], tmp_path: Path
) -> None:
    folder = dense_folder(tmp_path / "model", dtype, **changes)
    told = Told()
    report = copied(folder, tmp_path / "out", method, told)
    check_equal(load(tmp_path / "out"), load(folder, quantize=method))
    odd = method == "int4" and changes.get("intermediate_size") == 176
    left = [f"model.layers.{number}.mlp.down_proj" for number in range(2) if odd]
    assert [line.split()[0] for line in told.lines if "is not quantised" in line] == left
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert sorted(config["quantization_config"]["ignore"]) == sorted(["lm_head", *left])
    assert report.quantised == 14 - len(left) and report.after < report.before
    assert told.shares[-1] == 1.0 and told.shares == sorted(told.shares)


def test_a_copy_in_several_files_is_the_same_model(model: Path, tmp_path: Path) -> None:
    copied(model, tmp_path / "one", "int4")
    copied(model, tmp_path / "several", "int4", shard_bytes=100_000)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 3 and sorted(set(index["weight_map"].values())) == files
    check_equal(load(tmp_path / "several"), load(tmp_path / "one"))
    sizes = [path.stat().st_size for path in (tmp_path / "several").glob("*.safetensors")]
    assert max(sizes) < 120_000
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "several" / file, "pt") as opened:
            assert name in opened.keys()


@pytest.mark.parametrize(
    ("hidden", "wide", "asked", "group"),
    [(192, 256, None, 64), (256, 384, None, 128), (256, 160, None, 32), (256, 176, None, 128), (256, 384, 32, 32)],
)
def test_groups_have_one_size_in_all_layers(
    hidden: int, wide: int, asked: int | None, group: int, tmp_path: Path
) -> None:
    """The largest size that divides the inputs of all layers, but of those that no size divides."""
    sizes = {"hidden_size": hidden, "num_attention_heads": hidden // 64, "intermediate_size": wide}
    folder = dense_folder(tmp_path / "model", **sizes)
    copied(folder, tmp_path / "out", "int4", group=asked)
    made, dense = matrices(load(tmp_path / "out")), matrices(load(folder))
    for name, weight in dense.items():
        is_left = name == "head" or weight.shape[-1] % 32 != 0
        wanted = weight if is_left else quantise(weight, "int4", group=group)
        assert made[name].format == wanted.format
        assert is_left or made[name].format.name == f"int4-g{group}-zeros"
        assert all(torch.equal(made[name].parts[part], wanted.parts[part]) for part in wanted.parts)


def test_sizes_of_groups_that_fit_nothing_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidParams, match=r"group_size: must be a size that kernels take, got 48; wanted: 32, 64, 128"
    ):
        copied(model, tmp_path / "out", "int4", group=48)
    with pytest.raises(InvalidParams, match=r"group_size: is for int4 alone: fp8 has a scale for each output"):
        copied(model, tmp_path / "out", "fp8", group=64)
    with pytest.raises(InvalidParams, match=r"fits no linear layer: no number of inputs is a multiple of 128"):
        copied(model, tmp_path / "out", "int4", group=128)
    assert not list(tmp_path.iterdir())


def test_everything_beside_the_weights_is_copied(model: Path, tmp_path: Path) -> None:
    copied(model, tmp_path / "out", "int8")
    for name in ("tokenizer.json", "generation_config.json", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (model, tmp_path / "out"))
    assert after.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert after == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert not (tmp_path / "out" / "onnx").exists()


def test_a_link_out_of_the_folder_is_not_handed_on(tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "snapshots" / "model")
    (tmp_path / "secret").write_text("mine")
    (folder / "NOTICE").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelRejected, match="NOTICE: a link to .*secret, out of the model's folder"):
        copied(folder, tmp_path / "out", "fp8")
    assert not (tmp_path / "out.partial").exists(), "before any work is done"
    (folder / "NOTICE").unlink()
    (tmp_path / "blobs").mkdir()
    (folder / "LICENSE").rename(tmp_path / "blobs" / "1234")
    (folder / "LICENSE").symlink_to(tmp_path / "blobs" / "1234")
    copied(folder, tmp_path / "other", "fp8")
    assert (tmp_path / "other" / "LICENSE").read_text() == "as is" and not (tmp_path / "other" / "LICENSE").is_symlink()


def test_a_head_is_quantised_if_asked_for(model: Path, tmp_path: Path) -> None:
    copied(model, tmp_path / "out", "int8", head=True)
    assert isinstance(load(model).head.format, Dense)
    assert load(tmp_path / "out").head.format.name == "int8"
    copied(model, tmp_path / "calibrated", "int4", head=True, data=sequences())
    assert load(tmp_path / "calibrated").head.format.name == "int4-g64-zeros"


class _Experts(FeedSpec):
    """A feed with a router."""

    def parameters(self, hidden_size: int) -> Mapping[str, Fused]:
        return {**DenseFeed(64).parameters(hidden_size), "router": matrix(hidden_size, router=2)}


def test_routers_and_tables_of_embeddings_are_never_quantised(model: Path) -> None:
    spec = from_hf(read_hf_config(model))
    layer = LayerSpec(Attention(2, 1, 32), _Experts(), Norms(1e-5))
    names = replace(HF_NAMES, roles={**HF_NAMES.roles, "router": "mlp.router"})
    found = select(replace(spec, layers=(layer,), tied_head=True), names, "int8", head=False, symmetric=False)
    assert found.ignored == {"model.layers.0.mlp.router": "a router", "lm_head": "the table of embeddings"}
    assert [module.name.rpartition(".")[2] for module in found.modules] == [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip


# --- data


GROWING = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 16.0,
    "original_max_position_embeddings": 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 1.0,
}


@pytest.mark.parametrize("architecture", ["Llama", "Helium", "Ministral3"])
def test_codes_come_from_the_inputs_that_transformers_sees(architecture: str, tmp_path: Path) -> None:
    """In the second layer, those behind the quantised first one."""
    ids_ST = sequences()
    changes = {"rope_parameters": GROWING} if architecture == "Ministral3" else {}
    model = dense_folder(tmp_path / "model", architecture=architecture, head_dim=64, **changes)
    copied(model, tmp_path / "out", "int4", data=ids_ST)
    made = matrices(load(tmp_path / "out"))
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    sizes = {"qkv": [192, 64, 64], "gate_up": [320, 320], "o": [192], "down": [192]}
    for number, layer in enumerate(reference.model.layers):
        modules = {
            "qkv": [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
            "o": [layer.self_attn.o_proj],
            "gate_up": [layer.mlp.gate_proj, layer.mlp.up_proj],
            "down": [layer.mlp.down_proj],
        }
        for half in (("qkv", "o"), ("gate_up", "down")):
            seen: dict[str, Tensor] = {}
            hooks = [modules[name][0].register_forward_pre_hook(partial(_keep, seen, name)) for name in half]
            with torch.inference_mode():
                reference(ids_ST)
            for hook in hooks:
                hook.remove()
            for name in half:
                hessian = Hessian(seen[name].shape[-1], torch.device("cpu"))
                hessian.add(seen[name].flatten(0, 1))
                for module, piece in zip(modules[name], made[f"{number} {name}"].split(sizes[name]), strict=True):
                    rows = torch.arange(len(module.weight))
                    if architecture == "Helium" and module in modules["qkv"][:2]:  # whose pairs lie side by side
                        rows = rows.view(-1, 32, 2).transpose(1, 2).flatten()
                    wanted = gptq(Stored.from_dense(module.weight.detach()), hessian, "int4")
                    for part in ("scale", "zero"):
                        assert torch.equal(piece.parts[part], wanted.parts[part][rows])
                    # Sums in another order move a number across the middle between two codes now and then.
                    is_equal = piece.parts["values"] == wanted.parts["values"][rows]
                    assert is_equal.float().mean() > 0.97, (number, name)
                    with torch.no_grad():
                        module.weight[rows] = piece.dense(torch.float32)


def _keep(seen: dict[str, Tensor], name: str, _: object, given: tuple[Tensor, ...]) -> None:
    seen[name] = given[0]


@pytest.mark.parametrize("method", ["fp8", "int4"])
def test_data_brings_a_model_closer_to_the_dense_one(method: Method, model: Path, tmp_path: Path) -> None:
    ids_ST = sequences(64, 40)
    copied(model, tmp_path / "rounded", method)
    copied(model, tmp_path / "calibrated", method, data=ids_ST[:56])
    dense = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = dense(ids_ST[56:]).logits
        errors = []
        for name in ("calibrated", "rounded"):
            weights = load(tmp_path / name)
            for number, layer in enumerate(dense.model.layers):
                here = {each: stored.dense(torch.float32) for each, stored in matrices(weights).items()}
                pieces = here[f"{number} qkv"].split([192, 64, 64]) + here[f"{number} gate_up"].chunk(2)
                attention, feed = layer.self_attn, layer.mlp
                targets = [attention.q_proj, attention.k_proj, attention.v_proj, feed.gate_proj, feed.up_proj]
                for module, piece in zip(
                    [*targets, attention.o_proj, feed.down_proj],
                    [*pieces, here[f"{number} o"], here[f"{number} down"]],
                    strict=True,
                ):
                    module.weight.copy_(piece)
            errors.append(float((dense(ids_ST[56:]).logits - wanted).square().mean()))
    assert errors[0] < 0.9 * errors[1]


# --- interruption


@pytest.mark.parametrize(
    ("method", "data"),
    [("int4", None), ("int4", sequences()), ("fp8", sequences())],
    ids=["int4 without data", "int4", "fp8"],
)
@pytest.mark.parametrize("stop_after", [1, 4, 17, 21])
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    model: Path, method: Method, data: Tensor | None, stop_after: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data": data, "shard_bytes": 300_000}
    copied(model, tmp_path / "whole", method, **options)
    with pytest.raises(KeyboardInterrupt):
        copied(model, tmp_path / "out", method, Told(stop_after), **options)
    assert not (tmp_path / "out").exists()
    journal = tmp_path / "out.partial" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes() + b'"model.layers.1.ml')  # a line that was cut off
    _spoil(tmp_path / "out.partial" / "folder", journal)
    again = Told()
    copied(model, tmp_path / "out", method, again, **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_the_models_own_texts_are_written_once(model: Path, tmp_path: Path) -> None:
    """An interrupted run goes on with the texts that it has; one that was interrupted before writes them anew."""
    ids_ST, out, written = sequences(), tmp_path / "out", 0

    def write() -> list[list[int]]:
        nonlocal written
        written += 1
        if written == 1:
            raise KeyboardInterrupt
        return (ids_ST + written - 2).tolist()  # others each time

    own = OwnTexts(*ids_ST.shape, write)
    for told in (Told(), Told(17)):
        with pytest.raises(KeyboardInterrupt):
            copied(model, out, "int4", told, data=own)
    copied(model, out, "int4", data=own)
    copied(model, out, "int4", data=own)
    assert written == 2
    copied(model, tmp_path / "whole", "int4", data=ids_ST)
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    with pytest.raises(InvalidParams, match="made with data '12 x 40 of its own' and not"):
        copied(model, out, "int4", data=ids_ST)


def _spoil(folder: Path, journal: Path) -> None:
    """Overwrite all tensors that are not done, as a run does that is killed while it writes one."""
    done = {json.loads(line) for line in journal.read_text().splitlines()[1:-1]}
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__" and not {name, name.rpartition(".")[0]} & done:
                first, end = entry["data_offsets"]
                data[start + first : start + end] = b"\xa5" * (end - first)
        path.write_bytes(data)


def test_what_is_done_is_not_done_again(model: Path, tmp_path: Path) -> None:
    journal = tmp_path / "out.partial" / "journal.jsonl"
    for stop_after in (10, 11):
        with pytest.raises(KeyboardInterrupt):
            copied(model, tmp_path / "out", "int8", Told(stop_after))
        names = journal.read_text().splitlines()[1:]
        assert len(names) == len(set(names)) == stop_after


def test_a_folder_of_other_arguments_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        copied(model, tmp_path / "out", "int8", Told(3))
    before = contents(tmp_path)
    with pytest.raises(InvalidParams, match=r"out: .*out\.partial was begun with format 'int8' and not 'int4'"):
        copied(model, tmp_path / "out", "int4")
    other = dense_folder(tmp_path.with_name(tmp_path.name + "other"), rms_norm_eps=1e-6)
    with pytest.raises(InvalidParams, match="with another model"):
        copied(other, tmp_path / "out", "int8")
    assert contents(tmp_path) == before


def test_folders_of_others_are_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(InvalidParams, match=r"out: .*full is there already and not an empty folder"):
        copied(model, tmp_path / "full", "int8")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("x")
    with pytest.raises(InvalidParams, match=r"out\.partial is in the way"):
        copied(model, tmp_path / "out", "int8")
    with pytest.raises(InvalidParams, match="lies in the model's folder"):
        copied(model, model / "out", "int8")
    assert contents(tmp_path) == {"full/mine": b"x", "out.partial/mine": b"x"}
    (tmp_path / "empty").mkdir()
    copied(model, tmp_path / "empty", "int8")
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_two_runs_at_once_are_refused(model: Path, tmp_path: Path) -> None:
    class Twice(Told):
        def advance(self, doing: str, done: int, total: int) -> None:
            if not self.done:
                with pytest.raises(InvalidParams, match="another run is writing"):
                    copied(model, tmp_path / "out", "int8")
            super().advance(doing, done, total)

    copied(model, tmp_path / "out", "int8", Twice())


@pytest.mark.parametrize("leftover", [None, "journal", "journal and texts", "empty"])
def test_a_complete_copy_is_left_as_it_is(model: Path, leftover: str | None, tmp_path: Path) -> None:
    """Also beside what a run has left that was killed just behind the renaming of its folder."""
    with pytest.raises(KeyboardInterrupt):
        copied(model, tmp_path / "out", "int8", Told(3))
    journal = (tmp_path / "out.partial" / "journal.jsonl").read_bytes()
    first = copied(model, tmp_path / "out", "int8")
    assert first.after == sum(tensor.nbytes for tensor in load_file(tmp_path / "out" / "model.safetensors").values())
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (tmp_path / "out").rglob("*")}
    if leftover:
        (tmp_path / "out.partial").mkdir()
    if leftover in ("journal", "journal and texts"):
        (tmp_path / "out.partial" / "journal.jsonl").write_bytes(journal)
    if leftover == "journal and texts":
        (tmp_path / "out.partial" / "texts.json").write_text("[[1]]")
    told = Told()
    assert copied(model, tmp_path / "out", "int8", told) == first
    assert not told.done and "out is complete" in told.lines[-1]
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (tmp_path / "out").rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_complete_copy_of_other_arguments_is_refused(model: Path, tmp_path: Path) -> None:
    copied(model, tmp_path / "out", "int8")
    before = contents(tmp_path)
    with pytest.raises(InvalidParams, match=r"out: .*out is there already, made with format 'int8' and not 'int4'"):
        copied(model, tmp_path / "out", "int4")
    with pytest.raises(InvalidParams, match="made with another model; name another folder, or delete it"):
        copied(dense_folder(tmp_path.with_name(tmp_path.name + "other")), tmp_path / "out", "int8")
    assert contents(tmp_path) == before
    (tmp_path / "out" / "mine").write_text("x")
    copied(model, tmp_path / "out", "int8")
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(InvalidParams, match=r"model\.safetensors is missing or has changed since; delete the folder"):
        copied(model, tmp_path / "out", "int8")
    weights.unlink()
    with pytest.raises(InvalidParams, match=r"model\.safetensors is missing"):
        copied(model, tmp_path / "out", "int8")
    for record in ("", "[]", '{"files": 3}', "\xff"):
        (tmp_path / "out" / "headrace_quantize.json").write_bytes(record.encode("latin-1"))
        with pytest.raises(InvalidParams, match="not an empty folder"):
            copied(model, tmp_path / "out", "int8")


# --- bad input


def test_models_that_cannot_be_quantised_are_refused(model: Path, tmp_path: Path) -> None:
    quantised_checkpoints.write_checkpoint(tmp_path / "gptq", quantised_checkpoints.CASES["gptq"])
    with pytest.raises(ModelRejected, match=r"gptq is quantised already \(config.json says gptq\)"):
        copied(tmp_path / "gptq", tmp_path / "out", "int8")
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelRejected, match="is a GGUF file"):
        copied(tmp_path / "small.gguf", tmp_path / "out", "int8")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ModelRejected, match="architectures .*LlamaForCausalLM"):
        copied(tmp_path / "mamba", tmp_path / "out", "int8")
    with pytest.raises(ModelRejected, match="is not there"):
        copied(tmp_path / "nothing", tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRejected, match=r"layers\.1\.mlp\.up_proj\.weight is not finite"):
        copied(folder, tmp_path / "out", "int8")


def test_too_few_tokens_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParams, match=r"data: is too short: 80 tokens for products of up to 320 inputs"):
        copied(model, tmp_path / "out", "int4", data=sequences(2, 40))
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore")
def test_sequences_that_are_longer_than_the_model_takes_are_refused(model: Path, tmp_path: Path) -> None:
    most = transformers.AutoConfig.from_pretrained(model).max_position_embeddings
    for data in ({"data": sequences(2, most + 1)}, {"data": OwnTexts(2, most + 1, list)}):
        with pytest.raises(InvalidParams, match=rf"at most {most}$") as error:
            copied(model, tmp_path / "out", "int4", **data)
        assert error.value.field == "sequence_tokens"
    assert not list(tmp_path.iterdir())


def test_a_model_of_bounded_scores_is_not_calibrated(tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    config = transformers.Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path / "model")
    with pytest.raises(InvalidParams, match="data: is not possible for this model"):
        copied(tmp_path / "model", tmp_path / "out", "int4", data=sequences())
    assert not (tmp_path / "out.partial").exists()


def test_a_table_of_embeddings_is_no_head_to_quantise(tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "model", tie_word_embeddings=True)
    with pytest.raises(InvalidParams, match="the head is the table of embeddings"):
        copied(folder, tmp_path / "out", "int8", head=True)


def test_a_model_without_whole_groups_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3, "head_dim": 16}
    folder = dense_folder(tmp_path / "model", **sizes)
    with pytest.raises(InvalidParams, match="fits no linear layer"):
        copied(folder, tmp_path / "out", "int4")


class Peak(TorchDispatchMode):
    """Notes the most bytes of tensors that live at a time, but for those that lie in files."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self._live[each.untyped_storage()] = each.untyped_storage().nbytes()
        self.most = max(self.most, sum(self._live.values()))
        return out


def test_a_model_is_never_in_memory_as_a_whole_while_it_is_quantised(tmp_path: Path) -> None:
    """Beside what is kept, there is never more than a few times the largest matrix in float32."""
    config = quantised_checkpoints.CONFIG | {"num_hidden_layers": 24, "hidden_size": 128, "intermediate_size": 128}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config | {"num_attention_heads": 2}))
    model.bfloat16().save_pretrained(tmp_path)
    dense = sum(parameter.nbytes for parameter in model.parameters())
    spec, peak = from_hf(read_hf_config(tmp_path)), Peak()
    with peak:
        weights = load_weights(tmp_path, spec, dtype=torch.bfloat16, device="cpu", keep_packed=True, quantize="int4")
    kept = sum(part.nbytes for part in stored_parts(weights))
    largest = 2 * 128 * 128 * torch.float32.itemsize
    assert kept < 0.7 * dense and 16 * largest < dense - kept
    assert kept < peak.most <= kept + 12 * largest, (peak.most - kept) / largest
