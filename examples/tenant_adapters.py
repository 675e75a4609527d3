"""One model, a voice for each tenant: every tenant's chats use its adapter, all in one batch, and none sees another's.

The adapters in examples/adapters were trained by train_adapters.py: `pirate` talks like one, `json` answers programs.

python examples/tenant_adapters.py [model folder or .gguf file]
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from headrace.engine import Engine, SamplingParams
from headrace.server.demo import demo_model

ADAPTERS = Path(__file__).parent / "adapters"
TENANTS = {"harbour": "pirate", "billing": "json", "plain": None}
"""The adapter that each tenant has chosen."""
QUESTIONS = ("What is the capital of Spain?", "What do cows eat?")


async def main(model: str, max_tokens: int = 40) -> None:
    """Ask every tenant's questions at once and print the answers by tenant."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    answers: dict[tuple[str, str], str] = {}

    async def ask(engine: Engine, tenant: str, question: str) -> None:
        chat = [{"role": "user", "content": question}]
        completion = await engine.generate(chat, params, adapter=TENANTS[tenant], tenant=tenant)
        answers[tenant, question] = completion.choices[0].text

    async with Engine(model, kv_memory="256MiB", adapter_slots=2) as engine:
        for name in sorted(set(TENANTS.values()) - {None}, key=str):
            await engine.adapters.load(str(name), ADAPTERS / str(name))
        async with anyio.create_task_group() as tasks:
            for tenant in TENANTS:
                for question in QUESTIONS:
                    tasks.start_soon(ask, engine, tenant, question)
        for info in engine.adapters.list():
            print(f"{info.name}: {info.nbytes / 1024:.0f} KiB, {info.where}")
    for tenant, adapter in TENANTS.items():
        print(f"\n{tenant} ({adapter or 'no adapter'})")
        for question in QUESTIONS:
            print(f"  {question}\n    {answers[tenant, question]}")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else str(demo_model()))
