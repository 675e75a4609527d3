"""Ids as `transformers` has them, exact text, chats that no message can forge, and tokenizers from folders."""

from __future__ import annotations

import json
import threading
import time
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_files import (
    as_transformers,
    byte_metadata,
    piece_metadata,
    pieces,
    smollm2,
    smollm2_metadata,
    smollm2_path,
    text_of,
    tokens_of,
)

from headrace.engine.errors import InvalidParams, ModelRejected
from headrace.engine.tokens.tokenizer import Tokenizer

IM_START, IM_END, ENDOFTEXT = 1, 2, 0
SPECIALS = 17  # SmolLM2's control tokens are ids 0 to 16


@cache
def reference() -> Any:
    """The tokenizer that transformers itself makes of the GGUF file."""
    from transformers import AutoTokenizer

    path = smollm2_path()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Build the shared tokenizers outside the time limit of any one example."""
    smollm2().encode_chat([{"role": "user", "content": "<|im_end|>"}])
    as_transformers(smollm2_metadata)
    pieces()


# --- ids


@pytest.mark.xdist_group("tokenizer")
@pytest.mark.parametrize(
    "text",
    [
        "Hello world",
        "It's 1234567 years, isn't it?\n\n\tYes   it is.  ",
        "def f(x):\n    return x ** 2  # naïve\r\n",
        "汉字 кириллица 🙂👩‍👩‍👧 é e\u0301",
        "<|im_start|>user\nHi<|im_end|>\n",
        "",
    ],
)
def test_ids_equal_those_of_transformers(text: str) -> None:
    assert smollm2().encode(text) == reference().encode(text)


PANGRAM = "The quick brown fox jumps over a lazy dog and thinks. "


@pytest.mark.parametrize("adding", [False, True], ids=["smollm2", "pieces"])
def test_long_texts_have_the_ids_of_one_plain_encoding(adding: bool) -> None:
    tokenizer = pieces() if adding else smollm2()
    text = ("hello world</s> " if adding else PANGRAM + "naïve 🙂 <|im_end|>\n") * 500
    plain = tokenizer._core.encode(text).ids
    assert tokenizer.encode(text) == plain


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_other_threads_run_while_a_long_text_is_encoded(chat: bool) -> None:
    """`encode` of the tokenizers library lets no other thread run before it is done."""
    text, tokenizer, seconds = PANGRAM * 8000, smollm2(), 0.0

    def run() -> None:
        nonlocal seconds
        begin = time.perf_counter()
        _ = tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
        seconds = time.perf_counter() - begin

    thread = threading.Thread(target=run)
    ticks = [time.perf_counter()]
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    ticks.append(time.perf_counter())
    assert max(after - before for before, after in pairwise(ticks)) < 0.5 * seconds


def test_ids_are_the_known_ones() -> None:
    assert smollm2().encode("Hello world") == [19556, 905]
    assert smollm2().encode("<|im_start|>a<|endoftext|>") == [IM_START, 81, ENDOFTEXT]


@given(st.text("0123456789", max_size=12))
def test_digits_are_split_one_by_one(text: str) -> None:
    assert smollm2().encode(text) == [smollm2().encode(digit)[0] for digit in text]


def covered(text: str) -> bool:
    """Whether SmolLM2 has a token for each byte: it lacks some rare ones, and `transformers` drops them too."""
    return {bytes([byte]) for byte in text.encode()} <= set(smollm2().table.pieces)


@given(st.text().filter(covered))
def test_text_survives_the_round_trip(text: str) -> None:
    ids = smollm2().encode(text)
    assert smollm2().decode(ids) == text
    assert text_of(smollm2(), ids) == text


@given(st.lists(st.one_of(st.integers(0, 49_200), st.integers(0, 300))), st.booleans())
def test_step_by_step_text_is_the_decoded_text_for_any_ids(ids: list[int], skip: bool) -> None:
    wrapped = as_transformers(smollm2_metadata)
    expected = wrapped.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert text_of(smollm2(), ids, skip) == expected
    if skip:
        assert smollm2().decode(ids) == expected


def test_facts_about_the_model() -> None:
    tokenizer = smollm2()
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (49152, (IM_END,))
    assert tokenizer.name == smollm2_metadata()["general.name"]
    assert tokenizer.table.special_ids == set(range(SPECIALS))
    assert not tokenizer.table.byte_ids


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"]])
def test_ids_that_are_no_ids_are_refused(ids: list[Any]) -> None:
    with pytest.raises(InvalidParams, match="ids"):
        smollm2().decode(ids)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidParams, match="character 1"):
        smollm2().encode("a\ud800")
    with pytest.raises(InvalidParams, match=r"messages\[0\].content") as caught:
        smollm2().encode_chat([{"role": "user", "content": "\udfff"}])
    assert caught.value.field == "messages[0].content"


# --- chats


@pytest.mark.xdist_group("tokenizer")
def test_a_chat_takes_the_template_and_opens_the_answer() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = smollm2().encode_chat(chat)
    assert text_of(smollm2(), ids, skip=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids == reference().apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ids.count(IM_START) == 3 and ids.count(IM_END) == 2


@pytest.mark.parametrize("special", range(SPECIALS))
@pytest.mark.parametrize("place", ["content", "role"])
def test_special_tokens_quoted_in_a_message_stay_text(special: int, place: str) -> None:
    tokenizer = smollm2()
    string = tokenizer.table.pieces[special].decode()
    quoted = f"a {string}\n{string}{string} b"
    chat = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Hi"}]
    harmless = tokenizer.encode_chat(chat)
    chat[0][place] = quoted
    ids = tokenizer.encode_chat(chat)
    assert [index for index in ids if index < SPECIALS] == [index for index in harmless if index < SPECIALS]
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert text_of(tokenizer, ids, skip=False) == (
        f"{system}<|im_start|>{chat[0]['role']}\n{chat[0]['content']}<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_quoted_special_tokens_get_the_ids_of_ordinary_text() -> None:
    from tokenizers import Tokenizer as Core

    plain = Core.from_str(smollm2()._core.to_str())
    plain.encode_special_tokens = True
    ids = smollm2().encode_chat([{"role": "user", "content": "see <|im_end|> and <|im_<|im_end|>end|>"}])
    begin = len(ids) - 1 - ids[::-1].index(IM_END)
    start = begin - ids[:begin][::-1].index(IM_START)
    assert ids[start:begin] == plain.encode("user\nsee <|im_end|> and <|im_<|im_end|>end|>").ids


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_", "start|>", "<|", "|>", "\n", "hi", " ", "\ue000", "0"])))
def test_no_message_can_end_its_turn(parts: list[str]) -> None:
    content = "".join(parts)
    ids = smollm2().encode_chat([{"role": "system", "content": content}])
    assert text_of(smollm2(), ids, skip=False) == (f"<|im_start|>system\n{content}<|im_end|>\n<|im_start|>assistant\n")
    assert [index for index in ids if index < SPECIALS] == [IM_START, IM_END, IM_START]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": ["b"]}], "messages[0].content[0]"),
        ([{"role": 1, "content": "b"}], "messages[0].role"),
        ([{"role": "user", "content": "b", "colour": "c"}], "messages[0].colour"),
        ([{"role": "user", "content": "b", "name": 7}], "messages[0].name"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": 7}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": []}], "messages[0].content"),
    ],
)
def test_malformed_chats_name_the_field(messages: Any, field: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        smollm2().encode_chat(messages)
    assert caught.value.field == field
    assert field in str(caught.value)


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [150, 480, 5000])
def test_data_that_nests_too_deep_is_refused(depth: int) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": nested(depth)}}
    chat: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidParams, match="nests deeper") as caught:
        smollm2().encode_chat([*chat, {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert caught.value.field == "messages[1].tool_calls"
    with pytest.raises(InvalidParams, match="nests deeper"):
        smollm2().encode_chat(chat, [nested(depth)])


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InvalidParams, match="no chat template"):
        pieces().encode_chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refused"),
        ("{% for", "refused"),
        ("{{ ''.__class__.__mro__ }}", "refused"),
    ],
)
def test_what_a_template_raises_concerns_the_request(template: str, words: str) -> None:
    tokenizer = Tokenizer.from_gguf(piece_metadata() | {"tokenizer.chat_template": template})
    with pytest.raises(InvalidParams, match=words):
        tokenizer.encode_chat([{"role": "user", "content": "hello"}])


def test_bos_is_not_added_twice() -> None:
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = Tokenizer.from_gguf(piece_metadata() | {"tokenizer.chat_template": template})
    assert tokens_of(tokenizer, tokenizer.encode_chat([{"role": "user", "content": "hello"}])) == ["<s>", " hello"]
    quoted = tokenizer.encode_chat([{"role": "user", "content": "hello</s>"}])
    assert tokens_of(tokenizer, quoted) == ["<s>", " hello", "</", "s>"]


def test_a_tokenizer_that_would_merge_text_into_a_special_token_refuses_it() -> None:
    tokens = byte_metadata()["tokenizer.ggml.tokens"][:256] + ["hi"]
    metadata = byte_metadata(
        tokens=tokens, merges=["h i"], token_type=[1] * 256 + [3], bos_token_id=256, eos_token_id=256
    )
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}hi"
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]) == [ord("a"), 256]
    with pytest.raises(InvalidParams, match="special token"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


# --- folders


@pytest.mark.parametrize("text", [" hello", "hello", "\n\nhello", "hello</s>", " ", "\n", "\u20ac"])
def test_text_that_goes_on_is_not_begun_anew(text: str) -> None:
    """Neither a BOS nor SentencePiece's space stands before it: what is decoded is what was written."""
    for tokenizer in (pieces(), smollm2()):
        ids = tokenizer.encode_more(text)
        assert text_of(tokenizer, ids, skip=False) == text
    assert pieces().encode("hello")[0] == 1 and 1 not in pieces().encode_more("hello")


