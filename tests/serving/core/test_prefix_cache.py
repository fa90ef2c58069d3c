"""Prefixes in whole virtual blocks, and the bugs that others met with them, as small inputs."""

from __future__ import annotations

import pytest

from cptools import HostKVPool, KVLayout
from cptools.block_tables import BlockTables
from cptools.page_allocator import PageAllocator, PoolExhausted
from serving.core import (
    Admission,
    BlockPool,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheIdentity,
    PrefixCache,
    PrefixStats,
    Restore,
)


class Cache:
    """A prefix cache and the tables of an engine over it."""

    def __init__(self, layout: KVLayout, pages: int, *, mtp: bool = False, host: BlockPool | None = None) -> None:
        self.events: list = []
        self.pool = BlockPool(PageAllocator(pages), on_event=self.events.append)
        self.prefixes = PrefixCache(CacheIdentity("m", "1", layout, ("fp8",), mtp=mtp), self.pool, host)
        self.tables = BlockTables(layout, self.pool)

    def admit(self, tokens: list[int], **options) -> Admission:
        return self.prefixes.admit(self.prefixes.blocks(tokens), **options)

    def begin(self, tokens: list[int]) -> int:
        admission = self.admit(tokens)
        return self.tables.open(admission.prefix, admission.own)

    def publish(self, request: int, tokens: list[int]) -> int:
        return self.prefixes.publish(self.prefixes.blocks(tokens), self.tables, request, len(tokens))

    def serve(self, tokens: list[int]) -> None:
        request = self.begin(tokens)
        self.publish(request, tokens)
        self.tables.close(request)

    def found(self, tokens: list[int]) -> int:
        return self.prefixes.match(self.prefixes.blocks(tokens))[0]


def test_a_hit_is_a_multiple_of_the_virtual_block() -> None:
    """Field case C1: with N = 4 two prompts that share a page of tokens and one more share no block."""
    cache = Cache(KVLayout(4, page_size=16), 20)
    shared = list(range(17))
    cache.serve(shared + [1000] * 80)
    assert cache.found(shared + [2000] * 80) == 0
    assert cache.found(shared + [1000] * 80) == 64


@pytest.mark.parametrize("length, found", [(127, 64), (128, 64), (129, 128), (130, 128)])
def test_around_a_block(length: int, found: int) -> None:
    """Field case F3: B * N - 1, B * N and B * N + 1 tokens; the last one is always computed."""
    cache = Cache(KVLayout(4, page_size=16), 20)
    tokens = list(range(length))
    cache.serve(tokens)
    assert cache.found(tokens) == found


@pytest.mark.parametrize("mtp", [False, True])
def test_equal_prompts_hit_under_dcp_8_with_and_without_drafts(mtp: bool) -> None:
    """Field case C2: 1500 equal tokens, blocks of 128 x 8. With the MTP layer's rows the token behind the block must be
    the same, which does not cost an equal prompt its only block."""
    cache = Cache(KVLayout(8, page_size=128), 4, mtp=mtp)
    cache.serve(list(range(1500)))
    assert cache.found(list(range(1500))) == 1024
    assert cache.found([*range(1024), 7, 8]) == (0 if mtp else 1024)


def test_a_shorter_prompt_restores_whole_blocks() -> None:
    """Field case F16: 741 and then 601 tokens, the second a prefix of the first."""
    cache = Cache(KVLayout(2, page_size=64), 20)
    cache.serve(list(range(741)))
    admission = cache.admit(list(range(601)))
    assert admission.cached_tokens == 512
    assert (len(admission.prefix), len(admission.own)) == (4, 1)


def test_a_hit_is_pinned_at_lookup() -> None:
    """What was promised can not be evicted before the request begins."""
    cache = Cache(KVLayout(1, page_size=4), 4)
    cache.serve(list(range(9)))
    admission = cache.admit(list(range(9)))
    assert admission == Admission(8, (0, 1), (2,))
    with pytest.raises(PoolExhausted, match="2 pages wanted, 1 of 4 are free"):
        cache.pool.allocate(2)
    assert cache.pool.evict(9) == 0
    cache.prefixes.cancel(admission)
    assert cache.pool.num_free == 4
    assert cache.pool.evict(9) == 2


def test_a_refused_request_changes_nothing_not_even_the_order() -> None:
    cache = Cache(KVLayout(1, page_size=4), 4)
    old, new = [1] * 5, [2] * 5
    cache.serve(old)
    cache.serve(new)
    with pytest.raises(PoolExhausted, match="4 pages wanted beside 1 cached ones, 3 of 4 are free"):
        cache.admit([*old, *[3] * 15])
    assert [cache.pool.users(page) for page in range(4)] == [0] * 4
    assert cache.prefixes.stats.requests == 2
    cache.pool.evict(1)
    assert (cache.found(old), cache.found(new)) == (0, 4)


