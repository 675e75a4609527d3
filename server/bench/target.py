"""The server that a benchmark loads, as a process: prints its port, serves, and prints what it still holds at its end.

Run as `python -m headrace.server.bench.target JSON` with `engine` (options), `fake` and `settings`.
"""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import anyio

from headrace.engine import Engine
from headrace.engine.bench.host.fake_device import FakeEngine
from headrace.server.app import create_app
from headrace.server.http.running import make_server, settle_memory
from headrace.server.settings import ServerSettings

__all__ = ["main"]

_BACKLOG = 4096


async def main(options: dict[str, Any]) -> None:
    """Serve until told to stop."""
    engine = FakeEngine(**options["engine"]) if options["fake"] else Engine(**options["engine"])
    async with engine:
        settle_memory()
        app = create_app(engine, ServerSettings(**options["settings"]))
        sock = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        port = sock.getsockname()[1]
        server = make_server(app, host="127.0.0.1", port=port, log_level="critical", backlog=_BACKLOG)
        print(json.dumps({"port": port, "model": app.state.service.model}), flush=True)
        await server.serve(sockets=[sock])
        with anyio.move_on_after(15):
            while engine.stats().pages_held:  # noqa: ASYNC110 - the last steps may still be in flight
                await anyio.sleep(0.01)
        print(json.dumps(asdict(engine.stats()) | {"live": app.state.service.limits.live}), flush=True)


if __name__ == "__main__":
    anyio.run(main, json.loads(sys.argv[1]), backend_options={"use_uvloop": find_spec("uvloop") is not None})
