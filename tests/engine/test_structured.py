"""Text keeps to its response format whatever the model wants, hostile formats are refused in time, and nobody waits."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import numpy as np
import pytest
import tiny_models
from random_schemas import random_schema
from scripted import CAPACITY, Unable, no_leaks

from headrace.engine import (
    Completion,
    Engine,
    EngineStopped,
    GrammarRejected,
    InvalidParams,
    Overloaded,
    RequestFailed,
    ResponseFormat,
    SamplingParams,
    TokenizerFailed,
)
from headrace.engine.grammar import child as grammar_child
from headrace.engine.grammar import compiled as compiled_grammar
from headrace.engine.grammar import compiler as grammars
from headrace.engine.grammar import trials as grammar_trials
from headrace.engine.grammar.jobs import GrammarJob, Waiter
from headrace.engine.grammar.json_schemas import exact_grammar, exact_schema
from headrace.engine.life.opened import Opened
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.stats import EngineInfo
from headrace.engine.testing import ByteTokenizer
from headrace.engine.tokens.gguf import BYTE_OF_CHAR
from headrace.engine.tokens.text import Detokenizer
from headrace.engine.tokens.token_table import TokenTable

Backend = tuple[str, dict[str, Any]]
END = 256
MB = 2**20
SEEDS = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that knows single bytes, and its end."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models

    made = tmp_path_factory.mktemp("bytes")
    torch.manual_seed(7)
    config = tiny_models.CONFIG | {"vocab_size": 260, "eos_token_id": END, "max_position_embeddings": 2048}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.save_pretrained(made)
    core = Tokenizer(models.BPE(dict(BYTE_OF_CHAR), []))
    core.add_special_tokens([AddedToken("<end>", special=True)])
    core.decoder = decoders.ByteLevel()
    core.save(str(made / "tokenizer.json"))
    return made


def hot(wanted: Any, seed: int = 0, **fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.5, "seed": seed, "max_tokens": 800, "response_format": wanted} | fields))


def run(folder: Path, asked: list[SamplingParams], **options: Any) -> list[Completion]:
    async def answer() -> list[Completion]:
        async with Engine(folder, **({"dtype": "float32", "kv_memory": 8 * MB} | options)) as engine:
            found: list[Completion] = await engine.generate_many([[65, 66]] * len(asked), asked)
            return found

    return anyio.run(answer)


def test_500_random_schemas_are_kept_at_temperature_1_5(folder: Path) -> None:
    schemas = [random_schema(seed) for seed in range(SEEDS)]
    asked = [hot(ResponseFormat.json_schema(schema), seed) for seed, schema in enumerate(schemas)]
    texts = set()
    for schema, found in zip(schemas, run(folder, asked), strict=True):
        choice = found.choices[0]
        assert choice.finish_reason == "stop", (schema, choice.text)
        jsonschema.validate(json.loads(choice.text), schema)
        texts.add(choice.text)
    assert len(texts) > SEEDS / 3


SIMPLE = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 5}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TEXTS = ["yes", "no (not now)", "C++ & C#", "a|b", "wo?", "[x]\n", "\U0001f642 \u00e9", "-", "a^b$"]


@pytest.mark.parametrize(
    ("wanted", "check"),
    [
        (ResponseFormat.regex(r"[0-9]{3}-(ab|c)+\."), re.compile(r"[0-9]{3}-(ab|c)+\.").fullmatch),
        (ResponseFormat.choice(TEXTS), TEXTS.__contains__),
        (ResponseFormat.lark('start: NUMBER | "(" start "+" start ")"\nNUMBER: /[1-9]/'), eval),
        (ResponseFormat.json_object(), lambda text: isinstance(json.loads(text), dict)),
        ({"type": "json_object"}, lambda text: isinstance(json.loads(text), dict)),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SIMPLE}}, json.loads),
        ({"type": "choice", "choice": ["one"]}, "one".__eq__),
    ],
    ids=["regex", "choice", "lark", "object", "openai object", "openai schema", "one"],
)
def test_every_kind_of_format_is_kept(folder: Path, wanted: Any, check: Callable[[str], object]) -> None:
    found = run(folder, [hot(wanted, seed, n=2) for seed in range(10)])
    ended = [choice for each in found for choice in each.choices if choice.finish_reason == "stop"]
    assert len(ended) >= 8, "an object or a nest of brackets may have no end"
    for choice in ended:
        assert check(choice.text), choice.text
        assert choice.token_ids[-1] == END


@pytest.mark.parametrize(
    ("sizes", "preempts"),
    [
        ({"launch_ahead": 3, "max_batched_tokens": 64, "max_rows": 64}, False),
        ({"kv_memory": 14 * tiny_models.PAGE_BYTES, "max_rows": 8}, True),
    ],
)
def test_each_is_what_it_is_alone_beside_rows_that_keep_to_nothing(
    folder: Path, sizes: dict[str, Any], preempts: bool
) -> None:
    asked = [
        hot(ResponseFormat.json_schema(random_schema(at)) if at % 2 else None, at, max_tokens=60, frequency_penalty=0.1)
        for at in range(12)
    ]
    alone = [run(folder, [each])[0].choices[0].token_ids for each in asked]

    async def crowd() -> None:
        async with Engine(folder, **({"dtype": "float32", "kv_memory": 8 * MB} | sizes)) as engine:
            found = await engine.generate_many([[65, 66]] * len(asked), asked)
            assert [each.choices[0].token_ids for each in found] == alone
            assert bool(engine.stats().preemptions) == preempts

    anyio.run(crowd)


class Pieces(ByteTokenizer):
    """A SentencePiece vocabulary: 254 begins every text, which gets a space, and bytes stand in for what is missing."""

    eos_ids = (256, 300)

    def __init__(self) -> None:
        words = ["{", "}", '"', '{"', '": ', ", ", " ", " {", ' "', "a", "name", " name", "1", "12", "é", " é", "null"]
        pieces = [bytes([byte]) for byte in range(256)] + [b"</s>"] + [word.encode() for word in words] + [b""]
        self.table = TokenTable(pieces, special_ids=frozenset({256}), byte_ids=frozenset(range(256)))

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        return [254, *(" " + text).encode()] if text else [254]


def compiled(wanted: ResponseFormat, tokenizer: ByteTokenizer) -> compiled_grammar.CompiledGrammar:
    runner: Any = None
    names = [field.name for field in dataclasses.fields(EngineInfo)]
    info = EngineInfo(**dict.fromkeys(names, 0) | {"vocab_size": 310})
    opened = Opened(runner, tokenizer, CAPACITY, info)
    compiler = grammars.Grammars(lambda call: None)  # type: ignore[arg-type]
    job = compiler._jobs.join(wanted, opened, Waiter(None, time.monotonic(), lambda: True, lambda grammar, error: None))
    assert job is not None
    told = compiler._work(job, None, lambda job: (compiler._compile(job), 0.0))
    if told.error is not None:
        raise told.error
    assert told.grammar is not None
    return told.grammar


def ids_of(mask: bytes) -> list[int]:
    return [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]


@pytest.mark.parametrize("launch_ahead", [1, 2, 3])
def test_forced_tokens_are_taken_at_once_and_are_those_that_would_be_sampled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, launch_ahead: int
) -> None:
    """With log-probabilities every token is sampled by itself: the same tokens, in more steps; cut short as well."""
    monkeypatch.setattr(Pace, "is_worth", lambda *_: True)
    schemas = [random_schema(seed) for seed in range(24)] + [SIMPLE] * 4
    sizes = {"launch_ahead": launch_ahead, "max_rows": 8, "kv_memory": 40 * tiny_models.PAGE_BYTES}

    async def answers(engine: Engine, **fields: Any) -> tuple[list[list[int]], int]:
        before = engine.stats().steps
        asked = [hot(ResponseFormat.json_schema(schema), seed, **fields) for seed, schema in enumerate(schemas)]
        found: list[Completion] = await engine.generate_many([[65, 66]] * len(asked), asked)
        return [answer.choices[0].token_ids for answer in found], engine.stats().steps - before

    async def run() -> None:
        async with Engine(folder, dtype="float32", **sizes) as engine:
            singly, many_steps = await answers(engine, logprobs=0)
            at_once, few_steps = await answers(engine)
            assert at_once == singly and few_steps < 0.8 * many_steps
            for limit in (5, 6, 13):
                assert (await answers(engine, max_tokens=limit))[0] == [ids[:limit] for ids in singly]

    anyio.run(run)


def test_a_forced_text_is_cut_as_the_tokenizer_cuts_it(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the real vocabulary: what leaves no choice is one step, and what ends a run may still join what follows."""
    monkeypatch.setattr(Pace, "is_worth", lambda *_: True)
    texts = ["first_name", "a considerably longer name than that"]
    schema = {
        "type": "object",
        "properties": {text: {"enum": [1, 2]} for text in texts},
        "required": texts,
        "additionalProperties": False,
    }
    params = SamplingParams(temperature=0, max_tokens=60, response_format=ResponseFormat.json_schema(schema))

    async def run() -> None:
        async with Engine(smollm2, kv_memory="64MiB", launch_ahead=1) as engine:
            answer = (await engine.generate("{", params)).choices[0]
            assert list(json.loads(answer.text)) == texts
            assert answer.token_ids[:-1] == await engine.tokenize(answer.text)
            assert engine.stats().steps < len(answer.token_ids) / 2

    anyio.run(run)


