"""A response format that the model's tokens cannot spell is the request's fault: 400, by the field's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from serving import Serving, check_error, logged, serving

from headrace.engine import Engine
from headrace.server import ServerSettings


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One token for each printable character of ASCII, and none for others."""
    folder = tiny_models.whole_folder(tmp_path_factory.mktemp("ascii"))
    with serving(Engine(folder, kv_memory=8 << 20), ServerSettings(served_model_name="scripted")) as here:
        yield here


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"\x01", "no text is in it"),
        ("é+", "no text is in it"),
        (r"[a-c]\x01", "leave no token to choose after 1 tokens"),
        (r"[a-c][x-z]{2}é", "leave no token to choose after 3 tokens"),
    ],
)
@pytest.mark.parametrize("field", ["guided_regex", "structured_outputs"])
def test_a_regex_that_leaves_no_token(server: Serving, pattern: str, said: str, field: str) -> None:
    asked: dict[str, Any] = {field: pattern if field == "guided_regex" else {"regex": pattern}}
    with logged() as records:
        answer = server.post({"prompt": "a", "max_tokens": 20, **asked})
    error = check_error(answer, 400)
    assert said in error["message"] and error["param"] == field and error["message"].startswith(field)
    assert error["type"] == "invalid_request_error"
    assert not [record for record in records if record.levelname == "ERROR"]


def test_the_same_in_a_stream_is_its_last_event(server: Serving) -> None:
    answer = server.post({"prompt": "a", "max_tokens": 20, "guided_regex": r"[a-c]{6}\x01", "stream": True})
    *chunks, last = [line for line in answer.text.split("\n\n") if line]
    assert chunks
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "no_token_left" and error["param"] == "guided_regex"


def test_what_can_be_spelled_is_answered(server: Serving, tmp_path: Path) -> None:
    answer = server.post({"prompt": "a", "max_tokens": 20, "guided_regex": "(?:é|[x-z]{3})"})
    assert answer.status_code == 200 and set(answer.json()["choices"][0]["text"]) <= set("xyz")
