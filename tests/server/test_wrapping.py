"""Words of a streamed text stay whole at the terminal's margin."""

from __future__ import annotations

import pytest

from headrace.server.commands.wrapping import WordWrap


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_words_wrap_whole_however_they_come(size: int) -> None:
    text = "one two three four\n  indented words\nabcdefghijklmnopqrstuvwxyz end\n\na漢字漢字漢字漢字 b\tc"
    wrap = WordWrap(lambda: 10)
    pieces = [wrap.take(text[start : start + size]) for start in range(0, len(text), size)]
    assert "".join(pieces) + wrap.end() == (
        "one two\nthree four\n  indented\nwords\nabcdefghijklmnopqrstuvwxyz end\n\na漢字漢字\n漢字漢字 b\nc"
    )
