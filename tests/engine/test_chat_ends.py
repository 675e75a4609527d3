"""How the token ids of a chat end: ready for an answer, closed, left open to be continued, or behind an answer."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from scripted import CAPACITY
from tokenizer_files import as_transformers, byte_metadata

from headrace.engine import InvalidParams
from headrace.engine.testing import ScriptedEngine
from headrace.engine.tokens.tokenizer import Tokenizer

USER = {"role": "user", "content": "Say it."}
END = "<\uff5cend\u2581it\uff5c>"
PROMPT = "{% if add_generation_prompt %}<a>{% endif %}"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + END + "{% endfor %}" + PROMPT
TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}" + END + "{% endfor %}" + PROMPT
NEVER = "{% for m in messages %}{{ m.content | length }}{% endfor %}"


def metadata(template: str) -> dict[str, Any]:
    """Return the metadata of a small tokenizer with a chat template."""
    return byte_metadata(chat_template=template) | {"tokenizer.chat_template": template}


@cache
def speaker(template: str) -> Tokenizer:
    """Make that tokenizer."""
    return Tokenizer.from_gguf(metadata(template))


def rendered(template: str, chat: list[dict[str, str]], **options: Any) -> list[int]:
    """What transformers gives."""
    reference = as_transformers(lambda: metadata(template))
    found: list[int] = list(reference.apply_chat_template(chat, tokenize=True, return_dict=False, **options))
    return found


@pytest.mark.parametrize("template", [PLAIN, TRIMS])
@pytest.mark.parametrize("text", ["Sure: ", "Sure:", "a\n\n", "a"])
def test_the_ends_are_those_of_transformers(template: str, text: str) -> None:
    tokenizer = speaker(template)
    chat = [USER, {"role": "assistant", "content": text}]
    opened, closed, answer = (tokenizer.encode_chat(chat, end=end) for end in ("open", "closed", "answer"))
    assert opened == rendered(template, chat, continue_final_message=True)
    assert closed == rendered(template, chat, add_generation_prompt=False)
    assert answer == rendered(template, chat, add_generation_prompt=True) == tokenizer.encode_chat(chat)
    assert len(opened) < len(closed) < len(answer)


def test_special_tokens_in_what_is_continued_stay_text() -> None:
    tokenizer = speaker(PLAIN)
    ids = tokenizer.encode_chat([USER, {"role": "assistant", "content": f"see {END}"}], end="open")
    plain = tokenizer.encode_chat([USER, {"role": "assistant", "content": "see "}], end="open")
    assert ids[: len(plain)] == plain and len(ids) > len(plain) + 2 and 260 not in ids[len(plain) :]


def test_what_the_template_does_not_write_cannot_be_continued() -> None:
    with pytest.raises(InvalidParams, match="^messages: the chat template of .* does not write the last one"):
        speaker(NEVER).encode_chat([USER], end="open")


@pytest.mark.anyio
async def test_an_engine_tokenizes_with_every_end() -> None:
    chat = [USER, {"role": "assistant", "content": "Sure"}]
    async with ScriptedEngine(CAPACITY) as engine:
        text = {
            name: engine.detokenize(await engine.tokenize(chat, **options))
            for name, options in (
                ("answer", {}),
                ("closed", {"add_generation_prompt": False}),
                ("open", {"continue_final_message": True, "add_generation_prompt": False}),
            )
        }
        assert text["open"] == "user: Say it.\nassistant: Sure" and text["closed"] == text["open"] + "\n"
        before = [*b"before"]
        after = await engine.tokenize([USER], after=before)
        assert engine.detokenize(after) == "before\nuser: Say it.\n"
        with pytest.raises(InvalidParams, match="continue_final_message"):
            await engine.tokenize(chat, continue_final_message=True, add_generation_prompt=True)
        with pytest.raises(InvalidParams, match="after"):
            await engine.tokenize(chat, continue_final_message=True, after=before)
