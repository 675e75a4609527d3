"""Other engines to run in turn with headrace, each behind one method; imports a peer only when it is asked for.

Both engines stay open together, so on a GPU headrace's own cache must be bounded (`--kv-memory`); the peer takes its
share of the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Final, Protocol

import torch

from headrace.engine import SamplingParams
from headrace.engine.bench.opening import BenchmarkFailed, Subject, Target

__all__ = ["PEERS", "Peer", "open_peer"]

_NO_EOS = -1


class Peer(Protocol):
    """Another engine with the same model open."""

    name: str
    version: str

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> float:
        """Generate all at once, end-of-sequence ignored, and return the seconds that it took without its warm-up.

        Raises:
            BenchmarkFailed: The peer did not generate the tokens that were asked for.
        """
        ...

    def close(self) -> None:
        """Return the peer's memory."""
        ...


class _Transformers:
    """The continuous batching of transformers, at its own defaults, in bfloat16."""

    name = "transformers continuous batching"

    def __init__(self, path: str, device: str, random: bool) -> None:
        transformers: Any = import_module("transformers")
        self.version = transformers.__version__
        with torch.device(device):
            if random:
                config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            else:
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype=torch.bfloat16, local_files_only=True
                )
        self._model: Any = model.to(device).eval()

    @torch.no_grad()
    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> float:
        transformers: Any = import_module("transformers")  # its classes have no types
        outputs = [each.max_tokens or 1 for each in params]
        temperature = params[0].temperature
        choosing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        config = transformers.GenerationConfig(
            max_new_tokens=max(outputs), eos_token_id=_NO_EOS, pad_token_id=0, **choosing
        )
        generated = 0
        with self._model.continuous_batching_context_manager(generation_config=config) as manager:
            started = time.perf_counter()
            for prompt, count in zip(prompts, outputs, strict=True):
                manager.add_request(prompt, max_new_tokens=count, eos_token_id=_NO_EOS)
            left = len(outputs)
            while left:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    generated += len(result.generated_tokens)
                    left -= 1
                elif result is None and not manager.is_running():
                    raise BenchmarkFailed(f"{self.name} ended with {left} requests open")
            seconds = time.perf_counter() - started
        _check(self.name, generated, sum(outputs))
        return seconds

    def close(self) -> None:
        del self._model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class _Vllm:
    """vLLM's offline class at its defaults, with the share of the GPU that is free."""

    name = "vllm"

    def __init__(self, path: str, device: str, random: bool) -> None:
        if not device.startswith("cuda"):
            raise BenchmarkFailed("vllm is compared on a GPU only: use --device cuda")
        self.version = version("vllm")
        self._vllm: Any = import_module("vllm")
        free, total = torch.cuda.mem_get_info()
        self._llm: Any = self._vllm.LLM(
            model=path,
            dtype="bfloat16",
            load_format="dummy" if random else "auto",
            skip_tokenizer_init=True,
            gpu_memory_utilization=0.9 * free / total,
        )

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> float:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        choosing = [
            self._vllm.SamplingParams(
                temperature=each.temperature, max_tokens=each.max_tokens, ignore_eos=True, detokenize=False
            )
            for each in params
        ]
        started = time.perf_counter()
        answers = self._llm.generate(asked, choosing, use_tqdm=False)
        seconds = time.perf_counter() - started
        generated = sum(len(answer.outputs[0].token_ids) for answer in answers)
        _check(self.name, generated, sum(each.max_tokens or 1 for each in params))
        return seconds

    def close(self) -> None:
        del self._llm


PEERS: Final[dict[str, Callable[[str, str, bool], Peer]]] = {"transformers": _Transformers, "vllm": _Vllm}


@contextmanager
def open_peer(name: str | None, subject: Subject, target: Target) -> Iterator[Peer | None]:
    """Open the peer of that name with the subject's model; None for no name.

    Raises:
        BenchmarkFailed: The peer is not known, not installed, or cannot share the device.
    """
    if name is None:
        yield None
        return
    if name not in PEERS:
        raise BenchmarkFailed(f"--peer {name} is not known: use {' or '.join(PEERS)}")
    if find_spec(name) is None:
        raise BenchmarkFailed(f"--peer {name}: it is not installed here (pip install {name})")
    if subject.path.endswith(".gguf"):
        raise BenchmarkFailed(
            "--peer: peers open model folders, not .gguf files; see also `headrace bench transformers`"
        )
    device = subject.engine.info.device
    if device.startswith("cuda") and target.kv_memory is None:
        raise BenchmarkFailed("--peer: both engines share the GPU, so bound headrace's cache: --kv-memory")
    peer = PEERS[name](subject.path, device, subject.random)
    try:
        yield peer
    finally:
        peer.close()


def _check(name: str, generated: int, asked: int) -> None:
    if generated != asked:
        raise BenchmarkFailed(f"{name} generated {generated} tokens instead of {asked}")
