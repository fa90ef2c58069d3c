"""Which pages are in use, and by how many users."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from cptools.integers import require_int


class PoolExhausted(RuntimeError):
    """There are not enough free pages; nothing was allocated."""


class Pages(Protocol):
    """Reference counts of pages, wherever the pages are: what :class:`PageAllocator` does, in its words."""

    @property
    def num_pages(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    def users(self, page: int) -> int: ...
    def allocate(self, n: int) -> list[int]: ...
    def retain(self, pages: Iterable[int]) -> None: ...
    def release(self, pages: Iterable[int]) -> None: ...


class PageAllocator:
    """Reference counts of the pages 0 ... num_pages - 1. Integers only; local, no communication, not thread-safe.

    Each method that raises has changed nothing.

    Args:
        num_pages: >= 0.
    """

    def __init__(self, num_pages: int) -> None:
        num_pages = require_int("num_pages", num_pages, minimum=0)
        self._users = [0] * num_pages
        self._free = list(range(num_pages))  # a heap, for the lowest ids first

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self._users)

    @property
    def num_free(self) -> int:
        """Pages without a user."""
        return len(self._free)

    def users(self, page: int) -> int:
        """Reference count of a page; 0 when it is free. Raises ValueError when there is no such page."""
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is outside num_pages={self.num_pages}")
        return self._users[page]

    def counts(self) -> tuple[int, ...]:
        """Reference count of every page."""
        return tuple(self._users)

    def allocate(self, n: int) -> list[int]:
        """Take the n lowest free pages, each with one user, in ascending order.

        Raises:
            PoolExhausted: fewer than n pages are free.
            ValueError: n is negative.
        """
        n = require_int("n", n, minimum=0)
        if n > self.num_free:
            raise PoolExhausted(f"{n} pages wanted, {self.num_free} of {self.num_pages} are free")
        pages = [heapq.heappop(self._free) for _ in range(n)]
        for page in pages:
            self._users[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a user to each page; a page named k times gets k.

        Raises:
            ValueError: a page is out of range or free.
        """
        for page, times in self._counted(pages).items():
            self._users[page] += times

    def release(self, pages: Iterable[int]) -> None:
        """Remove a user from each page; a page named k times loses k. A page without users is free again.

        Raises:
            ValueError: a page is out of range or free, or is named more often than it has users.
        """
        counted = self._counted(pages)
        for page, times in counted.items():
            if times > self._users[page]:
                raise ValueError(f"page {page} is released {times} times but has {self._users[page]} users")
        for page, times in counted.items():
            self._users[page] -= times
            if not self._users[page]:
                heapq.heappush(self._free, page)

    def _counted(self, pages: Iterable[int]) -> Counter[int]:
        counted = Counter(require_int("page", page) for page in pages)
        for page in counted:
            if not self.users(page):
                raise ValueError(f"page {page} is free")
        return counted
