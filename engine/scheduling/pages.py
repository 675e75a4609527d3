"""`PagePool`: who holds which page, and which prefix each full page holds; counts integers, never sees a tensor.

A page is in exactly one of three places: free (nothing worth keeping), cached (unreferenced, but its prefix is
remembered; evicted least recently used first) or held by one or more requests. Next to read: ../loop.py.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

__all__ = ["PagePool"]

_KEY_BYTES = 16


class PagePool:
    """A fixed number of pages of `page_size` tokens, reference-counted and shared by prefix."""

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
        """Holders of each page."""
        self._secret = secret
        self._remember = remember
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free ones and unreferenced cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Unreferenced pages whose prefix is remembered."""
        return len(self._cached)

    @property
    def held(self) -> int:
        """Pages that at least one request holds."""
        return self.num_pages - self.available

    def allocate(self) -> int | None:
        """Give one page with one holder, evicting the least recently used cached page if none is free; None if full."""
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            self.forget(page)
        else:
            return None
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a holder to a held or cached page."""
        if self.refs[page] == 0:
            del self._cached[page]
        self.refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one holder of each page; of those nobody holds, the later pages of a prefix are evicted first."""
        for page in reversed(pages):
            self.refs[page] -= 1
            if self.refs[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def extend_keys(self, keys: list[bytes], tokens: Sequence[int], root: bytes) -> None:
        """Append the chained hash of every further full page of `tokens` to `keys`.

        Each key is BLAKE2b, keyed with the pool's secret, over the key before it and the page's token ids, so that
        a key stands for the whole prefix. `root` starts the chain: adapter and tenant salt.
        """
        size = self.page_size
        for start in range(len(keys) * size, len(tokens) - size + 1, size):
            link = blake2b(keys[-1] if keys else root, key=self._secret, digest_size=_KEY_BYTES)
            link.update(array("q", tokens[start : start + size]).tobytes())
            keys.append(link.digest())

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The pages that hold the longest remembered prefix of `keys`; the caller must `share` those it takes."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def register(self, page: int, key: bytes) -> None:
        """Remember that a held, full `page` holds the prefix `key`; a page that already holds it stays the one."""
        if self._remember and key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget(self, page: int) -> None:
        """Stop offering `page` to others; if nobody holds it, it becomes free."""
        key = self._key_of.pop(page, None)
        if key is None:
            return
        del self._page_of[key]
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that `holders` (the page tables of all requests) explain every reference, and every page is somewhere.

        Raises:
            AssertionError: The pool is inconsistent: a defect of headrace.
        """
        counts = [0] * self.num_pages
        for pages in holders:
            assert len(set(pages)) == len(pages), f"a page appears twice in one page table: {pages}"
            for page in pages:
                counts[page] += 1
        assert counts == self.refs, "reference counts differ from the page tables"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, "a page is both free and cached"
        assert all((self.refs[page] == 0) == (page in free or page in cached) for page in range(self.num_pages))
        assert all(page in self._key_of for page in cached), "a cached page has no key"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "keys and pages differ"
