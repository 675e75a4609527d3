"""`LLM` does what `Engine` does: streams, chats, vectors, scores, looks inside and adapters, over a fake device."""

from __future__ import annotations

import gc
import inspect
import io
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_folders import lora_folder
from leftovers import Threads, wait_until
from rich.console import Console
from scripted import CAPACITY, Gate, expected_ids, greedy
from tiny_models import whole_folder

from headrace.engine import (
    LLM,
    AdapterRejected,
    Engine,
    EngineStopped,
    HookFailed,
    InvalidParams,
    SamplingParams,
    TokenizeOptions,
    UnknownAdapter,
)
from headrace.engine.blocking import options as llm_options
from headrace.engine.life.opened import Opened
from headrace.engine.life.progress import LoggedProgress
from headrace.engine.many.bars import OpeningBar
from headrace.engine.testing import ScriptedEngine, ScriptedRunner

TYPED = {
    "stream": "StreamKeywords",
    "embed": "EmbedKeywords",
    "score": "ScoreKeywords",
    "tokenize": "TokenizeKeywords",
    "hidden_states": "HiddenKeywords",
}
"""Method -> the keywords that type checkers are told of."""


@contextmanager
def scripted(gate: Gate | None = None, **options: Any) -> Iterator[LLM]:
    """An open LLM that must leave no thread behind."""
    threads = Threads()
    llm = LLM(ScriptedEngine(CAPACITY, lambda: ScriptedRunner(CAPACITY, gate=gate), **options))
    try:
        with llm:
            yield llm
    finally:
        if gate is not None:
            gate.release()
    threads.check_ended()


def check_nothing_held(llm: LLM) -> None:
    wait_until(lambda: not (llm.stats().pages_held or llm.stats().running), lambda: f"still held: {llm.stats()}")


# -- streams -------------------------------------------------------------------------------------------------------


def test_a_stream_is_a_plain_iterator() -> None:
    with scripted() as llm:
        stream = llm.stream("count", greedy(20))
        assert iter(stream) is stream
        tokens = list(stream)
        assert [token.id for token in tokens] == expected_ids("count", 20)
        assert stream.finish_reasons == ["length"] and stream.usage.completion_tokens == 20
        assert stream.prompt_token_ids == list(b"count")
        assert list(stream) == []
        both = list(llm.stream("two", greedy(5, n=2)))
        assert sorted(token.index for token in both) == [0] * 5 + [1] * 5
        check_nothing_held(llm)


def test_closing_a_stream_early_cancels_its_request_and_no_other() -> None:
    with scripted() as llm:
        other = llm.stream("kept", greedy(30))
        first = next(other)
        for number in range(4):
            stream = llm.stream(f"endless {number}", greedy(None))
            next(stream)
            if number == 0:
                stream.close()
            elif number == 1:
                with stream:
                    next(stream)
            elif number == 2:
                for _ in stream:
                    break
                del stream, _
                gc.collect()
                continue
            else:
                stream.close()
                stream.close()
            assert list(stream) == [] or stream.finish_reasons == ["cancelled"]
        assert [first.id, *(token.id for token in other)] == expected_ids("kept", 30)
        check_nothing_held(llm)


def test_a_reader_that_falls_behind_pauses_its_request() -> None:
    with scripted(max_unread_tokens=4) as llm:
        stream = llm.stream("slow reader", greedy(200))
        next(stream)
        wait_until(lambda: llm.stats().paused, lambda: "never paused")
        assert [token.id for token in stream] == expected_ids("slow reader", 200)[1:]


def test_errors_of_a_stream() -> None:
    with scripted() as llm:
        with pytest.raises(InvalidParams, match="^prompt: is empty"):
            next(llm.stream(""))
        with pytest.raises(InvalidParams, match="best_of"):
            llm.stream("x", SamplingParams(best_of=2))
        with pytest.raises(TypeError, match="colour"):
            llm.stream("x", colour="red")
        mine = llm.stream("mine", greedy(3))
        with pytest.raises(HookFailed) as failed:
            list(llm.stream("x", stop_when=lambda token: bool(next(mine))))
        assert "would wait for ever" in str(failed.value.__cause__)
        left = llm.stream("left", greedy(None))
        next(left)
    with pytest.raises(EngineStopped):
        list(left)
    left.close()


def test_a_stream_that_is_read_when_the_llm_closes_ends() -> None:
    gate = Gate()
    with scripted(gate) as llm:
        stream, ends = llm.stream("x", greedy(None)), list[object]()
        gate.hold()

        def read() -> None:
            try:
                ends.extend(stream)
            except EngineStopped as error:
                ends.append(type(error))

        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: gate.holds, lambda: "no step")
        threading.Timer(0.05, gate.release).start()
        llm.close()
        thread.join(20)
        assert ends[-1] is EngineStopped or getattr(ends[-1], "finish_reason", None) == "cancelled"


