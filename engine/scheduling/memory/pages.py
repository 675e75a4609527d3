"""`PagePool` records who holds which page and which prefix each full page holds; it never sees a tensor.

A page is in exactly one of four states: free (no useful content), cached (unreferenced, with a remembered prefix;
evicted least recently used first), kept (cached, but reserved for the next turn of a conversation; evicted last) or
held by one or more requests. Next to read: engine/steps/loop.py.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from struct import Struct

from headrace.engine.scheduling.memory.page_log import PageLog

__all__ = ["PagePool"]

_KEY_BYTES = 16


class PagePool:
    """Pages of `page_size` tokens, reference-counted and shared by prefix."""

    def __init__(self, num_pages: int, page_size: int, *, secret: bytes, remember: bool = True) -> None:
        """Start with every page free.

        Args:
            num_pages: Pages in the pool.
            page_size: Tokens in a page.
            secret: Key of the prefix hash (up to 64 bytes), so that nobody outside can craft a collision.
            remember: False turns the prefix cache off.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        self.refs = [0] * num_pages
        """Number of holders of each page."""
        self._keyed = blake2b(key=secret, digest_size=_KEY_BYTES)
        self._pack = Struct(f"{page_size}q").pack
        self._remember = remember
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._reservations: Counter[bytes] = Counter()
        self._partly: set[int] = set()
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self.log = PageLog(secret)
        self.on_evict: Callable[[int, bytes], None] | None = None
        """Callback for the eviction of a full page: called with the page and its prefix key before the page is
        reused."""

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can give: free, cached and kept ones."""
        return len(self._free) + len(self._cached) + len(self._kept)

    @property
    def cached(self) -> int:
        """Number of unreferenced pages whose prefix is remembered, kept ones included."""
        return len(self._cached) + len(self._kept)

    @property
    def held(self) -> int:
        """Number of pages that at least one request holds."""
        return self.num_pages - self.available

    def allocate(self) -> int | None:
        """Return a page with one holder, evicting the least recently used one if none is free; None if all are held."""
        if self._free:
            page = self._free.pop()
        elif self._cached or self._kept:
            page = self._evict()
        else:
            return None
        self.refs[page] = 1
        return page

    def _evict(self) -> int:
        """Forget the prefix that is evicted first, and return its page, which then has no holder."""
        page, _ = (self._cached or self._kept).popitem(last=False)
        if self.on_evict is not None and page not in self._partly:
            self.on_evict(page, self._key_of[page])
        self.forget(page)
        return page

    def shrink(self, num_pages: int) -> dict[int, int]:
        """Keep only pages 0 to `num_pages` - 1, evicting pages that do not fit; at most `num_pages` may be held.

        Returns:
            Old page number -> new one, for pages from `num_pages` on that still hold content.
        """
        while self.num_pages - len(self._free) > num_pages:
            self._free.append(self._evict())
        free = set(self._free)
        self._free = [page for page in self._free if page < num_pages]
        moved = {page: self._free.pop() for page in range(num_pages, self.num_pages) if page not in free}
        for page, target in moved.items():
            self.refs[target] = self.refs[page]
        del self.refs[num_pages:]
        self.num_pages = num_pages
        self._key_of = {moved.get(page, page): key for page, key in self._key_of.items()}
        self._page_of = {key: page for page, key in self._key_of.items()}
        self._cached = OrderedDict.fromkeys(moved.get(page, page) for page in self._cached)
        self._kept = OrderedDict.fromkeys(moved.get(page, page) for page in self._kept)
        self._partly = {moved.get(page, page) for page in self._partly}
        return moved

    def grow(self, num_pages: int) -> None:
        """Have pages 0 to `num_pages` - 1, at least as many as before; the new ones are free."""
        self._free[:0] = range(num_pages - 1, self.num_pages - 1, -1)
        self.refs += [0] * (num_pages - self.num_pages)
        self.num_pages = num_pages

    def share(self, page: int) -> None:
        """Add a holder to a held or cached page."""
        if self.refs[page] == 0:
            del self._place_of(page)[page]
        self.refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one holder of each page; among pages left without one, later pages of a prefix are evicted first."""
        for page in reversed(pages):
            self.refs[page] -= 1
            if self.refs[page] == 0:
                if page in self._key_of:
                    self._place_of(page)[page] = None
                else:
                    self._free.append(page)

    def keep(self, keys: Iterable[bytes]) -> None:
        """Evict the pages with these keys after all others, until `unkeep`; calls nest."""
        for key in keys:
            self._move(key, 1)

    def unkeep(self, keys: Sequence[bytes]) -> None:
        """Undo one `keep` of these keys."""
        for key in reversed(keys):
            self._move(key, -1)

    def is_writable(self, page: int) -> bool:
        """Return whether the only holder of `page` may append to it, which it may not if the page is full or kept."""
        key = self._key_of.get(page)
        return self.refs[page] == 1 and (key is None or (page in self._partly and key not in self._reservations))

    def _move(self, key: bytes, change: int) -> None:
        page = self._page_of.get(key)
        is_idle = page is not None and self.refs[page] == 0
        if page is not None and is_idle:
            del self._place_of(page)[page]
        self._reservations[key] += change
        if not self._reservations[key]:
            del self._reservations[key]
        if page is not None and is_idle:
            self._place_of(page)[page] = None

    def _place_of(self, page: int) -> OrderedDict[int, None]:
        """Return the eviction queue of a page that has a key, for while it has no holder."""
        return self._kept if self._key_of[page] in self._reservations else self._cached

    def extend_keys(self, keys: list[bytes], tokens: Sequence[int], root: bytes) -> None:
        """Append the chained hash of every further full page of `tokens` to `keys`.

        Each key is BLAKE2b, keyed with the pool's secret, over the key before it and the page's token ids, so that
        a key stands for the whole prefix. `root` starts the chain: adapter and tenant salt.
        """
        size = self.page_size
        for start in range(len(keys) * size, len(tokens) - size + 1, size):
            keys.append(self._link(keys[-1] if keys else root, self._pack(*tokens[start : start + size])))

    def key_of_rest(self, keys: Sequence[bytes], tokens: Sequence[int], root: bytes) -> bytes:
        """Return the key of a partly full page that holds the last of `tokens`, after the full pages with `keys`."""
        return self._link(keys[-1] if keys else root, array("q", tokens[len(keys) * self.page_size :]).tobytes())

    def _link(self, before: bytes, ids: bytes) -> bytes:
        link = self._keyed.copy()
        link.update(before)
        link.update(ids)
        return link.digest()

    def page_of(self, key: bytes) -> int | None:
        """Return the page that holds the prefix `key`; None if none is remembered."""
        return self._page_of.get(key)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages that hold the longest remembered prefix of `keys`; the caller must `share` those it uses."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def register(self, page: int, key: bytes) -> bool:
        """Remember that a held, full `page` holds the prefix `key`, unless another page already does."""
        if not self._remember or key in self._page_of:
            return False
        if page in self._partly:
            self.forget(page)
        if page in self._key_of:
            return False
        self._page_of[key] = page
        self._key_of[page] = key
        return True

    def register_rest(self, page: int, key: bytes) -> None:
        """Remember the prefix `key` of a partly full page, until a key of more tokens replaces it."""
        self.register(page, key)
        if self._key_of.get(page) == key:
            self._partly.add(page)

    def forget(self, page: int) -> None:
        """Stop offering `page` to others; it becomes free if it has no holder."""
        key = self._key_of.pop(page, None)
        if key is None:
            return
        del self._page_of[key]
        self._partly.discard(page)
        if self.log.is_on:
            self.log.removed(key, "device")
        for idle in (self._cached, self._kept):
            if page in idle:
                del idle[page]
                self._free.append(page)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that `holders` (the block tables of all requests) explain every reference, and no page is lost.

        Raises:
            AssertionError: The pool is inconsistent, which is a defect of headrace.
        """
        counts = [0] * self.num_pages
        for pages in holders:
            assert len(set(pages)) == len(pages), f"a page appears twice in one page table: {pages}"
            for page in pages:
                counts[page] += 1
        assert counts == self.refs, "reference counts differ from the page tables"
        free, cached, kept = set(self._free), set(self._cached), set(self._kept)
        assert len(free) == len(self._free), "a page is free twice"
        idle = free | cached | kept
        assert len(idle) == self.available, "a page is in two of free, cached and kept"
        assert {page for page, refs in enumerate(self.refs) if refs == 0} == idle, "a page is lost, or idle and used"
        assert all(page in self._key_of for page in cached | kept), "a cached page has no key"
        assert {page for page in cached | kept if self._key_of[page] in self._reservations} == kept, (
            "a page is kept for nobody"
        )
        assert self._partly <= self._key_of.keys(), "a page without a key is said to be partly full"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "keys and pages differ"
