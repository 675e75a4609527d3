"""`ReasoningTags`: how models mark reasoning and the answer behind it, found by chat template; reads no completion.

Next to read: parser.py, which splits a completion by such tags.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

__all__ = ["THINK", "ReasoningTags", "find_tags"]


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """Marks around the reasoning at the start of a completion; the defaults are those of most models.

    Where there are several marks in a field, a model writes any of them, and grammars write the first.
    """

    opens: tuple[str, ...] = ("<think>",)
    """Marks at which reasoning begins."""
    closes: tuple[str, ...] = ("</think>",)
    """Marks at which reasoning ends."""
    answer: tuple[str, str] | None = None
    """Marks before and behind the content, which are no part of it; a model may leave them out."""
    prompts: tuple[str, ...] = ()
    """More ends of a prompt within reasoning, beside `opens`."""
    keeps_special_tokens: bool = False
    """Whether the marks are special tokens, which the completion's text must then keep."""

    def are_open(self, text: str) -> bool:
        """Return whether `text`, the beginning of a completion, ends within reasoning."""
        return max(map(text.rfind, self.opens)) > max(map(text.rfind, self.closes))

    def end(self, prompt: str) -> bool:
        """Return whether a rendered prompt ends with a mark at which reasoning begins."""
        return prompt.rstrip().endswith(self.opens + self.prompts)


THINK: Final = ReasoningTags()

# What a chat template contains, and the tags of its model; the first that fits counts.
_KNOWN: Final[tuple[tuple[str, ReasoningTags], ...]] = (
    (
        "<|channel|>",  # gpt-oss
        ReasoningTags(
            ("<|channel|>analysis<|message|>",),
            ("<|end|><|start|>assistant",),
            ("<|channel|>final<|message|>", ""),
            keeps_special_tokens=True,
        ),
    ),
    (
        "<|channel>thought",  # Gemma 4
        ReasoningTags(("<|channel>thought\n", "<|channel>thought"), ("<channel|>",), keeps_special_tokens=True),
    ),
    (
        "<seed:think>",
        ReasoningTags(
            ("<seed:think>",),
            ("</seed:think>",),
            prompts=("<seed:think><seed:cot_budget_reflect>",),
            keeps_special_tokens=True,
        ),
    ),
    ("[THINK]", ReasoningTags(("[THINK]",), ("[/THINK]",), keeps_special_tokens=True)),
    (
        "<|START_THINKING|>",
        ReasoningTags(
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>",),
            ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            keeps_special_tokens=True,
        ),
    ),
    (
        "Here is my thought process:",  # Granite 3.2
        ReasoningTags(
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
        ),
    ),
    ("<think>", THINK),
    ("</think>", THINK),
)
# Marks around the answer, of models that reason in `<think>`: Granite 3.3 and ERNIE 4.5, Hunyuan.
_ANSWERS: Final = (("<response>", "</response>"), ("<answer>", "</answer>"))


def find_tags(chat_template: str) -> ReasoningTags | None:
    """Return how the model of a chat template marks its reasoning; None if it does not reason."""
    tags = next((tags for marker, tags in _KNOWN if marker in chat_template), None)
    if tags is THINK:
        answer = next((pair for pair in _ANSWERS if pair[0] in chat_template), None)
        return replace(tags, answer=answer)
    return tags
