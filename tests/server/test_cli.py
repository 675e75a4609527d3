"""What a person at the terminal sees: errors are one line, a base model gets plain text, a chat outlives refusals."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import adapter_folders
import anyio
import pytest
import tiny_models
import typer
from anyio.from_thread import start_blocking_portal
from rich.console import Console
from serving import speaking

from headrace.engine import Engine, HeadraceError, SamplingParams
from headrace.engine.config import EngineConfig
from headrace.server.cli import main
from headrace.server.commands.chat import _Chat
from headrace.server.commands.serve import _adapters, _named
from headrace.server.demo import _Chat as _DemoChat
from headrace.server.demo import _panel, _run_chat


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, typed: str = "") -> int:
    monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    handlers = logging.getLogger().handlers[:]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        logging.getLogger().handlers[:] = handlers  # `serve` logs to the test's stderr, which later tests find closed
    return 0


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a chat template, one token a character, a context of 256."""
    return tiny_models.whole_folder(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("command", ["demo", "chat"])
def test_a_model_that_is_not_there_is_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, command, str(tmp_path / "nothing")) == 1
    assert run(monkeypatch, command, str(tmp_path)) == 1
    missing, empty = capsys.readouterr().err.splitlines()
    assert missing.startswith("headrace: model: no such folder or file") and missing.count(str(tmp_path)) == 1
    assert empty.startswith(f"headrace: config.json: no such file in {tmp_path}; ")


