"""The tests of the official client once more with its version 2, which `make test` installs apart from version 3."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSION_2 = Path(sys.prefix, "openai-2")
TESTS = (
    "test_openai_client.py",
    "test_responses.py::test_a_response_streams_what_it_answers_whole",
    "test_responses.py::test_the_stream_helper_gathers_the_same_answer",
    "test_responses.py::test_a_call_and_its_output_go_back_as_input",
    "test_transport.py::test_an_answer_is_read_while_it_is_generated",
    "test_transport.py::test_a_request_that_nobody_reads_any_more_is_cancelled",
    "test_vectors.py::test_vectors_come_as_numbers_and_in_base64",
)


@pytest.mark.skipif(not VERSION_2.is_dir(), reason="openai 2 is not installed beside openai 3: `make test` does it")
def test_version_2_of_the_official_client() -> None:
    path = os.pathsep.join(filter(None, [str(VERSION_2), os.environ.get("PYTHONPATH")]))
    script = (
        "import pytest, sys; code = pytest.main(sys.argv[1:]); import openai; print(openai.__version__); sys.exit(code)"
    )
    tests = [str(Path(__file__).with_name(name)) for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-c", script, "-q", "-p", "no:cacheprovider", *tests],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("2."), (
        done.stdout[-4000:] + done.stderr[-2000:]
    )
