"""What a prefix cache should do, by looking at everything each time; and random schedules that compare it with one.

The model knows blocks by their tokens, not by hashes, and what stands in each page as if rows were written there.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from cptools.block_tables import BlockTables
from cptools.layout import KVLayout
from cptools.page_allocator import PageAllocator, PoolExhausted
from serving.core import (
    Admission,
    BlockPool,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheIdentity,
    PrefixCache,
    TokenBlocks,
)

LAYOUT = KVLayout(2, 1, 2)
BLOCK = 4
Key = tuple[str, tuple[int, ...]]


@dataclass
class _Cached:
    page: int
    used: int
    serial: int


class ModelPool:
    """Brute force: every question is answered by a walk over all blocks."""

    def __init__(self, num_pages: int, seen: int) -> None:
        self.users = [0] * num_pages
        self.cached: dict[Key, _Cached] = {}
        self.seen = seen  # tokens behind a block that belong to its key
        self.clock = self.serial = 0

    def parent(self, key: Key) -> Key | None:
        salt, tokens = key
        return (salt, tokens[:-BLOCK]) if len(tokens) - self.seen > BLOCK else None

    def needed(self, key: Key) -> bool:
        """In use, or some block behind it is."""
        return bool(self.users[self.cached[key].page]) or any(self.needed(k) for k in self.children(key))

    def children(self, key: Key) -> list[Key]:
        return [k for k in self.cached if self.parent(k) == key]

    def holding(self) -> set[int]:
        return {block.page for block in self.cached.values()}

    def empty(self) -> list[int]:
        return [page for page, users in enumerate(self.users) if not users and page not in self.holding()]

    def num_free(self) -> int:
        return len(self.empty()) + sum(not self.needed(key) for key in self.cached)

    def evict(self, n: int) -> list[Key]:
        gone = []
        for _ in range(n):
            leaves = [k for k, b in self.cached.items() if not self.users[b.page] and not self.children(k)]
            if not leaves:
                break
            oldest = min(leaves, key=lambda k: (self.cached[k].used, self.cached[k].serial))
            del self.cached[oldest]
            gone.append(oldest)
        return gone

    def allocate(self, n: int) -> list[int]:
        self.evict(n - len(self.empty()))
        pages = self.empty()[:n]
        for page in pages:
            self.users[page] += 1
        return pages

    def release(self, pages: list[int]) -> None:
        self.clock += 1
        for page in pages:
            self.users[page] -= 1
        for block in self.cached.values():
            if block.page in pages and not self.users[block.page]:
                block.used = self.clock

    def store(self, keys: list[Key], pages: list[int]) -> int:
        new = [(key, page) for key, page in zip(keys, pages, strict=True) if key not in self.cached]
        for key, page in new:
            self.serial += 1
            self.cached[key] = _Cached(page, self.clock, self.serial)
        return len(new)

    def forget(self, key: Key) -> None:
        for child in self.children(key):
            self.forget(child)
        del self.cached[key]


@dataclass
class _Request:
    tokens: list[int]
    salt: str
    blocks: TokenBlocks
    admission: Admission
    handle: int
    pages: list[int]
    read_only: int
    pending: bool


class Schedule:
    """Random calls to a prefix cache of two tiers, each checked against the model."""

    def __init__(self, seed: int, *, mtp: bool, gpu_pages: int = 7, host_pages: int = 5, pool: type = BlockPool):
        self.random, self.mtp = random.Random(seed), mtp
        self.identity = CacheIdentity("m", "r", LAYOUT, ("rows",), mtp=mtp)
        self.events: list = []
        self.gpu = pool(PageAllocator(gpu_pages), on_event=self.events.append)
        self.host = pool(PageAllocator(host_pages), medium="CPU", on_event=self.events.append)
        self.prefixes = PrefixCache(self.identity, self.gpu, self.host)
        self.tables = BlockTables(LAYOUT, self.gpu)
        self.models = {"GPU": ModelPool(gpu_pages, mtp), "CPU": ModelPool(host_pages, mtp)}
        self.held: dict[str, list[tuple[int, ...] | None]] = {"GPU": [None] * gpu_pages, "CPU": [None] * host_pages}
        self.requests: list[_Request] = []
        self.index: dict[str, set[bytes]] = {"GPU": set(), "CPU": set()}
        self.known: dict[Key, bytes] = {}
        self.done: Counter[str] = Counter()

    def keys(self, tokens: list[int], salt: str, count: int) -> list[Key]:
        return [(salt, tuple(tokens[: (i + 1) * BLOCK + self.mtp])) for i in range(count)]

    def run(self, steps: int) -> Counter[str]:
        actions = [self.admit] * 4 + [self.grow] * 3 + [self.close] * 2 + [self.offload, self.restore, self.evict]
        for _ in range(steps):
            self.random.choice([*actions, self.rarely])()
            self.check()
        while self.requests:
            self.close()
            self.check()
        assert self.gpu.num_free == self.gpu.num_pages
        assert self.host.num_free == self.host.num_pages
        return self.done

    def prompt(self) -> list[int]:
        """Often a further turn of an earlier sequence; else few different tokens, so that prefixes meet by chance."""
        tokens = [self.random.randint(0, 1) for _ in range(self.random.choice((1, 3, 4, 5, 8, 9, 13)))]
        earlier = sorted(self.known, key=lambda key: (len(key[1]), key))
        if earlier and self.random.random() < 0.6:
            tokens = list(self.random.choice(earlier)[1]) + tokens[:6]
        return tokens

    def admit(self) -> None:
        tokens, salt = self.prompt(), self.random.choice(("", "", "tenant"))
        blocks = self.prefixes.blocks(tokens, salt=salt)
        gpu, host = self.models["GPU"], self.models["CPU"]
        keys = self.keys(tokens, salt, (len(tokens) - 1) // BLOCK)
        on_gpu = next((i for i, key in enumerate(keys) if key not in gpu.cached), len(keys))
        on_host = next((i for i, key in enumerate(keys[on_gpu:]) if key not in host.cached), len(keys) - on_gpu)
        assert self.prefixes.match(blocks) == (on_gpu * BLOCK, on_host * BLOCK)
        cached = (on_gpu + on_host) * BLOCK
        room = self.random.choice((None, 0, 3))
        total = -(-(cached + (len(tokens) - cached if room is None else room)) // BLOCK)
        shared = [gpu.cached[key].page for key in keys[:on_gpu]]
        for page in shared:
            gpu.users[page] += 1
        if total - on_gpu > gpu.num_free():
            for page in shared:
                gpu.users[page] -= 1
            try:
                self.prefixes.admit(blocks, room=room)
            except PoolExhausted:
                self.done["refused"] += 1
                return
            raise AssertionError(f"{total - on_gpu} pages were not there")
        new = gpu.allocate(total - on_gpu)
        sources = [host.cached[key].page for key in keys[on_gpu : on_gpu + on_host]]
        for page in sources:
            host.users[page] += 1
        admission = self.prefixes.admit(blocks, room=room)
        assert admission.cached_tokens == cached
        assert list(admission.prefix) == shared + new[:on_host]
        assert list(admission.own) == new[on_host:]
        assert [(r.host_page, r.gpu_page) for r in admission.restores] == list(zip(sources, new, strict=False))
        for page, key in zip(shared, keys, strict=False):
            assert self.held["GPU"][page] == key[1], "a wrong hit"
        for page in new:
            self.held["GPU"][page] = None
        self.done["hits"] += on_gpu
        self.done["restores"] += on_host
        self.done["admitted"] += 1
        if self.random.random() < 0.1:
            self.prefixes.cancel(admission)
            gpu.release(shared + new)
            host.release(sources)
            return
        handle = self.tables.open(admission.prefix, admission.own)
        request = _Request(tokens, salt, blocks, admission, handle, shared + new, on_gpu + on_host, on_host > 0)
        self.requests.append(request)
        if not request.pending:
            self.compute(request)

    def compute(self, request: _Request) -> None:
        """Write the rows of tokens that have none, and publish what is full."""
        try:
            self.tables.reserve({request.handle: len(request.tokens)})
        except PoolExhausted:
            assert -(-len(request.tokens) // BLOCK) - len(request.pages) > self.models["GPU"].num_free()
            self.done["exhausted"] += 1
            self.close(request)
            return
        more = self.models["GPU"].allocate(max(-(-len(request.tokens) // BLOCK) - len(request.pages), 0))
        request.pages += more
        assert self.tables.pages(request.handle) == request.pages
        for i, page in enumerate(request.pages[request.read_only :], request.read_only):
            assert self.gpu.users(page) == 1, "a page of others is written"
            assert not self.gpu.is_cached(page), "a cached page is written"
            self.held["GPU"][page] = tuple(request.tokens[: (i + 1) * BLOCK + self.mtp])
        if self.random.random() < 0.8:
            self.publish(request)

    def publish(self, request: _Request) -> None:
        count = (len(request.tokens) - self.mtp) // BLOCK
        keys = self.keys(request.tokens, request.salt, count)
        new = self.prefixes.publish(request.blocks, self.tables, request.handle, len(request.tokens))
        assert new == self.models["GPU"].store(keys, request.pages[:count])
        self.known.update(zip(keys, request.blocks.hashes, strict=True))
        request.read_only = max(request.read_only, len(request.tokens) // BLOCK if not self.mtp else count)
        assert self.tables.read_only_tokens(request.handle) == request.read_only * BLOCK
        self.done["published"] += new

    def pick(self, pending: bool = False) -> _Request | None:
        there = [request for request in self.requests if request.pending == pending]
        return self.random.choice(there) if there else None

    def grow(self) -> None:
        if (request := self.pick()) is not None:
            tokens = [self.random.randint(0, 1) for _ in range(self.random.randint(1, 5))]
            request.blocks.extend(tokens)
            request.tokens += tokens
            self.compute(request)

    def restore(self, request: _Request | None = None) -> None:
        if request is None and (request := self.pick(pending=True)) is None:
            return
        self.prefixes.restored(request.admission.restores)
        self.models["CPU"].release([r.host_page for r in request.admission.restores])
        for pair in request.admission.restores:
            self.held["GPU"][pair.gpu_page] = self.held["CPU"][pair.host_page]
        for i in range(request.read_only):
            want = tuple(request.tokens[: (i + 1) * BLOCK + self.mtp])
            assert self.held["GPU"][request.pages[i]] == want, "a wrong hit"
        request.pending = False
        self.compute(request)

    def close(self, request: _Request | None = None) -> None:
        if request is None:
            if not self.requests:
                return
            request = self.random.choice(self.requests)
        self.requests.remove(request)
        if request.pending:
            self.prefixes.restored(request.admission.restores)
            self.models["CPU"].release([r.host_page for r in request.admission.restores])
        self.tables.close(request.handle)
        self.models["GPU"].release(request.pages)

    def offload(self) -> None:
        """Copy published blocks of a request to the host tier, as far as there is room."""
        if (request := self.pick()) is None:
            return
        host = self.models["CPU"]
        keys = self.keys(request.tokens, request.salt, (len(request.tokens) - self.mtp) // BLOCK)
        keys = [key for key in keys if key in self.known][: request.read_only]
        start = next((i for i, key in enumerate(keys) if key not in host.cached), len(keys))
        # What is there already is pinned, so that making room for the rest does not evict it.
        room = self.random.randint(0, len(keys) - start)
        for key in keys[:start]:
            host.users[host.cached[key].page] += 1
        room = min(room, host.num_free())
        held, new = self.host.take(request.blocks.hashes[:start], room)
        assert held == [host.cached[key].page for key in keys[:start]]
        assert new == host.allocate(room)
        for i, page in enumerate(new, start):
            self.held["CPU"][page] = self.held["GPU"][request.pages[i]]
        if self.random.random() < 0.5:
            stored = self.host.store(request.blocks, new, first=start)
        else:
            stored = self.host.store(request.blocks, [*held, *new])
        assert stored == host.store(keys[: start + room], [*held, *new]) == room
        self.host.release([*held, *new])
        host.release([*held, *new])
        self.done["offloaded"] += room

    def evict(self) -> None:
        name, n = self.random.choice(("GPU", "CPU")), self.random.randint(0, 2)
        pool = self.gpu if name == "GPU" else self.host
        assert pool.evict(n) == len(self.models[name].evict(n))

    def rarely(self) -> None:
        """Forget a block and what stands behind it, or everything."""
        if self.random.random() < 0.1:
            self.prefixes.clear()
            for model in self.models.values():
                model.cached.clear()
            return
        name = self.random.choice(("GPU", "CPU"))
        model, pool = self.models[name], self.gpu if name == "GPU" else self.host
        if model.cached and self.random.random() < 0.3:
            key = self.random.choice(sorted(model.cached))
            before = len(model.cached)
            model.forget(key)
            assert pool.forget(self.known[key]) == before - len(model.cached)
            self.done["forgotten"] += 1

    def check(self) -> None:
        for event in self.events:
            index = self.index[event.medium]
            if isinstance(event, BlocksCleared):
                index.clear()
            elif isinstance(event, BlocksRemoved):
                assert index.issuperset(event.hashes)
                index.difference_update(event.hashes)
                self.done["removed"] += len(event.hashes)
            else:
                assert isinstance(event, BlocksStored)
                assert event.parent is None or event.parent in index
                assert not index.intersection(event.hashes)
                assert len(event.token_ids) == len(event.hashes) * event.block_size == len(event.hashes) * BLOCK
                index.update(event.hashes)
        self.events.clear()
        for name, pool in (("GPU", self.gpu), ("CPU", self.host)):
            model = self.models[name]
            assert [pool.users(page) for page in range(pool.num_pages)] == model.users
            assert pool.num_free == model.num_free()
            assert pool.num_cached == len(model.cached)
            assert {page for page in range(pool.num_pages) if pool.is_cached(page)} == model.holding()
            assert self.index[name] == {self.known[key] for key in model.cached}
            assert all(parent in model.cached for key in model.cached if (parent := model.parent(key))), "a hole"
            for key, block in model.cached.items():
                assert self.held[name][block.page] == key[1], "a cached page holds other rows"
