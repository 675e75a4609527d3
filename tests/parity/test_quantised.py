"""Quantised checkpoints generate what transformers generates from the numbers that they stand for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf_families import Metadata, Tensors, random_model, write_gguf
from quantised_checkpoints import CASES, CONFIG, products, write_checkpoint
from quantised_layouts import plain
from safetensors.torch import load_file, save_file
from tokenizer_files import byte_metadata
from torch import Tensor

from headrace.engine import Choice, Engine, SamplingParams
from headrace.ops.cpu.native.library import library

COUNT = 32
MARGIN = 1e-2
PROMPTS = [[5, 17, 40, 3], [60, 2, 2, 33]]
NAMES = (
    "fp8 blocks", "modelopt fp8", "modelopt mixture", "modelopt nvfp4", "compressed int8 with zeros",
    "compressed int4 in an order", "compressed nvfp4", "compressed mixture", "gptq v2 in an order", "gptq with rules",
    "awq", "auto-round mixture", "mxfp4", "bitsandbytes nf4", "bitsandbytes int8",
)  # fmt: skip
"""At least one checkpoint in each format, and the mixtures."""
PACKED = (
    "compressed int8 with zeros", "compressed int4 groups with zeros", "compressed int4 channels",
    "compressed int4 in an order", "compressed int8 words", "gptq", "gptq v2 in an order", "gptq of 8 bits",
    "gptq with rules", "awq", "auto-round", "bitsandbytes int8",
)  # fmt: skip
"""Checkpoints whose integers a CPU's kernels multiply by."""
KINDS = {
    Kind.Q4_0: "q4_0", Kind.Q4_1: "q4_1", Kind.Q5_0: "q5_0", Kind.Q5_1: "q5_1", Kind.Q8_0: "q8_0", Kind.Q4_K: "q4_k",
    Kind.Q5_K: "q5_k", Kind.Q6_K: "q6_k", Kind.IQ4_XS: "int8-g32",
}  # fmt: skip
"""Kinds of GGUF's blocks, and the formats that the kernels have them in."""
NORM, SMALLER = "model.norm.weight", 8
"""The norm that logits grow with, and how much smaller it is than in other tests. One code of an activation more or
less, which the last bits of float32 decide, moves logits by some 4 %, which is then less than `MARGIN`."""

needs_kernels = pytest.mark.skipif(library() is None, reason="no C compiler, or a processor without AVX2")


def generated(model: Path, **options: Any) -> tuple[set[str], list[Choice]]:
    """The formats of an engine's matrices on a CPU, and its greedy answers."""
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=5)

    async def run() -> tuple[set[str], list[Choice]]:
        async with Engine(model, device="cpu", kv_memory="4MiB", **options) as engine:
            parts = {part.format for part in engine.info.weights if part.part not in ("embedding", "other")}
            return parts, [(await engine.generate(prompt, params)).choices[0] for prompt in PROMPTS]

    return anyio.run(run)


def logits_of(model: Any, found: Tensor, cache: Any = None) -> Tensor:
    """What a model of transformers says at the place of each generated token, [prompts, COUNT, V]."""
    with torch.inference_mode():
        ids = torch.cat([torch.tensor(PROMPTS), found], dim=1)
        return model(ids, cache=cache, use_cache=cache is not None).logits[:, len(PROMPTS[0]) - 1 : -1]


def check_tokens(logits: Tensor, found: Tensor) -> None:
    """Assert that every token is the likeliest behind those before it, unless two are all but equally likely."""
    best = logits.topk(2)
    is_clear = best.values[..., 0] - best.values[..., 1] > MARGIN
    assert torch.equal(best.indices[..., 0][is_clear], found[is_clear])
    assert is_clear.sum() > COUNT and len(set(found.flatten().tolist())) > 5, "the weights decide the tokens"


def tokens(answers: list[Choice]) -> Tensor:
    return torch.tensor([answer.token_ids for answer in answers])


def in_doubles(model: Any) -> Any:
    """A model of transformers in float64, its norms too, so that it says the same on every processor."""
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = partial(norm, module)
    return model.double().eval()


