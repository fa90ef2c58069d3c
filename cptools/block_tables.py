"""Which pages each request holds. A page id means one page on *every* rank of a DCP group: one virtual block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .integers import require_int
from .layout import KVLayout
from .page_allocator import Pages


class BlockTables:
    """Page lists of the open requests of one engine; all ranks keep the same one. Local, integers only."""

    def __init__(self, layout: KVLayout, allocator: Pages) -> None:
        self.layout = layout
        self.allocator = allocator
        self._pages: dict[int, list[int]] = {}
        self._read_only: dict[int, int] = {}
        self._next = 0

    def open(self, prefix: Sequence[int] = (), own: Sequence[int] = ()) -> int:
        """A new request; its handle is never used again.

        prefix: pages of its first blocks, full of rows of its tokens, which other requests may read too. own: pages for
        what follows. It takes over a user of each page: the caller no longer releases them.

        Raises ValueError, changing nothing, for a page without a user.
        """
        pages = [*prefix, *own]
        if free := [page for page in pages if not self.allocator.users(page)]:
            raise ValueError(f"a request can not begin with pages {free}: they are free")
        self._next += 1
        self._pages[self._next], self._read_only[self._next] = pages, len(prefix)
        return self._next

    def protect(self, request: int, blocks: int) -> None:
        """The request's first ``blocks`` blocks are read-only from now on, since others may read them too.

        Raises ValueError for a request that is not open or has fewer pages.
        """
        if require_int("blocks", blocks, minimum=0) > len(self._held(request)):
            raise ValueError(f"request {request} holds {len(self._held(request))} pages, no {blocks} to protect")
        self._read_only[request] = max(blocks, self._read_only[request])

    def read_only_tokens(self, request: int) -> int:
        """How many of the request's first positions may never be written again: whole blocks."""
        self._held(request)
        return self._read_only[request] * self.layout.virtual_block

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
        del self._pages[request], self._read_only[request]

    def pages(self, request: int, start: int = 0, stop: int | None = None) -> list[int]:
        """The request's page ids of blocks [start, stop)."""
        return self._held(request)[start:stop]

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
