"""Checks that `import headrace.engine` is light and without side effects; never imports headrace into itself.

Run by the interpreter whose headrace is to be checked. Each look is a fresh process.
"""

from __future__ import annotations

import json
import subprocess
import sys

LIMIT_S = 0.3
TRIES = 5
HEAVY = ("torch", "transformers", "tokenizers", "gguf", "starlette", "flashinfer", "llguidance", "rich", "typer")

PROBE = """
import json, os, signal, sys, threading, time
import warnings; warnings.simplefilter("error")
environment, handler, threads = dict(os.environ), signal.getsignal(signal.SIGINT), threading.active_count()
begin = time.perf_counter()
import headrace.engine
seconds = time.perf_counter() - begin
assert dict(os.environ) == environment, "the import changed the environment"
assert signal.getsignal(signal.SIGINT) is handler, "the import changed a signal handler"
assert threading.active_count() == threads, "the import started a thread"
print(json.dumps({"seconds": seconds, "file": headrace.engine.__file__, "modules": sorted(sys.modules)}))
"""


def look() -> dict[str, object]:
    """Import the engine in a fresh isolated process and say what that took."""
    done = subprocess.run([sys.executable, "-I", "-c", PROBE], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"import headrace.engine failed:\n{done.stderr}")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def main() -> None:
    """Exit with a message where the import is heavy, slow or not of the wheel."""
    looks = [look() for _ in range(TRIES)]
    modules = looks[0]["modules"]
    assert isinstance(modules, list)
    heavy = [name for name in HEAVY if name in modules]
    seconds = sorted(float(str(found["seconds"])) for found in looks)
    print(f"import headrace.engine: best {seconds[0]:.3f} s, worst {seconds[-1]:.3f} s, {len(modules)} modules in all")
    if "site-packages" not in str(looks[0]["file"]):
        sys.exit(f"this is not the installed wheel: {looks[0]['file']}")
    if heavy:
        sys.exit(f"import headrace.engine imports {', '.join(heavy)}")
    if seconds[0] > LIMIT_S:
        sys.exit(f"import headrace.engine took {seconds[0]:.3f} s at best; the limit is {LIMIT_S} s")


if __name__ == "__main__":
    main()
