"""Chat templates: the text that transformers gives for real ones, and limits that no template can pass."""

from __future__ import annotations

import gc
import json
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import tiny_models
from scripted import no_leaks

from headrace.engine import Engine, InvalidParams, ModelRejected, PromptTooLong, RequestFailed, SamplingParams
from headrace.engine.concurrency.child import Child, ChildDied, Children
from headrace.engine.tokens.chat_template import MAX_SOURCE, ChatTemplate, TemplateRefused, TemplateTooCostly
from headrace.engine.tokens.rendering import Renderer
from headrace.engine.tokens.tokenizer import Tokenizer

TOOLS = [{"type": "function", "function": {"name": "f", "description": "<d>", "parameters": {"type": "object"}}}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Say "ü" & <b>.'},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "é"]}}}],
    },
    {"role": "tool", "content": "3", "tool_call_id": "c1"},
]
SOURCES = [
    # the constructions that templates of the supported families use
    "{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- '\\n' ~ tool | tojson }}{%- endfor %}{%- endif %}\n"
    "{% for message in messages %}\n"
    "{{ bos_token if loop.first else '' }}<|{{ message['role'] }}|>{{ message.content | trim }}"
    "{% if loop.last %}!{% endif %}\n"
    "    {% if message.tool_calls is defined %}{% for call in message.tool_calls %}\n"
    "{{ call.function.arguments | tojson(indent=2) }}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{% set ns = namespace(count=0) %}{% for m in messages if m.role != 'system' %}{% set ns.count = ns.count + 1 %}"
    "{{ ns.count ~ ':' ~ m.content + ' ' }}{% generation %}{{ m.role | upper }}{% endgeneration %}"
    "{% if ns.count == 2 %}{% break %}{% endif %}{% else %}none{% endfor %}{{ loop is defined }}",
    "{% macro show(m) %}[{{ m.role }}]{% endmacro %}{{ messages | map(attribute='role') | join(',') }}"
    "{{ show(messages[0]) }}"
    "{{ messages[::-1][0].content * 2 }}{{ '%s-%02d' % ('a', 7) }}{{ (messages | length) % 2 }}{{ dict(a=1) }}",
]


HI = [{"role": "user", "content": "hi"}]
PLAIN = "{{ messages[0].content }}"


def render(source: str, chat: Any = CHAT, *, tools: Any = None, names: Any = None, **limits: Any) -> str:
    with closing(ChatTemplate(source, names, **limits)) as template:
        return template.render(chat, tools=tools)


