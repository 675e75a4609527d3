"""`LlamaCpp`: llama.cpp as a peer on the CPU, through the low-level functions of the package `llama-cpp-python`.

The package is imported only when it is asked for. Its wheels are built for old processors; a comparison needs one that
was built on the machine (`pip install --no-binary llama-cpp-python llama-cpp-python`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from headrace.engine.bench.opening import BenchmarkFailed

__all__ = ["LlamaCpp"]


class LlamaCpp:
    """An open model; each run has a context of its own, sized for it."""

    name = "llama.cpp"

    def __init__(self, path: Path, threads: int) -> None:
        """Open a GGUF file.

        Raises:
            BenchmarkFailed: The package is not installed, or cannot open the file.
        """
        if find_spec("llama_cpp") is None:
            raise BenchmarkFailed("llama.cpp: the package llama-cpp-python is not installed")
        self._library: Any = import_module("llama_cpp.llama_cpp")
        self._threads = threads
        self._log = self._library.llama_log_callback(lambda *_: None)
        self._library.llama_log_set(self._log, None)
        self._library.llama_backend_init()
        self._model = self._library.llama_model_load_from_file(
            str(path).encode(), self._library.llama_model_default_params()
        )
        if not self._model:
            raise BenchmarkFailed(f"llama.cpp cannot open {path.name}")
        self._vocab_size = self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(self._model))

    def time(self, prompts: Sequence[list[int]], output_tokens: int) -> float:
        """Generate greedily for prompts of one length, and return the seconds without making the context.

        Raises:
            BenchmarkFailed: A step failed.
        """
        library, rows, length = self._library, len(prompts), len(prompts[0])
        params = library.llama_context_default_params()
        params.n_ctx = rows * -(-(length + output_tokens) // 256) * 256
        params.n_seq_max, params.n_batch = rows, max(512, rows)
        params.n_threads = params.n_threads_batch = self._threads
        context = library.llama_init_from_model(self._model, params)
        batch = library.llama_batch_init(params.n_batch, 0, 1)
        try:
            started = time.perf_counter()
            last = [
                self._step(context, batch, [(token, at, row) for at, token in enumerate(prompt)], [length - 1])[0]
                for row, prompt in enumerate(prompts)
            ]
            for at in range(length, length + output_tokens - 1):
                last = self._step(context, batch, [(token, at, row) for row, token in enumerate(last)], range(rows))
            return time.perf_counter() - started
        finally:
            library.llama_batch_free(batch)
            library.llama_free(context)

    def _step(
        self, context: Any, batch: Any, tokens: Sequence[tuple[int, int, int]], wanted: Sequence[int]
    ) -> list[int]:
        """Compute (token, position, row) each, and return the likeliest next tokens of those at `wanted`."""
        asked = set(wanted)
        batch.n_tokens = len(tokens)
        for place, (token, position, row) in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
            batch.logits[place] = place in asked
        if self._library.llama_decode(context, batch):
            raise BenchmarkFailed("llama.cpp: a step failed")
        logits = (self._library.llama_get_logits_ith(context, place) for place in wanted)
        return [int(np.ctypeslib.as_array(row, (self._vocab_size,)).argmax()) for row in logits]
