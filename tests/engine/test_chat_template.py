"""Chat templates: the text that transformers gives for real ones, and limits that no template can pass."""

from __future__ import annotations

import time
from typing import Any

import pytest
from jinja2 import UndefinedError

from headrace.engine.chat_template import ChatTemplate, TemplateTooCostly

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


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_it_writes_what_transformers_writes(source: str, tools: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        [CHAT], tools=tools, chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert ChatTemplate(source).render(CHAT, tools=tools, names={"bos_token": "<s>"}) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) ~ f(n) }}{% endmacro %}{% for i in range(9999) %}{{ f(i) }}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '{:1000000000}'.format('a') }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a\nb' | indent(10**9) }}",
        "{{ 9**9**9**9**9 }}",
        "{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{{ ('a'*20000).replace('a', 'b'*20000) | length }}",
        "{{ ('a'*20000) | replace('a', 'b'*20000) | length }}",
        "{{ (['a'*100000]*400) | join | length }}",
        "{{ ''.join(['a'*100000]*400) | length }}",
        "{{ [1, 2] | join('a'*100000) | length }}",
        "{{ DOUBLING | tojson | length }}",
        "{{ DOUBLING | string | length }}",
        "{{ DOUBLING }}",
        "{{ '%s' % DOUBLING }}",
        "{{ '%s%s' | format('a'*99999, 'a'*99999) | length }}",
        "{{ '{:{}}'.format('a', 10**9) }}",
        "{{ ([range(99999)]*90000) | map('list') | map('length') | list | length }}",
        "{{ [1]*10**6 }}",
        "{{ ([3, 1, 2]*3000000) | sort | length }}",
        "{{ lipsum(10**6) }}",
    ],
)
def test_no_template_passes_its_limits(source: str) -> None:
    doubling = (
        "{% set ns = namespace(x=['aaaaaaaa']) %}{% for i in range(22) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    )
    source = source if "DOUBLING" not in source else doubling + source.replace("DOUBLING", "ns.x")
    began = time.monotonic()
    with pytest.raises(UndefinedError if "lipsum" in source else TemplateTooCostly):
        ChatTemplate(source, seconds=0.3, max_chars=100_000).render(CHAT)
    assert time.monotonic() - began < 1.0


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{% include 'x' %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    from jinja2 import TemplateError

    with pytest.raises((TemplateError, TypeError)):
        ChatTemplate(source).render(CHAT)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% macro show(x) %}<{{ x }}>{% endmacro %}{{ show(12345678) }}", "<12345678>"),
        ("{{ 12345678 | center(10) }}", " 12345678 "),
        ("{{ dict(a=12345678) | tojson }}", '{"a": 12345678}'),
        ("{{ '{}'.format(12345678) }}", "12345678"),
        ("{{ '%d' | format(12345678) }}", "12345678"),
        ("{{ '{{\"id\": {}}}'.format(7) }}", '{"id": 7}'),
        ("{{ 'use %20000d' | indent(2) }}", "use %20000d"),
        ("{{ '{\"id\": 123456}' | indent(2) }}", '{"id": 123456}'),
    ],
)
def test_large_numbers_are_values_like_others(source: str, expected: str) -> None:
    assert ChatTemplate("{% raw %}{% endraw %}" + source).render(CHAT) == expected