CALLED = "{% for m in messages %}{% for call in m.tool_calls or [] %}"
ENDED = "{% endfor %}{% endfor %}"
HISTORIES = {
    "DeepSeek V3.1 adds arguments to text": (
        CALLED + "{{ call['function']['name'] + '<sep>' + call['function']['arguments'] + '<end>' }}" + ENDED,
        'f<sep>{"x": [1, "é"]}<end>',
    ),
    "DeepSeek V3 writes calls where the content is none": (
        "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
        "{% for call in m['tool_calls'] %}{{ call['type'] + '<sep>' + call['function']['name'] }}"
        "{{ '\n```json\n' + call['function']['arguments'] + '\n```' }}{% endfor %}{% endif %}{% endfor %}",
        'function<sep>f\n```json\n{"x": [1, "é"]}\n```',
    ),
    "arguments stand alone": (CALLED + "{{ call.function.arguments }}" + ENDED, '{"x": [1, "é"]}'),
    "GLM-4.5 goes through the arguments": (
        CALLED + "{% set args = call.function.arguments %}{% for k, v in args.items() %}"
        "<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson if v is not string else v }}</arg_value>{% endfor %}"
        + ENDED,
        '<arg_key>x</arg_key><arg_value>[1, "é"]</arg_value>',
    ),
    "Seed-OSS goes through their items": (
        CALLED + "{% for k, v in call.function.arguments | items %}<{{ k }}>{{ v | string }}{% endfor %}" + ENDED,
        "<x>[1, 'é']",
    ),
    "Hunyuan writes both": (
        CALLED + "{% set args = call.function.arguments %}{% if args is not string %}{% set args = args | tojson %}"
        "{% endif %}{{ 'f' + args }}" + ENDED,
        'f{"x": [1, "é"]}',
    ),
    "Cohere writes JSON": (CALLED + "{{ call.function.arguments | tojson }}" + ENDED, '{"x": [1, "é"]}'),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_calls_of_earlier_turns_have_the_form_that_the_template_expects(name: str) -> None:
    source, expected = HISTORIES[name]
    assert render(source) == expected


PHI = (
    "{% for m in messages %}{% if 'tools' in m and m['tools'] is not none %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|>' }}"
    "{% else %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(("chat", "content"), [(CHAT, "Be brief."), (CHAT[1:], "")])
def test_tools_go_into_the_first_message_where_the_template_looks_for_them_there(chat: Any, content: str) -> None:
    said = render(PHI, chat, tools=TOOLS)
    start, rest = f"<|system|>{content}<|tool|>", "<|/tool|><|user|>Say"
    assert said.startswith(start) and rest in said and said.count("<|tool|>[") == 1
    assert json.loads(said.removeprefix(start).split(rest)[0]) == [TOOLS[0]["function"]]
    assert "<|tool|>[" not in render(PHI, chat)


GOING_THROUGH = {
    "Llava": "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }}{% endfor %}",
    "SmolVLM": "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}",
    "both": "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<' ~ part.text ~ '>' }}{% endfor %}{% endif %}",
    "text": "{% for line in message.content.split() %}{{ line }} {% endfor %}",
}


@pytest.mark.parametrize("name", GOING_THROUGH)
def test_a_template_that_goes_through_the_parts_of_a_content_gets_parts(name: str) -> None:
    """As those of models that see expect, to which a text would have no parts: it would be lost."""
    chat = [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": ""}]
    said = render("{% for message in messages %}[" + GOING_THROUGH[name] + "]{% endfor %}", chat)
    said = said.replace(": ", "").replace(" ]", "]")
    assert said == "[Say hi.][]"


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it never came to pass"
        time.sleep(0.02)


def child_of(template: ChatTemplate) -> psutil.Process:
    """The process that waits for the template's next chat."""
    (child,) = template._children._idle
    return psutil.Process(child._process.pid)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_it_writes_what_transformers_writes(source: str, tools: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        [CHAT], tools=tools, chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert render(source, tools=tools, names={"bos_token": "<s>"}) == expected


DOUBLING = "{% set ns = namespace(x=['aaaaaaaa']) %}{% for i in range(22) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) ~ f(n) }}{% endmacro %}{% for i in range(9999) %}{{ f(i) }}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '{:{}}'.format('a', 10**9) }}",
        "{{ 'a\nb' | indent(10**9) }}",
        "{{ 7 ** (10**8 * messages | length) % 10 }}",
        "{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{{ ('a'*20000) | replace('a', 'b'*20000) | length }}",
        "{{ ''.join(['a'*100000]*4000) | length }}",
        DOUBLING + "{{ ns.x | tojson | length }}",
        DOUBLING + "{{ '%s' % ns.x }}",
        "{{ ([range(99999)]*90000) | map('list') | map('length') | list | length }}",
        "{{ [1]*10**6 }}",
        "{{ ([3, 1, 2]*3000000) | sort | length }}",
        "{{ lipsum(10**6) }}",
        "{{ ('ab ' * 10**7) | wordwrap(1) | length }}",
        "{{ ('a' * 10**7).encode().hex() | urlize }}",
        "{{ 1 }}" * 20_000,
        "{{ " + "1+" * 30_000 + "1 }}",
        "{% if a %}" * 5_000 + "{% endif %}" * 5_000,
    ],
    ids=lambda source: source[:40],
)
def test_no_template_passes_its_limits(source: str) -> None:
    with pytest.raises(TemplateTooCostly):
        render(source, seconds=0.3, memory=2**28, max_chars=100_000)


ESCAPES = {
    "comparing lists that share their parts": (
        "{% set ns = namespace(a=[1], b=[1]) %}"
        "{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
        "{{ ns.a == ns.b }}"
    ),
    "a wide indent": "{{ [1, [2]] | tojson(indent=10**9) | length }}",
    "a wide date": "{{ strftime_now('%250d' * 3000000) | length }}",
    "a table of long texts": "{{ ('a' * 10**6).translate({97: 'b' * 8000}) | length }}",
    "texts that are kept": (
        "{% set ns = namespace(x=[]) %}"
        "{% for i in range(9999) %}{% set ns.x = ns.x + ['a' * 16 * 10**6 ~ i] %}{% endfor %}{{ ns.x | length }}"
    ),
    "a long template": "{{ 1 }}" * 300_000,
}
VICTIM = """
import json, sys
from headrace.engine.tokens.chat_template import ChatTemplate, TemplateTooCostly
for line in sys.stdin:
    template = ChatTemplate(json.loads(line))
    try:
        template.render([{"role": "user", "content": "hi"}])
    except Exception as error:
        print(isinstance(error, TemplateTooCostly), flush=True)
    template.close()
"""


@pytest.fixture(scope="module")
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """An application that renders whatever it is given, and that a template may take with it."""
    command = [sys.executable, "-c", VICTIM]
    with subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b'"{% if %}"\n')
        assert process.stdout.readline() == b"False\n"  # all is imported
        yield process
        process.kill()


def resident(process: psutil.Process) -> int:
    """Bytes in memory of a process and its children."""
    held = 0
    for each in (process, *process.children()):
        with suppress(psutil.NoSuchProcess):
            held += each.memory_info().rss
    return held


@pytest.mark.parametrize("name", ESCAPES)
def test_what_once_escaped(name: str, victim: subprocess.Popen[bytes]) -> None:
    assert victim.stdin is not None and victim.stdout is not None
    process, ends, most = psutil.Process(victim.pid), time.monotonic() + 60.0, 0
    before = sum(process.cpu_times()[:2])
    victim.stdin.write(json.dumps(ESCAPES[name]).encode() + b"\n")
    while not (told := select.select([victim.stdout], [], [], 0.02)[0]) and time.monotonic() < ends:
        most = max(most, resident(process))
        used = sum(process.cpu_times()[:2]) - before
        if most > 1_500 << 20 or used > 3.0:
            break
    if not told:
        victim.kill()
        pytest.fail(f"the application holds {most >> 20} MiB, has computed {used:.1f} s, and has no answer")
    assert victim.stdout.readline() == b"True\n"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ('{0.__class__.__init__.__globals__}' | attr('format'))(1) }}",
        "{% include 'x' %}",
        "{% if %}",
        "{{ '\\ud800' }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TemplateRefused):
        render(source)