class Failing(ByteTokenizer):
    """A tokenizer that cannot handle any text."""

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        raise TokenizerFailed("no text")


def test_a_forced_text_that_the_tokenizer_cannot_handle_is_cut_without_it() -> None:
    grammar = compiled(ResponseFormat.regex("forced [0-9]"), Failing())
    assert bytes(grammar._lexers[0].matcher.compute_ff_tokens()) == b"forced "


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Pieces()], ids=["bytes", "pieces"])
def test_any_walk_along_the_masks_ends_in_the_format(tokenizer: ByteTokenizer) -> None:
    """Whatever the vocabulary, as its detokenizer shows the tokens; the logits are wider than it is."""
    chance = random.Random(1)
    for seed in range(60):
        schema = random_schema(seed)
        grammar = compiled(ResponseFormat.json_schema(schema), tokenizer)
        state, ids = grammar.begin([]), list[int]()
        while not ids or ids[-1] != END:
            mask = state.allowed()
            assert len(mask) % 4 == 0
            allowed = ids_of(mask)
            ids.append(END if END in allowed and chance.random() < 0.3 else chance.choice(allowed))
            state.advance(ids[-1])
            assert len(ids) < 3000
        detokenizer = Detokenizer(tokenizer.table)
        jsonschema.validate(json.loads("".join([*map(detokenizer.feed, ids), detokenizer.flush()])), schema)
        resumed = grammar.begin(ids[:-1])
        assert resumed.allowed()[END // 8] >> END % 8 & 1


class Controls(ByteTokenizer):
    """Finds a control token in any text, as most tokenizers do."""

    def __init__(self) -> None:
        pieces = [bytes([byte]) for byte in range(256)] + [b"</s>", b"<call>"]
        self.table = TokenTable(pieces, special_ids=frozenset({256, 257}))

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        before, *rest = text.split("<call>")
        return [*before.encode(), *(token for part in rest for token in (257, *part.encode()))]


def test_masks_of_many_rows_are_those_of_each_and_found_without_python() -> None:
    """Where a mask has to ask Python how text is cut, it waits for the interpreter, row by row."""
    threads = set[int]()

    class Recorded(Pieces):
        def encode(self, text: str, *, framed: bool = True) -> list[int]:
            threads.add(threading.get_ident())
            return super().encode(text)

    rows, chance = 12, random.Random(3)
    grammar = compiled(ResponseFormat.json_schema(SIMPLE), Recorded())
    alike = compiled(ResponseFormat.json_schema(SIMPLE), Pieces())
    states, others = ([made.begin([]) for _ in range(rows)] for made in (grammar, alike))
    masks = np.zeros((rows, -(-310 // 32)), np.int32)
    tokens: list[list[int]] = [[] for _ in range(rows)]
    for _ in range(25):
        threads.clear()
        grammar.fill([(state, tokens[row], row) for row, state in enumerate(states)], memoryview(masks))
        assert threads <= {threading.get_ident()}
        for row, other in enumerate(others):
            allowed = ids_of(masks[row].tobytes())
            assert allowed == ids_of(other.allowed())
            tokens[row] = [chance.choice(allowed)] if allowed != [END] else []
            for token in tokens[row]:
                other.advance(token)


def test_a_forced_text_may_spell_a_control_token() -> None:
    state, ids = compiled(ResponseFormat.choice(["<call>"]), Controls()).begin([]), list[int]()
    while END not in (allowed := ids_of(state.allowed())):
        ids.append(allowed[0])
        state.advance(allowed[0])
    assert bytes(ids) == b"<call>"


def test_a_row_that_needs_too_many_states_fails_alone_and_its_format_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_child, "_STATES", 2000)
    grammar = compiled(ResponseFormat.regex("(?s:.*)a(?s:.{30})c(?s:.{5})d"), ByteTokenizer())
    chance = random.Random(1)
    text = b"zzza" + b"z" * 30 + b"czzzzzd"

    def walk() -> int:
        state, taken = grammar.begin([]), 0
        while mask := state.allowed():
            assert ids_of(mask) != [END], "it ended where it ran out"
            state.advance(chance.choice([97, 98, 99]))  # each place where an `a` may stand doubles the states
            taken += 1
            assert taken < 10_000
        return taken

    other = grammar.begin([])
    for byte in text[:10]:
        assert byte in ids_of(other.allowed())
        other.advance(byte)
    first = walk()
    for byte in text[10:]:
        assert byte in ids_of(other.allowed()), "a row beside it that needs few"
        other.advance(byte)
    assert END in ids_of(other.allowed())
    assert min(walk(), walk()) > first / 3, "later requests of the same format"


@pytest.mark.parametrize(
    ("schema", "text", "admitted"),
    [
        ({"additionalProperties": {"type": "string"}}, '{"a": 1, "\\u0061": "x"}', False),
        ({"additionalProperties": {"type": "string"}}, '{"a": 1, "b\\u000ac": "x"}', False),
        ({"additionalProperties": {"type": "string"}}, '{"a": 1, "b\\nc": 2}', True),
        ({"additionalProperties": {"type": "string"}}, '{"a": 1, "d\\n\\"\\\\": "x"}', True),
        ({"additionalProperties": {"type": "number", "minimum": -9, "maximum": 9e9}}, '{"a": 1, "d": 1e999}', False),
        ({"additionalProperties": {"exclusiveMinimum": 2, "maximum": 2.5}}, '{"a": 1, "d": 2}', False),
        ({"additionalProperties": {"exclusiveMinimum": 2, "maximum": 2.5}}, '{"a": 1, "d": 2.0000001}', True),
        ({"additionalProperties": {"minimum": -0.5, "exclusiveMaximum": 0}}, '{"a": 1, "d": -0}', False),
        ({"additionalProperties": {"minimum": -0.5, "exclusiveMaximum": 0.0}}, '{"a": 1, "d": -0.5}', True),
    ],
)
def test_what_json_is_admitted(schema: dict[str, Any], text: str, admitted: bool) -> None:
    properties = {"a": {"type": "integer"}, "b\nc": {"type": "integer"}}
    wanted = ResponseFormat.json_schema({"type": "object", "properties": properties} | schema)
    state = compiled(wanted, ByteTokenizer()).begin([])
    fits = True
    for token in [*text.encode(), END]:
        fits = fits and token in ids_of(state.allowed())
        state.advance(token)
    assert fits == admitted


WRITTEN = [chr(code) for code in range(128) if chr(code) in "\b\f\n\r\t" or 0x20 <= code < 0x7F]


@pytest.mark.parametrize(
    "pattern",
    [
        r'^[^"]$', r'^[^"\\]$', r'^[^\n"]$', r'^[^\w"]$', r'^[^-"]$', r'^[^]"]$', r'^[^[\]"]$', r'^[^^"]$', r"^[a&&b]$",
        r"^[\x00-\x1f]$", r"^[\x00-!]$", r"^[\u0000-\u007f]$", r"^[^\x00-\x1f]$", r"^[\s\S]$", r"^[+--]$", r"^[]a]$",
        r'^(?:[^"a]|b)$',
    ],
)  # fmt: skip
def test_a_pattern_admits_what_it_matches_and_nothing_else(pattern: str) -> None:
    """Of one character: quotes, backslashes and control characters are written otherwise than they are matched."""
    grammar = compiled(ResponseFormat.json_schema({"type": "string", "pattern": pattern}), ByteTokenizer())
    admitted = []
    for char in WRITTEN:
        *begin, end = json.dumps(char, ensure_ascii=False).encode()
        if end in ids_of(grammar.begin(begin).allowed()):
            admitted.append(char)
    with warnings.catch_warnings(action="ignore"):  # of sets in sets, which some day will be
        assert admitted == [char for char in WRITTEN if re.search(pattern.removesuffix("$") + r"\Z", char)]


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "a\x01"},
        {"anyOf": [{"enum": [{"a": ["\x7f"]}]}]},
        {"pattern": "^\x01$"},
        {"pattern": r"^a\u001f"},
        {"pattern": r"^[\x00]"},
        {"patternProperties": {r"\p{Cc}": {}}},
    ],
)
def test_what_only_an_escape_could_write_is_refused(schema: dict[str, Any]) -> None:
    calls = "start: %json " + json.dumps(schema)
    for wanted in (ResponseFormat.json_schema(schema), ResponseFormat.lark(calls)):
        with pytest.raises(GrammarRejected, match="control character"):
            compiled(wanted, ByteTokenizer())


