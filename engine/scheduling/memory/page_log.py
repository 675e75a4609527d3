"""`PageLog` tells listeners which prefixes the pages hold; it changes no page and never holds a tensor.

Nothing is recorded while nobody listens. Keys and scopes are digests under the engine's secret: they reveal which
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
    """Event: requests that start with the same tokens as this page now find it in the cache."""

    key: str
    """Key of the page and of all tokens before it, within its scope."""
    parent: str | None
    """Key of the page before it; None for the first page."""
    scope: str
    """Scope of sharing: `Engine.kv_scope` returns the same value for the same adapter and tenant or salt."""
    tokens: tuple[int, ...]
    """Token ids in the page, as many as a page holds."""
    medium: Medium = "device"
    """Memory that holds the page; `host` if it was evicted to host memory and is fetched when a request starts with
    it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRemoved:
    """Event: a page is no longer in the given medium."""

    key: str
    medium: Medium = "device"


class PageLog:
    """Cached prefixes of one page pool and its host pool, as events for listeners."""

    def __init__(self, secret: bytes) -> None:
        """Record nothing yet; `secret` keys the digests."""
        self.is_on = False
        self.tell: Callable[[PageStored | PageRemoved], None] = _nobody
        """Listener, called with every event while `is_on`."""
        self._secret = secret
        self._present: dict[tuple[bytes, Medium], PageStored] = {}

    def start(self, tell: Callable[[PageStored | PageRemoved], None]) -> None:
        """Record changes from now on, and call `tell` with each."""
        self.is_on = True
        self.tell = tell

    def stop(self) -> None:
        """Stop recording, and forget all recorded pages."""
        self.is_on = False
        self.tell = _nobody
        self._present.clear()

    def scope(self, root: bytes) -> str:
        """Return the name of the scope whose prefix hash chain starts with `root`."""
        return blake2b(root, key=self._secret, digest_size=16, person=b"scope").hexdigest()

    def present(self) -> list[PageStored]:
        """Return the pages recorded since `start` that are still there, in the order in which they were recorded."""
        return list(self._present.values())

    def stored(self, keys: Sequence[bytes], index: int, tokens: Sequence[int], root: bytes) -> None:
        """Record that page `index` of a prefix with these keys is on the device."""
        key = keys[index]
        parent = keys[index - 1].hex() if index else None
        page = PageStored(key=key.hex(), parent=parent, scope=self.scope(root), tokens=tuple(tokens))
        self._present[key, "device"] = page
        self.tell(page)

    def spilled(self, key: bytes) -> None:
        """Record that a page on the device is kept in host memory, too."""
        page = self._present.get((key, "device"))
        if page is not None:
            page = self._present[key, "host"] = replace(page, medium="host")
            self.tell(page)

    def removed(self, key: bytes, medium: Medium) -> None:
        """Record that a page is gone; do nothing if it was never recorded."""
        if self._present.pop((key, medium), None) is not None:
            self.tell(PageRemoved(key=key.hex(), medium=medium))


def _nobody(event: PageStored | PageRemoved) -> None:
    """Drop an event, since nobody listens."""