def test_a_reason_is_short() -> None:
    with pytest.raises(TemplateRefused) as caught:
        render("{{ raise_exception('é' * 10**6) }}")
    assert str(caught.value) == "é" * 500


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% macro show(x) %}<{{ x }}>{% endmacro %}{{ show(12345678) }}", "<12345678>"),
        ("{{ 12345678 | center(10) }}", " 12345678 "),
        ("{{ dict(a=12345678) | tojson }}", '{"a": 12345678}'),
        ("{{ '{}'.format(12345678) }}", "12345678"),
        ("{{ 'use %20000d' | indent(2) }}", "use %20000d"),
        ("{{ '\\n\\x00\\u2028' }}\r\n\"é\U0001f30a", '\n\0\u2028\n"é\U0001f30a'),
        ("{{ strftime_now('%Y')|length }}", "4"),
        ("", ""),
    ],
)
def test_text_and_numbers_pass_as_they_are(source: str, expected: str) -> None:
    assert render("{% raw %}{% endraw %}" + source) == expected


def test_data_of_other_classes_is_rendered_as_json_has_it() -> None:
    from types import MappingProxyType

    tools: Any = (MappingProxyType({"a": (1, float("inf"))}),)
    assert render("{{ tools[0].a }}", tools=tools) == "[1, inf]"
    with pytest.raises(TemplateRefused, match="object has no JSON"):
        render(PLAIN, tools=[{"a": object()}])


def test_a_template_is_compiled_once_and_rendered_in_one_process() -> None:
    with closing(ChatTemplate(PLAIN)) as template:
        assert template.render(HI) == "hi"
        child = child_of(template)
        assert [template.render([{"role": "user", "content": str(at)}]) for at in range(50)] == [*map(str, range(50))]
        assert child_of(template) == child
    assert not child.is_running()


def test_what_cannot_be_compiled_is_tried_once() -> None:
    with closing(ChatTemplate("{% if %}")) as template:
        with pytest.raises(TemplateRefused, match="Expected an expression"):
            template.render(HI)
        template._children._start = pytest.fail
        with pytest.raises(TemplateRefused, match="Expected an expression"):
            template.render(HI)


def test_a_chat_has_its_whole_allowance_whatever_was_rendered_before() -> None:
    source = (
        "{% set n = messages[0].content | int %}{{ ('a' * n) | length }}{{ (range(99999) | map('string') | list)[0] }}"
    )
    with closing(ChatTemplate(source, memory=2**28)) as template:
        for _ in range(4):
            assert template.render([{"role": "user", "content": str(180 << 20)}]) == f"{180 << 20}0"
            with pytest.raises(TemplateTooCostly, match="more than 256 MiB"):
                template.render([{"role": "user", "content": str(260 << 20)}])