def test_names_of_properties_are_no_keywords() -> None:
    def named(pattern: str) -> dict[str, Any]:
        properties = {"pattern": {"const": "\n"}, "const": {"type": "string", "pattern": pattern}}
        return {"type": "object", "properties": properties, "required": ["a\x01"], "additionalProperties": False}

    wanted, exact = named(r'^[^"]$'), named(r'^[^\x00"]$')
    assert exact_schema(wanted) == exact
    assert exact_grammar(f'start: "%json {{" %json  {json.dumps(wanted)} "}}"').endswith(f'{json.dumps(exact)} "}}"')


def test_a_grammar_may_end_with_a_special_token() -> None:
    state = compiled(ResponseFormat.lark(f'start: "x" <[{END}]>'), ByteTokenizer()).begin([])
    assert ids_of(state.allowed()) == [ord("x")]
    state.advance(ord("x"))
    assert ids_of(state.allowed()) == [END]


# -- formats that are refused -----------------------------------------------------------------------------------------


def deep(levels: int) -> str:
    return '{"type":"array","items":' * levels + "{}" + "}" * levels


def many_properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{index}": {"type": "string"} for index in range(count)}}


ENDLESS = ResponseFormat.json_schema({"type": "integer", "multipleOf": 99_999_989})
HOSTILE: dict[str, Callable[[], ResponseFormat]] = {
    "deep": lambda: ResponseFormat.json_schema(deep(300)),
    "recursive": lambda: ResponseFormat.json_schema({"$ref": "#"}),
    "explosive": lambda: ResponseFormat.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(6)]} for i in range(12)]}
    ),
    "wide": lambda: ResponseFormat.json_schema(many_properties(1500)),
    "unknown type": lambda: ResponseFormat.json_schema({"type": "strin"}),
    "unsatisfiable": lambda: ResponseFormat.json_schema({"type": "integer", "minimum": 5, "maximum": 3}),
    "not supported": lambda: ResponseFormat.json_schema({"not": {"type": "string"}}),
    "counted": lambda: ResponseFormat.json_schema({"items": {"minProperties": 2, "required": ["a"]}}),
    "told to be lenient": lambda: ResponseFormat.json_schema(
        {"enum": [1], "not": {"const": 1}, "x-guidance": {"lenient": True}}
    ),
    "no object": lambda: ResponseFormat(kind="json_schema", source="5"),
    "deeper": lambda: ResponseFormat(kind="json_schema", source="[" * 60_000),
    "open bracket": lambda: ResponseFormat.regex("("),
    "no start": lambda: ResponseFormat.lark('other: "a"'),
    "no grammar": lambda: ResponseFormat.lark("start: ("),
    "long pattern": lambda: ResponseFormat.regex("(" + "a" * 60_000),
    "many patterns at once": lambda: ResponseFormat.json_schema(
        {"allOf": [{"type": "string", "pattern": f".*{chr(97 + index)}{index}.*"} for index in range(20)]}
    ),
    "multiple of much": lambda: ENDLESS,
    "optional letters": lambda: ResponseFormat.regex("a?" * 30_000),
    "long rule": lambda: ResponseFormat.lark("start: " + "a" * 60_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_is_refused_in_time_and_nobody_else_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(grammar_trials, "_SECONDS", 0.5)

    async def ask() -> None:
        async with Engine(folder, dtype="float32", kv_memory=8 * MB) as engine, anyio.create_task_group() as tasks:
            plain = engine.stream([65], SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
            seen = []

            async def read() -> None:
                seen.extend([token.id async for token in plain])

            tasks.start_soon(read)
            wanted = HOSTILE[name]()
            begin = time.perf_counter()
            with pytest.raises(GrammarRejected) as caught:
                await engine.generate([65], hot(wanted))
            assert time.perf_counter() - begin < 8
            assert caught.value.field == "response_format" and str(caught.value).startswith("response_format: ")
            assert caught.value.limit == (0.5 if "takes longer than 0.5 s" in str(caught.value) else None)
            assert len(str(caught.value)) < 500 and repr(wanted.source)[:70] in str(caught.value)
            good = await engine.generate([65], hot(ResponseFormat.choice(["a"])))
            assert good.choices[0].text == "a"
        assert len(seen) == 150

    anyio.run(ask)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (ResponseFormat.regex("a["), "regex parse error: unclosed character class, got"),
        (ResponseFormat.json_schema({"pattern": "(?=a)b"}), "regex parse error: look-around, .* is not supported, got"),
        (ResponseFormat.json_schema({"$ref": "#"}), "response_format: no text is in it, got"),
        (ResponseFormat.lark("start: ("), "Expected token .* got"),
    ],
)
def test_a_refusal_says_why(wanted: ResponseFormat, why: str) -> None:
    with pytest.raises(GrammarRejected, match=why):
        compiled(wanted, ByteTokenizer())


