"""Drives a target and a draft head by the operations of an emulated GPU, without an engine or its graphs; no tests."""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from emulated_cuda import Gpu, kernels_on
from model_driver import request
from torch import Tensor

from headrace.engine.model.checkpoint.weights import load_weights
from headrace.engine.model.drafting.heads.loading import load_head
from headrace.engine.model.drafting.heads.medusa import MedusaHeads
from headrace.engine.model.drafting.heads.reading import open_head, open_mtp
from headrace.engine.model.drafting.heads.recurrent import RecurrentHead
from headrace.engine.model.drafting.heads.spec import MedusaSpec
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.network.decoder import Decoder, HiddenStates
from headrace.engine.scheduling.plan import Work
from headrace.ops.quantise import Method

__all__ = ["CudaDrafting"]

PAGE = 16
ROWS = 8
CONTEXT = 128
DTYPE = torch.float32
ASKED = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64)
"""Dtypes of temperatures, top-k, top-p, min-p and seeds."""
CPU = torch.device("cpu")


class CudaDrafting:
    """A target and its drafter on an emulated GPU; rows hold known sequences, in pages that no order can be guessed of.

    It has to be made, and used, inside `emulated()`.
    """

    def __init__(self, gpu: Gpu, target: Path, head: Path | None, depth: int, quantize: Method | None = None) -> None:
        """Open a head for steps of at most `depth` drafts, quantised if that is asked for.

        None stands for the module that comes with the target.
        """
        operations, arch, opening, drafter, sampling, packing, self._steps, self._fused = map(
            importlib.import_module,
            (
                "headrace.engine.model.cuda.operations",
                "headrace.ops.cuda.arch",
                "headrace.engine.model.cuda.drafting.opening",
                "headrace.engine.model.cuda.drafting.drafter",
                "headrace.ops.cuda.sampling.sample",
                "headrace.ops.cuda.codes.packing",
                "headrace.ops.cuda.attention.steps",
                "headrace.ops.cuda.fused",
            ),
        )
        self._drafter_module, self.depth = drafter, depth
        self.spec = from_hf(read_hf_config(target))
        kernels = kernels_on(gpu)
        sizes: dict[str, Any] = {
            "page_size": PAGE, "max_positions": CONTEXT, "dtype": DTYPE, "kv_dtype": DTYPE, "kv_scales": {},
            "device": CPU, "arch": arch.Arch.of(CPU), "kernels": kernels,
        }  # fmt: skip
        self._ops = operations.cuda_ops(self.spec, **sizes)
        self._decoder = Decoder(self.spec, load_weights(target, self.spec, dtype=DTYPE, device="cpu"), self._ops)
        with open_mtp(target, self.spec) if head is None else open_head(head, self.spec) as found:
            layout = None if quantize is None else partial(packing.in_codes, dtype=DTYPE)
            weights: Any = load_head(found, self.spec, dtype=DTYPE, device=CPU, layout=layout, quantize=quantize)
            of_head: Any = found.spec
        made: Any
        block = self.spec if isinstance(of_head, MedusaSpec) else of_head.block
        kinds = operations.kinds_in((*weights.products, *weights.outputs))
        head_ops = operations.cuda_ops(block, **sizes, codes=kinds)
        if isinstance(of_head, MedusaSpec):
            made = MedusaHeads(of_head, weights, next(iter(head_ops.values())))
        else:
            made = RecurrentHead(of_head, weights, head_ops, self._decoder, DTYPE)
        cuda_head = opening.CudaHead(made, head_ops, self._ops, kernels)
        shape = next(iter(self._ops.values())).shape
        pages = ROWS * CONTEXT // PAGE
        layers = self.spec.num_layers + cuda_head.layers
        self.kv = torch.full((layers, pages + 1, 2, PAGE, shape.kv_heads, shape.head_dim), 17.0, dtype=DTYPE)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).int()
        table_RP = torch.cat((order.view(ROWS, -1), torch.full((1, CONTEXT // PAGE), pages, dtype=torch.int32)))
        self.rows = drafter.RowTable(
            torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32), torch.zeros(ROWS + 1, dtype=torch.int32),
            torch.full((ROWS + 1,), depth, dtype=torch.int32), torch.zeros(ROWS + 1, dtype=torch.int32), table_RP,
            table_RP.numpy(), self.kv, ROWS * (depth + 1),
            sampling.Asks(*(torch.zeros(ROWS + 1, dtype=dtype) for dtype in ASKED)),
        )  # fmt: skip
        self.drafter = cuda_head.drafter(self.rows)
        unread = importlib.import_module("headrace.engine.model.cuda.drafting.unread")
        self.lag = unread.LAG if isinstance(self.drafter, drafter.LateDrafter) else 0
        self._unread = [0] * ROWS
        self._room = importlib.import_module("headrace.ops.cuda.attention.registry").DecodeRoom(
            arch.Arch.of(CPU), CPU, most_rows=ROWS * (depth + 1), pdl=False
        )
        by_name = {each.name: each for each in kernels.decodes}
        self._decodes = by_name["split"]
        self._prefills = {
            mixer: {each.name: each for each in kernels.prefills}["grouped"].open(ops.shape, CPU, pdl=False)
            for mixer, ops in self._ops.items()
        }

    def start(self, sequences: Sequence[Sequence[int]], prompt: int, chunk: int) -> None:
        """Compute the first tokens of each sequence, `prompt` at most, in parts of `chunk`; what follows is known."""
        self.rows.pool_RC.zero_()
        self._unread = [0] * ROWS
        for row, ids in enumerate(sequences):
            self.rows.pool_RC[row, : min(prompt, len(ids) - 1) + 1] = torch.tensor(ids[: min(prompt, len(ids) - 1) + 1])
        at = [0] * len(sequences)
        while True:
            works = []
            for row, ids in enumerate(sequences):
                if tokens := min(chunk, min(prompt, len(ids) - 1) - at[row]):
                    works.append(Work(request(list(ids), 8), row, at[row], tokens, True))
                    at[row] += tokens
            if not works:
                return
            self._prefill(works)

    def _prefill(self, works: Sequence[Work]) -> None:
        rows_N = torch.tensor([work.row for work in works for _ in range(work.num_tokens)])
        positions_N = torch.tensor([work.start + at for work in works for at in range(work.num_tokens)])
        slots_N = self.rows.table_RP[rows_N, positions_N // PAGE].long() * PAGE + positions_N % PAGE
        steps = {}
        for mixer, attention in self._prefills.items():
            lengths = [work.start + work.num_tokens for work in works]
            pages = [self.rows.table_RP[work.row].tolist() for work in works]
            attention.plan([work.num_tokens for work in works], lengths, pages)
            steps[mixer] = self._steps.PrefillStep(positions_N, slots_N, attention)
        tokens_N = self.rows.pool_RC[rows_N, positions_N]
        states = self._states(tokens_N, steps)
        for work in works:
            self.rows.lengths_R[work.row] = work.start + work.num_tokens
        last_W = torch.tensor([work.num_tokens for work in works]).cumsum(0) - 1
        self.drafter.take_up_prompts(self._drafter_module.Prefilled(works, tokens_N, rows_N, last_W, steps, states))

    def catch_up(self, rows: Sequence[int]) -> None:
        """Read what is unread of some rows, if the drafter reads late."""
        if self.lag:
            self.drafter.catch_up(torch.tensor([*rows, *[ROWS] * (ROWS - len(rows))], dtype=torch.int32))
            for row in rows:
                self._unread[row] = 0

    def drafts(self, rows: Sequence[int], depth: int, most: int | None = None) -> list[list[int]]:
        """Draft behind some rows, which have to be padded in a batch of all rows."""
        self.catch_up([row for row in rows if self._unread[row]])
        self.rows.most_R.fill_(depth if most is None else most)
        rows_B = torch.tensor([*rows, *[ROWS] * (ROWS - len(rows))], dtype=torch.int32)
        counts_B = torch.full((ROWS,), -7, dtype=torch.int32)
        before_C = self.rows.pool_RC[ROWS].clone()
        self.drafter.draft(rows_B, depth, counts_B)
        assert torch.equal(self.rows.pool_RC[ROWS], before_C), "the padding row was written to"
        assert not counts_B[len(rows) :].any(), "the padding row has drafts"
        found = []
        for row, count in zip(rows, counts_B.tolist(), strict=False):
            first = int(self.rows.lengths_R[row]) + 1
            found.append(self.rows.pool_RC[row, first : first + count].tolist())
        return found

    def go_on(self, sequences: Sequence[Sequence[int]], drafted: dict[int, tuple[int, int]], depth: int) -> None:
        """Compute a step of `depth`: for each row, how many drafts it has, and how many of them are right."""
        lines, rows = depth + 1, self.rows
        self.catch_up([row for row in drafted if self._unread[row] >= (1 if depth else self.lag)])
        rows_B = torch.tensor([*drafted, *[ROWS] * (ROWS - len(drafted))], dtype=torch.int32)
        line_rows, positions, counts = [], [], []
        for row in rows_B.tolist():
            many, right = drafted.get(row, (0, 0))
            length = int(rows.lengths_R[row])
            for ahead in range(lines):
                there = row != ROWS and ahead <= many
                line_rows.append(row if there else ROWS)
                positions.append(length + ahead if there else 0)
                if there and ahead:
                    truth = sequences[row][length + ahead]
                    rows.pool_RC[row, length + ahead] = truth if ahead <= right else (truth + 1) % self.spec.vocab_size
            counts.append(right + 1)
        line_rows_L, positions_L = (
            torch.tensor(line_rows, dtype=torch.int32),
            torch.tensor(positions, dtype=torch.int32),
        )
        pages_LP = rows.table_RP[line_rows_L.long()].contiguous()
        slots_L = pages_LP[torch.arange(len(positions)), positions_L.long() // PAGE].long() * PAGE + positions_L % PAGE
        tokens_L = rows.pool_RC[line_rows_L.long(), positions_L.long()]
        tails_L = positions_L + 1 - (pages_LP.shape[1] - 1) * PAGE
        inputs = self._fused.DecodeInputs(tokens_L, positions_L, slots_L, positions_L + 1, pages_LP, tails_L)
        steps = {mixer: self._decodes.open(ops.shape, inputs, self._room) for mixer, ops in self._ops.items()}
        states = self._states(tokens_L, steps)
        for row, (_, right) in drafted.items():
            length = int(rows.lengths_R[row])
            rows.pool_RC[row, length + 1 : length + right + 2] = torch.tensor(
                sequences[row][length + 1 : length + right + 2]
            )
            rows.lengths_R[row] = length + right + 1
            self._unread[row] += not depth
        counts_B = torch.tensor(counts, dtype=torch.int32)
        self.drafter.take_up(self._drafter_module.Decoded(depth, rows_B, inputs, line_rows_L, counts_B, steps, states))

    def _states(self, tokens: Tensor, steps: Any) -> HiddenStates:
        return self._decoder.hidden_states(tokens, steps, self.kv, self.drafter.taps or ())

    def verified(
        self, sequences: Sequence[Sequence[int]], seed: int, prompt: int, pauses: bool = False
    ) -> list[list[int]]:
        """Drafts behind each sequence, computed in runs of random lengths beside guesses that were wrong.

        With `pauses`, there are long runs of steps without drafts, and of steps in which some rows take no part.
        """
        draw = random.Random(seed)
        pause = 0
        self.start(sequences, prompt, 64)
        while going := [row for row, ids in enumerate(sequences) if int(self.rows.lengths_R[row]) < len(ids) - 1]:
            if pauses and not pause:
                lag = self.lag or 16
                pause = draw.choice((1, lag - 1, lag, lag + 1, 2 * lag + 3))
            pause -= pause > 0
            depth = 0 if pause else draw.randint(0, self.depth)
            if pauses:
                going = [row for row in going if draw.random() < 0.9]
            if depth:
                self.drafts(going, depth)
            works = {}
            for row in going:
                left = len(sequences[row]) - 2 - int(self.rows.lengths_R[row])
                many = min(draw.randint(0, depth), left)
                works[row] = many, draw.randint(0, many)
            self.go_on(sequences, works, depth)
        return self.drafts(range(len(sequences)), self.depth)