def test_the_end_of_the_oldest_chain_goes_first_and_uncached_pages_before_it() -> None:
    cache = Cache(KVLayout(1, page_size=4), 7)
    first, second = [1] * 13, [2] * 9
    cache.serve(first)  # blocks in pages 0, 1, 2
    cache.serve(second)  # in pages 3, 4
    cache.tables.close(cache.begin(first[:9]))  # its first two blocks are used again; the end is now the oldest
    assert cache.pool.allocate(2) == [5, 6]
    assert (cache.found(first), cache.found(second)) == (12, 8)
    assert cache.pool.allocate(1) == [2]
    assert cache.pool.allocate(1) == [4]
    assert (cache.found(first), cache.found(second)) == (8, 4)
    assert cache.pool.allocate(2) == [1, 3]
    assert (cache.found(first), cache.found(second)) == (4, 0)


def test_a_block_stays_while_one_behind_it_is_in_use() -> None:
    """Two requests compute the same first block side by side; only one copy is kept, and the other request's next block
    stands behind it."""
    cache = Cache(KVLayout(1, page_size=4), 6)
    one, two = [1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 3, 3, 3, 3, 3]
    a, b = cache.begin(one), cache.begin(two)
    assert (cache.publish(a, one), cache.publish(b, two)) == (2, 1)
    assert cache.publish(b, two) == 0
    cache.tables.close(a)
    assert cache.pool.num_free == 2  # page 2 of a, and its second block; not its first, which b's second needs
    assert cache.pool.evict(9) == 1
    assert cache.found(two) == 8
    cache.tables.close(b)
    assert cache.pool.num_free == 6


def test_a_prefix_used_over_and_over_leaves_no_trail() -> None:
    """What is remembered of the order of eviction grows with the blocks, not with the requests."""
    cache = Cache(KVLayout(1, page_size=4), 6)
    often, rarely = [1] * 9, [2] * 9
    cache.serve(rarely)
    for _ in range(500):
        cache.serve(often)
    assert len(cache.pool._oldest) < 100
    assert cache.pool.evict(2) == 2
    assert (cache.found(often), cache.found(rarely)) == (8, 0)


def test_events_tell_an_index_elsewhere() -> None:
    cache = Cache(KVLayout(2, page_size=2), 3)
    tokens = list(range(10, 19))
    hashes = tuple(cache.prefixes.blocks(tokens).hashes)
    request = cache.begin(tokens)
    cache.publish(request, tokens[:5])
    cache.publish(request, tokens)
    cache.tables.close(request)
    cache.pool.evict(1)
    cache.prefixes.clear()
    assert cache.events == [
        BlocksStored(hashes[:1], None, (10, 11, 12, 13), 4, "GPU"),
        BlocksStored(hashes[1:], hashes[0], (14, 15, 16, 17), 4, "GPU"),
        BlocksRemoved(hashes[1:], "GPU"),
        BlocksCleared("GPU"),
    ]


def test_tokens_that_are_not_written_yet_are_not_published() -> None:
    """Drafts that nobody verified, and the last token, which was not fed: the caller says how far rows are final."""
    cache = Cache(KVLayout(1, page_size=4), 4)
    tokens = list(range(12))
    blocks, request = cache.prefixes.blocks(tokens), cache.begin(tokens)
    assert [cache.prefixes.publish(blocks, cache.tables, request, n) for n in (3, 4, 11, 12)] == [0, 1, 1, 1]
    assert cache.tables.read_only_tokens(request) == 12


def test_wrong_bytes_are_forgotten_with_all_that_stand_on_them() -> None:
    cache = Cache(KVLayout(1, page_size=4), 4)
    tokens = list(range(13))
    cache.serve(tokens)
    request = cache.begin(tokens)
    assert cache.pool.forget(cache.prefixes.blocks(tokens).hashes[1]) == 2
    assert cache.pool.forget(b"unknown") == 0
    assert cache.found(tokens) == 4
    assert [cache.pool.users(page) for page in range(4)] == [1, 1, 1, 1]
    cache.tables.close(request)
    assert (cache.pool.num_free, cache.pool.num_cached) == (4, 1)


