"""Texts to calibrate with: plain ones, lines of JSON, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
import tokenizer_files

from headrace.engine import InvalidParams
from headrace.engine.intake.calibration import calibration_ids, first_token
from headrace.engine.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(tiny_models.chat_folder(tmp_path_factory.mktemp("chat")))


def test_plain_text_is_cut_into_sequences_from_its_start(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "".join(f"line {number} é\n" for number in range(20_000))  # several pieces
    (tmp_path / "texts.txt").write_text(text, encoding="utf-8")
    rows = calibration_ids(tmp_path / "texts.txt", tokenizer, sequences=400, tokens=500)
    assert [len(row) for row in rows] == [500] * 400
    assert text.startswith(tokenizer.decode([token for row in rows for token in row]).removesuffix("\ufffd"))
    few = calibration_ids(tmp_path / "texts.txt", tokenizer, sequences=3, tokens=500)
    assert few == rows[:3]


def test_a_short_text_gives_what_it_has(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a" * 70)
    assert [len(row) for row in calibration_ids(tmp_path / "texts.txt", tokenizer, sequences=9, tokens=30)] == [30, 30]
    assert [len(row) for row in calibration_ids(tmp_path / "texts.txt", tokenizer, sequences=9, tokens=99)] == [70]


def test_lines_of_json_hold_texts_prompts_and_chats(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    records = [{"text": "one"}, {"id": 7, "prompt": "two"}, {"messages": chat}, {"prompt": chat[:1]}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    (row,) = calibration_ids(tmp_path / "a.jsonl", tokenizer, sequences=1, tokens=500)
    wanted = "onetwouser: Hi\nassistant: Hello\nuser: Hi\n"
    assert tokenizer.decode(row) == wanted
    assert row.count(256) == 3, "the template's own end of a message"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"ab\xff", "is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "has on line 2 none of text, messages, prompt"),
        ("a.jsonl", b'"text"\n', "has on line 1 none of text"),
        ("a.jsonl", b'{"text": 3}', "has on line 1 none of text"),
        ("a.jsonl", b"not JSON", "has on line 1 none of text"),
        ("a.jsonl", b'{"messages": [{"role": 3}]}', "has on line 1 what cannot be used"),
        ("folder", None, "cannot be read"),
        ("missing.txt", None, "cannot be read"),
    ],
)
def test_a_file_that_holds_no_texts_is_refused(
    name: str, data: bytes | None, message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    elif name == "folder":
        (tmp_path / name).mkdir()
    with pytest.raises(InvalidParams, match=message) as refused:
        calibration_ids(tmp_path / name, tokenizer, sequences=4, tokens=8)
    assert refused.value.field == "data" and str(tmp_path / name) in str(refused.value)


def test_a_text_of_the_models_own_begins_as_its_tokenizer_begins_texts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.encode("") == [] and tokenizer.eos_ids == (256,)
    assert [first_token(tokenizer, bos) for bos in (7, 0, None)] == [7, 0, 256]
    letter, text = {"SpecialToken": {"id": "!", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    known = {"!": {"id": "!", "ids": [0], "tokens": ["!"]}}
    framing = {"type": "TemplateProcessing", "single": [letter, text], "pair": [letter, text], "special_tokens": known}
    (tmp_path / "framing").mkdir()
    framed = Tokenizer.from_folder(tokenizer_files.folder(tmp_path / "framing", post_processor=framing))
    assert framed.encode("a") == [0, 64] and first_token(framed, 7) == 0


def test_a_model_whose_texts_neither_begin_nor_end_writes_none(tmp_path: Path) -> None:
    bare = Tokenizer.from_folder(tokenizer_files.folder(tmp_path))
    with pytest.raises(InvalidParams, match=r"^self_data: .* no token that begins or ends a text") as refused:
        first_token(bare, None)
    assert refused.value.field == "self_data"
