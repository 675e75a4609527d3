"""`SeedOss` and `Qwen3Coder`: calls as `<function=name>` with an element for each argument."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from headrace.engine.tools.machine import Reading
from headrace.engine.tools.parameters import ParameterParser
from headrace.engine.tools.shapes import ArgumentTags, CallShape, CallStructure

__all__ = ["Qwen3Coder", "SeedOss"]


class Qwen3Coder(ParameterParser):
    """Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` for each call.

    The line feeds around a value are no part of it.
    """

    markers = ("<parameter=",)
    foreign_markers: tuple[str, ...] = ("<seed:tool_call>",)
    outer: ClassVar[tuple[str, str]] = ("<tool_call>", "</tool_call>")
    tags: ClassVar[ArgumentTags] = ArgumentTags("<parameter=", ">\n", "</parameter>", "\n")

    trims: ClassVar[bool] = True

    def read(self) -> Reading[None]:
        """Read text and calls in any order."""
        while (yield from self.text_until((self.outer[0],))):
            yield from self.attempt(self._call())

    def _call(self) -> Reading[None]:
        yield from self.space()
        yield from self.expect("<function=")
        name = yield from self.word("-.")
        yield from self.expect(">")
        yield from self.space()
        self.begin_arguments(name)
        while (yield from self.accept("<parameter=")):
            yield from self.argument(">", "</parameter>", trims=self.trims)
            yield from self.space()
        yield from self.expect("</function>")
        self.end_arguments()
        yield from self.space()
        yield from self.accept(self.outer[1])
        yield from self.space()

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return the structure of calls as the model's template writes them."""
        before, after = cls.outer
        calls = tuple(
            replace(
                shape,
                before=f"{before}\n<function={shape.name}>\n",
                after=f"</function>\n{after}",
                style="tagged",
                tags=cls.tags,
            )
            for shape in shapes
        )
        return CallStructure("", calls, "\n", "", maximum)


class SeedOss(Qwen3Coder):
    """Seed-OSS: as Qwen3-Coder writes calls, in `<seed:tool_call>` and without line feeds around values."""

    markers = ("<seed:tool_call>",)
    foreign_markers = ()
    keeps_special_tokens = True
    outer = ("<seed:tool_call>", "</seed:tool_call>")
    trims = False
    tags = ArgumentTags("<parameter=", ">", "</parameter>", "\n")
