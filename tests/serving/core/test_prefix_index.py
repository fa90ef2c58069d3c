"""`PrefixIndex` against sets of blocks, walked one by one."""

import random
import time
from collections import Counter

import pytest

from serving.core import prefix_index
from serving.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Tier, shared_blocks
from serving.core.prefix_index import PrefixIndex, PrefixMatch
from serving.core.speculation import SpeculativeChains

ENGINES = ["a", "b", "c"]


class SetIndex:
    """Copies of each block, by engine and tier; a prompt's blocks are looked up one by one."""

    def __init__(self, engines):
        self.copies = {(engine, tier): Counter() for engine in engines for tier in Tier}

    def store(self, engine, tier, hashes):
        self.copies[engine, tier].update(hashes)

    def remove(self, engine, tier, hashes):
        for block in hashes:
            if self.copies[engine, tier][block]:
                self.copies[engine, tier][block] -= 1

    def clear(self, engine):
        for tier in Tier:
            self.copies[engine, tier].clear()

    def lookup(self, engine, hashes, covered=0):
        gpu = min(covered, len(hashes))
        while gpu < len(hashes) and self.copies[engine, Tier.GPU][hashes[gpu]]:
            gpu += 1
        end = gpu
        while end < len(hashes) and self.copies[engine, Tier.HOST][hashes[end]]:
            end += 1
        return PrefixMatch(gpu, end - gpu)


def random_chains(rng, count, longest):
    """Chains that branch off one another at random places. A block's number is new, so it stands for its prefix."""
    chains, names = [[]], iter(range(1, 1 << 30))
    for _ in range(count):
        trunk = rng.choice(chains)
        keep = rng.randint(0, len(trunk))
        chains.append(trunk[:keep] + [next(names) for _ in range(rng.randint(1, longest))])
    return chains[1:]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("segment", [3, 4096])
def test_equals_sets_of_blocks(seed, segment, monkeypatch):
    monkeypatch.setattr(prefix_index, "_SEGMENT_BLOCKS", segment)
    rng = random.Random(seed)
    chains = random_chains(rng, 12, rng.choice([2, 9, 40]))
    index, sets = PrefixIndex(), SetIndex(ENGINES)
    for engine in ENGINES:
        index.add_engine(engine)
    for _ in range(400):
        engine, tier, chain = rng.choice(ENGINES), rng.choice(list(Tier)), rng.choice(chains)
        start, stop = sorted([rng.randint(0, len(chain)), rng.randint(0, len(chain))])
        what = rng.random()
        if what < 0.5:  # from the root, or from anywhere, its parent known or not
            start = 0 if rng.random() < 0.5 else start
            parent = chain[start - 1] if start and rng.random() < 0.8 else None
            index.store(engine, tier, chain[start:stop], parent=parent)
            sets.store(engine, tier, chain[start:stop])
        elif what < 0.85:
            gone = rng.sample(chain, min(len(chain), rng.randint(1, 5))) if rng.random() < 0.5 else chain[start:stop]
            index.remove(engine, tier, gone)
            sets.remove(engine, tier, gone)
        elif what < 0.87:
            index.clear(engine)
            sets.clear(engine)
        elif what < 0.88:
            index.clear(engine, tier)
            sets.copies[engine, tier].clear()
        elif what < 0.89:
            index.remove_engine(engine)
            index.add_engine(engine)
            sets.clear(engine)
        prompt = rng.choice(chains)
        prompt = prompt[: rng.randint(0, len(prompt))] + [-1] * rng.randint(0, 2)
        covered = {name: rng.randint(0, len(prompt) + 1) for name in ENGINES if rng.random() < 0.3}
        expected = {name: sets.lookup(name, prompt, covered.get(name, 0)) for name in ENGINES}
        assert index.lookup(prompt, covered) == expected
    for engine in ENGINES:
        for tier in Tier:
            held = +sets.copies[engine, tier]
            assert index.blocks(engine, tier) == len(held)
            assert index.unknown_removals >= 0
            index.remove(engine, tier, [block for block, copies in held.items() for _ in range(copies)])
            assert index.blocks(engine, tier) == 0
    assert len(index) == 0  # nothing that is held by nobody stays