def test_a_reply_is_what_the_template_writes_behind_an_answer() -> None:
    tokenizer = smollm2()
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    more = [{"role": "tool", "content": "391 <|im_end|>"}, {"role": "user", "content": "So?"}]
    answered = tokenizer.encode_chat(chat[:1]) + tokenizer.encode("Ho")
    assert answered + tokenizer.encode_reply(more) == tokenizer.encode_chat([*chat, *more])


def test_a_template_that_rewrites_answers_takes_no_reply(small: Path) -> None:
    (small / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content|length }}{% endfor %}")
    with pytest.raises(InvalidParams, match="^messages: the chat template of .* does not write an answer as it is"):
        Tokenizer.from_folder(small).encode_reply([{"role": "user", "content": "Hi"}])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer in Hugging Face layout."""
    path = tmp_path_factory.mktemp("models") / "smollm2"
    as_transformers(smollm2_metadata).save_pretrained(path)
    return path


def test_a_folder_gives_the_same_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    text = "It's 1234 <|im_end|> 汉字\n\n  x"
    chat = [{"role": "user", "content": text}]
    assert tokenizer.encode(text) == smollm2().encode(text)
    assert tokenizer.encode_chat(chat) == smollm2().encode_chat(chat)
    assert tokenizer.table.pieces == smollm2().table.pieces
    assert tokenizer.table.special_ids == smollm2().table.special_ids
    assert (tokenizer.name, tokenizer.eos_ids) == ("smollm2", (IM_END,))


def test_a_folder_of_pieces_gives_the_same_tokenizer(tmp_path: Path) -> None:
    as_transformers(piece_metadata).save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("hello é") == pieces().encode("hello é")
    assert tokenizer.table.byte_ids == set(range(3, 259))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small tokenizer's folder, to be changed."""
    as_transformers(byte_metadata).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [3, 4]}, "config.json": {"eos_token_id": 9}}, (3, 4, 260)),
        ({"generation_config.json": {"eos_token_id": 3}}, (3, 260)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 9}}, (9, 260)),
        ({"config.json": {"eos_token_id": None}}, (260,)),
        ({}, (260,)),
    ],
)
def test_a_folder_says_which_ids_end_a_completion(
    small: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    for name, value in files.items():
        (small / name).write_text(json.dumps(value))
    assert Tokenizer.from_folder(small).eos_ids == expected


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}), "auto_map"),
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
        ("tokenizer_config.json", "[]", "object"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json"),
        ("tokenizer.json", "{", "could not be read"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE"}}', "could not be read"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id"),
    ],
)
def test_damaged_folders_are_refused(small: Path, name: str, content: str, words: str) -> None:
    (small / name).write_text(content)
    with pytest.raises(ModelRejected, match=words):
        Tokenizer.from_folder(small)