def test_two_tiers_are_found_one_behind_the_other_and_counted_apart() -> None:
    """The GPU has lost the end of a prompt that host memory still has; each rank restores its shard of these pages."""
    with HostKVPool(num_pages=4, page_size=2, row_bytes=1, num_layers=1, pin_memory=False) as memory:
        host = BlockPool(memory, medium="CPU")
        cache = Cache(KVLayout(2, page_size=2), 5, host=host)
        tokens = list(range(17))
        cache.serve(tokens)
        blocks = cache.prefixes.blocks(tokens)
        pages = host.allocate(4)
        host.store(blocks, pages)
        host.release(pages)
        cache.pool.evict(3)
        assert cache.prefixes.match(blocks) == (4, 12)

        admission = cache.prefixes.admit(blocks)
        assert admission.cached_tokens == 16
        assert admission.prefix == (0, 1, 2, 3)
        assert admission.own == (4,)
        assert admission.restores == (Restore(1, 1), Restore(2, 2), Restore(3, 3))
        assert host.evict(9) == 0  # the first page is not read, but stands before those that are
        with pytest.raises(PoolExhausted):
            host.allocate(1)
        cache.prefixes.restored(admission.restores)
        assert host.evict(1) == 1
        assert cache.prefixes.stats == PrefixStats(2, 34, gpu_hit_tokens=4, host_hit_tokens=12, cold_requests=1)

        cache.prefixes.cancel(Admission(0, admission.prefix, admission.own))
        cache.prefixes.clear()
        assert cache.prefixes.match(blocks) == (0, 0)
        assert (cache.pool.num_free, host.num_free, memory.num_free) == (5, 4, 4)


def test_room_for_a_first_chunk_alone() -> None:
    cache = Cache(KVLayout(1, page_size=4), 8)
    cache.serve(list(range(9)))
    assert cache.admit(list(range(40)), room=5) == Admission(8, (0, 1), (2, 3))
    assert cache.admit(list(range(40)), room=0) == Admission(8, (0, 1), ())


def test_a_prompt_that_begins_anew_each_time_shows_in_the_counters() -> None:
    """A volatile header: other tokens in the first block of every request."""
    cache = Cache(KVLayout(1, page_size=4), 8)
    for i in range(3):
        cache.serve([i, *range(8)])
    cache.serve([9, 9])  # too short for a block: not cold
    assert cache.prefixes.stats == PrefixStats(requests=4, prompt_tokens=29, cold_requests=3)


def test_wrong_calls_are_refused_and_change_nothing() -> None:
    cache = Cache(KVLayout(1, page_size=4), 4)
    tokens = list(range(9))
    cache.serve(tokens)
    request = cache.begin(tokens)
    other = Cache(KVLayout(1, page_size=4), 4)
    blocks, foreign = cache.prefixes.blocks(tokens), Cache(KVLayout(2, page_size=2), 4).prefixes.blocks(tokens)
    pool = cache.pool
    calls = [
        (lambda: cache.prefixes.admit(foreign), "do not fit a cache"),
        (lambda: cache.prefixes.admit(cache.prefixes.blocks()), "without tokens"),
        (lambda: cache.prefixes.publish(foreign, cache.tables, request, 9), "do not fit a cache"),
        (lambda: cache.prefixes.publish(blocks, other.tables, request, 9), "another pool"),
        (lambda: cache.prefixes.publish(blocks, cache.tables, 99, 9), "request 99 is not open"),
        (lambda: pool.store(blocks, [0, 1, 2]), "pages for 3 blocks, 9 tokens have 2 full ones"),
        (lambda: pool.store(other.prefixes.blocks([7] * 9), [2, 2]), "named twice"),
        (lambda: pool.store(other.prefixes.blocks([7] * 9), [2], first=1), "block 0 before it is not cached"),
        (lambda: pool.store(other.prefixes.blocks([7] * 9), [2, 3]), "page 3 can not hold block 1: it has no user"),
        (lambda: pool.store(other.prefixes.blocks([7] * 9), [2, 1]), "page 1 can not hold block 1: it holds another"),
        (lambda: pool.release([2, 2]), "page 2 is released 2 times but has 1 users"),
        (lambda: pool.release([3]), "page 3 is released 1 times but has 0 users"),
        (lambda: pool.retain([2, 3]), "page 3 is free"),
        (lambda: pool.allocate(-1), "n=-1"),
        (lambda: pool.users(4), "page 4 is outside num_pages=4"),
        (lambda: cache.tables.protect(request, 4), "holds 3 pages, no 4 to protect"),
        (lambda: BlockPool(pool), "3 of 4 pages are in use already"),
        (lambda: PrefixCache(cache.prefixes.identity, pool, BlockPool(PageAllocator(1))), "both tiers are named 'GPU'"),
    ]
    before = list(cache.events)
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert [pool.users(page) for page in range(4)] == [1, 1, 1, 0]
    assert (pool.num_free, pool.num_cached, cache.events) == (1, 2, before)
    cache.tables.close(request)
    with pytest.raises(ValueError, match="page 0 is free"):
        pool.retain([0])
    assert cache.found(tokens) == 8
