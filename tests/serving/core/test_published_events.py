"""An engine's own prefix cache, seen from the router: what it publishes makes the index know what it would find."""

import random

import pytest

from cptools import HostKVPool, KVLayout
from cptools.block_tables import BlockTables
from cptools.page_allocator import PageAllocator, PoolExhausted
from serving.core import BlockPool, BlocksCleared, CacheIdentity, PrefixCache
from serving.core.engine_events import EngineEvents
from serving.core.kv_events import AllBlocksCleared, EventBatch
from serving.core.prefix_index import PrefixIndex
from serving.core.published_events import published


@pytest.mark.parametrize("seed", range(8))
def test_index_finds_what_the_engine_finds(seed):
    codec = pytest.importorskip("serving.events.codec", exc_type=ImportError)
    rng = random.Random(seed)
    layout, told = KVLayout(2, page_size=2), []
    index = PrefixIndex()
    index.add_engine("e")
    events = EngineEvents(index, "e", lambda: 0.0)
    with HostKVPool(num_pages=9, page_size=2, row_bytes=1, pin_memory=False) as pages:
        gpu = BlockPool(PageAllocator(14), on_event=told.append)
        host = BlockPool(pages, medium="CPU", on_event=told.append)
        prefixes = PrefixCache(CacheIdentity("m", "1", layout, ("fp8",)), gpu, host)
        tables = BlockTables(layout, gpu)
        prompts = [[rng.randint(0, 1) for _ in range(rng.randint(1, 30))] for _ in range(40)]
        for sequence, tokens in enumerate(prompts):
            blocks = prefixes.blocks(tokens)
            try:
                admission = prefixes.admit(blocks)
            except PoolExhausted:
                continue
            request = tables.open(admission.prefix, admission.own)
            prefixes.restored(admission.restores)
            prefixes.publish(blocks, tables, request, len(tokens))
            tables.close(request)
            if rng.random() < 0.5 and (count := rng.randint(0, min(len(blocks.hashes), 5))):
                copies = host.allocate(count)  # offload the first blocks
                host.store(blocks, copies)
                host.release(copies)
            if rng.random() < 0.3:
                gpu.evict(rng.randint(0, 6))
            if rng.random() < 0.05:
                rng.choice([gpu, host]).clear()
            batch = EventBatch(float(sequence), published(told))
            told.clear()
            events.receive(events.next_sequence, codec.decode_batch(codec.encode_batch(batch)))
            for other in prompts:
                wanted = prefixes.blocks(other)
                match = index.lookup(wanted.hashes[: wanted.reusable])["e"]
                assert (match.gpu_blocks * 4, match.host_blocks * 4) == prefixes.match(wanted)
        assert index.unknown_removals == 0


def test_media_that_no_router_knows_are_refused():
    assert published([BlocksCleared("CPU")]) == (AllBlocksCleared("CPU"),)
    with pytest.raises(ValueError, match="medium='DISK'"):
        published([BlocksCleared("DISK")])
    with pytest.raises(ValueError, match="str is no event"):
        published(["x"])
