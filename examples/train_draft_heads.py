"""Trains an EAGLE-3 head and Medusa heads for SmolLM2 on its own answers, and says how many of their drafts are right.

The engine writes the data: the model invents questions behind a bare chat header (Xu et al., 2024, "Magpie") and
answers them. Training takes minutes on a GPU; `--chats 8 --tokens 64 --steps 20 --batch 2` is a trial on a CPU. What is
written are folders in the formats of the heads' authors, and the last lines say how an engine takes them. Needs
`transformers`, and `gguf` for models in GGUF files.

python examples/train_draft_heads.py OUT [--model FILE] [--chats 4000] [--steps 20000] [--seconds 600]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from headrace.engine import LLM, SamplingParams
from headrace.server.demo import demo_model

DEPTH = 3
"""Drafts in a row that the EAGLE-3 head is trained for, and number of Medusa heads."""
LONGEST = 320
HELD_OUT = 24
AT_ONCE = 512
"""Chats that the engine writes before the script looks at the time."""
WRITING, MEASURING = 0.4, 0.1
"""Shares of the time for writing chats and for measuring."""


class Clock:
    """The time that is left of all that the script may take."""

    def __init__(self, seconds: float) -> None:
        self._began, self._seconds = time.monotonic(), seconds

    @property
    def spent(self) -> float:
        """Share of the time that is over, from 0 on."""
        return (time.monotonic() - self._began) / self._seconds


class Chat(NamedTuple):
    """Token ids of a question and its answer."""

    ids: list[int]
    start: int
    """Number of tokens before the answer."""


def write_chats(
    llm: LLM, tokenizer: Any, count: int, tokens: int, temperature: float, seed: int, clock: Clock
) -> list[Chat]:
    """Let the model invent questions and answer them, as many as there is time for."""
    found: list[Chat] = []
    for first in range(0, count, AT_ONCE):
        if not found or clock.spent < WRITING:
            few = min(AT_ONCE, count - first)
            found += write_some(llm, tokenizer, few, tokens, temperature, seed + first)
    return found


def write_some(llm: LLM, tokenizer: Any, count: int, tokens: int, temperature: float, seed: int) -> list[Chat]:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "@@"}], tokenize=False)
    opening = tokenizer(text.split("@@")[0], add_special_tokens=False)["input_ids"]
    asking = [SamplingParams(max_tokens=64, temperature=1.0, top_p=0.95, seed=seed + at) for at in range(count)]
    answering = [SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed + at) for at in range(count)]
    questions = [each.choices[0].text.strip() or "Hello!" for each in llm.generate([opening] * count, asking)]
    answers = llm.generate([[{"role": "user", "content": each}] for each in questions], answering)
    found = [Chat(each.prompt_token_ids + each.choices[0].token_ids, len(each.prompt_token_ids)) for each in answers]
    return [chat for chat in found if len(chat.ids) > chat.start + DEPTH + 2]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


class Eagle3(nn.Module):
    """A head of EAGLE-3 (Li et al., 2025) with tensors under their authors' names."""

    def __init__(self, config: Any, ids: Tensor) -> None:
        super().__init__()
        self.size, self.heads, self.kv_heads = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        self.head_dim, self.eps = self.size // self.heads, config.rms_norm_eps
        count = config.num_hidden_layers
        self.taps = (2, count // 2, count - 3)
        self.theta = float((config.rope_parameters or {}).get("rope_theta", 10000.0))
        size, both, keys = self.size, 2 * self.size, self.kv_heads * self.head_dim
        shapes = {
            "fc": (size, 3 * size),
            "midlayer.self_attn.q_proj": (size, both),
            "midlayer.self_attn.k_proj": (keys, both),
            "midlayer.self_attn.v_proj": (keys, both),
            "midlayer.self_attn.o_proj": (size, size),
            "midlayer.mlp.gate_proj": (config.intermediate_size, size),
            "midlayer.mlp.up_proj": (config.intermediate_size, size),
            "midlayer.mlp.down_proj": (size, config.intermediate_size),
            "lm_head": (len(ids), size),
        }
        norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
        drawn = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
        drawn |= {name: torch.ones(size) for name in norms}
        self.w = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(each) for name, each in drawn.items()})
        self.register_buffer("ids", ids)

    def weight(self, name: str) -> Tensor:
        found: Tensor = self.w[name.replace(".", "/")]
        return found

    def fused(self, inputs: Sequence[Tensor]) -> Tensor:
        return functional.linear(torch.cat([inputs[layer] for layer in self.taps], -1), self.weight("fc"))

    def rotated(self, x: Tensor) -> Tensor:
        """Heads [B, H, T, D] at the positions 0 to T - 1."""
        angles = torch.outer(
            torch.arange(x.shape[2], device=x.device).float(),
            self.theta ** (-torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim),
        )
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def forward(self, tokens: Tensor, states: Tensor, before: list[tuple[Tensor, Tensor]]) -> Tensor:
        """States of all positions at one depth of drafting, [B, T, E].

        At depth j a position attends to those at least j before it as the target has computed them, whose keys and
        values come first in `before`, and to the j positions up to itself at the depths 1 to j.
        """
        normed = rms(states, self.weight("midlayer.hidden_norm"), self.eps)
        x = torch.cat((rms(tokens, self.weight("midlayer.input_layernorm"), self.eps), normed), -1)
        q, k, v = (self.split(x, name) for name in ("q", "k", "v"))
        group = self.heads // self.kv_heads
        before.append((self.rotated(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        q, depth, length = self.rotated(q) / self.head_dim**0.5, len(before) - 1, x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-depth)
        scores = [(q @ before[0][0].transpose(2, 3)).masked_fill(~mask, float("-inf"))]
        values = []
        for nearer, (keys, of_keys) in enumerate(before[1:], 1):
            shift = depth - nearer
            scores.append((q * keys.roll(shift, 2)).sum(-1, keepdim=True))
            values.append(of_keys.roll(shift, 2))
        weights = torch.cat(scores, -1).softmax(-1)
        o = weights[..., :length] @ before[0][1]
        for at, of_keys in enumerate(values):
            o = o + weights[..., length + at, None] * of_keys
        states = states + functional.linear(o.transpose(1, 2).flatten(2), self.weight("midlayer.self_attn.o_proj"))
        x = rms(states, self.weight("midlayer.post_attention_layernorm"), self.eps)
        gate, up, down = (self.weight(f"midlayer.mlp.{name}_proj") for name in ("gate", "up", "down"))
        return states + functional.linear(functional.silu(x @ gate.T) * (x @ up.T), down)

    def split(self, x: Tensor, name: str) -> Tensor:
        y = functional.linear(x, self.weight(f"midlayer.self_attn.{name}_proj"))
        return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def scores(self, states: Tensor) -> Tensor:
        return functional.linear(rms(states, self.weight("norm"), self.eps), self.weight("lm_head"))

    def loss(self, table: Tensor, ids: Tensor, inputs: Sequence[Tensor], logits: Tensor, wanted: Tensor) -> Tensor:
        """Cross entropy with the target's distribution over the head's tokens, at each depth of drafting."""
        aim = logits[..., self.ids].float().softmax(-1)
        states, before, total = self.fused(inputs), [], torch.zeros((), device=ids.device)
        tokens = table[ids.roll(-1, 1)]
        for depth in range(DEPTH):
            states = self(tokens, states, before)
            chosen = wanted.roll(-1, 1) & wanted  # the next token is part of the answer, and so is the one guessed
            chosen[:, : depth + 1] = chosen[:, -2:] = False
            guess = self.scores(states[chosen]).float().log_softmax(-1)
            total = total - 0.8**depth * (aim.roll(-1, 1)[chosen] * guess).sum(-1).mean()
            states = states.roll(1, 1)
        return total

    def drafts(self, table: Tensor, ids: Tensor, inputs: Sequence[Tensor]) -> list[int]:
        """Drafts behind `ids`, whose last token the target has not computed."""
        tokens, states, found = table[ids[None, 1:]], self.fused(inputs), list[int]()
        for _ in range(DEPTH):
            output = self(tokens, states, [])[:, -1:]
            found.append(int(self.ids[self.scores(output)[0, 0].argmax()]))
            tokens = torch.cat((tokens, table[None, found[-1:]]), 1)
            states = torch.cat((states, output), 1)
        return found

    def save(self, folder: Path, config: Any) -> None:
        """Write config.json and model.safetensors."""
        vocabulary, ids = config.vocab_size, self.ids.cpu()
        kept = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        told = {name: getattr(config, name) for name in (*kept, "max_position_embeddings", "rms_norm_eps")}
        told |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
        told |= {"draft_vocab_size": len(ids), "rope_theta": self.theta, "tie_word_embeddings": False}
        tensors = {f"{name.replace('/', '.')}.weight": each.detach().bfloat16().cpu() for name, each in self.w.items()}
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
        write(folder, told, tensors)


class Medusa(nn.Module):
    """Heads of Medusa (Cai et al., 2024) of one residual block each; they begin as the target's own output head."""

    def __init__(self, head: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(head.shape[1], head.shape[1]) for _ in range(DEPTH))
        self.outputs = nn.ModuleList(nn.Linear(head.shape[1], head.shape[0], bias=False) for _ in range(DEPTH))
        for block, output in zip(self.blocks, self.outputs, strict=True):
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
            output.weight.data.copy_(head)

    def scores(self, number: int, final: Tensor) -> Tensor:
        found: Tensor = self.outputs[number](final + functional.silu(self.blocks[number](final)))
        return found

    def loss(self, ids: Tensor, final: Tensor, wanted: Tensor, most: int) -> Tensor:
        """Cross entropy with the answers' tokens, of at most so many positions."""
        total = torch.zeros((), device=ids.device)
        for number in range(DEPTH):
            distance = number + 2
            chosen = wanted.roll(-distance, 1) & wanted
            chosen[:, -distance:] = False
            rows, places = chosen.nonzero().unbind(1)
            few = torch.randperm(len(rows), device=rows.device)[:most]
            rows, places = rows[few], places[few]
            guess = self.scores(number, final[rows, places])
            total = total + 0.8**number * functional.cross_entropy(guess.float(), ids[rows, places + distance])
        return total

    def drafts(self, final: Tensor) -> list[int]:
        """Drafts behind the token that the target chooses by `final`."""
        return [int(self.scores(number, final).argmax()) for number in range(DEPTH)]

    def save(self, folder: Path) -> None:
        """Write config.json and medusa_lm_head.safetensors."""
        tensors = {}
        for number, (block, output) in enumerate(zip(self.blocks, self.outputs, strict=True)):
            tensors |= {f"{number}.0.linear.weight": block.weight, f"{number}.0.linear.bias": block.bias}
            tensors[f"{number}.1.weight"] = output.weight
        told = {"medusa_num_heads": DEPTH, "medusa_num_layers": 1, "base_model_name_or_path": "SmolLM2-135M-Instruct"}
        halves = {name: each.detach().bfloat16().cpu() for name, each in tensors.items()}
        write(folder, told, halves, "medusa_lm_head.safetensors")


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str = "model.safetensors") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({key: each.contiguous() for key, each in tensors.items()}, folder / name)


class States:
    """What the target computes: logits, the inputs of its layers, and the state behind its final norm."""

    def __init__(self, base: Any, ids: Tensor) -> None:
        with torch.no_grad():
            found = base(ids, output_hidden_states=True)
        self.logits: Tensor = found.logits
        *inputs, final = found.hidden_states
        self.inputs: list[Tensor] = [each.float() for each in inputs]
        self.final: Tensor = final.float()


def batches(chats: Sequence[Chat], size: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids [B, T] and whether each belongs to an answer, for ever."""
    order = torch.Generator().manual_seed(1)
    while True:
        for few in torch.randperm(len(chats), generator=order).split(size):
            cut = [(chats[at].ids[:LONGEST], chats[at].start) for at in few.tolist()]
            width = max(len(ids) for ids, _ in cut)
            ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in cut], device=device)
            wanted = torch.tensor([[start <= at < len(ids) for at in range(width)] for ids, start in cut])
            yield ids, wanted.to(device)


def train(
    base: Any, chats: Sequence[Chat], asked: argparse.Namespace, clock: Clock
) -> tuple[Eagle3, Medusa, list[float]]:
    """Train both on the same passes of the target, until the time for measuring; the losses of all steps."""
    torch.manual_seed(1)
    device = str(base.device)
    counts = torch.bincount(torch.tensor([id for chat in chats for id in chat.ids]), minlength=base.config.vocab_size)
    frequent = counts.argsort(descending=True, stable=True)[: asked.vocabulary].sort().values
    eagle, medusa = Eagle3(base.config, frequent).to(device), Medusa(base.lm_head.weight.float()).to(device)
    table = base.model.embed_tokens.weight.float()
    eagle.weight("lm_head").data.copy_(base.lm_head.weight.float()[frequent.to(device)])
    groups = [{"params": eagle.parameters(), "lr": 1e-3}, {"params": medusa.parameters(), "lr": 3e-4}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    before, losses, data = clock.spent, list[float](), batches(chats, asked.batch, device)
    for step in track(range(asked.steps), "training"):
        spent = max((clock.spent - before) / max(1 - MEASURING - before, 1e-6), step / asked.steps)
        if spent >= 1 and step:
            break
        for group, rate in zip(optimizer.param_groups, (1e-3, 3e-4), strict=True):
            group["lr"] = rate * min(1.0, (step + 1) / 50) * max(0.02, 1 - spent)
        ids, wanted = next(data)
        states = States(base, ids)
        with torch.autocast(base.device.type, torch.bfloat16, enabled=base.device.type == "cuda"):
            loss = eagle.loss(table, ids, states.inputs, states.logits, wanted)
            loss = loss + medusa.loss(ids, states.final, wanted, asked.positions)
        loss.backward()
        nn.utils.clip_grad_norm_([each for group in groups for each in group["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return eagle, medusa, losses


@torch.no_grad()
def accepted(base: Any, eagle: Eagle3, medusa: Medusa, chats: Sequence[Chat], clock: Clock) -> dict[str, float]:
    """Tokens of a step, its own included, where each head's drafts are verified with the answers of `chats`.

    The first chat is always measured, and the others as long as there is time.
    """
    table = base.model.embed_tokens.weight.float()
    tokens, steps = dict.fromkeys(("eagle3", "medusa"), 0), dict.fromkeys(("eagle3", "medusa"), 0)
    for number, chat in enumerate(track(chats, "held out")):
        if number and clock.spent >= 1:
            break
        ids = torch.tensor(chat.ids, device=base.device)
        states = States(base, ids[None])
        for name in tokens:
            known = chat.start + 1
            while known < len(chat.ids) - DEPTH:
                if name == "eagle3":
                    inputs = [each[:, : known - 1] for each in states.inputs]
                    drafts = eagle.drafts(table, ids[:known], inputs)
                else:
                    drafts = medusa.drafts(states.final[0, known - 2])
                right = 0
                while right < DEPTH and drafts[right] == chat.ids[known + right]:
                    right += 1
                known, tokens[name], steps[name] = known + right + 1, tokens[name] + right + 1, steps[name] + 1
    return {name: tokens[name] / max(steps[name], 1) for name in tokens}


def main(asked: argparse.Namespace) -> None:
    """Write data, train, save and measure; what was trained is saved before it is measured."""
    clock, device = Clock(asked.seconds), "cuda" if torch.cuda.is_available() else "cpu"
    gguf = Path(asked.model) if asked.model else demo_model()
    named = {"gguf_file": gguf.name} if gguf.is_file() else {}
    folder = gguf.parent if gguf.is_file() else gguf
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **named)
    with LLM(str(gguf)) as llm:
        held_out = write_chats(llm, tokenizer, min(HELD_OUT, asked.chats), asked.tokens, 0.0, 1 << 20, clock)
        chats = write_chats(llm, tokenizer, asked.chats, asked.tokens, 0.7, 0, clock)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **named).to(device).eval()
    base.requires_grad_(False)
    print(f"{len(chats)} chats of {sum(len(chat.ids) for chat in chats)} tokens")
    eagle, medusa, losses = train(base, chats, asked, clock)
    few = max(1, min(20, len(losses) // 4))
    print(f"{len(losses)} steps: loss {sum(losses[:few]) / few:.3f} to {sum(losses[-few:]) / few:.3f}")
    eagle.save(asked.out / "eagle3", base.config)
    medusa.save(asked.out / "medusa")
    for name, mean in accepted(base, eagle, medusa, held_out, clock).items():
        print(f"{name}: {mean:.2f} tokens a step with {DEPTH} drafts")
    for method, name in (("eagle", "eagle3"), ("medusa", "medusa")):
        print(f"headrace serve {gguf} --speculate {method}:{asked.out / name},k={DEPTH}")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 head and Medusa heads for SmolLM2.")
    parser.add_argument("out", type=Path, help="Folder to write eagle3/ and medusa/ to.")
    parser.add_argument("--model", help="A .gguf file or folder of a Llama-like model; left out, SmolLM2.")
    parser.add_argument("--chats", type=int, default=4000, help="Chats that the model writes to learn from.")
    parser.add_argument("--tokens", type=int, default=192, help="Most tokens of an answer.")
    parser.add_argument("--steps", type=int, default=20000, help="Most steps of training.")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="Seconds for everything: chats, training and measuring."
    )
    parser.add_argument("--batch", type=int, default=16, help="Chats of a step.")
    parser.add_argument(
        "--positions", type=int, default=512, help="Positions of a step that Medusa's heads learn from."
    )
    parser.add_argument("--vocabulary", type=int, default=8192, help="Tokens that the EAGLE-3 head can guess.")
    return parser.parse_args(given)


if __name__ == "__main__":
    main(arguments())
