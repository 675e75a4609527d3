"""An application with the scripted engine mounted in it, on a server of its own choice; run as a process by tests."""

from __future__ import annotations

import sys
import time
from functools import partial

import anyio
import uvicorn
from scripted_server import CAPACITY
from starlette.applications import Starlette
from starlette.routing import Mount

from headrace.engine.testing import ScriptedEngine, ScriptedRunner
from headrace.server import DrainingServer, ServerSettings, create_app, drained_at_signal


async def main(server: str, port: int, seconds: float) -> None:
    async with ScriptedEngine(CAPACITY, lambda: ScriptedRunner(CAPACITY, gate=lambda: time.sleep(0.01))) as engine:
        llm = create_app(engine, ServerSettings(drain_seconds=seconds))
        app = Starlette(routes=[Mount("/llm", llm)])
        if server == "hypercorn":
            from hypercorn.asyncio import serve
            from hypercorn.config import Config

            config = Config()
            config.bind = [f"127.0.0.1:{port}"]
            await serve(app, config, shutdown_trigger=partial(drained_at_signal, llm))
        else:
            await DrainingServer(uvicorn.Config(app, port=port, log_level="critical"), llm).serve()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
