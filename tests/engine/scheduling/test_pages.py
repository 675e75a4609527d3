"""`PagePool` against a naive model: references, order of eviction, and prefixes that only their own tokens can find."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from headrace.engine.scheduling.memory.pages import PagePool

SIZE = 2
ROOTS = (b"", b"a", b"b", b"ab")

Prefix = tuple[bytes, tuple[int, ...]]
"""What a page holds, in full: root and all tokens up to the page's end."""


class PoolMachine(RuleBasedStateMachine):
    """Tables of pages come and go; the model remembers in full what the pool remembers as hashes."""

    tables: Bundle[list[int]] = Bundle("tables")

    @initialize(num_pages=st.integers(1, 7))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, SIZE, secret=b"s")
        self.holders: list[list[int]] = []
        self.prefix_of: dict[int, Prefix] = {}
        self.cached: list[int] = []  # least recently used first

    def references(self, page: int) -> int:
        return sum(table.count(page) for table in self.holders)

    def keys(self, root: bytes, tokens: list[int]) -> list[bytes]:
        keys: list[bytes] = []
        self.pool.extend_keys(keys, tokens, root)
        return keys

    def allocate_one(self) -> int | None:
        free = [page for page in range(self.pool.num_pages) if not self.references(page) and page not in self.cached]
        page = self.pool.allocate()
        if free:
            assert page in free, "a cached page was evicted while one was free"
        elif self.cached:
            assert page == self.cached.pop(0), "not the least recently used page was evicted"
            del self.prefix_of[page]
        else:
            assert page is None
        return page

    @rule(target=tables, root=st.sampled_from(ROOTS), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def open_table(self, root: bytes, tokens: list[int]) -> list[int]:
        """Do as a request does: match, share, allocate the rest, register what is full."""
        keys = self.keys(root, tokens)
        matched = self.pool.match(keys)
        places = {prefix: page for page, prefix in self.prefix_of.items()}
        expected: list[int] = []
        for index in range(len(keys)):
            page = places.get((root, tuple(tokens[: (index + 1) * SIZE])))
            if page is None:
                break
            expected.append(page)
        assert matched == expected, "matched pages are not those that hold this prefix"
        table: list[int] = []
        self.holders.append(table)
        for page in matched:
            self.pool.share(page)
            table.append(page)
            if page in self.cached:
                self.cached.remove(page)
        while len(table) * SIZE < len(tokens):
            fresh = self.allocate_one()
            if fresh is None:
                break
            table.append(fresh)
        for index in range(min(len(keys), len(table))):
            prefix = (root, tuple(tokens[: (index + 1) * SIZE]))
            self.pool.register(table[index], keys[index])
            if prefix not in self.prefix_of.values() and table[index] not in self.prefix_of:
                self.prefix_of[table[index]] = prefix
        return table

    @rule(table=consumes(tables))
    def close_table(self, table: list[int]) -> None:
        self.holders = [held for held in self.holders if held is not table]
        self.pool.release(table)
        for page in reversed(table):
            if page in self.prefix_of and not self.references(page):
                self.cached.append(page)

    @rule(table=tables)
    def fork_table(self, table: list[int]) -> None:
        """Share a whole table for a moment, as choices of one prompt do."""
        for page in table:
            self.pool.share(page)
        assert all(self.pool.refs[page] >= 2 for page in table)
        self.pool.release(table)

    @precondition(lambda self: self.prefix_of)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.prefix_of)))
        self.pool.forget(page)
        self.pool.forget(page)  # nothing happens the second time
        del self.prefix_of[page]
        if page in self.cached:
            self.cached.remove(page)

    @invariant()
    def agrees_with_the_model(self) -> None:
        pool = self.pool
        pool.check(self.holders)
        counts = [self.references(page) for page in range(pool.num_pages)]
        assert pool.refs == counts
        assert pool.held == sum(count > 0 for count in counts)
        assert pool.cached == len(self.cached)
        assert pool.available == pool.num_pages - pool.held


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
TestPool = PoolMachine.TestCase

TOKENS = st.lists(st.integers(0, 2**31), max_size=20)
ROOT = st.binary(max_size=24)


def chain(pool: PagePool, tokens: list[int], root: bytes) -> list[bytes]:
    keys: list[bytes] = []
    pool.extend_keys(keys, tokens, root)
    return keys


