"""A chat in the terminal: ten lines around the engine. An empty line or Ctrl-D ends it.

python examples/chat.py [model folder or .gguf file]
"""

from __future__ import annotations

import sys

import anyio

from headrace.engine import Engine, SamplingParams
from headrace.server.demo import demo_model


async def main(model: str, max_tokens: int = 256) -> None:
    messages: list[dict[str, str]] = []
    async with Engine(model, kv_memory="256MiB") as engine:
        print("> ", end="", flush=True)
        while question := (await anyio.to_thread.run_sync(sys.stdin.readline)).strip():
            messages.append({"role": "user", "content": question})
            answer = ""
            async for token in engine.stream(messages, SamplingParams(max_tokens=max_tokens, top_p=0.9)):
                print(token.text, end="", flush=True)
                answer += token.text
            messages.append({"role": "assistant", "content": answer})  # the next turn finds its pages in the cache
            print("\n> ", end="", flush=True)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else str(demo_model()))
