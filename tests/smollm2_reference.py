"""What transformers computes for SmolLM2 in float32, kept in smollm2_reference.json; holds no tests.

To load the model in transformers and to generate with it takes about fifty seconds of processor time, and gives the
same every time. `python tests/smollm2_reference.py` writes the file anew; `make soak` computes all of it again and
compares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizer_files
import torch

__all__ = [
    "CLOSE",
    "ECHOED",
    "ECHOED_TOKENS",
    "NEW_TOKENS",
    "Prompt",
    "Reference",
    "compute",
    "digest",
    "kept",
    "prompts",
]

FILE = Path(__file__).with_suffix(".json")
CLOSE = 1e-3
"""The distance of the two largest logits below which another order of additions may exchange them."""
NEW_TOKENS = 16
ECHOED = "The longest river of Europe is"
"""The prompt whose log-probabilities are kept, with those of `ECHOED_TOKENS` greedy tokens after it."""
ECHOED_TOKENS = 8
TEXT = (
    "The river rises in the hills north of the town and falls four hundred metres before it meets the sea. In 1861 the "
    "first mill was built on its bank; by 1890 there were nineteen, and a canal three kilometres long led the water to "
    "their wheels. def gate(level: float, limit: float = 2.5) -> bool:\n    return level < limit\n\nThe keeper wrote "
    "every day: 'Monday, 12 March. Rain. Level 2.31 m, two gates open.' Die Müller lasen es am Abend, et le meunier "
    "aussi. 1, 1, 2, 3, 5, 8, 13, 21, 34. What the keeper did not write down is how often he closed a gate by hand, in "
    "the dark, because the wheel of the last mill turned too fast. Question: why does a wheel turn faster when the "
    "canal is full? Answer: because the weight of the water on it is greater, and because less of it is lost beside "
    "the wheel. The second book of the keeper begins with a list of repairs: planks, forty; nails, two pounds; "
    "rope, sixty metres; one lamp. It ends with a drawing of the gate that the town has kept in its museum. "
)
CHATS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about rain.",
    "What is 12 + 30?",
    "Translate 'good morning' into Spanish.",
    "Explain in one sentence why the sky is blue.",
    "List the planets of the solar system.",
    "Who wrote Hamlet?",
    "Summarise this text: " + TEXT[:700],
    "Continue: " + TEXT[300:620],
]
LENGTHS = [5, 8, 13, 15, 16, 17, 21, 24, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 80, 96, 112, 129, 150, 200, 250, 300]
"""In tokens, of the prompts that are raw text: a page has 16."""

Prompt = str | list[dict[str, str]]


@dataclass(frozen=True)
class Reference:
    """What transformers says."""

    model: str
    """The digest of the model's file."""
    prompts: list[list[int]]
    """The token ids of each of `prompts()`, by the tokenizer that transformers reads from the model's file."""
    tokens: list[list[int]]
    """For each prompt its greedy tokens, at most `NEW_TOKENS`."""
    comparable: list[int]
    """How many of the tokens come before the two largest logits are closer than `CLOSE`."""
    echoed: list[int]
    """The token ids of `ECHOED` and of `ECHOED_TOKENS` greedy tokens."""
    logprobs: list[float]
    """The log-probability of each of `echoed` but the first."""
    likeliest: list[list[float]]
    """The three largest log-probabilities at each of those places."""


def prompts() -> list[Prompt]:
    """Chats, and pieces of text that start at different words."""
    chats: list[Prompt] = [[{"role": "user", "content": chat}] for chat in CHATS]
    starts = [at + 1 for at, char in enumerate(TEXT) if char == " "]
    return chats + [(TEXT[starts[place] :] + TEXT)[: 4 * length] for place, length in enumerate(LENGTHS)]


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def kept() -> Reference:
    """Return what the file says."""
    return Reference(**json.loads(FILE.read_text(encoding="utf-8")))


def compute(path: Path) -> Reference:
    """Return what transformers says of the model in the GGUF file `path`, which takes about fifty seconds."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.eval()
    ids = [_ids(tokenizer, prompt) for prompt in prompts()]
    by_length = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    tokens: list[list[int]] = [[]] * len(ids)
    comparable = [0] * len(ids)
    for first in range(0, len(ids), 6):
        group = by_length[first : first + 6]
        for index, made, margins in zip(group, *_generate(model, [ids[index] for index in group]), strict=True):
            end = made.index(model.config.eos_token_id) + 1 if model.config.eos_token_id in made else len(made)
            tokens[index] = made[:end]
            comparable[index] = next((at for at in range(end) if margins[at] < CLOSE), end)
    (after,), _ = _generate(model, [_ids(tokenizer, ECHOED)], ECHOED_TOKENS)
    echoed = _ids(tokenizer, ECHOED) + after
    with torch.inference_mode():
        logprobs_NV = torch.log_softmax(model(torch.tensor([echoed])).logits[0, :-1], -1)
    chosen = logprobs_NV.gather(1, torch.tensor(echoed[1:])[:, None])[:, 0]
    likeliest = logprobs_NV.topk(3).values
    return Reference(digest(path), ids, tokens, comparable, echoed, chosen.tolist(), likeliest.tolist())


def _ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])


def _generate(
    model: Any, group: Sequence[list[int]], count: int = NEW_TOKENS
) -> tuple[list[list[int]], list[list[float]]]:
    """Generate greedily for prompts of like length, padded on the left.

    Returns:
        For each prompt its new tokens, and at each the distance of the two largest logits.
    """
    width = max(map(len, group))
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in group])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in group])
    with torch.inference_mode():
        made = model.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = torch.stack(made.logits, 1).topk(2).values
    return made.sequences[:, width:].tolist(), (top[..., 0] - top[..., 1]).tolist()


if __name__ == "__main__":
    lines = [
        f"{json.dumps(name)}: {json.dumps(value)}"
        for name, value in asdict(compute(tokenizer_files.smollm2_path())).items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