def test_copy_that_was_stored_twice_is_removed_twice():
    index = PrefixIndex()
    index.add_engine("a")
    for _ in range(2):
        index.store("a", Tier.GPU, [1, 2])
    index.remove("a", Tier.GPU, [2])
    assert index.lookup([1, 2])["a"] == PrefixMatch(2)
    index.remove("a", Tier.GPU, [2])
    assert index.lookup([1, 2])["a"] == PrefixMatch(1)


def test_leaving_the_gpu_leaves_the_host_copy():
    index = PrefixIndex()
    index.add_engine("a")
    stored = BlockStored((1, 2, 3), None, tuple(range(12)), 4)
    index.apply("a", [stored, BlockStored((2, 3), 1, tuple(range(8)), 4, medium="cpu"), BlockRemoved((2,))])
    assert index.lookup([1, 2, 3])["a"] == PrefixMatch(1, 2)
    index.apply("a", [AllBlocksCleared("GPU"), stored, AllBlocksCleared("DISK")])
    assert index.lookup([1, 2, 3])["a"] == PrefixMatch(3)
    index.apply("a", [AllBlocksCleared("GPU")])
    assert index.lookup([2, 3])["a"] == PrefixMatch(0, 2)
    index.apply("a", [AllBlocksCleared()])
    assert index.lookup([2, 3])["a"] == PrefixMatch()
    assert len(index) == 0


def test_other_media_and_groups_are_left_out():
    index = PrefixIndex()
    index.add_engine("a")
    index.apply("a", [BlockStored((1,), None, (), 4, medium="DISK"), BlockStored((2,), None, (), 4, group_idx=1)])
    assert len(index) == 0
    index.apply("a", [BlockStored((1,), None, (), 4, medium=None), BlockStored((2,), 1, (), 4, group_idx=0)])
    assert index.lookup([1, 2])["a"] == PrefixMatch(2)


def test_hashes_may_be_bytes_and_a_store_may_repeat_one():
    index = PrefixIndex()
    index.add_engine("a")
    index.store("a", Tier.GPU, [b"x", b"y"])
    index.store("a", Tier.GPU, [b"z", b"z"], parent=b"y")
    assert index.lookup([b"x", b"y", b"z"])["a"].gpu_blocks == 3


@pytest.mark.parametrize("seed", range(4))
def test_full_index_forgets_ends_of_chains_that_nobody_asked_for(seed):
    rng = random.Random(seed)
    index, sets = PrefixIndex(max_blocks=300), SetIndex(ENGINES)
    for engine in ENGINES:
        index.add_engine(engine)
    favourite = list(range(-100, 0))
    index.store("a", Tier.GPU, favourite)
    sets.store("a", Tier.GPU, favourite)
    for chain in random_chains(rng, 150, 40):
        assert index.lookup(favourite)["a"] == PrefixMatch(100)
        engine, tier = rng.choice(ENGINES), rng.choice(list(Tier))
        index.lookup(chain)
        index.store(engine, tier, chain[:60])
        sets.store(engine, tier, chain[:60])
        assert len(index) <= 300
        for name, match in index.lookup(chain).items():
            on_gpu, on_host = (sets.copies[name, tier] for tier in Tier)
            assert all(on_gpu[block] for block in chain[: match.gpu_blocks])  # forgotten, never invented
            assert all(on_host[block] for block in chain[match.gpu_blocks : match.blocks])
        if rng.random() < 0.3:
            index.remove(engine, tier, chain[30:60])
            sets.remove(engine, tier, chain[30:60])
    assert index.evicted_blocks > 500