def norm(module: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def model_of(state: dict[str, Any]) -> Any:
    """Transformers' model of the tiny checkpoint."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    return in_doubles(model)


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_generates_what_transformers_does_from_the_plain_model(name: str, tmp_path: Path) -> None:
    state = write_checkpoint(tmp_path, CASES[name])
    _, answers = generated(tmp_path, dtype="float32")
    check_tokens(logits_of(model_of(state), tokens(answers)), tokens(answers))


class HalfCache(transformers.DynamicCache):
    """Keys and values in bfloat16, as an engine keeps them."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Round them before they are kept."""
        return super().update(in_halves(key_states), in_halves(value_states), *args, **kwargs)


def in_halves(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def in_eight_bits(x: Tensor, order: Tensor | None = None) -> Tensor:
    """Activations as the kernels round them: codes from -127 to 127 times the scale of each 32 of them.

    With an order of columns, 32 of them stand together there.
    """
    if order is not None:
        return in_eight_bits(x[..., order])[..., order.argsort()]
    groups = x.unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return (torch.round(groups / torch.where(scale > 0, scale, 1)) * scale).flatten(-2)


def round_inputs(model: Any, dense: set[str], orders: dict[str, Tensor]) -> None:
    """Let each linear layer of a model round its inputs as the CPU's kernels do; those of `dense` are not quantised."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            rounded = in_halves if name in dense else partial(in_eight_bits, order=orders.get(name))
            module.register_forward_pre_hook(lambda _, args, rounded=rounded: (rounded(args[0]),))


def check_rounded(model: Any, dense: set[str], orders: dict[str, Tensor], answers: list[Choice]) -> None:
    """Assert that answers are those of a model whose inputs are rounded, and not those of the model as it is."""
    found = tokens(answers)

    def distance(logits: Tensor) -> float:
        """Mean distance of the five largest log-probabilities at each place."""
        logprobs = torch.log_softmax(logits, -1)
        listed = [[each.top_logprobs for each in answer.logprobs or ()] for answer in answers]
        ids = torch.tensor([[[other.id for other in place] for place in answer] for answer in listed])
        said = torch.tensor([[[other.logprob for other in place] for place in answer] for answer in listed])
        return float((logprobs.gather(-1, ids) - said).abs().mean())

    far = distance(logits_of(model, found))
    round_inputs(model, dense, orders)
    logits = logits_of(model, found, HalfCache())
    check_tokens(logits, found)
    assert distance(logits) < far / 2


@needs_kernels
@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_give_what_transformers_does_with_rounded_inputs(name: str, tmp_path: Path) -> None:
    """By default, where weights stay packed and activations have 8 bits in groups of 32."""
    state = write_checkpoint(tmp_path, CASES[name])
    stored = load_file(tmp_path / "model.safetensors")
    stored[NORM], state[NORM] = stored[NORM] / SMALLER, state[NORM] / SMALLER
    save_file(stored, tmp_path / "model.safetensors")
    formats, answers = generated(tmp_path)
    assert formats - {"bfloat16"} == CASES[name].formats - {"float32"}
    dense = {module for module in products() if CASES[name].writer(module) is plain}
    groups = {name: each for name, each in stored.items() if name.endswith("g_idx")}
    orders = {name.rpartition(".")[0]: group_of.argsort(stable=True) for name, group_of in groups.items()}
    assert ("order" in name) == any("-ordered" in each for each in formats)
    check_rounded(model_of(state), dense, orders, answers)


def with_tokenizer(metadata: Metadata, _tensors: Tensors) -> None:
    metadata.update(byte_metadata())


@needs_kernels
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_packed_blocks_give_what_transformers_does_with_rounded_inputs(kind: Kind, tmp_path: Path) -> None:
    model = random_model(
        "llama", vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = in_halves(parameter.data / (SMALLER if name == NORM else 1))
    # Codes of embeddings are whole numbers, which would often lie between two codes of activations.
    kinds = {"token_embd.weight": Kind.BF16}
    numbers = write_gguf(model, tmp_path / "model.gguf", with_tokenizer, kind=kind, kinds=kinds)
    model.load_state_dict(numbers, strict=False)
    formats, answers = generated(tmp_path / "model.gguf")
    assert formats == {KINDS[kind]}
    check_rounded(in_doubles(model), set(), {}, answers)
