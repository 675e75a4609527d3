"""What a server tells about itself: every figure is compared with what was asked of a real server."""

from __future__ import annotations

import itertools
import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
import tiny_models
import yaml
from hypothesis import given
from hypothesis import strategies as st
from leftovers import Threads
from prometheus_client.parser import text_string_to_metric_families
from serving import CAPACITY, Serving, check_error, events_of, scripted, serving, until
from speculating import always, guess_by
from starlette.testclient import TestClient

from headrace.engine import Engine, SamplingParams
from headrace.engine.bench.host.fake_device import FakeEngine
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.speculation import Ngram
from headrace.engine.steps.flights import Meter
from headrace.engine.testing import ScriptedRunner
from headrace.server import ServerSettings, create_app
from headrace.server.observability import watchdog
from headrace.server.observability.exporter import VLLM_NAMES
from headrace.server.observability.figures import Arrivals, Figures
from headrace.server.observability.logs import JsonLines, Line
from headrace.server.observability.recorder import ABORT_REASONS, OTHER, Histogram, Recorder

DOCS = Path(__file__).resolve().parents[2] / "docs"
CHATS = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a secret of mine"}]
KEYS = {"ann": "the-key-of-ann", "bob": "the-key-of-bob"}
BOSS = "the-key-of-the-boss"
READER = "the-key-of-prometheus"


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def samples(text: str) -> dict[str, float]:
    """Values by `name{label=value,...}`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()) if value)
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def scrape(server: Serving, **headers: str) -> dict[str, float]:
    answer = server.client.get("/metrics", headers=headers)
    assert answer.status_code == 200
    return samples(answer.text)


def shows(server: Serving, expected: dict[str, float], **headers: str) -> dict[str, float]:
    """Wait until the metrics show this: a text may be some tenths of a second old."""
    found: dict[str, float] = {}

    def agrees() -> bool:
        found.update(scrape(server, **headers))
        return all(found.get(f"headrace:{name}", 0.0) == value for name, value in expected.items())

    try:
        until(agrees, seconds=5)
    except AssertionError:
        assert {name: found.get(f"headrace:{name}") for name in expected} == expected
    return found


# -- counts ---------------------------------------------------------------------------------------------------------


def test_the_counts_are_those_of_what_was_asked() -> None:
    settings = ServerSettings(api_keys=KEYS, admin_keys={"boss": BOSS})
    with serving(scripted(), settings) as server:
        ann, bob = bearer(KEYS["ann"]), bearer(KEYS["bob"])
        for stream in (True, False):
            body = {"prompt": "x" * 40, "max_tokens": 10, "ignore_eos": True, "stream": stream}
            assert server.post(body, headers=ann).status_code == 200
        chat = {"messages": MESSAGES, "max_tokens": 5, "n": 2, "ignore_eos": True}
        usage = server.post(chat, CHATS, headers=bob).json()["usage"]
        check_error(server.post({"prompt": ""}, headers=bob), 400)
        check_error(server.post({"prompt": "x"}, headers=bearer("no-key-of-anybody")), 401)
        server.client.get("/v1/models/scripted", headers=bob)
        server.client.get("/v1/none", headers=bob)
        found = shows(
            server,
            {
                "tenant_requests_total{tenant=ann}": 2,
                "tenant_prompt_tokens_total{tenant=ann}": 80,
                "tenant_cached_tokens_total{tenant=ann}": 32,  # two full pages of the second prompt
                "tenant_generation_tokens_total{tenant=ann}": 20,
                "tenant_requests_total{tenant=bob}": 1,
                "tenant_prompt_tokens_total{tenant=bob}": usage["prompt_tokens"],
                "tenant_generation_tokens_total{tenant=bob}": 10,
                "prompt_tokens_total": 80 + 2 * usage["prompt_tokens"],
                "generation_tokens_total": 30,
                "choices_finished_total{finished_reason=length}": 4,
                "time_to_first_token_seconds_count": 3,
                "request_latency_seconds_count": 3,
                "queue_time_seconds_count": 3,
                "prefill_time_seconds_count": 3,
                "decode_time_seconds_count": 3,
                "time_per_output_token_seconds_count": 3,
                "request_prompt_tokens_sum": 80 + usage["prompt_tokens"],
                "request_generation_tokens_sum": 30,
                "http_requests_total{method=POST,route=/v1/completions,status=200}": 2,
                f"http_requests_total{{method=POST,route={CHATS},status=200}}": 1,
                "http_requests_total{method=POST,route=/v1/completions,status=400}": 1,
                "http_requests_total{method=POST,route=other,status=401}": 1,
                "http_requests_total{method=GET,route=/v1/models/{model:path},status=200}": 1,
                "http_requests_total{method=GET,route=other,status=404}": 1,
                "requests_in_progress": 0,
                "requests_running": 0,
                "kv_pages{state=held}": 0,
                "kv_memory_efficiency": 1,
                "ready": 1,
            },
            **bearer(BOSS),
        )
        assert sum(value for name, value in found.items() if name.startswith("headrace:requests_aborted")) == 0
        assert 0 < found["headrace:time_to_first_token_seconds_sum"] < found["headrace:request_latency_seconds_sum"]
        assert found["headrace:inter_token_latency_seconds_count"] >= 18 + 8 - 6  # all but those that came merged first
        assert found["headrace:steps_total"] >= 10 and found["headrace:device_busy_seconds_total"] > 0.01


def test_drafts_are_counted_by_their_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the four drafts of each run none, the first one, two, three and all are right in turn."""
    known: list[int] = []

    def guess(tokens: Sequence[int], most: int) -> list[int]:
        right = [0, 1, 3, 6, 10].index((len(tokens) - 3) % 15)  # places of runs behind a prompt of two, and a token
        return [(id + (ahead >= right)) % 256 for ahead, id in enumerate(known[len(tokens) :][:most])]

    guess_by(monkeypatch, guess, always(4))
    options: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "kv_memory": "1MiB"}
    engine = Engine(tiny_models.chat_folder(tmp_path), launch_ahead=1, speculation=Ngram(k=4), **options)
    asked: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 61}
    with serving(engine) as server:
        plain = server.portal.call(engine.generate, "go", SamplingParams(**asked, speculate=False))
        known += plain.prompt_token_ids + plain.choices[0].token_ids
        found = server.portal.call(engine.generate, "go", SamplingParams(**asked))
        assert found.choices == plain.choices
        stats = server.stats()
        assert (stats.draft_runs, stats.drafted_tokens, stats.accepted_tokens) == (20, 80, 40)
        assert (stats.drafted_by_position, stats.accepted_by_position) == ((20, 20, 20, 20), (16, 12, 8, 4))
        assert stats.speculation_depth == 4 and stats.mean_accepted_length == 60 / 20
        places = {f"num_accepted_tokens_per_pos_total{{position={at}}}": 16 - 4 * at for at in range(4)}
        places |= {f"num_draft_tokens_per_pos_total{{position={at}}}": 20 for at in range(4)}
        totals = {"num_drafts_total": 20, "num_draft_tokens_total": 80, "num_accepted_tokens_total": 40, "depth": 4}
        shown = {f"spec_decode_{name}": count for name, count in (places | totals).items()}
        shows(server, shown | {"generation_tokens_total": 2 * 61})


