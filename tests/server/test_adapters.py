"""Adapters over HTTP: chosen by the model's name or a field, listed, loaded and unloaded by admin keys alone."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from adapter_folders import lora_folder
from serving import Serving, serving
from serving import check_error as check_answer
from tiny_models import whole_folder

from headrace.engine import Engine, InvalidParams
from headrace.server import ServerSettings
from headrace.server.service import Service

BOSS, USER = "the-key-of-the-boss", "the-key-of-a-user"
ADMIN = {"authorization": f"Bearer {BOSS}"}
PROMPT = [3, 14, 15, 92, 65, 35]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    model = whole_folder(tmp_path / "model")
    for seed in (1, 2, 4):
        lora_folder(tmp_path / "adapters" / f"a{seed}", seed)
    lora_folder(tmp_path / "outside", 3)
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "outside")
    settings = ServerSettings(
        served_model_name="base",
        api_keys={"user": USER},
        admin_keys={"boss": BOSS},
        adapters={"first": str(tmp_path / "adapters" / "a1")},
        adapter_folder=str(tmp_path / "adapters"),
    )
    with serving(Engine(model, kv_memory="4MiB", dtype="float32", adapter_slots=2), settings) as here:
        yield here


def check_error(answer: Any, status: int, code: str, param: str | None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    check_answer(answer, status)


def said(server: Serving, **changes: Any) -> str:
    body = {"model": "base", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = server.post(body | changes)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == (body | changes)["model"]
    return str(answer.json()["choices"][0]["text"])


def test_an_adapter_is_a_model_or_a_field(server: Serving) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=USER, max_retries=0)
    base, first = client.models.list().data
    assert (base.id, first.id) == ("base", "first") and first.model_dump()["parent"] == "base"
    assert client.models.retrieve("first") == first
    plain, worn = said(server), said(server, model="first")
    assert plain != worn == said(server, adapter="first") == said(server, model="first", adapter="first")
    completion = client.completions.create(
        model="first", prompt=PROMPT, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert completion.choices[0].text == worn
    check_error(server.post({"model": "second", "prompt": "a"}), 404, "model_not_found", "model")
    check_error(server.post({"model": "base", "adapter": "b", "prompt": "a"}), 404, "model_not_found", "adapter")
    with loaded(server):
        check_error(server.post({"model": "first", "adapter": "b", "prompt": "a"}), 400, "invalid_value", "adapter")
    metrics = server.client.get("/metrics", headers=ADMIN).text
    assert 'headrace:tenant_generation_tokens_total{adapter="first",tenant="user"} 32.0' in metrics


@contextlib.contextmanager
def loaded(server: Serving) -> Iterator[None]:
    """Another adapter, `b`, for a while."""
    answer = server.client.put("/v1/adapters/b", json={"folder": "a2", "pinned": True}, headers=ADMIN)
    assert answer.status_code == 200 and answer.json()["pinned"] is True
    yield
    gone = server.client.delete("/v1/adapters/b", headers=ADMIN)
    assert gone.json() == {"id": "b", "object": "adapter", "deleted": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "ab"}),
        ("/v1/score", {"text_1": "ab", "text_2": ["ba", "c"]}),
        ("/v1/rerank", {"query": "ab", "documents": ["ba", "c"]}),
    ],
)
def test_vectors_and_scores_wear_an_adapter(server: Serving, path: str, body: dict[str, Any]) -> None:
    def told(**asked: Any) -> Any:
        answer = server.post({"model": "base", **body, **asked}, path)
        assert answer.status_code == 200, answer.text
        return answer.json().get("data") or answer.json()["results"]

    assert told() != told(adapter="first") == told(model="first")
    check_error(server.post({"model": "base", "adapter": "b", **body}, path), 404, "model_not_found", "adapter")


def test_admin_keys_load_replace_and_unload(server: Serving) -> None:
    client = server.client
    first = said(server, model="first")
    card = client.put("/v1/adapters/a2", json={}, headers=ADMIN).json()
    assert card["id"] == "a2" and card["requests"] == 0 and len(card["digest"]) == 64
    second = said(server, model="a2")
    assert first != second
    assert client.put("/v1/adapters/first", json={"folder": "a2"}, headers=ADMIN).status_code == 200
    assert said(server, model="first") == second
    listed = client.get("/v1/adapters", headers=ADMIN).json()["data"]
    assert [each["id"] for each in listed] == ["a2", "first"]
    assert len({each["digest"] for each in listed}) == 1
    assert client.delete("/v1/adapters/first", headers=ADMIN).status_code == 200
    check_error(server.post({"model": "first", "prompt": "a"}), 404, "model_not_found", "model")
    check_error(client.delete("/v1/adapters/first", headers=ADMIN), 404, "model_not_found", "adapter")


def test_a_pin_that_is_refused_changes_nothing(server: Serving) -> None:
    def listed() -> Any:
        return [
            (each["id"], each["digest"]) for each in server.client.get("/v1/adapters", headers=ADMIN).json()["data"]
        ]

    with loaded(server):
        before = listed()
        for name in ("new", "first"):
            refused = server.client.put(f"/v1/adapters/{name}", json={"folder": "a4", "pinned": True}, headers=ADMIN)
            check_error(refused, 400, "invalid_value", "name")
        assert listed() == before


@pytest.mark.anyio
async def test_no_adapter_has_the_name_of_the_model(tmp_path: Path) -> None:
    model = whole_folder(tmp_path / "model")
    settings = ServerSettings(served_model_name="base", adapters={"base": str(lora_folder(tmp_path / "a", 1))})
    async with Engine(model, kv_memory="4MiB", dtype="float32", adapter_slots=2) as engine:
        with pytest.raises(InvalidParams, match="the name of the model"):
            await Service(engine, settings).load_adapters()


def test_what_may_not_be_loaded_is_not(server: Serving) -> None:
    client = server.client
    for folder in ("../outside", "/etc", "link", "none", "a1/../a2", ".", "a\x00"):
        refused = client.put("/v1/adapters/x", json={"folder": folder}, headers=ADMIN)
        check_error(refused, 400, "adapter_invalid", "folder")
    for name in ("base", ".hidden", "a" * 65, "a b"):
        refused = client.put(f"/v1/adapters/{name}", json={"folder": "a1"}, headers=ADMIN)
        check_error(refused, 400, "adapter_invalid", "name")
    check_error(client.put("/v1/adapters/x", json={"path": "a1"}, headers=ADMIN), 400, "unknown_parameter", "path")
    for method, path in (("GET", ""), ("PUT", "/x"), ("DELETE", "/first")):
        for key, status in ((USER, 403), ("nobody", 401)):
            headers = {"authorization": f"Bearer {key}"}
            refused = client.request(method, f"/v1/adapters{path}", json={"folder": "a1"}, headers=headers)
            assert refused.status_code == status
    assert [each["id"] for each in client.get("/v1/adapters", headers=ADMIN).json()["data"]] == ["first"]


def test_an_adapter_whose_files_are_gone_is_told_so(tmp_path: Path) -> None:
    """With one slot and no host memory, what is asked for is read again each time."""
    settings = ServerSettings(
        served_model_name="base",
        adapters={name: str(lora_folder(tmp_path / name, seed)) for seed, name in enumerate(("kept", "gone"))},
    )
    options: dict[str, Any] = {"kv_memory": "4MiB", "dtype": "float32", "adapter_slots": 1, "adapter_host_memory": 1}
    with serving(Engine(whole_folder(tmp_path / "model"), **options), settings) as server:
        for name in ("gone", "kept"):
            said(server, model=name)
        shutil.rmtree(tmp_path / "gone")
        refused = server.post({"model": "gone", "prompt": PROMPT})
        check_error(refused, 503, "adapter_unavailable", None)
        assert refused.headers["x-should-retry"] == "false"
        said(server, model="kept")