def test_of_chains_met_by_one_lookup_the_root_outlives_what_stands_behind_it():
    index = PrefixIndex(max_blocks=10)
    index.add_engine("a")
    index.store("a", Tier.GPU, [1, 2])
    index.store("a", Tier.GPU, [11, 12], parent=1)
    index.store("a", Tier.GPU, [21, 22, 23], parent=11)
    index.lookup([1, 11, 21, 22, 23])
    index.store("a", Tier.GPU, range(100, 106))  # three too many
    assert [index.lookup([1, *tail])["a"].blocks for tail in ([2], [11, 12], [11, 21])] == [2, 3, 2]


def test_one_store_beyond_the_bound_keeps_its_beginning():
    index = PrefixIndex(max_blocks=10)
    index.add_engine("a")
    index.store("a", Tier.GPU, range(25))
    assert index.lookup(range(25))["a"] == PrefixMatch(10)
    assert (len(index), index.evicted_blocks) == (10, 15)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="max_blocks=0"):
        PrefixIndex(max_blocks=0)
    index = PrefixIndex()
    index.add_engine("a")
    with pytest.raises(ValueError, match="'a' is in the index already"):
        index.add_engine("a")
    for call in (index.clear, index.remove_engine, lambda name: index.store(name, Tier.GPU, [1])):
        with pytest.raises(ValueError, match=r"'b' is not in the index; there are \['a'\]"):
            call("b")
    index.remove("a", Tier.GPU, [7, 7])
    assert index.unknown_removals == 2


@pytest.mark.parametrize("blocks", [2048, 16384])
def test_lookup_of_a_million_tokens_is_quick(blocks):
    rng = random.Random(0)
    index = PrefixIndex()
    chain = [rng.randbytes(32) for _ in range(blocks)]
    for i in range(8):
        index.add_engine(f"engine{i}")
        for start in range(0, blocks * (i + 1) // 8, 128):  # as chunked prefill reports them
            index.store(f"engine{i}", Tier.GPU, chain[start : start + 128], parent=chain[start - 1] if start else None)
        index.store(f"engine{i}", Tier.HOST, chain)
    speculation = SpeculativeChains(time.monotonic, seconds=1e9)
    for i in range(200):
        speculation.add(i, f"engine{i % 8}", chain[: rng.randrange(blocks)])
    seconds = []
    for _ in range(5):
        prompt = [bytes(bytearray(block)) for block in chain]
        start = time.perf_counter()
        matches = index.lookup(prompt, speculation.covered(prompt))
        seconds.append(time.perf_counter() - start)
    assert {match.blocks for match in matches.values()} == {blocks}
    assert min(seconds) < 2e-3, seconds


def test_shared_blocks_from_any_place():
    assert shared_blocks([], [1]) == 0
    assert shared_blocks([1, 2, 3], [1, 2, 4]) == 2
    assert shared_blocks([0, 1, 2, 3], [1, 2, 3, 4], 1, 0) == 3
    assert shared_blocks([5], [5]) == 1


def test_speculation_expires_is_dropped_and_takes_the_longest_share():
    now = 0.0
    chains = SpeculativeChains(lambda: now, seconds=2, max_chains=3)
    chains.add("slow", "a", [1, 2, 3], delay=5)
    chains.add("quick", "a", [1, 2, 4, 5])
    chains.add("other", "b", [9])
    assert chains.covered([1, 2, 3, 7]) == {"a": 3}
    assert chains.covered([1, 2, 4, 5]) == {"a": 4}
    now = 2.0
    assert chains.covered([1, 2, 4, 5]) == {"a": 2}
    chains.add("more", "b", [1, 2])
    assert chains.covered([1, 2, 3]) == {"a": 3, "b": 2}
    chains.drop_engine("b")
    chains.drop("slow")
    assert len(chains) == 0
    for i in range(5):
        chains.add(i, "a", [i])
    assert len(chains) == 3
    with pytest.raises(ValueError, match="seconds=-1"):
        SpeculativeChains(lambda: now, seconds=-1)