def test_the_device_is_in_use_while_a_step_is_in_flight_and_requests_hold_memory() -> None:
    held, waiting = threading.Event(), threading.Event()

    def gate() -> None:
        waiting.set()
        held.wait(20)

    with serving(scripted(lambda: ScriptedRunner(CAPACITY, gate=gate))) as server:
        after: dict[str, float] = {}

        def is_late() -> bool:
            after.update(scrape(server))  # perhaps a text of some time ago
            return after["headrace:step_age_seconds"] > 0.5

        thread = threading.Thread(target=server.post, args=({"prompt": "x" * 20, "max_tokens": 5, "ignore_eos": True},))
        began = time.monotonic()
        thread.start()
        assert waiting.wait(5)
        until(is_late, seconds=15)
        busy, took = after["headrace:device_busy_seconds_total"], time.monotonic() - began
        assert busy == pytest.approx(after["headrace:step_age_seconds"], abs=0.4) and 0.5 < busy < took
        assert after["headrace:kv_pages{state=held}"] == 2 and after["headrace:requests_running"] == 1
        assert after["headrace:kv_memory_efficiency"] == pytest.approx(after["headrace:kv_live_tokens"] / 32)
        assert 20 <= after["headrace:kv_live_tokens"] <= 25
        assert after["headrace:requests_in_progress"] == 1
        held.set()
        thread.join()
        shows(server, {"steps_in_flight": 0, "step_age_seconds": 0, "kv_pages{state=held}": 0})