@given(tokens=TOKENS, root=ROOT, cut=st.integers(0, 20), size=st.integers(1, 5))
def test_a_chain_grows_to_what_it_would_be_at_once(tokens: list[int], root: bytes, cut: int, size: int) -> None:
    pool = PagePool(1, size, secret=b"s")
    keys: list[bytes] = []
    pool.extend_keys(keys, tokens[:cut], root)
    pool.extend_keys(keys, tokens, root)
    assert keys == chain(pool, tokens, root)
    assert len(keys) == len(tokens) // size


@given(first=TOKENS, second=TOKENS, roots=st.tuples(ROOT, ROOT), size=st.integers(1, 4))
def test_two_keys_are_equal_only_for_equal_root_and_whole_prefix(
    first: list[int], second: list[int], roots: tuple[bytes, bytes], size: int
) -> None:
    pool = PagePool(1, size, secret=b"s")
    seen: dict[bytes, tuple[bytes, list[int]]] = {}
    for tokens, root in ((first, roots[0]), (second, roots[0]), (first, roots[1])):
        for index, key in enumerate(chain(pool, tokens, root)):
            whole = (root, tokens[: (index + 1) * size])
            assert seen.setdefault(key, whole) == whole


def test_a_key_cannot_be_known_without_the_secret() -> None:
    chains = [chain(PagePool(1, 2, secret=secret), [1, 2, 3, 4], b"r") for secret in (b"one", b"two", b"")]
    assert len({key for keys in chains for key in keys}) == 6


def test_a_root_that_looks_like_a_key_does_not_continue_its_chain() -> None:
    """A root is never a key: only the secret's owner can compute keys. This pins the shape of the chain."""
    pool = PagePool(1, 1, secret=b"s")
    first, second = chain(pool, [1, 2], b"r")
    assert chain(pool, [2], b"r") != [second] and first != second


def test_pages_of_a_prefix_are_evicted_from_its_end() -> None:
    pool = PagePool(4, 1, secret=b"s")
    keys = chain(pool, [1, 2, 3], b"")
    pages = [page for _ in keys if (page := pool.allocate()) is not None]
    for page, key in zip(pages, keys, strict=True):
        pool.register(page, key)
    pool.release(pages)
    assert pool.available == 4 and pool.held == 0 and pool.cached == 3
    spare = pool.allocate()
    assert pool.match(keys) == pages, "the free page goes first"
    assert pool.allocate() == pages[2]
    assert pool.match(keys) == pages[:2], "what is left of the prefix still starts at its start"
    assert spare not in pages


def test_sharing_a_cached_page_makes_it_the_most_recently_used() -> None:
    pool = PagePool(2, 1, secret=b"s")
    keys = [chain(pool, [token], b"")[0] for token in (1, 2)]
    pages = [page for _ in keys if (page := pool.allocate()) is not None]
    for page, key in zip(pages, keys, strict=True):
        pool.register(page, key)
        pool.release([page])
    pool.share(pages[0])
    pool.release([pages[0]])
    assert pool.allocate() == pages[1]


def test_the_first_page_with_a_prefix_stays_the_one() -> None:
    pool = PagePool(2, 1, secret=b"s")
    (key,) = chain(pool, [1], b"")
    first, second = pool.allocate(), pool.allocate()
    assert first is not None and second is not None
    pool.register(first, key)
    pool.register(second, key)
    assert pool.match([key]) == [first]
    pool.release([second])
    assert pool.cached == 0, "the double is worth nothing"


def test_a_pool_that_remembers_nothing_matches_nothing() -> None:
    pool = PagePool(1, 1, secret=b"s", remember=False)
    keys = chain(pool, [1], b"")
    page = pool.allocate()
    assert page is not None
    pool.register(page, keys[0])
    pool.release([page])
    assert pool.match(keys) == [] and pool.cached == 0 and pool.available == 1


def test_check_sees_a_lost_reference_and_a_page_listed_twice() -> None:
    pool = PagePool(2, 1, secret=b"s")
    page = pool.allocate()
    assert page is not None
    pool.check([[page]])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])
    pool.share(page)
    with pytest.raises(AssertionError, match="appears twice"):
        pool.check([[page, page]])
