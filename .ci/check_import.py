"""Checks that `import headrace.engine` is light and without side effects; never imports headrace into itself.

Run by the interpreter whose headrace is to be checked. Each look is a fresh process.
"""

from __future__ import annotations

import json
import subprocess
import sys

LIMIT = 3.0
"""How many times as long as importing pydantic the import may take: machines differ, and so do their busy hours."""
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


BASELINE = """
import time
begin = time.perf_counter()
import pydantic
class Model(pydantic.BaseModel):
    field: int = 0
print(time.perf_counter() - begin)
"""


def baseline() -> float:
    """Return the seconds that importing pydantic and making one model take in a fresh isolated process."""
    return float(subprocess.run([sys.executable, "-I", "-c", BASELINE], capture_output=True, check=True).stdout)


def look() -> dict[str, object]:
    """Import the engine in a fresh isolated process and say what that took."""
    done = subprocess.run([sys.executable, "-I", "-c", PROBE], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"import headrace.engine failed:\n{done.stderr}")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def main() -> None:
    """Exit with a message where the import is heavy, slow or not of the wheel."""
    pairs = [(baseline(), look()) for _ in range(TRIES)]
    floor, looks = min(seconds for seconds, _ in pairs), [found for _, found in pairs]
    modules = looks[0]["modules"]
    assert isinstance(modules, list)
    heavy = [name for name in HEAVY if name in modules]
    seconds = sorted(float(str(found["seconds"])) for found in looks)
    times = f"best {seconds[0]:.3f} s, worst {seconds[-1]:.3f} s, of pydantic {floor:.3f} s"
    print(f"import headrace.engine: {times}, {len(modules)} modules in all")
    if "site-packages" not in str(looks[0]["file"]):
        sys.exit(f"this is not the installed wheel: {looks[0]['file']}")
    if heavy:
        sys.exit(f"import headrace.engine imports {', '.join(heavy)}")
    if seconds[0] > LIMIT * floor:
        took = f"{seconds[0] / floor:.1f} times as long as importing pydantic"
        sys.exit(f"import headrace.engine took {took}; the limit is {LIMIT}")


if __name__ == "__main__":
    main()