def test_a_meter_counts_the_time_with_a_step_in_flight() -> None:
    meter = Meter()
    assert meter.busy_seconds(5.0) == 0.0
    meter.launched(10.0)
    meter.launched(11.0)
    assert meter.busy_seconds(12.0) == 2.0
    meter.committed(12.5, 1)
    assert meter.busy_seconds(13.0) == 3.0
    meter.committed(13.0, 1)
    assert meter.busy_seconds(99.0) == 3.0
    meter.launched(100.0)
    assert meter.busy_seconds(100.5) == 3.5


def test_queue_time_is_what_a_request_waits_for_its_first_step() -> None:
    one_row = Capacity(num_pages=512, page_size=16, max_rows=1, max_batched_tokens=64, max_context=1024, vocab_size=257)
    runner = lambda: ScriptedRunner(one_row, gate=lambda: time.sleep(0.01))  # noqa: E731
    with serving(scripted(runner, one_row)) as server:
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
        threads = [threading.Thread(target=server.post, args=(body,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = shows(server, {"queue_time_seconds_count": 2, "time_to_first_token_seconds_count": 2})
        assert found["headrace:queue_time_seconds_bucket{le=0.05}"] == 1
        assert found["headrace:queue_time_seconds_sum"] > 0.5
        assert found["headrace:time_to_first_token_seconds_sum"] > found["headrace:queue_time_seconds_sum"]


class _Stream:
    """A stream that is only asked what it has used."""

    class usage:
        prompt_tokens, cached_tokens, completion_tokens = 7, 3, 0


@given(st.lists(st.tuples(st.floats(0.001, 10.0), st.integers(1, 50)), min_size=1, max_size=20))
def test_merged_tokens_share_the_time_that_they_took(chunks: list[tuple[float, int]]) -> None:
    moments = itertools.accumulate([0.0, *(seconds for seconds, _ in chunks)])
    recorder = Recorder(8)
    clock = pytest.MonkeyPatch()
    with clock.context() as patch:
        patch.setattr(time, "perf_counter", lambda: 100.0 + next(moments))
        figures = Figures(recorder, "id", "ann")
        arrivals = Arrivals(figures, _Stream(), 1)  # type: ignore[arg-type]
        for _, tokens in chunks:
            arrivals.came(tokens)
        arrivals.end()
    later = chunks[1:]
    assert sum(recorder.inter_token_latency.counts) == sum(tokens for _, tokens in later)
    assert recorder.inter_token_latency.total == pytest.approx(sum(seconds for seconds, _ in later))
    assert recorder.time_to_first_token.total == pytest.approx(chunks[0][0])
    used = recorder.tenant("ann")
    assert (used.prompt, used.cached, used.generated) == (7, 3, sum(tokens for _, tokens in chunks))


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 9)), max_size=30))
def test_a_histogram_counts_each_value_for_the_first_bound_that_holds_it(values: list[tuple[float, int]]) -> None:
    histogram = Histogram((0.5, 1.0, 5.0))
    for value, times in values:
        histogram.add(value, times)
    for place, (low, high) in enumerate([(-1.0, 0.5), (0.5, 1.0), (1.0, 5.0), (5.0, 99.0)]):
        assert histogram.counts[place] == sum(times for value, times in values if low < value <= high)


