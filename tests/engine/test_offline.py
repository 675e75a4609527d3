"""`LLM`: calls from scripts, threads and notebooks, interrupts, and every way it closes; over a fake device."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import lora_folder
from leftovers import Threads, wait_until
from scripted import CAPACITY, Gate, capacity, expected_ids, greedy
from tiny_models import whole_folder

from headrace.engine import (
    LLM,
    AdapterRejected,
    Completion,
    Engine,
    EngineCrashed,
    EngineStopped,
    HeadraceError,
    HookFailed,
    InvalidParams,
    ModelRejected,
    SamplingParams,
    UnknownAdapter,
)
from headrace.engine.blocking.host import HostCall
from headrace.engine.testing import ScriptedEngine, ScriptedRunner

PATIENCE = 20.0


def until(condition: Callable[[], object]) -> None:
    wait_until(condition, lambda: "it never came")


@contextmanager
def scripted(gate: Gate | None = None, **sizes: int) -> Iterator[LLM]:
    """An open LLM that must leave no thread behind."""
    threads = Threads()
    place = capacity(**sizes)
    llm = LLM(ScriptedEngine(place, lambda: ScriptedRunner(place, gate=gate)))
    try:
        with llm:
            yield llm
    finally:
        if gate is not None:
            gate.release()
    threads.check_ended()


def ids_of(answer: object) -> list[int]:
    assert isinstance(answer, Completion)
    return answer.choices[0].token_ids


def check_serving(llm: LLM) -> None:
    assert ids_of(llm.generate("still there?", greedy(4))) == expected_ids("still there?", 4)


def call_in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run `call` in a thread; what it gives or raises goes to the list."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


# -- answers -------------------------------------------------------------------------------------------------------


def test_one_prompt_one_answer_and_many_prompts_a_list() -> None:
    chat = [{"role": "user", "content": "Hi"}]
    with scripted() as llm:
        for prompt in ("text", [1, 2, 3], (4, 5), chat):
            one = llm.generate(prompt, greedy(3))
            assert isinstance(one, Completion)
            assert llm.generate([prompt], greedy(3))[0].choices == one.choices
        many = llm.generate(["text", [1, 2, 3], (4, 5), chat], [greedy(count) for count in (1, 2, 3, 4)])
        assert [len(answer.choices[0].token_ids) for answer in many] == [1, 2, 3, 4]
        assert ids_of(many[1]) == expected_ids([1, 2, 3], 2)
        nothing: list[str] = []
        assert llm.generate(nothing) == []
        assert len(llm.generate("text", greedy(2, n=3)).choices) == 3


def test_it_loads_what_its_prompts_wear(tmp_path: Path) -> None:
    threads = Threads()
    adapter = lora_folder(tmp_path / "a", 1)
    with LLM(whole_folder(tmp_path / "model"), kv_memory="4MiB", dtype="float32", adapter_slots=1) as llm:
        with pytest.raises(UnknownAdapter):
            llm.generate([3, 14, 15], greedy(8), adapter="a")
        with pytest.raises(AdapterRejected):
            llm.load_adapter("a", tmp_path / "nowhere")
        llm.load_adapter("a", adapter)
        assert ids_of(llm.generate([3, 14, 15], greedy(8), adapter="a")) != ids_of(llm.generate([3, 14, 15], greedy(8)))
    with pytest.raises(EngineStopped):
        llm.load_adapter("a", adapter)
    threads.check_ended()


def test_the_real_model(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = Threads()
    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM(smollm2, kv_memory="32MiB") as llm:
        chat = [{"role": "user", "content": "Name a colour."}]
        answers = llm.generate(["The sea is", chat], params)
        assert all(answer.choices[0].text for answer in answers)
        assert ids_of(llm.generate("The sea is", params)) == ids_of(answers[0])
    threads.check_ended()
    assert "2/2" in capsys.readouterr().err


def test_iterables_are_taken_from_in_the_callers_thread_and_as_room_comes() -> None:
    """So that they may hold what belongs to that thread, and may take their time."""
    taken: list[threading.Thread] = []

    def prompts(count: int) -> Iterator[str]:
        for number in range(count):
            taken.append(threading.current_thread())
            yield f"prompt {number}"

    gate = Gate()
    with scripted(gate) as llm:
        gate.hold()
        thread, outcome = call_in_thread(lambda: llm.generate(prompts(100), greedy(2)))
        until(lambda: len(taken) == 8 and gate.holds)
        time.sleep(0.02)
        assert len(taken) == 8  # two a row
        gate.release()
        thread.join(PATIENCE)
        assert set(taken) == {thread}
        [answers] = outcome
        assert isinstance(answers, list)
        assert [ids_of(answer) for answer in answers] == [expected_ids(f"prompt {n}", 2) for n in range(100)]


def test_the_bar_is_for_many_and_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted() as llm:
        llm.generate("one", greedy(1))
        llm.generate(["one", "two"], greedy(1), progress=False)
        assert capsys.readouterr().err == ""
        llm.generate({"one": 1, "two": 2}.keys(), greedy(1))
        assert "2/2" in capsys.readouterr().err
        llm.generate((each for each in ("one", "two")), greedy(1))
        assert "2/?" in capsys.readouterr().err


# -- errors --------------------------------------------------------------------------------------------------------


def test_errors_are_those_of_the_engine() -> None:
    with scripted() as llm:
        with pytest.raises(InvalidParams, match="^prompt: is empty") as caught:
            llm.generate("")
        assert caught.value.field == "prompt"
        with pytest.raises(InvalidParams, match=r"^prompts\[1\]: prompt: is empty"):
            llm.generate(["a", "", "b"])
        assert isinstance(llm.generate("", return_errors=True), InvalidParams)
        mixed = llm.generate(["a", ""], greedy(1), return_errors=True)
        assert [type(answer) for answer in mixed] == [Completion, InvalidParams]
        malformed: list[Any] = [None, 7, b"bytes", [1.5], [{"role": "user"}]]
        for prompt in malformed:
            with pytest.raises(InvalidParams, match=r"^(prompt|messages)"):
                llm.generate(prompt)
        unfit: list[Any] = [{}, [greedy()] * 2]
        for params in unfit:
            with pytest.raises(InvalidParams, match="^params"):
                llm.generate({"a": 1}.keys(), params)
        with pytest.raises(HookFailed) as failed:
            llm.generate("a", stop_when=lambda token: bool(llm.generate("b")))
        assert "would wait for ever" in str(failed.value.__cause__)
        check_serving(llm)


def test_an_error_of_the_iterable_cancels_the_rest() -> None:
    def prompts() -> Iterator[str]:
        yield from ["endless"] * 3
        raise ZeroDivisionError

    with scripted() as llm:
        with pytest.raises(ZeroDivisionError):
            llm.generate(prompts(), greedy(None))
        check_serving(llm)


def test_a_call_that_is_cancelled_as_it_starts_never_runs() -> None:
    """Start and cancellation reach the event loop in one turn, before the task of the call has begun."""
    asked: list[Engine] = []

    async def ask(engine: Engine) -> None:
        asked.append(engine)

    with scripted() as llm:
        call = HostCall(["x"])

        def start_and_cancel() -> None:
            llm._host._start(call, ask)
            call.cancel()

        llm._host._send(start_and_cancel)
        until(lambda: call.ended)
        check_serving(llm)
    assert not asked


def test_what_does_not_open_leaves_no_thread(tmp_path: Path) -> None:
    threads = Threads()
    with pytest.raises(InvalidParams, match="^colour"):
        LLM("model", colour="red")
    with pytest.raises(InvalidParams, match="^seed: an engine has its own options"):
        LLM(ScriptedEngine(CAPACITY), seed=1)
    with pytest.raises(ModelRejected):
        LLM(tmp_path / "absent.gguf")
    engine = ScriptedEngine(CAPACITY)
    with LLM(engine), pytest.raises(RuntimeError, match="opened once"):
        LLM(engine)
    threads.check_ended()


def test_a_dead_engine_says_so_and_closes() -> None:
    threads = Threads()
    engine = ScriptedEngine(CAPACITY)
    llm = LLM(engine)
    assert engine._life.loop is not None
    engine._life.loop.scheduler.plan = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    for _ in range(2):
        with pytest.raises(EngineCrashed):
            llm.generate("dies")
    with pytest.raises(EngineCrashed):
        llm.close()
    llm.close()
    threads.check_ended()


# -- threads and loops ---------------------------------------------------------------------------------------------


def test_threads_share_one_batch() -> None:
    """Their requests run side by side: all are in while the first step is held."""
    gate = Gate()
    with scripted(gate, max_rows=16) as llm:
        gate.hold()

        def ask(name: str) -> object:
            return llm.generate([f"{name}{n}" for n in range(4)], greedy(8), progress=False)

        calls = [call_in_thread(partial(ask, name)) for name in "abcd"]
        loop = llm._host._engine._life.loop
        assert loop is not None
        until(lambda: loop.scheduler.roster.num_running + loop.scheduler.roster.num_waiting == 16)
        gate.release()
        for name, (thread, outcome) in zip("abcd", calls, strict=True):
            thread.join(PATIENCE)
            [answers] = outcome
            assert isinstance(answers, list)
            assert [ids_of(answer) for answer in answers] == [expected_ids(f"{name}{n}", 8) for n in range(4)]


@pytest.mark.anyio
async def test_inside_a_running_event_loop() -> None:
    """As in a notebook, whose cells run on one."""
    with scripted() as llm:
        check_serving(llm)
        assert len(llm.generate((each for each in "abc"), greedy(2))) == 3
    async with ScriptedEngine(CAPACITY) as engine:  # and beside an engine of that loop
        with scripted() as llm:
            check_serving(llm)
            assert ids_of(await engine.generate("x", greedy(2))) == ids_of(llm.generate("x", greedy(2)))


def test_a_failing_caller_disturbs_no_other() -> None:
    gate = Gate()
    with scripted(gate) as llm:
        gate.hold()
        thread, outcome = call_in_thread(lambda: llm.generate(["kept"] * 3, greedy(20)))
        until(lambda: gate.holds)
        gate.release()
        with pytest.raises(InvalidParams):
            llm.generate(["x", ""], greedy(None))
        thread.join(PATIENCE)
        [answers] = outcome
        assert isinstance(answers, list)
        assert [ids_of(answer) for answer in answers] == [expected_ids("kept", 20)] * 3


# -- closing -------------------------------------------------------------------------------------------------------


def test_closed_is_closed() -> None:
    with scripted() as llm:
        llm.close()
        llm.close()
        given: list[Any] = ["x", ["x"], iter("x"), []]
        for prompts in given:
            with pytest.raises(EngineStopped):
                llm.generate(prompts, return_errors=True)


@pytest.mark.parametrize("prompts", ["x", ["x"] * 100, "generator"])
def test_closing_ends_calls_of_other_threads(prompts: Any) -> None:
    gate = Gate()
    with scripted(gate) as llm:
        gate.hold()
        given = (each for each in ["x"] * 100) if prompts == "generator" else prompts
        thread, outcome = call_in_thread(lambda: llm.generate(given, greedy(None), return_errors=True))
        until(lambda: gate.holds)
        closing, closed = call_in_thread(llm.close)
        thread.join(PATIENCE)  # although the device hangs
        assert [type(each) for each in outcome] == [EngineStopped]
        assert closing.is_alive()
        gate.release()
        closing.join(PATIENCE)
        assert closed == [None]


def test_an_error_of_the_block_goes_before_one_of_closing() -> None:
    engine = ScriptedEngine(CAPACITY)
    with pytest.raises(ZeroDivisionError), LLM(engine):
        assert engine._life.loop is not None
        engine._life.loop.crashed = EngineCrashed("dead")
        raise ZeroDivisionError


def test_dropping_the_last_reference_closes() -> None:
    threads = Threads()
    llm = LLM(ScriptedEngine(CAPACITY))
    engine = weakref.ref(llm._host._engine)
    check_serving(llm)
    del llm
    threads.check_ended()
    gc.collect()
    assert engine() is None


def test_a_collector_does_not_wait_for_the_device() -> None:
    threads = Threads()
    gate = Gate()
    llm = LLM(ScriptedEngine(CAPACITY, lambda: ScriptedRunner(CAPACITY, gate=gate)))
    gate.hold()
    host, streams = llm._host, []
    host._send(lambda: streams.append(host._engine.stream("x", greedy(None))))
    until(lambda: gate.holds)
    del llm
    gc.collect()
    assert threads.running()  # here at once, although a step hangs
    gate.release()
    threads.check_ended()
    assert streams[0]._generation.finished


def test_a_collector_may_run_in_the_thread_that_is_to_end() -> None:
    threads = Threads()
    gc.disable()
    try:
        llm = LLM(ScriptedEngine(CAPACITY))
        cycle: list[Any] = [llm]
        cycle.append(cycle)
        host = llm._host
        del llm, cycle
        assert threads.running()
        host._send(gc.collect)
        threads.check_ended()
    finally:
        gc.enable()


# -- interrupts, and the end of the interpreter --------------------------------------------------------------------


PREAMBLE = """
import contextlib, itertools, os, signal, sys, threading, time
import headrace.engine.offline
from headrace.engine import LLM, SamplingParams
from headrace.engine.testing import Capacity, ScriptedEngine, ScriptedRunner

