"""Requests and kept prefixes in arrival order, and what a running request pins."""

from __future__ import annotations

from bisect import insort
from enum import Enum

from .blocks import Block, BlockOwner, BlockStore
from .plan import HotRegion
from .sizes import ResidencySizes


class Phase(Enum):
    """Where a request stands. Admitted requests load what they must find on the GPU, then run."""

    WAITING = "in the queue; it pins nothing"
    LOADING = "admitted; copies that it needs are under way"
    RUNNING = "may ask for rows"


class Request(BlockOwner):
    """Attributes:

    known: tokens that it is known to need rows for: its prompt, and what it had.
    tokens: rows that are there for good. outstanding: rows asked for and not committed.
    hot: pages of its hot region. tail: its first block that may not leave the GPU while it is admitted.
    """

    __slots__ = ("hot", "id", "known", "outstanding", "phase", "tail", "tokens")

    def __init__(self, id: int, known: int) -> None:
        super().__init__()
        self.id, self.known = id, known
        self.phase = Phase.WAITING
        self.tokens = self.outstanding = self.tail = 0
        self.hot: tuple[int, ...] = ()

    @property
    def runs(self) -> bool:
        return self.phase is Phase.RUNNING


class Roster:
    """All owners of blocks. Ids ascend in order of arrival; both lists are in that order.

    Attributes:
        waiting, admitted: ids of requests. requests: all of them.
        kept: prefixes without a request, by handle, the one used longest ago first.
        damaged: for running requests with outstanding rows, the first block that is lost; they go back to the queue
            once nothing is outstanding.
        preempted: requests that went back to the queue by themselves, since whoever announces it cleared it.
        hot_changes: regions given and given back since whoever announces them cleared it.
    """

    def __init__(self, sizes: ResidencySizes) -> None:
        self.sizes, self.store = sizes, BlockStore(sizes)
        self.waiting: list[int] = []
        self.admitted: list[int] = []
        self.requests: dict[int, Request] = {}
        self.kept: dict[int, BlockOwner] = {}
        self.damaged: dict[int, int] = {}
        self.preempted: list[int] = []
        self.hot_changes: dict[int, HotRegion] = {}
        self._last = 0

    def new_id(self) -> int:
        """Never used before."""
        self._last += 1
        return self._last

    def enter(self, known: int, shared: list[Block]) -> Request:
        """A request at the end of the queue that shares blocks of another owner."""
        request = Request(self.new_id(), known)
        self.store.attach(request, shared)
        request.tokens = len(shared) * self.sizes.layout.virtual_block
        self.requests[request.id] = request
        self.waiting.append(request.id)
        return request

    def admit(self, request: Request, *, hot: bool) -> None:
        """From the queue to the loading ones; there must be room for its hot region."""
        self.waiting.remove(request.id)
        insort(self.admitted, request.id)
        request.phase = Phase.LOADING
        request.tail = self.tail(request)
        for block in request.blocks:
            self.store.pin(block, int(not hot or block.number >= request.tail), 1)
        if hot:
            self._take_hot(request)

    def leave(self, request: Request) -> None:
        """Back to the queue, with all its rows and none of its pins."""
        self._unpin(request)
        self.admitted.remove(request.id)
        insort(self.waiting, request.id)
        request.phase = Phase.WAITING
        request.known = max(request.known, request.tokens)
        # What is left behind the committed rows was reserved for steps.
        while len(request.blocks) > self.sizes.blocks(request.tokens):
            self.store.detach_last(request)
        if request.id in self.damaged:
            self.cut(request, self.damaged.pop(request.id))

    def cut(self, request: Request, blocks: int) -> None:
        """A waiting request keeps its first blocks only and computes the other rows again."""
        while len(request.blocks) > blocks:
            self.store.detach_last(request)
        before, request.tokens = request.tokens, min(request.tokens, blocks * self.sizes.layout.virtual_block)
        self.store.counters.recomputed_tokens += before - request.tokens

    def lose(self, block: Block) -> None:
        """What a block held is gone: its owners give it up, with all behind it."""
        for owner in list(block.owners):
            if not isinstance(owner, Request):
                while len(owner.blocks) > block.number:
                    self.store.detach_last(owner)
            elif owner.phase is Phase.WAITING:
                self.cut(owner, block.number)
            else:
                self.damaged[owner.id] = min(block.number, self.damaged.get(owner.id, block.number))
        for handle in [handle for handle, prefix in self.kept.items() if not prefix.blocks]:
            del self.kept[handle]
        self.send_back_damaged()

    def send_back_damaged(self) -> None:
        """Those of the damaged requests that have nothing outstanding go back to the queue."""
        for id in list(self.damaged):
            if not self.requests[id].outstanding:
                self.leave(self.requests[id])
                self.preempted.append(id)

    def remove(self, request: Request) -> None:
        """A request is gone, with every block that nobody else owns."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request.id)
        else:
            self._unpin(request)
            self.admitted.remove(request.id)
        del self.requests[request.id]
        self.damaged.pop(request.id, None)
        while request.blocks:
            self.store.detach_last(request)

    def keep(self, request: Request, blocks: int) -> int:
        """The handle of a prefix that owns a request's first blocks from now on."""
        handle, prefix = self.new_id(), BlockOwner()
        self.store.attach(prefix, request.blocks[:blocks])
        self.kept[handle] = prefix
        return handle

    def source(self, id: int) -> BlockOwner:
        """A request, or a kept prefix that is used now."""
        if id in self.kept:
            self.kept[id] = self.kept.pop(id)
            return self.kept[id]
        return self.requests[id]

    def forget(self, handle: int) -> None:
        """A kept prefix is gone."""
        prefix = self.kept.pop(handle)
        while prefix.blocks:
            self.store.detach_last(prefix)

    def tail(self, request: Request) -> int:
        """Its first block that may not leave the GPU while it runs: what is being written, and the last pages."""
        written = request.tokens // self.sizes.layout.virtual_block
        return max(0, min(written, len(request.blocks) - self.sizes.tail_pages))

    def give_hot(self, request: Request) -> None:
        """A running request gets a hot region and needs no more than its tail on the GPU."""
        for block in request.blocks[: request.tail]:
            self.store.pin(block, -1)
        self._take_hot(request)

    def take_back_hot(self, request: Request) -> None:
        """A request whose blocks are all on the GPU gives its hot region up."""
        for block in request.blocks[: request.tail]:
            self.store.pin(block, 1)
        self._release_hot(request)

    def extend(self, request: Request, blocks: list[Block]) -> None:
        """New blocks at the end of an admitted request."""
        for block in blocks:
            block.pins = block.active = 1
        self.store.attach(request, blocks)
        self.move_tail(request)

    def move_tail(self, request: Request) -> None:
        """Let go what lies before the tail, after the request has grown."""
        before, request.tail = request.tail, self.tail(request)
        if request.hot:
            for block in request.blocks[before : request.tail]:
                self.store.pin(block, -1)

    def _unpin(self, request: Request) -> None:
        hot = bool(request.hot)
        for block in request.blocks:
            self.store.pin(block, -int(not hot or block.number >= request.tail), -1)
        if hot:
            self._release_hot(request)
        request.outstanding = 0

    def _take_hot(self, request: Request) -> None:
        request.hot = tuple(self.store.take_gpu_pages(self.sizes.hot_pages))
        self.hot_changes[request.id] = HotRegion(request.id, request.hot)
        self.store.counters.hot_regions += 1

    def _release_hot(self, request: Request) -> None:
        self.store.gpu.release(request.hot)
        request.hot = ()
        self.hot_changes[request.id] = HotRegion(request.id, ())
