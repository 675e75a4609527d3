"""Log-probabilities on CUDA are those of the CPU: ranks and order to the last tie, values but for their sums."""

from __future__ import annotations

import math
import random

import pytest
import torch

from headrace.ops.cpu.logprobs import logprobs as on_cpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("triton")

from headrace.ops.cuda.sampling.logprobs import HEAD, ListScratch, logprobs

UNTOUCHED = -77


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("vocabulary", "places"), [(6, 32), (4096, 32), (50_001, 32), (128_256, 32), (9_000, 512)])
@torch.inference_mode()
def test_lines_are_those_of_the_cpu(vocabulary: int, places: int, dtype: torch.dtype) -> None:
    """Rows want different numbers of tokens or nothing; many logits are equal, zeros of both signs, or infinite."""
    generator, rows = random.Random(vocabulary), 40
    logits_BV = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)).mul_(4).to(dtype)
    logits_BV[0], logits_BV[1] = 0.0, logits_BV[1].round()
    logits_BV[0, ::2] = -0.0
    logits_BV[2, 1:] = -math.inf
    logits_BV[3, vocabulary // 2] = math.nan
    most = min(places, vocabulary)
    wants = [generator.choice([0, 1, 2, 6, 21, most + 1]) for _ in range(rows)]
    wants_R = torch.tensor([min(each, most + 1) for each in wants], dtype=torch.int32)
    row_B = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    tokens = [generator.randrange(vocabulary) for _ in range(rows)]
    out_BW = torch.full((rows, HEAD + 2 * places), UNTOUCHED, dtype=torch.int32, device="cuda")
    logprobs(
        logits_BV.cuda(), row_B.cuda(), wants_R.cuda(), torch.tensor(tokens, dtype=torch.int32).cuda(), out_BW,
        ListScratch(rows, vocabulary, places, "cuda"),
    )  # fmt: skip
    lines_BW = out_BW.cpu()
    for place, row in enumerate(row_B.tolist()):
        line_W, count = lines_BW[place], int(wants_R[row]) - 1
        if count < 0:
            assert (line_W == UNTOUCHED).all()
        elif place != 3:
            (right,) = on_cpu(logits_BV[place : place + 1], [tokens[place]], [count])
            values_W = line_W.view(torch.float32)
            assert line_W[1] == right.rank
            assert line_W[HEAD : HEAD + count].tolist() == [token for token, _ in right.top]
            found = [float(values_W[0]), *values_W[HEAD + places : HEAD + places + count].tolist()]
            assert found == pytest.approx([right.logprob, *(value for _, value in right.top)], abs=1e-4)