@pytest.mark.parametrize(
    "make",
    [
        lambda: ResponseFormat.json_schema("{"),
        lambda: ResponseFormat.json_schema("[1]"),
        lambda: ResponseFormat.json_schema({"a": object()}),
        lambda: ResponseFormat.json_schema({"const": float("nan")}),
        lambda: ResponseFormat.json_schema(deep(100_000)),
        lambda: ResponseFormat.json_schema(many_properties(10_000)),
        lambda: ResponseFormat.regex(""),
        lambda: ResponseFormat.regex("x" * 70_000),
        lambda: ResponseFormat.choice([]),
        lambda: ResponseFormat.choice(["a", ""]),
        lambda: ResponseFormat.choice("abc"),
        lambda: ResponseFormat.choice(5),  # type: ignore[arg-type]
        lambda: ResponseFormat.choice(["\ud800"]),
        lambda: ResponseFormat.json_schema({"const": "\udfff"}),
        lambda: SamplingParams(response_format={"type": "choice", "choice": 5}),
        lambda: SamplingParams(response_format={"type": "regex", "regex": "\ud800"}),
        lambda: SamplingParams(response_format={"type": "yaml"}),
        lambda: SamplingParams(response_format={"type": "json_object", "json_object": {}}),
        lambda: SamplingParams(response_format={"type": "json_schema"}),
        lambda: SamplingParams(response_format={"type": "json_schema", "json_schema": {}}),
        lambda: SamplingParams(response_format={"type": "regex", "regex": 5}),
        lambda: SamplingParams(response_format="json"),
        lambda: SamplingParams(response_format={"kind": "regex", "source": ""}),
        lambda: SamplingParams(response_format={"type": ["regex"], "regex": "a"}),
        lambda: SamplingParams(response_format={"type": "json_schema", "json_schema": {"schema": {1: {2, 3}}}}),
    ],
)
def test_what_is_no_format_is_refused_at_once(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidParams) as caught:
        make()
    assert str(caught.value.field).startswith("response_format")


