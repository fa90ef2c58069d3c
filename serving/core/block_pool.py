"""Pages of one tier: in use, cached, or both; and which of the cached ones goes first when room is needed."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cptools.integers import require_int
from cptools.page_allocator import Pages, PoolExhausted

from .block_hashes import TokenBlocks
from .cache_events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent

EventSink = Callable[[CacheEvent], None]


@dataclass(eq=False, slots=True)
class _Block:
    hash: bytes
    page: int
    parent: _Block | None
    serial: int
    used: int
    children: int = 0
    """Cached blocks right behind it."""
    holds: int = 0
    """Reasons to keep it: users of its page, counted once, and children that are kept."""


class BlockPool:
    """Page counts in which a page may go on holding a known block after its last user has left.

    Such a page counts as free. `allocate` takes pages that hold nothing first, then evicts cached blocks: of those that
    nobody uses and no cached block stands behind, always the one whose last user left first. So the cached blocks of a
    sequence never have a hole. A page is shared by count alone; nothing is ever copied.

    Integers only; local, no communication, not thread-safe. The same calls give the same pages on every rank. A method
    that raises has changed nothing.

    Args:
        pages: counts of the pages, such as a `PageAllocator` or a `HostKVPool`, all of them free. The pool is one more
            user of each page that it caches; nobody else may allocate there.
        medium: name of the tier in events.
        on_event: told of every change of what can be found.
    """

    def __init__(self, pages: Pages, *, medium: str = "GPU", on_event: EventSink | None = None) -> None:
        if pages.num_free != pages.num_pages:
            raise ValueError(f"{pages.num_pages - pages.num_free} of {pages.num_pages} pages are in use already")
        self.medium = medium
        self.evicted_blocks = 0
        """Since the beginning."""
        self._pages, self._on_event = pages, on_event
        self._blocks: dict[bytes, _Block] = {}
        self._of_page: dict[int, _Block] = {}
        self._evictable = 0
        self._oldest: list[tuple[int, int, _Block]] = []  # a heap; entries that no longer hold are skipped
        self._clock = 0
        self._serial = 0

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self._pages.num_pages

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give: without a user, and not needed for a cached block in use behind them."""
        return self._pages.num_free + self._evictable

    @property
    def num_cached(self) -> int:
        """Blocks that can be found, in use or not."""
        return len(self._blocks)

    def users(self, page: int) -> int:
        """Users of a page, the pool itself not counted. Raises ValueError when there is no such page."""
        return self._pages.users(page) - (page in self._of_page)

    def is_cached(self, page: int) -> bool:
        """Whether the page holds a block that can be found."""
        return page in self._of_page

    def allocate(self, n: int) -> list[int]:
        """Take n pages, each with one user, and forget what the least recently used of them held.

        Raises:
            PoolExhausted: fewer than n pages are free. ValueError: n is negative.
        """
        n = require_int("n", n, minimum=0)
        if n > self.num_free:
            raise PoolExhausted(f"{n} pages wanted, {self.num_free} of {self.num_pages} are free ({self.medium})")
        self.evict(n - self._pages.num_free)
        return self._pages.allocate(n)

    def retain(self, pages: Iterable[int]) -> None:
        """Add a user to each page. Raises ValueError for one that has none: `take` brings cached blocks back."""
        pages = list(pages)
        for page in pages:
            if not self.users(page):
                raise ValueError(f"page {page} is free")
        self._pages.retain(pages)

    def release(self, pages: Iterable[int]) -> None:
        """Remove a user from each page. A page without users is free; if it holds a block, that can still be found.

        Raises ValueError when a page is out of range, free, or named more often than it has users.
        """
        counted = Counter(pages)
        for page, times in counted.items():
            if times > self.users(page):
                raise ValueError(f"page {page} is released {times} times but has {self.users(page)} users")
        self._pages.release(counted.elements())
        self._clock += 1
        for page in counted:
            block = self._of_page.get(page)
            if block is not None and not self.users(page):
                block.used = self._clock
                self._unhold(block)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages of the longest cached prefix of a chain of hashes. Changes nothing: the pages may go at any time."""
        found = []
        for key in hashes:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block.page)
        return found

    def take(self, hashes: Sequence[bytes], extra: int = 0) -> tuple[list[int], list[int]]:
        """The longest cached prefix, with one more user for each page, and ``extra`` pages with one user each.

        Raises PoolExhausted if there are not so many free pages beside those of the prefix.
        """
        found = self.match(hashes)
        extra = require_int("extra", extra, minimum=0)
        last = self._of_page[found[-1]] if found else None
        room = self.num_free
        while last is not None and not last.holds:
            room, last = room - 1, last.parent
        if extra > room:
            raise PoolExhausted(
                f"{extra} pages wanted beside {len(found)} cached ones, {room} of {self.num_pages} are free "
                f"({self.medium})"
            )
        unused = [page for page in found if not self.users(page)]
        self._pages.retain(found)
        for page in unused:
            self._hold(self._of_page[page])
        return found, self.allocate(extra)

    def store(self, blocks: TokenBlocks, pages: Sequence[int], *, first: int = 0) -> int:
        """Some consecutive blocks of a sequence can be found from now on: block ``first + i`` in ``pages[i]``.

        Blocks that are cached already stay where they are, and the page given for one stays its user's alone. Returns
        how many are new. Their rows must be written, by work queued at the latest, and never change again.

        Raises ValueError if there are fewer full blocks, if the one before the first is not cached, or if the page of
        a new block has no user or holds another.
        """
        count = require_int("first", first, minimum=0) + len(pages)
        if count > len(blocks.hashes):
            raise ValueError(f"pages for {count} blocks, {len(blocks)} tokens have {len(blocks.hashes)} full ones")
        start = count
        while start > first and blocks.hashes[start - 1] not in self._blocks:
            start -= 1
        if start and blocks.hashes[start - 1] not in self._blocks:
            raise ValueError(f"block {first} can not be stored: block {first - 1} before it is not cached")
        new = list(pages[start - first :])
        if len(set(new)) < len(new):
            raise ValueError(f"blocks {start} to {count - 1} are in pages {new}, some of them named twice")
        for i, page in enumerate(new, start):
            if page in self._of_page or not self.users(page):
                holder = "holds another block" if page in self._of_page else "has no user"
                raise ValueError(f"page {page} can not hold block {i}: it {holder}")
        if not new:
            return 0
        self._pages.retain(new)
        parent = self._blocks[blocks.hashes[start - 1]] if start else None
        for key, page in zip(blocks.hashes[start:], new, strict=False):
            self._serial += 1
            block = _Block(key, page, parent, self._serial, self._clock)
            if parent is not None:
                parent.children += 1
            self._blocks[key] = self._of_page[page] = block
            self._evictable += 1
            self._hold(block)
            parent = block
        if self._on_event is not None:
            before = blocks.hashes[start - 1] if start else None
            stored, token_ids = tuple(blocks.hashes[start:count]), blocks.token_ids(start, count)
            self._on_event(BlocksStored(stored, before, token_ids, blocks.block, self.medium))
        return len(new)

    def evict(self, n: int) -> int:
        """Forget up to n cached blocks that nobody uses, the oldest first; returns how many. Any n is safe."""
        gone: list[bytes] = []
        while len(gone) < n and self._oldest:
            used, _, block = heapq.heappop(self._oldest)
            if not self._may_go(block) or block.used != used:
                continue
            gone.append(block.hash)
            self._remove(block)
            if (parent := block.parent) is not None:
                parent.children -= 1
                self._offer(parent)
        self.evicted_blocks += len(gone)
        self._tell_removed(gone)
        return len(gone)

    def forget(self, key: bytes) -> int:
        """Drop a block and all that stand behind it, as when its bytes turn out to be wrong; returns how many.

        Pages in use stay with their users. An unknown hash is no error. Looks at every block, which no other call does.
        """
        first = self._blocks.get(key)
        if first is None:
            return 0
        if (parent := first.parent) is not None:
            parent.children -= 1
            if first.holds:
                self._unhold(parent)
            else:
                self._offer(parent)
        behind = defaultdict(list)
        for block in self._blocks.values():
            if block.parent is not None:
                behind[block.parent.hash].append(block)
        gone, todo = [], [first]
        while todo:
            block = todo.pop()
            todo += behind[block.hash]
            gone.append(block.hash)
            self._remove(block)
        self._tell_removed(gone)
        return len(gone)

    def clear(self) -> None:
        """Forget all blocks. Pages in use stay with their users."""
        for block in list(self._blocks.values()):
            self._remove(block)
        self._oldest.clear()
        if self._on_event is not None:
            self._on_event(BlocksCleared(self.medium))

    def _remove(self, block: _Block) -> None:
        del self._blocks[block.hash], self._of_page[block.page]
        self._evictable -= not block.holds
        self._pages.release([block.page])

    def _tell_removed(self, hashes: list[bytes]) -> None:
        if hashes and self._on_event is not None:
            self._on_event(BlocksRemoved(tuple(hashes), self.medium))

    def _hold(self, block: _Block | None) -> None:
        while block is not None:
            block.holds += 1
            if block.holds > 1:
                return
            self._evictable -= 1
            block = block.parent

    def _unhold(self, block: _Block | None) -> None:
        while block is not None:
            block.holds -= 1
            if block.holds:
                return
            self._evictable += 1
            self._offer(block)
            block = block.parent

    def _may_go(self, block: _Block) -> bool:
        return not block.holds and not block.children and self._blocks.get(block.hash) is block

    def _offer(self, block: _Block) -> None:
        if not self._may_go(block):
            return
        if len(self._oldest) > 2 * len(self._blocks) + 64:
            leaves = filter(self._may_go, self._blocks.values())
            self._oldest = [(leaf.used, leaf.serial, leaf) for leaf in leaves]
            heapq.heapify(self._oldest)
        else:
            heapq.heappush(self._oldest, (block.used, block.serial, block))
