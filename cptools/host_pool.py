"""Cached rows in host memory, in pages."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

import torch

from cptools.integers import require_int
from cptools.page_allocator import PageAllocator, PoolExhausted

__all__ = ["HostKVPool", "PoolExhausted"]

_PIECE_BYTES = 64 << 20


class HostKVPool:
    """Pages of rows in host memory, each page with room for `page_size` rows of every layer.

    A slot is page id * page_size + offset; the same slots hold the row of a token in all layers. `allocate`, `retain`
    and `release` count the users of pages; `write` and `read` move rows and do not ask who uses a page.

    The memory comes in pieces of whole pages, at most 64 MiB each unless one page is larger, the last one only as large
    as it must be. A piece is made, zero-filled and pinned when it is first written to, and given back by
    `close()`, which also runs at the end of a `with` block and when the pool is collected. A page keeps its bytes when
    it is released and allocated again.

    Local, no communication; every method returns after its work is done; not thread-safe.

    Args:
        num_pages: pages in all, >= 0.
        page_size: rows of a page, >= 1.
        row_bytes: bytes of a row in one layer, >= 1.
        num_layers: >= 1.
        pin_memory: page-lock the pieces, for copies to and from a GPU; default when CUDA is there.

    Raises:
        ValueError: a size is out of range, or pinned memory is asked for without CUDA.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, row_bytes: int, num_layers: int = 1, pin_memory: bool | None = None
    ) -> None:
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory=True needs CUDA")
        self._pages = PageAllocator(num_pages)
        self.page_size = require_int("page_size", page_size, minimum=1)
        self.row_bytes = require_int("row_bytes", row_bytes, minimum=1)
        self.num_layers = require_int("num_layers", num_layers, minimum=1)
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._piece_pages = max(1, _PIECE_BYTES // (page_size * row_bytes * num_layers))
        self._pieces: dict[int, torch.Tensor] = {}
        self._free_memory = weakref.finalize(self, _free_pieces, self._pieces, self.pin_memory)

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        self._check_open()
        return self._pages.num_pages

    @property
    def num_free(self) -> int:
        """Pages without a user."""
        self._check_open()
        return self._pages.num_free

    def users(self, page: int) -> int:
        """Reference count of a page; 0 when it is free. Raises ValueError when there is no such page."""
        self._check_open()
        return self._pages.users(page)

    @property
    def resident_bytes(self) -> int:
        """Host memory held now: the pieces written to so far; 0 once closed."""
        return sum(piece.nbytes for piece in self._pieces.values())

    def allocate(self, n: int) -> list[int]:
        """Take n free pages, the lowest ids first; all or nothing.

        Raises:
            PoolExhausted: fewer than n pages are free; nothing has changed.
            ValueError: n is negative, or the pool is closed.
        """
        self._check_open()
        return self._pages.allocate(n)

    def retain(self, pages: Iterable[int]) -> None:
        """Add a user to each page. Raises ValueError, changing nothing, when one is free or out of range."""
        self._check_open()
        self._pages.retain(pages)

    def release(self, pages: Iterable[int]) -> None:
        """Remove a user from each page; without users it is free.

        Raises ValueError, changing nothing, when a page is free, out of range or named more often than it has users.
        """
        self._check_open()
        self._pages.release(pages)

    def write(self, layer: int, slots: Sequence[int] | torch.Tensor, rows: torch.Tensor) -> None:
        """Store rows[i] of `layer` at slots[i].

        Args:
            layer: in [0, num_layers).
            slots: [n] int32 or int64 tensor, or integers; -1 skips the row. No other slot may come twice.
            rows: uint8 [n, row_bytes] on the CPU.

        Raises:
            ValueError: a wrong layer, slot, shape, dtype or device, a slot named twice, or a closed pool; nothing is
                written.
        """
        order, sorted_slots = self._sorted_slots(layer, slots)
        self._check_rows("rows", rows, len(order))
        twice = (sorted_slots[1:] == sorted_slots[:-1]) & (sorted_slots[1:] >= 0)
        if twice.any():
            raise ValueError(f"slot {int(sorted_slots[1:][twice][0])} is named twice in one write")
        for index, some, offsets in self._by_piece(sorted_slots):
            self._piece(index)[layer].index_copy_(0, offsets, rows.index_select(0, order[some]))

    def read(self, layer: int, slots: Sequence[int] | torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of `layer` at `slots`; inverse of `write`. Slot -1, and a slot never written, reads zeros.

        Args:
            layer: in [0, num_layers).
            slots: [n] int32 or int64 tensor, or integers; any may come several times.
            out: uint8 [n, row_bytes] on the CPU to fill and return; not kept; no memory of the pool itself.

        Returns:
            uint8 [n, row_bytes] on the CPU.

        Raises:
            ValueError: a wrong layer, slot, shape, dtype or device, or a closed pool; `out` is not touched.
        """
        order, sorted_slots = self._sorted_slots(layer, slots)
        if out is None:
            out = torch.zeros(len(order), self.row_bytes, dtype=torch.uint8)
        else:
            self._check_rows("out", out, len(order))
            out.zero_()
        for index, some, offsets in self._by_piece(sorted_slots):
            piece = self._pieces.get(index)
            if piece is not None:
                out.index_copy_(0, order[some], piece[layer].index_select(0, offsets))
        return out

    def page_view(self, layer: int, page: int) -> torch.Tensor:
        """The memory of one page itself, uint8 [page_size, row_bytes], for copies that the caller queues on a stream.

        The caller sees to it that these are over before `close()` and before the page is used for other rows.

        Raises:
            ValueError: no such layer or page, or a closed pool.
        """
        self._check_layer(layer)
        page = require_int("page", page)
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is outside num_pages={self.num_pages}")
        index, offset = divmod(page, self._piece_pages)
        return self._piece(index)[layer].narrow(0, offset * self.page_size, self.page_size)

    def close(self) -> None:
        """Give the memory back. May be called again; any other use of the pool then raises ValueError.

        No copy from or to a `page_view` may still be under way.
        """
        self._free_memory()

    def __enter__(self) -> HostKVPool:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._free_memory.alive:
            raise ValueError("the pool is closed")

    def _check_layer(self, layer: int) -> None:
        self._check_open()
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer={layer} is outside num_layers={self.num_layers}")

    def _check_rows(self, name: str, rows: torch.Tensor, n: int) -> None:
        if rows.dtype != torch.uint8 or rows.shape != (n, self.row_bytes) or rows.device.type != "cpu":
            raise ValueError(
                f"{name} must be uint8 {[n, self.row_bytes]} on the cpu, "
                f"not {rows.dtype} {list(rows.shape)} on {rows.device}"
            )

    def _sorted_slots(self, layer: int, slots: Sequence[int] | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_layer(layer)
        if not isinstance(slots, torch.Tensor):
            slots = torch.tensor(slots, dtype=None if len(slots) else torch.int64)
        if slots.dtype not in (torch.int32, torch.int64) or slots.ndim != 1:
            raise ValueError(f"slots must be [n] of int32 or int64, not {list(slots.shape)} of {slots.dtype}")
        sorted_slots, order = slots.to("cpu", torch.int64).sort()
        if len(order) and (sorted_slots[0] < -1 or sorted_slots[-1] >= self.num_pages * self.page_size):
            raise ValueError(
                f"slots from {int(sorted_slots[0])} to {int(sorted_slots[-1])} are not all in "
                f"[-1, {self.num_pages} pages * {self.page_size} rows)"
            )
        return order, sorted_slots

    def _by_piece(self, sorted_slots: torch.Tensor) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """For each piece that the slots touch: its index, its part of `sorted_slots`, and their rows in it."""
        piece_rows = self._piece_pages * self.page_size
        begin = int(torch.searchsorted(sorted_slots, 0))
        while begin < len(sorted_slots):
            index = int(sorted_slots[begin]) // piece_rows
            end = int(torch.searchsorted(sorted_slots, (index + 1) * piece_rows))
            yield index, slice(begin, end), sorted_slots[begin:end] - index * piece_rows
            begin = end

    def _piece(self, index: int) -> torch.Tensor:
        """uint8 [num_layers, rows, row_bytes], made if need be."""
        if index not in self._pieces:
            self._pieces[index] = self._make_piece(index)
        return self._pieces[index]

    def _make_piece(self, index: int) -> torch.Tensor:
        pages = min(self._piece_pages, self.num_pages - index * self._piece_pages)
        shape = (self.num_layers, pages * self.page_size, self.row_bytes)
        # Torch's own pinned allocator rounds sizes up to powers of two and keeps what is freed. A private mapping is
        # exact, goes back to the system, and shares no memory page with another registered piece.
        memory = mmap.mmap(-1, math.prod(shape), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        piece = torch.frombuffer(memory, dtype=torch.uint8).view(shape)
        if self.pin_memory:
            cudart = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostRegister(piece.data_ptr(), piece.nbytes, 0))
        return piece


def _free_pieces(pieces: dict[int, torch.Tensor], pinned: bool) -> None:
    if pinned:
        cudart = torch.cuda.cudart()
        for piece in pieces.values():
            torch.cuda.check_error(cudart.cudaHostUnregister(piece.data_ptr()))
    pieces.clear()