# -- ends that are none ---------------------------------------------------------------------------------------------


def endless(server: Serving, **more: Any) -> Iterator[bytes]:
    body = {"model": "scripted", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body, **more) as answer:
        yield from answer.iter_bytes()


def test_aborts_are_counted_by_their_reason() -> None:
    with serving(scripted(lambda: ScriptedRunner(CAPACITY, gate=lambda: time.sleep(0.01)))) as server:
        stream = endless(server)
        assert next(stream)
        stream.close()  # type: ignore[attr-defined]
        shows(server, {"requests_aborted_total{reason=disconnected}": 1})
        assert list(endless(server, headers={"x-request-timeout": "0.3"}))
        shows(server, {"requests_aborted_total{reason=deadline_exceeded}": 1})
        check_error(server.post({"prompt": "x" * 2000}), 400)  # the client's own fault is no abort
        found = shows(server, {"requests_aborted_total{reason=disconnected}": 1, "requests_in_progress": 0})
        assert sum(found[f"headrace:requests_aborted_total{{reason={reason}}}"] for reason in ABORT_REASONS) == 2
        generated = server.portal.call(server.engine.stats).generated_tokens
        shows(
            server,
            {"tenant_generation_tokens_total{tenant=anonymous}": generated, "generation_tokens_total": generated},
        )


def test_steps_that_fail_are_aborts() -> None:
    faults = dict.fromkeys(range(50), MemoryError())  # what finds no memory is tried again
    with serving(scripted(lambda: ScriptedRunner(CAPACITY, faults=faults))) as server:
        check_error(server.post({"prompt": "x"}), 503, "out_of_memory")
        status = "http_requests_total{method=POST,route=/v1/completions,status=503}"
        shows(server, {"requests_aborted_total{reason=out_of_memory}": 1, status: 1})


def test_chats_of_a_socket_count_as_well(caplog: pytest.LogCaptureFixture) -> None:
    from websockets.sync.client import connect

    caplog.set_level(logging.INFO, "headrace.server.requests")
    with serving(scripted(lambda: ScriptedRunner(CAPACITY, gate=lambda: time.sleep(0.005)))) as server:
        with connect(server.url.replace("http", "ws") + CHATS, proxy=None) as socket:
            asked = {"model": "scripted", "messages": MESSAGES, "ignore_eos": True, "stream": True}
            socket.send(json.dumps({"type": "request", "id": "a", "request": asked | {"max_tokens": 4}}))
            while json.loads(socket.recv(timeout=5))["type"] != "done":
                pass
            socket.send(json.dumps({"type": "request", "id": "b", "request": asked | {"max_tokens": 900}}))
            socket.recv(timeout=5)
            socket.send(json.dumps({"type": "cancel", "id": "b"}))
            while json.loads(socket.recv(timeout=5))["type"] != "error":
                pass
        shows(
            server,
            {
                "requests_aborted_total{reason=cancelled}": 1,
                "request_latency_seconds_count": 1,
                f"http_requests_total{{method=WEBSOCKET,route={CHATS},status=101}}": 1,
            },
        )
    lines = [record.args[0].fields for record in caplog.records if record.name == "headrace.server.requests"]  # type: ignore
    chats = [line for line in lines if line["method"] == "WEBSOCKET" and "reason" in line]
    assert [line["reason"] for line in chats] == ["finished", "cancelled"]
    assert chats[0]["completion_tokens"] == 4 and chats[0]["request_id"] != chats[1]["request_id"]


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Every name of a sample that a fresh server shows or may show, under vLLM's names as well."""
    with TestClient(
        create_app(
            FakeEngine(), ServerSettings(allowed_hosts=("testserver",), admin_keys={"a": BOSS}, vllm_metric_names=True)
        )
    ) as client:
        client.post("/v1/completions", json={"model": "fake", "prompt": "x"}, headers=bearer(BOSS))
        time.sleep(0.4)
        text = client.get("/metrics", headers=bearer(BOSS)).text
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


