"""Blocks of rows, the pages that hold them, and the copies between these pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cptools.page_allocator import PageAllocator, PoolExhausted

from .copies import CopyDone, CopyKind, CopyPlan, CopyReports, PageRun, page_runs
from .plan import Counters
from .sizes import ResidencySizes
from .states import PageEvent, PageState, after


class BlockOwner:
    """Who reads a sequence of blocks from its start: a request or a kept prefix.

    Attributes:
        blocks: in order of their numbers; the first ones may be other owners' too.
        absent: how many of them are not readable on the GPU.
        copied: how many of them have a complete host copy.
    """

    __slots__ = ("absent", "blocks", "copied")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.absent = 0
        self.copied = 0


class Block:
    """The rows of one virtual block of a sequence, on all ranks.

    Attributes:
        number: which block of its sequence; the same for all owners, since they share it as part of a prefix.
        gpu_page, index_page, host_page: -1 = none. Whether they are readable is a matter of ``state`` and, for the
            index keys, of ``index_under_way``.
        active: running owners. pins: those of them that need the rows on the GPU.
    """

    __slots__ = (
        "active", "gpu_page", "host_page", "index_page", "index_under_way", "number", "owners", "pins", "state",
    )  # fmt: skip

    def __init__(self, number: int, gpu_page: int, index_page: int) -> None:
        self.number = number
        self.gpu_page, self.index_page, self.host_page = gpu_page, index_page, -1
        self.state = PageState.DIRTY
        self.active = self.pins = 0
        self.index_under_way = False
        self.owners: list[BlockOwner] = []

    def places(self) -> tuple[int, int, int]:
        """Pages of the rows, of the index keys and in host memory that can be read; -1 = none."""
        state = self.state
        return (
            self.gpu_page if state.on_gpu else -1,
            -1 if self.index_under_way else self.index_page,
            self.host_page if state.on_host else -1,
        )


@dataclass(frozen=True, slots=True)
class _Copy:
    """What a copy holds until all ranks reported: pages that others may give up meanwhile."""

    kind: CopyKind
    rows: tuple[Block, ...]
    index: tuple[Block, ...]
    gpu_pages: tuple[int, ...]
    index_pages: tuple[int, ...]
    host_pages: tuple[int, ...]


class BlockStore:
    """Pages with reference counts, and every change of a block's state. A block holds each of its pages once, a copy
    under way holds them once more, a hot region holds GPU pages alone.

    Attributes:
        gpu, index, host: the allocators.
        evictable: blocks in state EVICTABLE, the one that is longest so first.
        idle: blocks without a running owner whose index keys are on the GPU and in host memory.
        idle_dirty: blocks without a running owner in state DIRTY.
        touched: blocks whose places changed; whoever told the owners clears it.
    """

    def __init__(self, sizes: ResidencySizes) -> None:
        self.sizes = sizes
        self.gpu = PageAllocator(sizes.gpu_pages)
        self.index = PageAllocator(sizes.index_pages)
        self.host = PageAllocator(sizes.host_pages)
        self.evictable: dict[Block, None] = {}
        self.idle: dict[Block, None] = {}
        self.idle_dirty: dict[Block, None] = {}
        self.touched: dict[Block, None] = {}
        self.counters = Counters()
        self._reports = CopyReports(sizes.layout.world_size)
        self._copies: dict[int, _Copy] = {}

    @property
    def copies_under_way(self) -> int:
        return len(self._reports)

    @property
    def gpu_room(self) -> int:
        """GPU pages to be had at once."""
        return self.gpu.num_free + len(self.evictable)

    @property
    def index_room(self) -> int:
        """Index pages to be had at once."""
        return self.index.num_free + len(self.idle)

    def take_gpu_pages(self, n: int) -> list[int]:
        """n pages: free ones, then those of evictable blocks. Raises PoolExhausted if there is no room for all."""
        if n > self.gpu_room:
            raise PoolExhausted(f"{n} GPU pages wanted, {self.gpu_room} are free or evictable")
        while self.gpu.num_free < n:
            self._drop(next(iter(self.evictable)))
        return self.gpu.allocate(n)

    def take_index_pages(self, n: int) -> list[int]:
        """n pages: free ones, then those of idle blocks, which lose their GPU page too. Raises as `take_gpu_pages`."""
        if n > self.index_room:
            raise PoolExhausted(f"{n} index pages wanted, {self.index_room} are free or idle")
        while self.index.num_free < n:
            block = next(iter(self.idle))
            if block.state is PageState.EVICTABLE:
                self._drop(block)
            self.index.release([block.index_page])
            block.index_page = -1
            self.settle(block)
        return self.index.allocate(n)

    def new_blocks(self, numbers: Iterable[int]) -> list[Block]:
        """Blocks to be written, for which there must be room; without owner yet."""
        numbers = list(numbers)
        pages = zip(self.take_gpu_pages(len(numbers)), self.take_index_pages(len(numbers)), strict=True)
        blocks = [Block(number, *both) for number, both in zip(numbers, pages, strict=True)]
        self.touched.update(dict.fromkeys(blocks))
        return blocks

    def attach(self, owner: BlockOwner, blocks: Sequence[Block]) -> None:
        """More blocks at the end of an owner's."""
        for block in blocks:
            block.owners.append(owner)
            owner.absent += not block.state.on_gpu
            owner.copied += block.state.on_host
            self.settle(block)
        owner.blocks.extend(blocks)

    def detach_last(self, owner: BlockOwner) -> None:
        """An owner gives up its last block; a block without owner is forgotten."""
        block = owner.blocks.pop()
        block.owners.remove(owner)
        owner.absent -= not block.state.on_gpu
        owner.copied -= block.state.on_host
        if block.owners:
            self.settle(block)
            return
        for gone in (self.evictable, self.idle, self.idle_dirty, self.touched):
            gone.pop(block, None)
        for pool, page in ((self.gpu, block.gpu_page), (self.index, block.index_page), (self.host, block.host_page)):
            if page >= 0:
                pool.release([page])

    def pin(self, block: Block, pins: int, active: int = 0) -> None:
        """Add running owners that need the rows on the GPU, and running owners at all; negative takes away."""
        block.pins += pins
        block.active += active
        self.settle(block)

    def settle(self, block: Block) -> None:
        """Bring state and sets in line with pins and owners."""
        if block.state is PageState.CLEAN and not block.pins:
            self._change(block, PageEvent.UNPIN)
            self.evictable[block] = None
        elif block.state is PageState.EVICTABLE and block.pins:
            self._change(block, PageEvent.PIN)
            del self.evictable[block]
        alone, state = not block.active, block.state
        _member(self.idle_dirty, block, alone and state is PageState.DIRTY)
        on_host = state is PageState.EVICTABLE or state is PageState.HOST
        _member(self.idle, block, alone and on_host and block.index_page >= 0 and not block.index_under_way)

    def rewrite(self, block: Block) -> None:
        """A step may write into the block: its host copy is given up."""
        if block.state is PageState.DIRTY:
            return
        self._change(block, PageEvent.REWRITE)
        self.host.release([block.host_page])
        block.host_page = -1
        self.settle(block)

    def mirror(self, blocks: Sequence[Block]) -> CopyPlan:
        """Begin the host copies of DIRTY blocks, for which there must be host pages."""
        blocks = sorted(blocks, key=lambda block: block.gpu_page)
        for block, page in zip(blocks, self.host.allocate(len(blocks)), strict=True):
            block.host_page = page
            self._change(block, PageEvent.MIRROR)
        rows = page_runs((block.gpu_page, block.host_page) for block in blocks)
        index = page_runs((block.index_page, block.host_page) for block in blocks)
        return self._begin(CopyKind.MIRROR, blocks, blocks, rows, index)

    def fetch(self, rows: Sequence[Block], index: Sequence[Block]) -> CopyPlan:
        """Begin to bring rows of HOST blocks, and index keys of blocks without them, to the GPU; there must be room."""
        for block, page in zip(rows, self.take_gpu_pages(len(rows)), strict=True):
            block.gpu_page = page
            self._change(block, PageEvent.FETCH)
        for block, page in zip(index, self.take_index_pages(len(index)), strict=True):
            block.index_page = page
        row_runs = page_runs((block.host_page, block.gpu_page) for block in rows)
        index_runs = page_runs((block.host_page, block.index_page) for block in index)
        return self._begin(CopyKind.FETCH, rows, index, row_runs, index_runs)

    def report(self, done: CopyDone) -> list[Block]:
        """A rank's answer; with the last one the copy ends. Returns blocks whose rows or keys are lost: their owners
        must give them up.

        Raises ValueError, changing nothing, as `CopyReports.report`, and for damaged pages that are not the copy's.
        """
        known = self._copies.get(done.copy)
        sources = known.host_pages if known is not None and known.kind is CopyKind.FETCH else ()
        if known is not None and not set(done.damaged) <= set(sources):
            raise ValueError(f"copy {done.copy} reads host pages {sources}, damaged={done.damaged}")
        end = self._reports.report(done)
        if end is None:
            return []
        copy = self._copies.pop(done.copy)
        self.counters.failed_copies += not end.ok
        lost = []
        for block in dict.fromkeys([*copy.rows, *copy.index]):
            if block.owners and block.host_page in end.damaged:
                lost.append(block)
        for block in copy.rows:
            if block.owners:
                self._end_rows(block, end.ok and block.host_page not in end.damaged)
        if copy.kind is CopyKind.FETCH:
            for block in copy.index:
                if block.owners:
                    self._end_index(block, end.ok and block.host_page not in end.damaged)
        self.gpu.release(copy.gpu_pages)
        self.index.release(copy.index_pages)
        self.host.release(copy.host_pages)
        self.counters.damaged += len(lost)
        return lost

    def pages_held(self) -> tuple[list[int], list[int], list[int]]:
        """GPU, index and host pages that copies under way hold, once for each time."""
        copies = self._copies.values()
        return (
            [page for copy in copies for page in copy.gpu_pages],
            [page for copy in copies for page in copy.index_pages],
            [page for copy in copies for page in copy.host_pages],
        )

    def _begin(
        self,
        kind: CopyKind,
        rows: Sequence[Block],
        index: Sequence[Block],
        row_runs: tuple[PageRun, ...],
        index_runs: tuple[PageRun, ...],
    ) -> CopyPlan:
        copy = self._reports.open()
        if kind is CopyKind.FETCH:
            for block in index:
                block.index_under_way = True
                self.settle(block)
            self.counters.fetched += len(rows)
        else:
            self.counters.mirrored += len(rows)
        for block in rows:
            self.settle(block)
        gpu_pages = tuple(block.gpu_page for block in rows)
        index_pages = tuple(block.index_page for block in index)
        host_pages = tuple(block.host_page for block in dict.fromkeys([*rows, *index]))
        self.gpu.retain(gpu_pages)
        self.index.retain(index_pages)
        self.host.retain(host_pages)
        self._copies[copy] = _Copy(kind, tuple(rows), tuple(index), gpu_pages, index_pages, host_pages)
        return CopyPlan(copy, kind, row_runs, index_runs)

    def _end_rows(self, block: Block, success: bool) -> None:
        self._change(block, PageEvent.COPIED if success else PageEvent.FAILED)
        if block.state is PageState.DIRTY:
            self.host.release([block.host_page])
            block.host_page = -1
        elif block.state is PageState.HOST:
            self.gpu.release([block.gpu_page])
            block.gpu_page = -1
        self.settle(block)

    def _end_index(self, block: Block, success: bool) -> None:
        block.index_under_way = False
        if not success:
            self.index.release([block.index_page])
            block.index_page = -1
        self.touched[block] = None
        self.settle(block)

    def _drop(self, block: Block) -> None:
        self._change(block, PageEvent.DROP)
        del self.evictable[block]
        self.gpu.release([block.gpu_page])
        block.gpu_page = -1
        self.counters.dropped += 1
        self.settle(block)

    def _change(self, block: Block, event: PageEvent) -> None:
        before, state = block.state, after(block.state, event)
        block.state = state
        absent, copied = before.on_gpu - state.on_gpu, state.on_host - before.on_host
        if absent or copied:
            self.touched[block] = None
            for owner in block.owners:
                owner.absent += absent
                owner.copied += copied


def _member(group: dict[Block, None], block: Block, belongs: bool) -> None:
    if belongs:
        if block not in group:
            group[block] = None
    else:
        group.pop(block, None)
