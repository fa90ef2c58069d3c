"""Which pages each request holds. A page id means one page on *every* rank of a DCP group: one virtual block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .layout import KVLayout
from .page_allocator import PageAllocator


class BlockTables:
    """Page lists of the open requests of one engine; all ranks keep the same one. Local, integers only."""

    def __init__(self, layout: KVLayout, allocator: PageAllocator) -> None:
        self.layout = layout
        self.allocator = allocator
        self._pages: dict[int, list[int]] = {}
        self._next = 0

    def open(self) -> int:
        """A new request without pages; its handle is never used again."""
        self._next += 1
        self._pages[self._next] = []
        return self._next

    def reserve(self, tokens: Mapping[int, int]) -> None:
        """Make room for the first ``tokens[request]`` tokens of each request. All or nothing, over all of them.

        Raises PoolExhausted if the pages do not suffice and ValueError for a request that is not open; both change
        nothing.
        """
        missing = {
            request: max(self.layout.pages(length) - len(self._held(request)), 0) for request, length in tokens.items()
        }
        pages = self.allocator.allocate(sum(missing.values()))
        for request, count in missing.items():
            self._pages[request].extend(pages[:count])
            del pages[:count]

    def close(self, request: int) -> None:
        """Give the request's pages back."""
        self.allocator.release(self._held(request))
        del self._pages[request]

    def pages(self, request: int, start: int = 0) -> list[int]:
        """The request's page ids from block ``start`` on."""
        return self._held(request)[start:]

    def table(self, requests: Sequence[int]) -> Tensor:
        """int64 [R, most pages held], page ids in order, -1 after a request's last page."""
        held = [self._held(request) for request in requests]
        out = np.full((len(held), max(map(len, held), default=0)), -1, dtype=np.int64)
        for row, pages in enumerate(held):
            out[row, : len(pages)] = pages
        return torch.from_numpy(out)

    def _held(self, request: int) -> list[int]:
        if request not in self._pages:
            raise ValueError(f"request {request} is not open; open: {sorted(self._pages)}")
        return self._pages[request]