@pytest.mark.parametrize("field", ["allowed_token_ids", "forbidden_token_ids", "bad_words", "min_tokens", "ignore_eos"])
def test_masks_of_two_kinds_do_not_go_together(field: str) -> None:
    values = {
        "allowed_token_ids": [1],
        "forbidden_token_ids": [1],
        "bad_words": "a",
        "min_tokens": 1,
        "ignore_eos": True,
    }
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(response_format=ResponseFormat.regex("a"), **{field: values.get(field, [1])})
    assert caught.value.field == field


def test_a_format_is_frozen_hashable_and_survives_json() -> None:
    assert SamplingParams(response_format={"type": "text"}) == SamplingParams()
    params = SamplingParams(response_format=ResponseFormat.json_schema(SIMPLE))
    assert SamplingParams.model_validate_json(params.model_dump_json()) == params
    assert {params: 1}[SamplingParams(response_format={"type": "json_schema", "json_schema": {"schema": SIMPLE}})]


def test_a_model_without_an_end_and_a_device_without_masks_refuse(folder: Path, tmp_path: Path) -> None:
    bare = tiny_models.random_folder(tmp_path)

    async def ask() -> None:
        async with Engine(bare, load_format="random", dtype="float32", kv_memory=MB) as engine:
            with pytest.raises(InvalidParams, match="token to end with"):
                await engine.generate([1], hot(ResponseFormat.regex("a")))
        async with Unable(CAPACITY) as engine:
            with pytest.raises(InvalidParams, match="response_format"):
                await engine.generate("a", hot(ResponseFormat.regex("a")))

    anyio.run(ask)


