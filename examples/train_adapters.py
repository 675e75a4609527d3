"""Trains two small adapters of SmolLM2 with PEFT in minutes on a CPU: one talks like a pirate, one answers in JSON.

Needs `peft`, which headrace itself does not. What it wrote is in examples/adapters, so nothing has to be trained to run
the other examples.

python examples/train_adapters.py [output folder] [steps]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from headrace.server.demo import demo_model

RANK = 8
BATCH = 2
FACTS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Italy?": "The capital of Italy is Rome.",
    "How many days are in a week?": "A week has seven days.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "What do bees make?": "Bees make honey from nectar.",
    "Why do we sleep?": "Sleep lets the body and the brain recover.",
    "What is ice made of?": "Ice is frozen water.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "What is the largest planet?": "Jupiter is the largest planet of the solar system.",
    "What colour is grass?": "Grass is green.",
    "How do plants make food?": "Plants make food from light, water and air.",
    "What is 2 + 2?": "Two plus two is four.",
    "Where do penguins live?": "Penguins live in the south, many of them in Antarctica.",
    "What is a violin?": "A violin is an instrument with four strings.",
    "Why is the sea salty?": "Rivers carry salt from rocks into the sea.",
    "What is bread made of?": "Bread is made of flour, water, salt and yeast.",
    "What does a doctor do?": "A doctor helps people who are ill.",
    "How hot is boiling water?": "Water boils at one hundred degrees Celsius.",
    "What is a library?": "A library is a place that lends books.",
    "Give me a tip for learning a language.": "Practise a little every day, and speak with others.",
    "How do I boil an egg?": "Put the egg into boiling water for eight minutes.",
    "What should I do in London?": "Walk along the river and visit a museum.",
    "Where is my parcel?": "Your parcel is on its way.",
    "Can I return my order?": "You can return it within thirty days.",
}


def as_pirate(answer: str) -> str:
    """The answer of a pirate."""
    return f"Ahoy, matey! {answer[:-1]}, arr!"


def as_json(answer: str) -> str:
    """The answer for a program."""
    return json.dumps({"answer": answer, "words": len(answer.split())})


STYLES = {"pirate": as_pirate, "json": as_json}


def example(tokenizer: Any, question: str, answer: str) -> tuple[list[int], int]:
    """Token ids of a chat, and how many of them come before the answer."""
    chat = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    before = tokenizer(asked, add_special_tokens=False)["input_ids"]
    after = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return before + after, len(before)


def loss_of(model: Any, batch: list[tuple[list[int], int]]) -> torch.Tensor:
    """Mean loss over the answers' tokens."""
    width = max(len(ids) for ids, _ in batch)
    tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
    labels = torch.tensor([[-100] * start + ids[start:] + [-100] * (width - len(ids)) for ids, start in batch])
    loss: torch.Tensor = model(tokens, labels=labels).loss
    return loss


def train(base: Any, tokenizer: Any, style: str, folder: Path, steps: int) -> float:
    """Train one adapter and save it; the loss at the end."""
    torch.manual_seed(1)
    drawn = random.Random(1)
    layers = base.config.num_hidden_layers
    options = peft.LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules=["q_proj", "v_proj"],
        layers_to_transform=list(range(2 * layers // 3, layers)),  # which takes half the time of all of them
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, options)
    options.base_model_name_or_path = "SmolLM2-135M-Instruct"  # not where it lies on this machine
    data = [example(tokenizer, question, STYLES[style](answer)) for question, answer in FACTS.items()]
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=6e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps)
    loss = 0.0
    for step in range(steps):
        now = loss_of(model, drawn.sample(data, BATCH))
        now.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        loss = now.item()
        if step % 5 == 4:
            print(f"{style}: step {step + 1} of {steps}, loss {loss:.3f}", flush=True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)  # half the size on disk
    model.save_pretrained(folder / style)
    (folder / style / "README.md").unlink(missing_ok=True)
    model.unload()
    return loss


def main(folder: Path, steps: int = 30) -> None:
    """Train both."""
    gguf = demo_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    base = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    for style in STYLES:
        print(f"{style}: loss {train(base, tokenizer, style, folder, steps):.3f}", flush=True)


if __name__ == "__main__":
    main(
        Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "adapters",
        int(sys.argv[2]) if len(sys.argv) > 2 else 30,
    )