SIZES = Capacity(num_pages=128, page_size=16, max_rows=4, max_batched_tokens=64, max_context=1024, vocab_size=257)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
ENDLESS = SamplingParams(ignore_eos=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored

# Engine.stats() is for the event loop's thread alone, so these scripts look into the scheduler.
def scripted(gate=lambda: time.sleep(0.005)):
    return ScriptedEngine(SIZES, lambda: ScriptedRunner(SIZES, gate=gate))

def when_running(engine, call):
    def watch():
        while not engine._life.loop.scheduler.roster.num_running:
            time.sleep(0.001)
        call()
    threading.Thread(target=watch, daemon=True).start()
"""


def run_script(script: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


INTERRUPTED = """
engine = scripted()
llm = LLM(engine)
for prompts in ("one", ["x"] * 10000, itertools.repeat("x"), (time.sleep(each) or "x" for each in (0, 0, 0, 60))):
    when_running(engine, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        llm.generate(prompts, ENDLESS, progress=False)
    except KeyboardInterrupt:
        deadline = time.monotonic() + 5
        while engine._life.loop.scheduler.pool.held:
            assert time.monotonic() < deadline, "pages are still held"
        print("interrupted", llm.generate("x", SHORT).usage.completion_tokens)
llm.close()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
print([thread.name for thread in threading.enumerate()])
"""


def test_ctrl_c_cancels_and_leaves_the_llm_usable() -> None:
    code, printed, errors = run_script(INTERRUPTED)
    assert (code, errors) == (0, "")
    assert printed == "interrupted 4\n" * 4 + "['MainThread']\n"


INTERRUPTED_OFTEN = """
import random

def call(prompts):
    llm.generate(prompts, SHORT, progress=False)

def interrupt(number, frame):
    while frame is not None:
        if frame.f_code is call.__code__:  # a flag would be stale where an interrupt strikes before it is reset
            raise KeyboardInterrupt
        frame = frame.f_back

def fire():
    while running:
        time.sleep(random.random() * 0.004)
        os.kill(os.getpid(), signal.SIGINT)

running = True
signal.signal(signal.SIGINT, interrupt)
engine = scripted(lambda: None)
llm = LLM(engine)
threading.Thread(target=fire, daemon=True).start()
ends, interrupts = time.monotonic() + 1.5, 0
while time.monotonic() < ends:
    prompts = random.choice(["x", ["x"] * 200, itertools.repeat("x", 200)])
    try:
        call(prompts)
    except KeyboardInterrupt:
        interrupts += 1
running, deadline = False, time.monotonic() + 5
while engine._life.loop._generations and time.monotonic() < deadline:
    time.sleep(0.01)
print(interrupts > 10, len(engine._life.loop._generations), len(llm._host._calls))
print(llm.generate("x", SHORT).usage.completion_tokens)
"""


def test_ctrl_c_again_and_again_leaves_nothing_running() -> None:
    """Wherever it strikes, also while the call before is being cancelled."""
    code, printed, _ = run_script(INTERRUPTED_OFTEN)
    assert (code, printed) == (0, "True 0 0\n4\n")


SLOW_OPENING = """
class Slow(ScriptedEngine):
    def _open(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        return super()._open()

begin = time.monotonic()
try:
    LLM(Slow(SIZES))
except KeyboardInterrupt:
    print("at once" if time.monotonic() - begin < 0.4 else "late")
while len(threading.enumerate()) > 1:
    time.sleep(0.001)
print("ended")
"""


def test_ctrl_c_while_the_model_loads() -> None:
    assert run_script(SLOW_OPENING) == (0, "at once\nended\n", "")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        pytest.param("", 0, id="idle"),
        pytest.param("sys.exit(3)", 3, id="exit"),
        pytest.param(
            "def generate():\n"
            "    with contextlib.suppress(headrace.engine.EngineStopped):\n"
            "        llm.generate(['x'] * 1000, ENDLESS, progress=False)\n"
            "threading.Thread(target=generate, daemon=True).start()\n"
            "while not engine._life.loop.scheduler.roster.num_running: time.sleep(0.001)",
            0,
            id="a daemon thread still generates",
        ),
        pytest.param("cycle = [llm]; cycle.append(cycle); del llm, cycle", 0, id="garbage"),
        pytest.param("del llm", 0, id="dropped just before"),
        pytest.param("sys.modules['kept'] = llm", 0, id="kept by a module"),
    ],
)
def test_the_interpreter_ends_without_close(script: str, code: int) -> None:
    first = "engine = scripted()\nllm = LLM(engine)\nllm.generate('x', SHORT)\n"
    assert run_script(first + script) == (code, "", "")


HANGING = """
hung = threading.Event()
engine = scripted(lambda: hung.wait())
llm = LLM(engine)
headrace.engine.blocking.host.EXIT_SECONDS = 0.2
threading.Thread(target=llm.generate, args=("x",), daemon=True).start()
while not engine._life.loop.scheduler.roster.num_running:
    time.sleep(0.001)
print("ends")
"""


def test_the_interpreter_ends_although_the_device_hangs() -> None:
    begin = time.monotonic()
    code, printed, _ = run_script(HANGING)
    assert (code, printed) == (0, "ends\n")
    assert time.monotonic() - begin < 9.0


def test_memory_of_a_finished_call_is_not_kept() -> None:
    class Prompt(list[int]):
        """Can be watched."""

    with scripted() as llm:
        prompts = [Prompt([1, 2, 3]) for _ in range(5)]
        watched = [weakref.ref(prompt) for prompt in prompts]
        llm.generate(prompts, greedy(2))
        with pytest.raises(HeadraceError):
            llm.generate([*prompts, []], greedy(2))
        del prompts
        until(lambda: gc.collect() >= 0 and not any(each() for each in watched))
        assert not llm._host._calls