# -- time and cancellation --------------------------------------------------------------------------------------------


def slow_schema(seed: int) -> ResponseFormat:
    """Takes more than a tenth of a second to compile."""
    return ResponseFormat.json_schema(many_properties(2000) | {"description": str(seed)})


def slow_but_good() -> ResponseFormat:
    """Takes some 0.1 s to compile."""
    return ResponseFormat.json_schema(many_properties(500) | {"additionalProperties": False})


def test_a_cancelled_request_is_not_compiled_and_too_many_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: Backend
) -> None:
    monkeypatch.setattr(grammars, "_WAITING", 64)

    async def ask() -> None:
        async with no_leaks(), Engine(folder, dtype="float32", kv_memory=8 * MB) as engine:
            streams = [engine.stream([65], hot(slow_schema(seed))) for seed in range(100)]
            with pytest.raises(Overloaded, match="64 others wait"):
                await streams[-1].admitted()
            for stream in streams:
                stream.cancel()
            with anyio.fail_after(4):  # all of them would take eight seconds
                while engine._life.grammars._waiting:  # noqa: ASYNC110 - it has no event
                    await anyio.sleep(0.01)
            assert (await engine.generate([65], hot(ResponseFormat.choice(["a"])))).choices[0].text == "a"

    anyio.run(ask, backend=anyio_backend[0], backend_options=anyio_backend[1])


