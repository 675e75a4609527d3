"""Says whether greedy tokens are right, by transformers in float32; never compares one sequence of tokens to another.

The margin. Let F be transformers' logits in float32 and B those in bfloat16, from the same weights over the same
tokens, and E the largest |B - F| over all positions and ids seen so far, a calibration set included. An engine whose
logits are no further than E from F picks token t over the best b only if F[b] - F[t] <= 2 E. That is what `check`
demands of every token, given the tokens before it (teacher forcing), so one near tie does not spoil what follows it.
A margin that lets many tokens through would prove nothing, so `check` also demands that few do, and that the engine
differs from F's best about as rarely as B does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

__all__ = ["Judge", "Output"]

_BATCH = 16
_LOOSE, _LOOSE_FP8 = 4.0, 16.0
"""Ids a step, of about 500, that the margin may let through on average."""
_FP8 = "headrace_test_fp8"


class Output(NamedTuple):
    """What an engine generated after a prompt."""

    prompt: Sequence[int]
    tokens: Sequence[int]


class _Seen(NamedTuple):
    """One output under both references; all over the generated positions."""

    output: Output
    exact_TV: Tensor
    error: float
    peer_flips: int


def _fp8_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """Transformers' own attention over keys and values that went through e4m3."""
    eager = sys.modules[type(module).__module__].eager_attention_forward  # the family's, with its bounds and sinks
    key, value = (side.to(torch.float8_e4m3fn).to(side.dtype) for side in (key, value))
    return eager(module, query, key, value, mask, **options)


class Judge:
    """The references of one checkpoint, on the device under test."""

    def __init__(self, folder: Path, device: str, *, fp8: bool = False, loose: float = _LOOSE) -> None:
        """Load both references; `fp8` rounds the keys and values of the bfloat16 one to e4m3.

        `loose`: ids a step that the margin may let through on average.
        """
        if fp8:
            transformers.AttentionInterface.register(_FP8, _fp8_attention)
            transformers.AttentionMaskInterface.register(
                _FP8, transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"]
            )
        self._device = device
        self._loose = _LOOSE_FP8 if fp8 else loose
        self._exact = self._load(folder, torch.float32, "eager")
        self._peer = self._load(folder, torch.bfloat16, _FP8 if fp8 else "eager")
        self.vocabulary = int(self._exact.config.vocab_size)
        self.error = 0.0
        """E: the largest error of bfloat16 logits so far."""
        generator = torch.Generator().manual_seed(2)
        for length in (40, 120, 250, 250):
            ids = torch.randint(8, self.vocabulary, (length,), generator=generator).tolist()
            self._see([Output(ids[:1], ids[1:])])

    def _load(self, folder: Path, dtype: torch.dtype, attention: str) -> Any:
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(folder, dtype=dtype, attn_implementation=attention).to(self._device).eval()

    @property
    def margin(self) -> float:
        """How far below the best a right token may be, in float32 logits."""
        return 2.0 * self.error

    def logits(self, output: Output) -> Tensor:
        """float32 [T, V]: what the references' exact half says before each generated token."""
        return self._see([output])[0].exact_TV

    def _see(self, outputs: Sequence[Output]) -> list[_Seen]:
        """Run both references over outputs of similar length, padded at their ends, where causality hides it."""
        longest = max(len(output.prompt) + len(output.tokens) for output in outputs)
        ids = torch.zeros(len(outputs), longest, dtype=torch.int64)
        for row, (prompt, tokens) in enumerate(outputs):
            ids[row, : len(prompt) + len(tokens)] = torch.tensor([*prompt, *tokens])
        ids = ids.to(self._device)
        with torch.inference_mode():
            exact_BTV = self._exact(ids, use_cache=False).logits
            peer_BTV = self._peer(ids, use_cache=False).logits.float()
        seen = []
        for row, output in enumerate(outputs):
            generated = slice(len(output.prompt) - 1, len(output.prompt) + len(output.tokens) - 1)
            exact, peer = exact_BTV[row, generated], peer_BTV[row, generated]
            error = float((exact - peer).abs().max())
            assert error < float("inf"), "a reference gave logits that are not finite"
            self.error = max(self.error, error)
            seen.append(_Seen(output, exact, error, int((exact.argmax(-1) != peer.argmax(-1)).sum())))
        return seen

    def check(self, outputs: Iterable[Output], what: str = "", *, flips_to_peer: float = 2) -> None:
        """Assert that every token of every greedy output is the best one, up to the margin.

        Args:
            outputs: Tokens and the prompts that they follow.
            what: Begins each message.
            flips_to_peer: How many times as many tokens as of transformers in bfloat16 may not be float32's best.
        """
        ordered = sorted((o for o in outputs if o.tokens), key=lambda output: len(output.prompt) + len(output.tokens))
        assert ordered, f"{what}: nothing to judge"
        steps = flips = peer_flips = loose = 0
        wrong: list[tuple[float, str]] = []
        gaps: list[tuple[Output, Tensor]] = []
        for start in range(0, len(ordered), _BATCH):
            for output, exact_TV, _, flipped in self._see(ordered[start : start + _BATCH]):
                assert all(0 <= token < self.vocabulary for token in output.tokens)
                tokens = torch.tensor(output.tokens, device=self._device)
                gap_TV = exact_TV.max(-1, keepdim=True).values - exact_TV
                gaps.append((output, gap_TV.gather(1, tokens[:, None])[:, 0].cpu()))
                loose += int((gap_TV <= self.margin).sum())
                peer_flips += flipped
                steps += len(output.tokens)
        for output, gap_T in gaps:
            flips += int((gap_T > 0).sum())
            for place in (gap_T > self.margin).nonzero()[:1, 0].tolist():
                where = f"token {place} of {len(output.tokens)} after a prompt of {len(output.prompt)}"
                wrong.append((float(gap_T[place]), f"{where}: {float(gap_T[place]):.3f} below the best"))
        assert not wrong, (
            f"{what}: {len(wrong)} of {len(ordered)} outputs are wrong (margin {self.margin:.3f}), such as "
            + "; ".join(text for _, text in sorted(wrong, reverse=True)[:5])
        )
        assert loose <= self._loose * steps, f"{what}: the margin {self.margin:.3f} lets {loose / steps:.1f} ids pass"
        assert flips <= flips_to_peer * peer_flips + 0.02 * steps + 4, (
            f"{what}: {flips} of {steps} tokens are not float32's best, of transformers' bfloat16 only {peer_flips}"
        )

    def check_agree(self, first: Output, second: Output, what: str = "") -> int:
        """Assert that two greedy outputs of one prompt part, if they do, at a near tie; how many tokens agree."""
        assert list(first.prompt) == list(second.prompt) and len(first.tokens) == len(second.tokens), what
        pairs = zip(first.tokens, second.tokens, strict=True)
        place = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
        if place is None:
            return len(first.tokens)
        exact_V = self.logits(Output(first.prompt, first.tokens[: place + 1]))[place]
        gaps = [float(exact_V.max() - exact_V[output.tokens[place]]) for output in (first, second)]
        assert max(gaps) <= self.margin, (
            f"{what}: token {place} differs, {gaps} below the best, margin {self.margin:.3f}"
        )
        return place