NAMES = re.compile(r"\b(?:headrace|vllm):\w+")


def bare(names: set[str]) -> set[str]:
    """Without the suffixes of counters, histograms and infos."""
    return {re.sub(r"_(total|bucket|count|sum|info)$", "", name) for name in names}


@pytest.mark.parametrize("file", ["alerts.yaml", "grafana-dashboard.json", "serving.md"])
def test_documents_name_metrics_that_exist(file: str, exported: set[str]) -> None:
    named = set(NAMES.findall((DOCS / file).read_text(encoding="utf-8")))
    assert named and not named - exported - bare(exported)


def test_rules_and_dashboard_ask_for_samples_that_exist(exported: set[str]) -> None:
    rules = [rule for group in yaml.safe_load((DOCS / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 3
    panels = json.loads((DOCS / "grafana-dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for query in [target["expr"] for panel in panels for target in panel["targets"]] + [rule["expr"] for rule in rules]:
        named = set(NAMES.findall(query))
        assert named and not named - exported, query
        for opening, closing in ("()", "[]", "{}"):
            assert query.count(opening) == query.count(closing), query


def test_a_request_that_waited_in_vain_counts_for_queue_time() -> None:
    one_row = Capacity(num_pages=512, page_size=16, max_rows=1, max_batched_tokens=64, max_context=1024, vocab_size=257)
    runner = lambda: ScriptedRunner(one_row, gate=lambda: time.sleep(0.01))  # noqa: E731
    with serving(scripted(runner, one_row), ServerSettings(queue_timeout=0.5)) as server:
        first = endless(server)
        assert next(first)
        check_error(server.post({"prompt": "late"}), 503, "queue_timeout")
        found = shows(server, {"queue_time_seconds_count": 1, "requests_aborted_total{reason=queue_timeout}": 1})
        assert 0.5 <= found["headrace:queue_time_seconds_sum"] < 2.0
        first.close()  # type: ignore[attr-defined]


def test_vllms_names_have_the_same_values_and_are_shown_on_request_alone(exported: set[str]) -> None:
    assert {*VLLM_NAMES, *VLLM_NAMES.values()} <= bare(exported)
    with serving(scripted(), ServerSettings(vllm_metric_names=True)) as server:
        server.post({"prompt": "x" * 20, "max_tokens": 7, "ignore_eos": True})
        found = shows(server, {"request_latency_seconds_count": 1, "generation_tokens_total": 7})
        labels = "engine=0,model_name=scripted"
        assert found[f"vllm:generation_tokens_total{{{labels}}}"] == 7
        assert found["vllm:request_success_total{engine=0,finished_reason=length,model_name=scripted}"] == 1
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
            assert found[f"vllm:{name}_count{{{labels}}}"] == 1
        assert (
            found[f"vllm:time_to_first_token_seconds_sum{{{labels}}}"]
            == found["headrace:time_to_first_token_seconds_sum"]
        )
    with serving(scripted()) as server:
        assert not [name for name in scrape(server) if name.startswith("vllm:")]


def test_labels_are_bounded() -> None:
    recorder = Recorder(max_tenants=3)
    for number in range(10):
        recorder.tenant(f"tenant-{number}").generated += 1
        recorder.abort(f"reason-{number}")
    assert set(recorder.tenants) == {("tenant-0", ""), ("tenant-1", ""), ("tenant-2", ""), (OTHER, "")}
    assert recorder.tenants[OTHER, ""].generated == 7 and recorder.aborted[OTHER] == 10
    assert set(recorder.aborted) == {*ABORT_REASONS, OTHER}


# -- who may read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "allowed", "refused"),
    [
        ({}, [None], []),
        ({"metrics_key": READER}, [READER], [None, "wrong-key"]),
        ({"api_keys": KEYS}, [], [None, KEYS["ann"]]),
        ({"api_keys": KEYS, "admin_keys": {"boss": BOSS}}, [BOSS], [None, KEYS["ann"], READER]),
        ({"api_keys": KEYS, "metrics_key": READER}, [READER], [None, KEYS["ann"], READER + "x"]),
        ({"allowed_hosts": ("*",)}, [], [None]),
        ({"allowed_hosts": ("*",), "metrics_key": READER}, [READER], [None]),
    ],
)
def test_who_may_read_the_metrics(settings: dict[str, Any], allowed: list[str], refused: list[str | None]) -> None:
    client = TestClient(create_app(FakeEngine(), ServerSettings(**settings)), base_url="http://localhost")
    for secret in allowed:
        assert client.get("/metrics", headers=bearer(secret) if secret else {}).status_code == 200
    for secret in refused:
        answer = client.get("/metrics", headers=bearer(secret) if secret else {})
        assert answer.status_code in (401, 403) and "headrace:" not in answer.text
    if "metrics_key" in settings and "api_keys" in settings:
        for path in ("/v1/models", "/v1/admin/keys/ann/limits", "/metrics/", "/metrics/x"):
            assert client.get(path, headers=bearer(READER)).status_code in (401, 403)


def test_a_dead_or_closed_engine_still_has_metrics() -> None:
    client = TestClient(create_app(FakeEngine()), base_url="http://localhost")
    found = samples(client.get("/metrics").text)
    assert found["headrace:ready"] == 0 and "headrace:requests_running" not in found


# -- logs -----------------------------------------------------------------------------------------------------------


def test_one_line_a_request_with_its_counts_and_nothing_of_what_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace")
    with serving(scripted(), ServerSettings(api_keys=KEYS)) as server:
        named = bearer(KEYS["ann"]) | {"x-request-id": "mine-1"}
        body = {"messages": MESSAGES, "max_tokens": 6, "ignore_eos": True, "stream": True, "user": "somebody"}
        assert server.post(body, CHATS, headers=named).status_code == 200
        check_error(server.post({"prompt": "x" * 5000}, headers=bearer(KEYS["bob"])), 400)
        server.client.get("/v1/a%0Asecret", headers={"x-request-id": "a\tb"})
        server.client.get("/health/ready")
        until(lambda: len(caplog.records) >= 3)
    text = "\n".join([JsonLines().format(record) for record in caplog.records])
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["event"] for line in lines] == ["request"] * 3
    first, second, third = lines
    assert first["request_id"] == "mine-1" and first["tenant"] == "ann" and first["status"] == 200
    assert (first["method"], first["route"], first["reason"]) == ("POST", CHATS, "finished")
    assert first["completion_tokens"] == 6 and first["prompt_tokens"] > 6 and first["finish_reasons"] == ["length"]
    assert 0 <= first["queue_seconds"] <= first["first_token_seconds"] <= first["seconds"] < 5
    assert second["status"] == 400 and second["reason"] == "context_length_exceeded" and second["tenant"] == "bob"
    assert third["route"] == "other" and third["status"] == 404 and re.fullmatch(r"req_[0-9a-f]+", third["request_id"])
    everything = text + "\n".join(record.getMessage() for record in caplog.records)
    for hidden in ("secret", "somebody", "xxxx", *KEYS.values()):
        assert hidden not in everything
    assert " completion_tokens=6 " in caplog.records[0].getMessage()


def test_a_slow_consumer_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    import socket as sockets

    engine = FakeEngine(max_rows=4, max_context=100_000)
    with serving(engine, ServerSettings(stall_timeout=0.5, ping_seconds=0.2)) as server:
        body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 90_000, "ignore_eos": True, "stream": True})
        sock = sockets.socket()
        sock.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        until(lambda: "slow_consumer" in caplog.text, seconds=20)
        shows(
            server,
            {"requests_aborted_total{reason=slow_consumer}": 1, "requests_aborted_total{reason=disconnected}": 0},
        )
        sock.close()
    assert caplog.text.count("slow_consumer request_id=") == 1


def test_the_command_logs_json_lines_alone(tmp_path: Path) -> None:
    model = tiny_models.whole_folder(tmp_path)
    command = [sys.executable, "-c", "from headrace.server.cli import main; main()", "serve", str(model), "--port", "0"]
    command += ["--log-format", "json", "--served-model-name", "tiny", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(json.loads(line))
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", lines[-1].get("message", "")):
                body = {"model": "tiny", "prompt": "x", "max_tokens": 3, "ignore_eos": True}
                url = f"http://127.0.0.1:{found[1]}/v1/completions"
                assert httpx2.post(url, json=body, trust_env=False, timeout=30).status_code == 200
                process.terminate()
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.stderr.close()
        process.wait()
    started, asked = (line for line in lines if "event" in line)
    assert started["event"] == "serving" and started["model"] == "tiny" and started["device"] == "cpu"
    assert asked["event"] == "request" and asked["level"] == "info"
    assert asked["completion_tokens"] == 3 and asked["status"] == 200
    assert {line["logger"].split(".")[0] for line in lines} <= {"headrace", "uvicorn"}


# -- spans ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spans() -> Any:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    patch = pytest.MonkeyPatch()
    patch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    patch.undo()


def test_a_span_continues_the_trace_of_the_request(spans: Any) -> None:
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with serving(scripted()) as server:
        spans.clear()
        body = {"messages": MESSAGES, "max_tokens": 6, "ignore_eos": True, "temperature": 0.5, "seed": 3}
        server.post(body, CHATS, headers={"traceparent": f"00-{trace_id}-{parent}-01", "x-request-id": "mine-2"})
        check_error(server.post({"prompt": "x" * 5000}), 400)
        until(lambda: len(spans.get_finished_spans()) == 2)
    chat, refused = spans.get_finished_spans()
    assert chat.name == "chat scripted" and chat.kind.name == "SERVER" and chat.status.is_unset
    assert f"{chat.context.trace_id:032x}" == trace_id and f"{chat.parent.span_id:016x}" == parent
    told = dict(chat.attributes)
    assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.request.model"] == "scripted"
    assert told["gen_ai.request.max_tokens"] == 6 and told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.usage.output_tokens"] == 6 and told["gen_ai.usage.input_tokens"] > 6
    assert told["gen_ai.response.finish_reasons"] == ("length",) and told["headrace.request_id"] == "mine-2"
    assert "secret" not in str(told)
    assert refused.name == "text_completion scripted" and refused.parent is None and refused.status.is_unset
    assert refused.attributes["error.type"] == "context_length_exceeded"


def test_a_span_is_the_child_of_the_applications_own(spans: Any) -> None:
    from opentelemetry import trace

    async def main() -> None:
        engine = FakeEngine()
        async with engine:
            app = create_app(engine)
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
                with trace.get_tracer("host").start_as_current_span("host"):
                    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
                    body = {"model": "fake", "prompt": "x", "max_tokens": 2}
                    assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200

    spans.clear()
    anyio.run(main)
    mine, host = spans.get_finished_spans()
    assert host.name == "host" and mine.parent.span_id == host.context.span_id and mine.kind.name == "INTERNAL"


def test_without_opentelemetry_everything_works() -> None:
    script = """
import sys
sys.modules["opentelemetry"] = None
from starlette.testclient import TestClient
from headrace.engine.bench.host.fake_device import FakeEngine
from headrace.server import create_app
with TestClient(create_app(FakeEngine()), base_url="http://localhost") as client:
    answer = client.post("/v1/completions", json={"model": "fake", "prompt": "x"}, headers={"traceparent": "x"})
    assert answer.status_code == 200, answer.text
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# -- hangs ----------------------------------------------------------------------------------------------------------


def test_a_step_that_hangs_is_logged_once_with_all_stacks_and_its_streams_end(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def hang_here() -> None:
        release.wait(20)

    settings = ServerSettings(ready_stall=0.3, stall_abort=1.5)
    with serving(scripted(lambda: ScriptedRunner(CAPACITY, gate=hang_here)), settings) as server:
        answer = server.post({"prompt": "x", "stream": False})
        check_error(answer, 503, "engine_stalled")
        shows(server, {"ready": 0, "stalls_total": 1, "requests_aborted_total{reason=engine_stalled}": 1})
        release.set()
        until(lambda: server.client.get("/health/ready").status_code == 200)
        server.check()
    (told,) = [record.getMessage() for record in caplog.records if "stacks" in record.getMessage()]
    assert "no step has ended for" in told and "in hang_here" in told and "thread MainThread" in told


def test_an_event_loop_that_is_held_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_LOOP_HANGS", 0.3)

    def hold_the_loop() -> None:
        time.sleep(1.2)

    with serving(scripted()) as server:
        server.portal.call(hold_the_loop)
        found = shows(server, {"stalls_total": 1})
        assert found["headrace:event_loop_lag_seconds_sum"] > 0.5
    assert "the event loop is held" in caplog.text and "in hold_the_loop" in caplog.text


def test_the_watchdog_ends_with_the_application() -> None:
    threads = Threads("headrace-watchdog")
    with TestClient(create_app(FakeEngine()), base_url="http://localhost"):
        assert len(threads.running()) == 1
    threads.check_ended()


# -- the rest -------------------------------------------------------------------------------------------------------


def test_answers_name_the_system_that_gave_them() -> None:
    with serving(scripted()) as server:
        body = {"max_tokens": 2, "ignore_eos": True}
        answers = [server.post(body | {"prompt": "x"}).json(), server.post(body | {"messages": MESSAGES}, CHATS).json()]
        for path, asked in (("/v1/completions", {"prompt": "x"}), (CHATS, {"messages": MESSAGES})):
            answers += events_of(server.post(body | asked | {"stream": True}, path).text)[:-1]
        assert len({answer["system_fingerprint"] for answer in answers}) == 1
        assert re.fullmatch(r"fp_[0-9a-f]{12}", answers[0]["system_fingerprint"])
        with serving(FakeEngine()) as other:
            answer = other.client.post("/v1/completions", json={"model": "fake", "prompt": "x"}).json()
        assert answer["system_fingerprint"] != answers[0]["system_fingerprint"]


def test_a_server_is_not_ready_while_its_engine_sleeps() -> None:
    with serving(scripted()) as server:
        server.portal.call(server.engine.sleep)
        answer = server.client.get("/health/ready")
        assert answer.status_code == 503 and "asleep" in answer.text
        shows(server, {"ready": 0, "kv_usage": 0, "sleep_level": 1})
        server.portal.call(server.engine.wake)
        assert server.client.get("/health/ready").status_code == 200
        shows(server, {"ready": 1, "sleep_level": 0})


def test_steps_without_memory_are_counted() -> None:
    faults = {0: MemoryError()}
    with serving(scripted(lambda: ScriptedRunner(CAPACITY, faults=faults))) as server:
        server.post({"prompt": ["x" * 20] * 3, "max_tokens": 3, "ignore_eos": True})
        shows(server, {"memory_retries_total": 1})


def test_a_mapping_stands_in_a_line_as_json() -> None:
    line = Line("serving", {"policy": {"name": "fair_share", "background_last": True}, "model": "m"})
    assert str(line) == 'serving policy={"name":"fair_share","background_last":true} model=m'
