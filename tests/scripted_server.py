"""A server over the scripted engine, to be run as a process: prints its port, then serves until it is told to stop."""

from __future__ import annotations

import json
import resource
import socket
import sys
import time
from typing import Any

import anyio

from headrace.engine.scheduling.plan import Capacity
from headrace.engine.testing import ScriptedEngine, ScriptedRunner
from headrace.server import ServerSettings, create_app
from headrace.server.http.running import make_server

CAPACITY = Capacity(num_pages=4096, page_size=16, max_rows=64, max_batched_tokens=512, max_context=8192, vocab_size=257)


async def main(options: dict[str, Any]) -> None:
    pause, log_level = options.pop("pause", 0.01), options.pop("log_level", "critical")
    if "files" in options:
        files = int(options.pop("files"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    def runner() -> ScriptedRunner:
        return ScriptedRunner(CAPACITY, gate=lambda: time.sleep(pause))

    async with ScriptedEngine(CAPACITY, runner) as engine:
        sock = socket.create_server(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        app = create_app(engine, ServerSettings(**options))
        server = make_server(app, host="127.0.0.1", port=port, log_level=log_level)
        print(port, flush=True)
        await server.serve(sockets=[sock])


if __name__ == "__main__":
    anyio.run(main, json.loads(sys.argv[1]), backend_options={"use_uvloop": True})