INTERRUPTED = """
import os, signal, threading, time
from headrace.engine import LLM, SamplingParams
from headrace.engine.testing import ScriptedEngine, ScriptedRunner

signal.signal(signal.SIGINT, signal.default_int_handler)
llm = LLM(ScriptedEngine(make_runner=lambda: ScriptedRunner(gate=lambda: time.sleep(0.2))))
stream = llm.stream("x", SamplingParams(ignore_eos=True))
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    for token in stream:
        pass
except KeyboardInterrupt:
    ends = time.monotonic() + 10
    while llm.stats().pages_held and time.monotonic() < ends:
        time.sleep(0.01)
    print("interrupted", llm.stats().pages_held)
llm.close()
"""


def test_ctrl_c_cancels_a_stream() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "interrupted 0\n"), done.stderr


# -- what else an engine does --------------------------------------------------------------------------------------


def test_vectors_scores_and_looks_inside(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted() as llm:
        many = llm.embed(text for text in ("rain", "snow", "rain"))
        assert many.vectors.shape == (3, 8) and np.array_equal(many.vectors[0], many.vectors[2])
        assert "3/3" in capsys.readouterr().err
        one = llm.embed("rain", normalize=False, pooling="mean")
        llm.embed(["rain", "snow"], progress=False)
        scores = llm.score("rain", (text for text in ("rain", "snow")))
        assert capsys.readouterr().err == ""
        assert one.vectors.shape == (1, 8) and scores.scores[0] > scores.scores[1]
        with pytest.raises(InvalidParams, match=r"^prompts\[1\]: prompt: is empty"):
            llm.embed(["a", ""])
        assert llm.tokenize("Hi") == list(b"Hi") and llm.detokenize(list(b"Hi")) == "Hi"
        assert llm.info.max_context == CAPACITY.max_context and llm.info.model == "scripted"
        assert llm.stats().steps > 0 and llm.stats().pages == CAPACITY.num_pages
    for call in (lambda: llm.info, llm.stats, lambda: llm.embed("x"), lambda: llm.tokenize("x"), llm.adapters.list):
        with pytest.raises(EngineStopped):
            call()


def test_a_chat_offers_tools() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    prompts: list[str] = []
    with LLM(ScriptedEngine(answer=lambda prompt: prompts.append(prompt) or "Sunny.")) as llm:  # type: ignore[func-returns-value]
        chat = [{"role": "user", "content": "Rome?"}]
        assert llm.chat(chat).choices[0].text == "Sunny."
        assert llm.chat(chat, tools=[tool]).choices[0].text == "Sunny."
        both = llm.chat([chat, chat], SamplingParams(max_tokens=2), tools=[tool], progress=False)
        assert [answer.choices[0].text for answer in both] == ["Su", "Su"]
    assert prompts[0] == "user: Rome?\n"
    assert all('"weather"' in prompt and prompt.endswith(prompts[0]) for prompt in prompts[1:])


def test_chats_are_written_as_asked_in_the_callers_thread_and_fail_by_their_number() -> None:
    threads: list[threading.Thread] = []

    def chats(*texts: str) -> Iterator[list[dict[str, str]]]:
        for text in texts:
            threads.append(threading.current_thread())
            yield [{"role": "assistant", "content": text}]

    with LLM(ScriptedEngine(answer=lambda prompt: f"[{prompt}]")) as llm:
        answers = llm.chat(chats("a", "b"), continue_final_message=True, progress=False)
        assert [answer.choices[0].text for answer in answers] == ["[assistant: a]", "[assistant: b]"]
        with pytest.raises(InvalidParams, match=r"^prompts\[1\]: "):
            llm.chat([*chats("a"), [{"role": "user"}]], tools=[], progress=False)
        kept = llm.chat([[{"role": "user"}], *chats("a")], tools=[], progress=False, return_errors=True)
        assert isinstance(kept[0], InvalidParams) and not isinstance(kept[1], Exception)
    assert set(threads) == {threading.current_thread()}


def test_a_conversation_goes_on() -> None:
    with LLM(ScriptedEngine(answer=lambda prompt: f"{len(prompt)} ")) as llm:
        stream = llm.stream("ab")
        assert "".join(token.text for token in stream) == "2 "
        assert "".join(token.text for token in stream.send("cd", deadline=60)) == "6 "
        assert stream.prompt_token_ids == [*b"ab2 ", 256, *b"cd"]


def test_memory_is_given_back_and_taken_again() -> None:
    with scripted() as llm:
        llm.sleep()
        assert llm.sleep_level == 1 and llm.stats().pages == 0
        llm.resize_kv(20 * CAPACITY.page_size)  # of the scripted device, one byte for a token
        llm.wake()
        assert llm.sleep_level == 0 and llm.info.num_pages == 20
        with pytest.raises(InvalidParams, match="level"):
            llm.sleep(3)  # type: ignore[arg-type]


def test_it_has_every_method_of_an_engine() -> None:
    """What differs: how it opens and closes, and what a router or a watchdog asks an engine itself."""
    left_out = {"open", "aclose", "generate_many", "kv_events", "kv_scope", "step_age"}
    asked = {name for name in dir(Engine) if not name.startswith("_")}
    assert asked - left_out <= set(dir(LLM))


@pytest.mark.parametrize("name", ["stream", "embed", "score", "tokenize", "hidden_states"])
def test_its_methods_are_typed_as_those_of_an_engine(name: str) -> None:
    typed = llm_options.__dict__[TYPED[name]]
    keywords = {
        each.name
        for each in inspect.signature(getattr(Engine, name)).parameters.values()
        if each.kind is each.KEYWORD_ONLY
    }
    own = TokenizeOptions.__annotations__.keys() if name == "tokenize" else set()
    assert typed.__annotations__.keys() - own == keywords - {"progress", "started"}


def test_adapters(tmp_path: Path) -> None:
    folder = lora_folder(tmp_path / "a", 1)
    with LLM(ScriptedEngine(answer=lambda prompt: str(prompt.adapter), adapter_slots=2)) as llm:
        assert llm.adapters.load("a", folder, pinned=True).name == "a"
        llm.load_adapter("b", folder)
        assert [(info.name, info.pinned) for info in llm.adapters.list()] == [("a", True), ("b", False)]
        assert llm.generate("x", adapter="a").choices[0].text == "a"
        llm.adapters.pin("a", False)
        llm.adapters.unload("b")
        assert [(info.name, info.pinned) for info in llm.adapters.list()] == [("a", False)]
        for call in (lambda: llm.generate("x", adapter="b"), lambda: llm.adapters.unload("b")):
            with pytest.raises(UnknownAdapter):
                call()
        with pytest.raises(AdapterRejected, match=f"{tmp_path}/nowhere cannot be read"):
            llm.adapters.load("c", tmp_path / "nowhere")


def test_the_real_engine_tells_what_it_reads_and_streams(tmp_path: Path) -> None:
    engine = Engine(whole_folder(tmp_path / "model"), kv_memory="4MiB", dtype="float32", device="cpu")
    told: list[tuple[int, int]] = []
    engine.on_weights = lambda done, total: told.append((done, total))
    with LLM(engine, progress=False) as llm:
        assert len(list(llm.stream([3, 14, 15], greedy(4)))) == 4
    assert len(told) > 1 and told[-1][0] == told[-1][1] > 0


# -- the bar of the opening ----------------------------------------------------------------------------------------


class Loading(ScriptedEngine):
    """An engine whose weights take a moment."""

    def _open(self) -> Opened:
        progress = LoggedProgress(lambda done, total: "")
        for done in range(0, 101, 20):
            progress(done * 10**6, 10**8)
            time.sleep(0.06)
        return super()._open()


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Have rich take stderr for a terminal."""
    screen = io.StringIO()

    def console(**_: object) -> Console:
        return Console(file=screen, force_terminal=True, width=100)

    monkeypatch.setattr("rich.console.Console", console)
    return screen


def test_the_opening_shows_a_bar_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    LLM(Loading(CAPACITY)).close()
    assert capsys.readouterr().err == "", "stderr is no terminal"
    screen = terminal(monkeypatch)
    LLM(Loading(CAPACITY), progress=False).close()
    assert screen.getvalue() == ""
    LLM(Loading(CAPACITY)).close()
    shown = screen.getvalue()
    assert "loading weights" in shown and "/100.0 MB" in shown


def test_bars_are_drawn_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with LLM(Loading(CAPACITY)) as llm:
        assert "/100.0 MB" in capsys.readouterr().err
        llm.embed(["rain", "snow"])
        assert "2/2" in capsys.readouterr().err
    assert not [each for each in recwarn if "ipywidgets" in str(each.message)]


def test_a_bar_that_has_ended_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read again by `wake`, in another thread, long after the opening."""
    screen = terminal(monkeypatch)
    with OpeningBar() as bar:
        pass
    bar(1, 2)
    assert screen.getvalue() == ""