def test_a_demo_whose_prompts_do_not_fit_is_one_line(
    base_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal comes out of a task group."""
    assert run(monkeypatch, "demo", str(base_model)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headrace: prompt: ") and "256" in line


def test_a_chat_outlives_a_refusal(
    base_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "chat", str(base_model), typed="Hi\nAgain\n\n") == 1
    shown = capsys.readouterr()
    assert shown.err.count("no chat template") == 2 and not shown.out


def test_the_demo_asks_a_base_model_in_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(tiny_models.CONFIG, "max_position_embeddings", 1024)
    model = tiny_models.whole_folder(tmp_path)
    assert run(monkeypatch, "demo", str(model), "--max-tokens", "5", "--temperature", "0") == 0
    assert capsys.readouterr().out.count(" 5 tok, ") == 6


def test_adapters_are_named_once_and_the_demos_model_brings_its_own() -> None:
    assert _adapters(["a=x", "b=y=z"], None) == {"a": "x", "b": "y=z"}
    assert _adapters(None, "model") == {} and set(_adapters(None, None)) == {"pirate", "json"}
    for given in (["a"], ["a="], ["a=x", "a=y"]):
        with pytest.raises(typer.BadParameter, match="NAME=FOLDER"):
            _adapters(given, None)


def test_the_demo_shows_no_command_to_the_terminal() -> None:
    engine = speaking("a\x1b[2Jb\x07\u009b1m\n\tc", prompt_len=len("Hi"))
    shown = io.StringIO()

    async def main() -> None:
        async with engine:
            chat = _DemoChat("?")
            await _run_chat(engine, chat, "Hi", SamplingParams(max_tokens=64))
            Console(file=shown, force_terminal=True, color_system=None).print(_panel(chat, 60, 12))

    anyio.run(main)
    assert "a[2Jb1m" in shown.getvalue() and not set("\x1b\x07\u009b") & set(shown.getvalue())


def test_the_demo_wears_the_adapters_of_the_examples(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "demo", str(smollm2), "--max-tokens", "10") == 0
    shown = capsys.readouterr().out
    assert shown.count(" 10 tok, ") >= 6 and "[pirate]" in shown and "Ahoy, matey!" in shown and '{"answer": ' in shown


def test_a_chat_answers_with_all_that_was_said_before(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = ["Name a river.", "And its sea?"]
    options = ["--temperature", "0", "--max-tokens", "12", "--system", "Be brief."]
    assert run(monkeypatch, "chat", str(smollm2), *options, typed="\n".join([*questions, "", ""])) == 0
    shown = capsys.readouterr().out

    async def expected() -> list[str]:
        messages, answers = [{"role": "system", "content": "Be brief."}], []
        async with Engine(smollm2, kv_memory="32MiB") as engine:
            for question in questions:
                messages.append({"role": "user", "content": question})
                completion = await engine.generate(messages, SamplingParams(temperature=0, max_tokens=12))
                answers.append(completion.choices[0].text)
                messages.append({"role": "assistant", "content": answers[-1]})
        return answers

    assert shown == "".join(f"{answer}\n" for answer in anyio.run(expected))


def test_an_answer_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "all:\n\tcc a[:100:] :key: \x1b[2J\x07\r\n."
    engine = speaking(text, prompt_len=len("user: Hi\n"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(engine):
        chat = _Chat(portal, engine, Console(), "", {"temperature": 0, "max_tokens": 64})
        chat.run()
        assert capsys.readouterr() == (text + "\n", "")
        chat._terminal = True  # which the text must not command
        chat._show(text)
        chat._end_line()
        assert capsys.readouterr().out == "all:\n\tcc a[:100:] :key: [2J\n.\n"


def test_commands_of_a_chat(smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "/help", "/dance", "/system You are terse.", "/adapter nobody", "/adapter none", "/set temperature 0",
        "/set temperature cold", "/set temperature 2.5", "/set top_k -2", "/set max_tokens 2.0", "/set max_tokens 2",
        "/set beam_width 3", "", "Hi", "/clear", "Hi", "/exit", "Never",
    ]  # fmt: skip
    assert run(monkeypatch, "chat", str(smollm2), typed="\n".join(lines)) == 1
    shown, refused = (text.splitlines() for text in capsys.readouterr())
    for place, command in enumerate(("/help", "/system", "/adapter", "/set", "/clear", "/exit")):
        assert shown[place].startswith(command)
    rest = shown[6:]
    assert rest[0] == "system message: You are terse." and rest[1].startswith("adapter: none")
    assert rest[2].startswith("temperature 0.0, ") and "max_tokens 2" in rest[3]
    assert refused[0] == "/dance: there is no such command; /help lists them"
    assert refused[1].startswith("nobody: there is no such adapter")
    assert refused[2].startswith("temperature: ") and "'cold'" in refused[2]
    assert [line.partition(":")[0] for line in refused[3:6]] == ["temperature", "top_k", "max_tokens"]
    assert "equal to 2," in refused[3] and "-1" in refused[4]  # the API's bounds
    assert refused[6].startswith("beam_width: what can be set is ")
    first, forgotten, again = rest[4:]
    assert first == again and first and forgotten.startswith("forgotten")


def test_chat_and_demo_take_the_options_of_serve(base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineConfig] = []

    def opened(model: str, console: Console, **options: object) -> None:
        seen.append(EngineConfig(model=model, **options))
        raise HeadraceError("seen")

    for command, module in (("chat", "commands.chat"), ("demo", "demo")):
        monkeypatch.setattr(f"headrace.server.{module}.opened", opened)
        flags = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "64", "--seed", "7", "--top-p", "0.5"]
        assert run(monkeypatch, command, str(base_model), *flags) == 1
    assert [(one.device, one.dtype, one.max_context, one.seed) for one in seen] == [("cpu", "float32", 64, 7)] * 2


@pytest.mark.parametrize("flags", [["--top-p", "0.5"], []])
def test_top_p_of_a_chat_is_where_set_begins(
    flags: list[str], base_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "chat", str(base_model), *flags, typed="/set\n/set top_p 0.9\n/set top_p null\n") == 0
    shown = [line.partition("top_p ")[2].partition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["0.5" if flags else "1.0", "0.9", "1.0"]


def test_a_terminal_shows_words_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, shown = speaking("The river turns the wheel.", prompt_len=len("user: Hi\n")), io.StringIO()
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(engine):
        chat = _Chat(portal, engine, Console(file=shown, force_terminal=True, width=12), "", {"max_tokens": 64})
        chat._terminal = True
        chat._take("Hi")
    assert shown.getvalue().startswith("The river\nturns the\nwheel.\n")


def test_adapters_of_a_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_models.whole_folder(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    adapter = adapter_folders.lora_folder(tmp_path / "poet", seed=1)
    options = ["--temperature", "0", "--max-tokens", "8", "--adapter", f"poet={adapter}"]
    lines = ["Hi", "/clear", "/adapter poet", "Hi", "/clear", "/adapter none", "Hi"]
    assert run(monkeypatch, "chat", str(model), *options, typed="\n".join(lines)) == 0
    plain, _, chosen, worn, _, _, again = capsys.readouterr().out.splitlines()
    assert chosen == "adapter: poet, of none, poet"
    assert plain == again != worn
    assert run(monkeypatch, "chat", str(model), "--adapter", "poet") == 2
    assert run(monkeypatch, "chat", str(model), "--adapter", f"poet={tmp_path / 'nothing'}") == 1
    assert "poet" in capsys.readouterr().err


def test_at_a_terminal_ctrl_c_stops_the_answer_and_arrow_up_brings_the_question_back(smollm2: Path) -> None:
    with Terminal("chat", str(smollm2), "--temperature", "0", "--max-tokens", "900") as terminal:
        terminal.read_until("> ")
        terminal.type("Write a long story about a river.\r")
        terminal.read_until("a river.\r\n")
        terminal.read_until(" ")
        terminal.type("\x03")
        assert "stopped, " in terminal.read_until("> ")
        time.sleep(0.3)  # a prompt is shown a moment before it is read
        terminal.type("\x03")  # at the prompt it ends nothing
        terminal.read_until("> ")
        terminal.type("/set max_tokens 4\r")
        terminal.read_until("> ")
        terminal.type("\x1b[A\x1b[A\r")  # past the command
        shown = terminal.read_until("tokens/s")
        assert "Write a long story about a river." in shown and "4 tokens, " in shown and "stopped" not in shown
        terminal.read_until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0


class Terminal:
    """The command line in a process of its own, with a terminal."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-c", "from headrace.server.cli import main; main()", *arguments]
        environment = os.environ | {"TERM": "dumb", "INPUTRC": os.devnull}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True, preexec_fn=own_it
        )
        os.close(slave)
        self._seen = ""

    def read_until(self, text: str, seconds: float = 60.0) -> str:
        """What is shown up to the next `text`."""
        end = time.monotonic() + seconds
        while text not in self._seen:
            ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} is not in {self._seen!r}"
            self._seen += os.read(self._master, 65536).decode(errors="replace")
        found, _, self._seen = self._seen.partition(text)
        return found + text

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def own_it() -> None:
    """Make stdin the terminal that Ctrl-C comes from; a shell's background jobs start with it ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


SLOW = """
import sys, time
from headrace.engine import Engine
def slow(self):
    print("begun", file=sys.stderr, flush=True)
    time.sleep(60)
