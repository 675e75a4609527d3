"""A batch from a script that has no event loop: many prompts, answers in order, and errors in their places.

python examples/offline_batch.py [model folder or .gguf file]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from headrace.engine import LLM, HeadraceError, Prompt, SamplingParams
from headrace.server.demo import demo_model

NUMBERS = range(2, 14)


def main(model: str) -> None:
    with LLM(model, kv_memory="64MiB") as llm:
        one = llm.generate("The sea is", SamplingParams(max_tokens=8, temperature=0))
        print(f"one: {one.choices[0].text!r}")
        in_order(llm)
        mixed(llm)


def questions() -> Iterator[list[dict[str, str]]]:
    """Prompts that are made when the engine has room for them; they could come from a file of any size."""
    for number in NUMBERS:
        yield [{"role": "user", "content": f"Is {number} a prime number? Answer yes or no."}]


def in_order(llm: LLM) -> None:
    """All run in one batch; the answers come in the order of the questions, as JSON lines."""
    answers = llm.generate(questions(), SamplingParams(max_tokens=4, temperature=0))
    for number, answer in zip(NUMBERS, answers, strict=True):
        print(
            json.dumps({"number": number, "answer": answer.choices[0].text, "tokens": answer.usage.completion_tokens})
        )


def mixed(llm: LLM) -> None:
    """Parameters for each prompt, and a bad prompt that does not cost the others their answers."""
    prompts: list[Prompt] = ["Rain is", "", [504, 3100, 314]]
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True) for tokens in (2, 4, 6)]
    for prompt, answer in zip(prompts, llm.generate(prompts, params, return_errors=True, progress=False), strict=True):
        if isinstance(answer, HeadraceError):
            print(f"mixed: {prompt!r}: {answer}")
        else:
            print(f"mixed: {prompt!r}: {answer.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(demo_model()))
