"""An agent on one stream: the model calls a calculator, its result is sent back, and two answers branch off.

python examples/agent.py [model folder or .gguf file]
"""

from __future__ import annotations

import json
import operator
import sys

import anyio

from headrace.engine import Engine, ResponseFormat, SamplingParams, TokenStream
from headrace.server.demo import demo_model

OPERATIONS = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
CALL = ResponseFormat.json_schema(
    {
        "type": "object",
        "properties": {"a": NUMBER, "operation": {"enum": list(OPERATIONS)}, "b": NUMBER},
        "required": ["a", "operation", "b"],
        "additionalProperties": False,
    }
)
TASK = (
    "Write the question as a call of the calculator, in JSON with a, operation (plus, minus or times) and b. "
    "Question: what is {question}?"
)


async def text_of(stream: TokenStream) -> str:
    return "".join([token.text async for token in stream])


async def main(model: str, question: str = "17 times 23") -> None:
    chat = [{"role": "user", "content": TASK.format(question=question)}]
    calling = SamplingParams(temperature=0, max_tokens=60, response_format=CALL)
    answering = SamplingParams(temperature=0.7, max_tokens=40)
    async with Engine(model, kv_memory="256MiB") as engine, engine.stream(chat, calling) as stream:
        call = json.loads(await text_of(stream))
        result = OPERATIONS[call["operation"]](call["a"], call["b"])
        print(f"{call['a']} {call['operation']} {call['b']} is {result}")
        async with stream.fork() as other:
            for number, branch in enumerate((stream, other)):
                told = [{"role": "tool", "content": f"The calculator says {result}. Tell the user."}]
                await branch.send(told, answering.replace(seed=number))
                print(f"answer {number + 1}: {await text_of(branch)!r}")
                usage = branch.usage
                print(f"computed {usage.prompt_tokens - usage.cached_tokens} of {usage.prompt_tokens} tokens")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else str(demo_model()))