def test_a_chat_that_is_too_costly_costs_no_other_chat() -> None:
    """Half of the threads render what is killed, half of them what is not."""
    endless = "{{ ([range(99999)] * 90000) | map('list') | list | length }}"
    told: list[str] = []

    def ask(content: str) -> None:
        for _ in range(3):
            try:
                told.append(template.render([{"role": "user", "content": content}]))
            except TemplateTooCostly:
                told.append("costly")

    source = "{% if messages[0].content == 'x' %}" + endless + "{% endif %}" + PLAIN
    with closing(ChatTemplate(source, seconds=0.3, memory=2**28)) as template:
        threads = [threading.Thread(target=ask, args=[content]) for content in ("x", "fine", "x", "fine")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(told) == ["costly"] * 6 + ["fine"] * 6


def test_a_process_that_others_ended_is_replaced() -> None:
    with closing(ChatTemplate(PLAIN)) as template:
        template.render(HI)
        child_of(template).kill()
        assert template.render(HI) == "hi"  # whether or not it was seen to be dead
        child = child_of(template)
        child.suspend()
        killer = threading.Timer(0.3, child.kill)
        killer.start()
        assert template.render(HI) == "hi"
        killer.join()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which a whole service may get, while it drains
            child_of(template).send_signal(number)
        child = child_of(template)
        assert template.render(HI) == "hi" and child_of(template) == child


def test_a_new_process_that_cannot_answer_is_not_replaced_for_ever(tmp_path: Path) -> None:
    started = []

    def start() -> Child:
        started.append(Child(tmp_path / "nothing.py"))
        return started[-1]

    with closing(ChatTemplate(PLAIN)) as template:
        template._children = Children(start)
        with pytest.raises(ChildDied, match="code 1"):
            template.render(HI)
    assert len(started) == 1


def test_a_template_that_nobody_closed_leaves_no_process() -> None:
    template = ChatTemplate(PLAIN)
    template.render(HI)
    child = child_of(template)
    del template
    gc.collect()
    assert not child.is_running()


def test_limits_hold_where_the_application_blocks_signals() -> None:
    """Masks and ignored signals pass to new processes."""
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    try:
        with pytest.raises(TemplateTooCostly, match="seconds"):
            render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", seconds=0.3)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
        signal.signal(signal.SIGPROF, before)


APPLICATION = """
import os, resource, sys
from headrace.engine.tokens.chat_template import ChatTemplate
template = ChatTemplate("{{ messages[0].content }}")
chat = [{"role": "user", "content": "hi"}]
template.render(chat)
pid = template._children._idle[0]._process.pid
print(pid, flush=True)
"""


def run_application(script: str) -> tuple[int, str]:
    """Run what follows `APPLICATION`; the id of its child, and what it prints."""
    ran = subprocess.run([sys.executable, "-c", APPLICATION + script], capture_output=True, text=True, timeout=120)
    assert not ran.stderr, ran.stderr
    pid, _, told = ran.stdout.partition("\n")
    return int(pid), told


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(1)", "sys.exit()"])
def test_the_process_ends_with_the_application(end: str) -> None:
    pid, _ = run_application(end)
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_fork_of_the_application_has_processes_of_its_own() -> None:
    pid, told = run_application("""
if os.fork() == 0:
    assert template.render(chat) == "hi"
    print(template._children._idle[0]._process.pid, flush=True)
    sys.exit()
os.wait()
assert template.render(chat) == "hi"
print(template._children._idle[0]._process.pid, flush=True)
""")
    forked, own = map(int, told.split())
    assert own == pid != forked


def test_descriptors_above_a_thousand_are_fine() -> None:
    _, told = run_application("""
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
other = ChatTemplate("{{ messages[0].content * 2 }}")
print(other.render(chat))
""")
    assert told == "hihi\n"


def test_a_process_holds_no_model_and_little_else() -> None:
    import torch  # which this process has, and the other has not

    with closing(ChatTemplate(PLAIN)) as template:
        template.render(HI)
        child = child_of(template)
        assert torch.__name__ and not any("torch" in each.path for each in child.memory_maps())
        assert child.memory_info().rss < 64 << 20
        assert child.memory_info().rss < psutil.Process().memory_info().rss / 2


# -- of a model ------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of random weights, whose template computes for ever for one message."""
    folder = tiny_models.whole_folder(tmp_path / "model")
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source = "{% if messages[0].content == 'endless' %}" + endless + "{% endif %}<{{ messages[0].content }}>"
    (folder / "chat_template.jinja").write_text(source)
    return folder


def chat_of(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_no_chat_is_rendered_on_the_event_loop(model: Path, anyio_backend: tuple[str, dict[str, Any]]) -> None:
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            before = anyio.current_time()
            await anyio.sleep(0.01)
            gaps.append(anyio.current_time() - before)

    async def refused(engine: Engine) -> None:
        use = engine.tokenize if anyio_backend[0] == "trio" else engine.generate
        with pytest.raises(InvalidParams, match="more than 2 seconds"):
            await use(chat_of("endless"))

    async def ask() -> None:
        async with no_leaks(), Engine(model, dtype="float32", kv_memory="8MiB") as engine:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(tick)
                async with anyio.create_task_group() as rendering:
                    rendering.start_soon(refused, engine)
                    await anyio.sleep(0.3)
                    await engine.generate("text", SamplingParams(max_tokens=2))
                tasks.cancel_scope.cancel()
            assert await engine.tokenize(chat_of("Hi")) == await engine.tokenize("<Hi>")

    anyio.run(ask, backend=anyio_backend[0], backend_options=anyio_backend[1])
    assert len(gaps) > 40 and max(gaps) < 1.5


def test_closing_an_engine_ends_its_processes(model: Path, anyio_backend: tuple[str, dict[str, Any]]) -> None:
    before = set(psutil.Process().children())

    async def ask() -> None:
        async with no_leaks(), Engine(model, dtype="float32", kv_memory="8MiB") as engine:
            assert len(set(psutil.Process().children()) - before) == 1, "the first chat finds a process that waits"
            await engine.tokenize(chat_of("Hi"))
            engine.stream(chat_of("endless"))
            await anyio.sleep(0.2)
        assert set(psutil.Process().children()) <= before

    anyio.run(ask, backend=anyio_backend[0], backend_options=anyio_backend[1])


def test_a_long_template_is_refused_with_the_model(model: Path) -> None:
    (model / "chat_template.jinja").write_text("x" * (MAX_SOURCE + 1))
    with pytest.raises(ModelRejected, match=f"at most {MAX_SOURCE} characters") as caught:
        Tokenizer.from_folder(model)
    assert caught.value.field == "chat_template" and caught.value.limit == MAX_SOURCE


def test_an_empty_list_of_tools_offers_none() -> None:
    sources = {"default": "plain {{ tools is none }}", "tool_use": "tools {{ tools | length }}"}
    with closing(Renderer(sources, {}, "model")) as renderer:
        assert [renderer.render(HI, tools) for tools in (None, [], TOOLS)] == ["plain True", "plain True", "tools 1"]


def test_what_no_context_can_hold_is_not_tokenised(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[0].content * 1000000 }}")
    with closing(Tokenizer.from_folder(model)) as tokenizer:
        tokenizer.start(256)
        monkeypatch.setattr(tokenizer._encoder, "encode", pytest.fail)
        with pytest.raises(PromptTooLong, match="2000000 characters are more than the context of 256 tokens"):
            tokenizer.encode_chat(chat_of("Hi"))


def test_without_another_process_a_chat_fails_and_a_text_does_not(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.frozen", True, raising=False)
    tokenizer = Tokenizer.from_folder(model)
    tokenizer.start(256)
    with pytest.raises(RequestFailed, match="no Python that could be started"):
        tokenizer.encode_chat(chat_of("Hi"))
    assert tokenizer.encode("Hi")


def test_an_application_that_is_no_python_finds_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "the-application")
    assert render(PLAIN, HI) == "hi"


def test_closing_ends_what_is_rendered() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template, ends = ChatTemplate(endless, seconds=60), list[str]()
    before = set(psutil.Process().children())

    def ask() -> None:
        try:
            template.render(HI)
        except OSError as error:
            ends.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: set(psutil.Process().children()) - before)  # some of those before may end meanwhile
    template.close()
    thread.join(10)
    assert ends == ["the engine closed meanwhile"]


def test_a_path_that_no_import_heeds_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
    assert render(PLAIN, HI) == "hi"


def test_a_template_cannot_forge_what_stands_for_quoted_tokens(tmp_path: Path) -> None:
    """A mark for a special token of another number, and one of more digits than Python reads."""
    folder = tiny_models.whole_folder(tmp_path / "model")
    saved = json.loads((folder / "tokenizer.json").read_text())
    token = {"id": 94, "content": "<end>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    (folder / "tokenizer.json").write_text(json.dumps(saved | {"added_tokens": [token | flags]}))
    forged = "{{ messages[0].content.replace('.94', '.7') }}{{ messages[0].content.replace('.94', '.' ~ '9' * 5000) }}"
    (folder / "chat_template.jinja").write_text("a{{ messages[0].content }}b" + forged)
    with closing(Tokenizer.from_folder(folder)) as tokenizer:
        tokenizer.start(10_000)
        ids = tokenizer.encode_chat(chat_of("<end>"))
    assert tokenizer.decode(ids).startswith("a<end>b") and 94 not in ids