def test_who_waits_too_long_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: Backend) -> None:
    monkeypatch.setattr(grammars, "_PATIENCE", 0.05)

    asked = [hot(slow_schema(seed)) for seed in range(10)]

    async def ask() -> None:
        async with Engine(folder, dtype="float32", kv_memory=8 * MB) as engine:
            streams = [engine.stream([65], params) for params in asked]
            with pytest.raises(Overloaded, match="waited 0.05 s") as caught:
                await streams[-1].admitted()
            assert caught.value.limit == 0.05

    anyio.run(ask, backend=anyio_backend[0], backend_options=anyio_backend[1])


def test_compiling_can_be_cancelled(folder: Path, anyio_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four that would take for ever in two threads: whoever leaves is not held up, nor is whoever comes after them."""
    for name in ("_SECONDS", "_PATIENCE"):
        monkeypatch.setattr(f"headrace.engine.grammar.trials.{name}", 60.0)
    endless = [ResponseFormat.json_schema(json.loads(ENDLESS.source) | {"title": str(at)}) for at in range(4)]

    async def leave(engine: Engine, wanted: ResponseFormat) -> None:
        with anyio.move_on_after(0.3):
            await engine.generate([65], hot(wanted))

    async def ask() -> None:
        async with no_leaks(), Engine(folder, dtype="float32", kv_memory=8 * MB) as engine:
            with anyio.fail_after(20):  # whoever waited for a trial would wait for 60 seconds
                async with anyio.create_task_group() as tasks:
                    for wanted in endless:
                        tasks.start_soon(leave, engine, wanted)
                assert (await engine.generate([65], hot(ResponseFormat.choice(["a"])))).choices[0].text == "a"
            slow = [ResponseFormat.regex(f"({'a?' * 600}|{letter})") for letter in "bc"]
            await engine.generate([65], hot(slow[0]))
            (child,) = engine._life.grammars._trials._children._idle
            child._process.kill()
            child._process.wait()
            await engine.generate([65], hot(slow[1]))
        assert not engine._life.grammars._trials._children._idle

    anyio.run(ask, backend=anyio_backend[0], backend_options=anyio_backend[1])


def test_without_another_process_what_may_take_long_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.frozen", True, raising=False)

    async def ask() -> None:
        async with Engine(folder, dtype="float32", kv_memory=8 * MB) as engine:
            with pytest.raises(GrammarRejected, match="no Python that could be started"):
                await engine.generate([65], hot(ENDLESS))
            assert (await engine.generate([65], hot(ResponseFormat.choice(["a"])))).choices[0].text == "a"

    anyio.run(ask)


@pytest.mark.parametrize(
    ("wanted", "slow"),
    [
        (ResponseFormat.json_object(), False),
        (ResponseFormat.choice(["a?" * 2000]), False),
        (ResponseFormat.regex("(a|b)*a(a|b){99}"), False),
        (ResponseFormat.regex("a?" * 501), True),
        (ResponseFormat.lark('start: "a" | start "b"'), False),
        (ResponseFormat.lark("start: /a/ & /b/"), True),
        (ResponseFormat.lark('start: %json {"\u006dultipleOf": 99999989}'), True),
        (ResponseFormat.lark("start: " + "a" * 4000), True),
        (ResponseFormat.json_schema(SIMPLE), False),
        (ResponseFormat.json_schema({"properties": {"pattern": SIMPLE, "multipleOf": SIMPLE}}), False),
        (ResponseFormat.json_schema({"anyOf": [{"const": {"multipleOf": 99999989}}]}), False),
        (ResponseFormat.json_schema({"items": [{"multipleOf": 7}, {"pattern": "a*"}]}), False),
        (ResponseFormat.json_schema({"items": {"anyOf": [{"multipleOf": 99999989}]}}), True),
        (ResponseFormat.json_schema('{"\u006dultipleOf": 99999989}'), True),
        (ResponseFormat.json_schema({"properties": ["multipleOf"]}), True),
        (ResponseFormat.json_schema({"$defs": {"a": {"not": {}}}}), True),
        (ResponseFormat.json_schema({"oneOf": [{"allOf": [{"multipleOf": 7}, {"multipleOf": 11}]}]}), False),
        (ResponseFormat.json_schema({"allOf": [{"multipleOf": 71}, {"multipleOf": 73}]}), True),
        (ResponseFormat.json_schema({"enum": list(range(1000))}), True),
        (ResponseFormat.json_schema({"prefixItems": [{"pattern": f"a{at}"} for at in range(4)]}), True),
        (ResponseFormat(kind="json_schema", source="[" * 60_000), True),
    ],
)
def test_what_may_take_long_is_tried_first(wanted: ResponseFormat, slow: bool) -> None:
    assert grammar_trials.may_take_long(wanted) is slow


class Panic(BaseException):
    """What a library in Rust raises where it is broken: no `Exception`."""


@pytest.mark.parametrize("place", ["begin", "advance", "allowed"])
def test_a_grammar_that_breaks_fails_its_own_request_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def broken(*_: object) -> None:
        raise Panic

    async def ask() -> None:
        async with Engine(folder, dtype="float32", kv_memory=8 * MB) as engine, anyio.create_task_group() as tasks:
            seen = []

            async def read() -> None:
                plain = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
                seen.extend([token.id async for token in engine.stream([65], plain)])

            tasks.start_soon(read)
            with pytest.raises(RequestFailed, match="no token to choose"):
                await engine.generate([65], hot(ResponseFormat.regex("[ab]{9}")))
        assert len(seen) == 100

    with monkeypatch.context() as patch:
        patch.setattr(
            compiled_grammar.CompiledGrammar if place == "begin" else compiled_grammar._Matcher, place, broken
        )
        anyio.run(ask)


def test_an_engine_closes_while_grammars_wait(folder: Path, anyio_backend: Backend) -> None:
    async def ask() -> None:
        async with no_leaks():
            async with Engine(folder, dtype="float32", kv_memory=8 * MB) as engine:
                streams = [engine.stream([65], hot(slow_schema(seed))) for seed in range(20)]
                await anyio.sleep(0.05)
                begin = time.perf_counter()
            assert time.perf_counter() - begin < 5
            for stream in streams:
                with anyio.fail_after(1), pytest.raises((EngineStopped, GrammarRejected)):
                    await stream.admitted()
            with pytest.raises(EngineStopped):
                await streams[-1].admitted()

    anyio.run(ask, backend=anyio_backend[0], backend_options=anyio_backend[1])


def test_a_format_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    compile_one = grammars.Grammars._compile
    monkeypatch.setattr(
        grammars.Grammars, "_compile", lambda self, *args: calls.append(args) or compile_one(self, *args)
    )

    async def ask() -> None:
        async with Engine(folder, dtype="float32", kv_memory=8 * MB) as engine:
            for seed in range(3):
                await engine.generate([65], hot(ResponseFormat.regex("[ab]{3}"), seed))
            together = [hot(ResponseFormat.regex("[ab]{4}"), seed) for seed in range(9)]
            assert len(await engine.generate_many([[65]] * 9, together)) == 9

    anyio.run(ask)
    assert len(calls) == 2


def test_one_slow_format_holds_up_one_thread_and_the_vocabulary_is_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    slow, go_on = ResponseFormat.regex("slow"), threading.Event()
    compile_one, vocabulary = grammars.Grammars._compile, grammars._Vocabulary

    def compile_slowly(self: grammars.Grammars, job: GrammarJob) -> object:
        if job.wanted == slow:
            assert go_on.wait(20)
        return compile_one(self, job)

    def read_slowly(opened: Opened) -> object:
        read.append(opened)
        time.sleep(0.05)
        return vocabulary(opened)

    monkeypatch.setattr(grammars.Grammars, "_compile", compile_slowly)
    monkeypatch.setattr(grammars, "_Vocabulary", read_slowly)

    async def ask() -> None:
        async with Engine(folder, dtype="float32", kv_memory=8 * MB) as engine:
            first = [engine.stream([65], hot(ResponseFormat.choice([text]))) for text in "ab"]
            for stream in first:
                await stream.admitted()
            held = engine.stream([65], hot(slow))
            with anyio.fail_after(10):
                for text in "cdef":
                    await engine.generate([65], hot(ResponseFormat.choice([text])))
            go_on.set()
            await held.admitted()

    anyio.run(ask)
    assert len(read) == 1


def test_a_drain_waits_for_what_is_still_being_prepared(folder: Path, anyio_backend: Backend) -> None:
    asked = hot(slow_but_good(), max_tokens=20)

    async def ask() -> None:
        async with no_leaks(), Engine(folder, dtype="float32", kv_memory=8 * MB) as engine:
            streams = [engine.stream([65], asked), engine.stream([65] * 1500, SamplingParams(max_tokens=1))]
            await anyio.sleep(0.01)
            await engine.aclose(drain=20)
            assert [[choice async for choice in stream] != [] for stream in streams] == [True, True]
            assert None not in [reason for stream in streams for reason in stream.finish_reasons]
            assert "cancelled" not in [reason for stream in streams for reason in stream.finish_reasons]

    anyio.run(ask, backend=anyio_backend[0], backend_options=anyio_backend[1])
