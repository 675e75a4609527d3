"""`PageLog`: which prefixes the pages hold, as others are told of them; changes nothing, and never holds a tensor.

Nothing is noted while nobody wants to know. Keys and scopes are digests under the engine's secret: they say which
prefixes are equal, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal, TypeAlias

__all__ = ["Medium", "PageLog", "PageRemoved", "PageStored"]

Medium: TypeAlias = Literal["device", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStored:
    """A request that starts as this page does finds it from now on."""

    key: str
    """Key of the page and of all that comes before it, within its scope."""
    parent: str | None
    """`key` of the page before it; None for the first."""
    scope: str
    """Who may use it: `Engine.kv_scope` gives the same for the same adapter and tenant or salt."""
    tokens: tuple[int, ...]
    """Ids of the tokens in it, as many as a page holds."""
    medium: Medium = "device"
    """`host`: it was evicted to host memory, and comes back when a request starts with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRemoved:
    """A page is not there any more, in that medium."""

    key: str
    medium: Medium = "device"


class PageLog:
    """What one page pool and its host pool hold for whoever has the same prefix."""

    def __init__(self, secret: bytes) -> None:
        """Note nothing yet; `secret` keys the digests."""
        self.is_on = False
        self.tell: Callable[[PageStored | PageRemoved], None] = _nobody
        """Called with every change while `is_on`."""
        self._secret = secret
        self._present: dict[tuple[bytes, Medium], PageStored] = {}

    def start(self, tell: Callable[[PageStored | PageRemoved], None]) -> None:
        """Note changes, and `tell` of them, from now on."""
        self.is_on = True
        self.tell = tell

    def stop(self) -> None:
        """Note nothing any more, and forget what was noted."""
        self.is_on = False
        self.tell = _nobody
        self._present.clear()

    def scope(self, root: bytes) -> str:
        """The name of those who share the chain that starts with `root`."""
        return blake2b(root, key=self._secret, digest_size=16, person=b"scope").hexdigest()

    def present(self) -> list[PageStored]:
        """What is there, of what came after `start`; a page before those that follow it, where both came in order."""
        return list(self._present.values())

    def stored(self, keys: Sequence[bytes], index: int, tokens: Sequence[int], root: bytes) -> None:
        """Page number `index` of a prefix with these keys is on the device."""
        key = keys[index]
        parent = keys[index - 1].hex() if index else None
        page = PageStored(key=key.hex(), parent=parent, scope=self.scope(root), tokens=tuple(tokens))
        self._present[key, "device"] = page
        self.tell(page)

    def spilled(self, key: bytes) -> None:
        """A page on the device is kept in host memory, too."""
        page = self._present.get((key, "device"))
        if page is not None:
            page = self._present[key, "host"] = replace(page, medium="host")
            self.tell(page)

    def removed(self, key: bytes, medium: Medium) -> None:
        """A page is gone; nothing is told of one that was never told of."""
        if self._present.pop((key, medium), None) is not None:
            self.tell(PageRemoved(key=key.hex(), medium=medium))


def _nobody(event: PageStored | PageRemoved) -> None:
    """Drop an event, as nobody has asked for any."""
