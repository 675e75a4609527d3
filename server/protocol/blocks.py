"""`BlockReader`: an answer as a row of blocks of reasoning, text and tool calls; never renders them.

Responses and messages are such rows; each form has its own names for the steps of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from headrace.engine import FinishReason
from headrace.engine.tools import Content, Event, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart, ToolParser
from headrace.server.protocol.answers import Piece

__all__ = ["Block", "BlockReader", "Step", "read_piece"]


_OF_CALLS = (ToolCallStart, ToolCallArguments, ToolCallEnd)


def read_piece(parser: ToolParser, piece: Piece, *, parallel: bool = True, only_calls: bool = False) -> list[Event]:
    """Return the events that `parser` finds in the next piece of a choice; the last piece ends the parsing.

    Args:
        parser: The parser of this choice.
        piece: The next piece.
        parallel: Whether to keep calls after the first one.
        only_calls: Whether to leave text out: where calls are forced, it can only be a part of one that was cut.
    """
    events = parser.feed(piece.text)
    if piece.finish_reason is not None:
        events = [*events, *parser.finish(cut=piece.finish_reason == "length")]
    if only_calls:
        events = [each for each in events if not isinstance(each, Content)]
    if parallel:
        return events
    return [each for each in events if not isinstance(each, _OF_CALLS) or each.index == 0]


@dataclass(slots=True)
class Block:
    """One block of an answer."""

    index: int
    """Place in the answer, from 0."""
    kind: Literal["reasoning", "text", "call"]
    call_id: str = ""
    name: str = ""
    """Name of the tool that is called."""
    complete: bool = False
    """Whether the block has ended without being cut."""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text of the block so far; for a call, the arguments as JSON."""
        return "".join(self.parts)


class Step(NamedTuple):
    """One step in the course of a block."""

    what: Literal["opened", "added", "closed"]
    block: Block
    text: str = ""
    """Text that was added, which is never empty for `added`."""


class BlockReader:
    """Reader of the pieces of one choice, which keeps the blocks that they make."""

    def __init__(self, parser: ToolParser | None, *, parallel: bool = True, only_calls: bool = False) -> None:
        """Read with `parser`, or take everything as text if it is None; the others are arguments of `read_piece`."""
        self.blocks: list[Block] = []
        self.finish_reason: FinishReason = "stop"
        """Finish reason of the choice, once the last piece has been read."""
        self.stop_string: str | None = None
        """The stop string that ended the answer, if one did."""
        self._parser = parser
        self._parallel, self._only_calls = parallel, only_calls
        self._open: Block | None = None
        self._lengths: list[int] = []  # lengths of the texts of the tokens, until the reasoning ends
        self._reasoned = 0  # characters of the completion, from its start, that are reasoning

    @property
    def complete(self) -> bool:
        """Whether the blocks hold all of the completion: it was not cut while it was parsed, and no call left out."""
        cut = self.stop_string is not None or (self._parser is not None and self.finish_reason == "length")
        return not cut and not (self.called and not self._parallel)

    @property
    def called(self) -> bool:
        """Whether a tool is called."""
        return any(block.kind == "call" for block in self.blocks)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens up to the end of the reasoning."""
        begin = count = 0
        for length in self._lengths:
            if begin >= self._reasoned:
                break
            begin += length
            count += 1
        return count

    def feed(self, piece: Piece) -> list[Step]:
        """Add the next piece, and return the steps that it makes."""
        steps: list[Step] = []
        if self._parser is None:
            self._add("text", piece.text, steps)
        else:
            self._parse(self._parser, piece, steps)
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason
            self.stop_string = piece.tokens[-1].stop_string if piece.tokens else None
            self._close(piece.finish_reason != "length", steps)
        return steps

    def _parse(self, parser: ToolParser, piece: Piece, steps: list[Step]) -> None:
        if not self.blocks or self.blocks[-1].kind == "reasoning":
            self._lengths += [len(token.text) for token in piece.tokens]
        for event in read_piece(parser, piece, parallel=self._parallel, only_calls=self._only_calls):
            if isinstance(event, Content):
                self._add("text", event.text, steps)
            elif isinstance(event, Reasoning):
                self._reasoned += len(event.raw)
                self._add("reasoning", event.text, steps)
            elif isinstance(event, ToolCallStart):
                self._begin(Block(len(self.blocks), "call", event.id, event.name), steps)
            elif isinstance(event, ToolCallArguments):
                self._add("call", event.text, steps)
            elif isinstance(event, ToolCallEnd):
                self._close(event.complete, steps)

    def _add(self, kind: Literal["reasoning", "text", "call"], text: str, steps: list[Step]) -> None:
        if not text:
            return
        block = self._open
        if block is None or block.kind != kind:
            block = self._begin(Block(len(self.blocks), kind), steps)
        block.parts.append(text)
        steps.append(Step("added", block, text))

    def _begin(self, block: Block, steps: list[Step]) -> Block:
        self._close(True, steps)
        self.blocks.append(block)
        self._open = block
        steps.append(Step("opened", block))
        return block

    def _close(self, complete: bool, steps: list[Step]) -> None:
        if self._open is not None:
            self._open.complete = complete
            steps.append(Step("closed", self._open))
            self._open = None