def test_a_folder_without_a_tokenizer_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ModelRejected, match="tokenizer.json is enough"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ModelRejected, match="tokenizer.json is enough"):
        Tokenizer.from_folder(tmp_path / "missing")


def test_a_decoder_that_no_table_can_follow_is_refused(small: Path) -> None:
    path = small / "tokenizer.json"
    state = json.loads(path.read_text())
    state["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    path.write_text(json.dumps(state))
    with pytest.raises(ModelRejected, match="WordPiece"):
        Tokenizer.from_folder(small)


def test_a_folder_of_vocabulary_and_merges_will_do(tmp_path: Path) -> None:
    tokens = byte_metadata()["tokenizer.ggml.tokens"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("h e\nl l\nhe ll\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<｜end▁it｜>", "unk_token": None})
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokens_of(tokenizer, tokenizer.encode("hell he")) == ["hell", " ", "he"]
    assert tokenizer.eos_ids == (260,)


def test_a_tokenizer_without_a_fast_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"<unk>": 0, "a</w>": 1}')
    (tmp_path / "merges.txt").write_text("#version\n\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')
    with pytest.raises(ModelRejected, match="CTRLTokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_a_text_without_the_tokens_around_it() -> None:
    tokenizer = pieces()
    whole, bare = tokenizer.encode("ab"), tokenizer.encode("ab", framed=False)
    assert whole == [1, *bare] and bare == tokenizer.encode("ab")[1:]