Engine._open = slow
from headrace.server.cli import main
main()
"""


@pytest.mark.parametrize("command", ["serve --port 0", "chat", "demo"])
def test_ctrl_c_while_a_model_is_opened_ends_at_once(command: str, base_model: Path) -> None:
    arguments = [sys.executable, "-c", SLOW, *command.split(), str(base_model)]
    default = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, **default) as process:
        assert process.stderr is not None
        while "begun" not in process.stderr.readline():
            assert process.poll() is None
        for _ in range(20):  # of the 60 seconds that opening takes
            process.send_signal(signal.SIGINT)  # again: asyncio does not see one that comes just before it waits
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
                break
        assert process.returncode == 130
        assert process.stderr.read() == f"headrace: interrupted while opening {base_model.name}\n"


def test_ctrl_c_elsewhere_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.server.cli.chosen_model", interrupted)
    assert run(monkeypatch, "chat") == 130
    assert capsys.readouterr().err.strip() == "headrace: interrupted"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org", "::"])
def test_without_keys_only_loopback_is_served(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "serve", "--host", host) == 2
    assert "loopback" in capsys.readouterr().err


def test_two_keys_or_more_share_fairly_unless_told_otherwise(base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    async def serve(model: str, options: dict[str, object], *_: object) -> None:
        seen.append(EngineConfig(model=model, **options).policy)

    monkeypatch.setattr("headrace.server.commands.serve._serve", serve)
    one, two = ["--api-key", "ann=secret-of-ann"], ["--api-key", "bob=secret-of-bob"]
    admin = ["--admin-api-key", "root=secret-of-root"]
    for arguments in (
        [], one, [*one, *two], [*one, *admin], [*one, *two, "--scheduling-policy", "first_come"],
        [*one, "--scheduling-policy", "deadlines"], [*one, *two, "--background-last"],
        [*one, *two, "--set", "policy=ageing"],
    ):  # fmt: skip
        assert run(monkeypatch, "serve", str(base_model), "--port", "0", *arguments) == 0
    background = {"name": "fair_share", "background_last": True}
    assert seen == [
        "first_come", "first_come", "fair_share", "fair_share", "first_come", "deadlines", background, "ageing"
    ]  # fmt: skip


def test_keys_of_the_command_line() -> None:
    assert _named(["ann=secret-of-ann", "c2VjcmV0LW9mLWJvYg==", "eve=c2VjcmV0LWZvci1ldmU="], "key") == {
        "ann": "secret-of-ann",
        "key-2": "c2VjcmV0LW9mLWJvYg==",
        "eve": "c2VjcmV0LWZvci1ldmU=",
    }
    for twice in (["ann=first-secret", "ann=second-secret"], ["key-2=first-secret", "second-secret"]):
        with pytest.raises(typer.BadParameter) as error:
            _named(twice, "key")
        assert "secret" not in error.value.message


def test_a_bad_key_is_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("me=hush hush hush", "hush me=long-enough-secret"):
        assert run(monkeypatch, "serve", "--api-key", key) != 0
        shown = capsys.readouterr().err
        assert "api_keys" in shown and "hush" not in shown


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("--version", 0, "headrace 0."),
        ("serve {file}", 1, "headrace: model: {file} is no .gguf file; a folder with config.json and safetensors, or "),
        (
            "chat no/such",
            1,
            "allow_download=True fetches the model (`hf download no/such` does, too; headrace serve has ",
        ),
        ("serve {model} --device tpu", 1, "headrace: device: must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ("serve {model} --kv-cache-memory-bytes lots", 1, "got 'lots' (--kv-cache-memory-bytes)"),
        ("serve {model} --max-model-len 1000000", 1, "this model was made for 256, got 1000000 (--max-model-len)"),
        (
            "serve {model} --speculate ngrams",
            1,
            "ngram, draft, eagle, medusa, mtp, got 'ngrams' (--speculate)",
        ),
        ("serve {model} --speculate ngram:k=99", 1, "k: must be an int from 1 to 16, got 99 (--speculate)"),
        ("serve {model} --speculate draft:no/such", 1, "the draft model no/such cannot be used: "),
        ("serve {model} --speculate eagle:no/such", 1, "fetches the model (`hf download no/such` does, too"),
        ("serve {model} --set max_row=1", 1, "max_row: there is no such option (did you mean max_rows?), got '1'"),
        ("serve {model} --set policy=weird", 1, "fair_share, deadlines, got 'weird'"),
        ("serve {model} --scheduling-policy weird", 1, "fair_share, deadlines, got 'weird' (--scheduling-policy)"),
        ("serve {model} --n-ctx 256", 2, "--n-ctx: there is no such flag (it is --max-context here)"),
        ("serve {model} --n-threads 2", 2, "--n-threads: there is no such flag (say --set cpu_threads=VALUE)"),
        ("serve {model} --max_model_len 9", 2, "--max_model_len: there is no such flag (it is --max-model-len here)"),
        ("serve {model} --mem-fraction-static 1", 2, "there is no such flag (say --kv-memory 40GiB instead"),
        ("serve {model} --swap-space 4", 2, "there is no such flag (say --set swap_memory=4GiB instead)"),
        ("serve {model} --disable-radix-cache", 2, "there is no such flag (say --no-prefix-cache)"),
        ("serve {model} --max-completion-tokens 4", 2, "there is no such flag (each request says it, in its body)"),
        ("serve {model} --lora-path x", 2, "there is no such flag (say --lora-modules NAME=FOLDER)"),
        ("serve --model {model}", 2, "--model: there is no such flag (give the model as the argument)"),
        ("chat {model} --gpu-memory-utilization 1", 2, "there is no such flag (say kv_memory="),
        ("serve {model} --max-context 1000000", 1, "this model was made for 256, got 1000000 (--max-model-len)"),
        ("serve {model} --generation-defaults some", 1, "headrace: generation_defaults: Input should be 'model' or "),
        ("serve {model} --file x.gguf", 1, "headrace: file: nothing in {model} matches x.gguf"),
        ("chat {model} --file x.gguf", 1, "headrace: file: nothing in {model} matches x.gguf"),
        ("demo {model} --file x.gguf", 1, "headrace: file: nothing in {model} matches x.gguf"),
        ("chat {model} --max-model-len 1000000", 1, "this model was made for 256, got 1000000 (--max-model-len)"),
        ("demo {model} --max-context 1000000", 1, "this model was made for 256, got 1000000 (--max-model-len)"),
        ("chat {model} --device tpu", 1, "headrace: device: must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ("demo {model} --dtype int3", 1, "headrace: dtype: "),
        ("chat {model} --top-p 0", 1, "headrace: top_p: Input should be greater than 0, got 0.0"),
        ("demo {model} --top-p 2", 1, "headrace: top_p: Input should be less than or equal to 1, got 2.0"),
        ("chat {model} --temperature 3", 2, "--temperature"),
        ("serve {model} --background-last", 2, "--scheduling-policy fair_share or deadlines, not first_come"),
        ("serve {model} --tool-call-parser xyz", 2, "--tool-call-parser xyz: must be one of "),
        ("serve {model} --adapter-folder {file}", 2, "--adapter-folder {file}: there is no such folder"),
        ("serve {model} --adapter-folder .", 2, "--adapter-folder .: without --admin-api-key nobody may "),
        ("serve {model} --lora-modules a/b={model}", 1, "headrace: name: must be 1 to 64 letters"),
        ("serve {model} --uvicorn-log-level loud", 2, "--uvicorn-log-level loud: give one of debug, info, "),
        ("bench policies --json {file}/x.json", 2, "{file}/x.json: no file in an existing folder"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(
    base_model: Path,
    arguments: str,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"model": base_model, "file": base_model / "config.json"}
    assert run(monkeypatch, *arguments.format(**names).split()) == code
    written = capsys.readouterr()
    assert told.format(**names) in written.out + written.err and "Traceback" not in written.err


def test_lists_of_commands_are_not_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for group in ([], ["bench"], ["kernels"]):
        assert run(monkeypatch, *group, "--help") == 0
        commands = capsys.readouterr().out.partition("Commands:")[2]
        assert commands and "..." not in commands


def test_an_address_that_is_taken_or_missing_is_refused_before_anything_is_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(monkeypatch, "serve", "/nowhere", "--port", str(port)) == 2
        assert f"--host 127.0.0.1 --port {port}: Address already in use" in capsys.readouterr().err
    assert run(monkeypatch, "serve", "/nowhere", "--port", str(port)) == 1
    capsys.readouterr()
    # 192.0.2.1 is kept for documentation (RFC 5737): no machine has it.
    address = ["--host", "192.0.2.1", "--port", str(port)]
    assert run(monkeypatch, "serve", "/nowhere", "--api-key", "a=long-enough", *address) == 2
    assert f"--host 192.0.2.1 --port {port}: Cannot assign requested address" in capsys.readouterr().err
