"""`EngineEvents`: batches lost, repeated, out of order, of an engine that restarted."""

import random

import pytest

from serving.core.engine_events import EngineEvents
from serving.core.foreign_hashes import ForeignHashes
from serving.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Tier
from serving.core.prefix_index import PrefixIndex, PrefixMatch


def stored(*hashes, parent=None, **more):
    return BlockStored(hashes, parent, (), 4, **more)


class Stream:
    """An index with one engine, and a clock that is set by hand."""

    def __init__(self, **options):
        self.now = 0.0
        self.index = PrefixIndex()
        self.index.add_engine("a")
        self.events = EngineEvents(self.index, "a", lambda: self.now, **options)

    def receive(self, sequence, *events, ts=None):
        self.events.receive(sequence, EventBatch(float(sequence) if ts is None else ts, events))

    def holds(self, *chain):
        return self.index.lookup(chain)["a"].blocks


def test_out_of_order_and_repeated_batches_are_applied_once_and_in_order():
    stream = Stream()
    stream.receive(1, BlockRemoved((1,)))
    assert (stream.events.wanted, stream.events.sure) == (0, False)
    stream.receive(1, BlockRemoved((1,)))
    stream.receive(0, stored(1), stored(1))
    assert (stream.events.wanted, stream.events.sure) == (None, True)
    stream.receive(0, stored(1), stored(1))
    assert stream.holds(1) == 1  # two copies, one removed
    stream.receive(2, BlockRemoved((1,)))
    assert stream.holds(1) == 0
    assert stream.events.repeated_batches == 2


def test_hole_keeps_what_was_known_until_patience_ends():
    stream = Stream(patience=1.0)
    stream.receive(0, stored(1, 2))
    stream.now = 5.0
    stream.receive(2, stored(3, parent=2))
    assert stream.events.wanted == 1
    stream.now = 5.9
    stream.events.poll()
    assert stream.holds(1, 2) == 2
    stream.now = 6.0
    stream.events.poll()
    assert (stream.holds(1, 2), stream.events.wanted, stream.events.lost_batches) == (0, None, 1)
    stream.receive(3, stored(1, 2))
    assert stream.holds(1, 2, 3) == 3  # batch 2, behind the hole, was not lost


def test_replay_fills_a_hole_and_its_end_gives_up_the_rest():
    stream = Stream()
    stream.receive(4, stored(5))
    assert stream.events.wanted == 0  # a router that starts late asks for all there is
    stream.receive(2, stored(3))
    stream.receive(3, stored(4))
    stream.events.replay_ended()
    assert [stream.holds(block) for block in (1, 3, 4, 5)] == [0, 1, 1, 1]
    assert stream.events.lost_batches == 2
    stream.events.replay_ended()  # nothing to give up


def test_too_many_waiting_batches_end_the_wait():
    stream = Stream(max_waiting=3)
    for sequence in range(1, 6):
        stream.receive(sequence, stored(sequence))
    assert stream.events.sure
    assert [stream.holds(block) for block in range(1, 6)] == [1] * 5


def test_restart_forgets_what_the_old_process_held():
    stream = Stream()
    for sequence in range(5):
        stream.receive(sequence, stored(sequence))
    stream.receive(1, stored(1))  # a repetition: as old as it was
    assert stream.events.restarts == 0
    stream.receive(0, stored(100), ts=50.0)
    assert stream.events.restarts == 1
    assert [stream.holds(block) for block in (0, 1, 4, 100)] == [0, 0, 0, 1]
    stream.receive(1, stored(101), ts=51.0)
    assert stream.holds(101) == 1
    stream.events.lost()
    assert len(stream.index) == 0
    stream.receive(0, stored(7), ts=1.0)  # the clock of the machine that replaces it may stand anywhere
    assert stream.holds(7) == 1


@pytest.mark.parametrize("seed", range(20))
def test_random_losses_never_make_the_index_believe_more_than_the_engine_holds(seed):
    rng = random.Random(seed)
    chain = list(range(30))
    held, batches = {tier: set() for tier in Tier}, []
    for number in range(120):
        events = []
        for _ in range(rng.randint(0, 3)):
            tier = rng.choice(list(Tier))
            if rng.random() < 0.6:
                start = rng.randint(0, 29)
                new = [b for b in chain[start : start + rng.randint(1, 8)] if b not in held[tier]]
                held[tier].update(new)
                events += [stored(b, parent=b - 1 if b else None, medium=tier.value) for b in new]
            elif rng.random() < 0.95:
                gone = rng.sample(sorted(held[tier]), min(len(held[tier]), 3))
                held[tier].difference_update(gone)
                events.append(BlockRemoved(tuple(gone), tier.value))
            else:
                held = {tier: set() for tier in Tier}
                events.append(AllBlocksCleared())
        batches.append(EventBatch(float(number), tuple(events)))
    delivery = [n for n in range(120) if n == 119 or rng.random() > 0.1]
    delivery += rng.sample(delivery, 20)
    delivery.sort(key=lambda n: n + rng.choice([0, 0, 0, 2.5, 7]))
    replays = rng.random() < 0.5
    oldest = rng.choice([0, 0, 60])  # what the publisher keeps
    stream = Stream(patience=rng.choice([0.0, 3.0, 1e9]))
    for n in delivery:
        stream.now += rng.random()
        stream.events.receive(n, batches[n])
        if replays and (first := stream.events.wanted) is not None:
            for missed in range(max(first, oldest), n + 1):
                stream.events.receive(missed, batches[missed])
            stream.events.replay_ended()
        stream.events.poll()
    stream.events.replay_ended()
    assert stream.events.sure
    for tier in Tier:
        believed = {b for b in chain if stream.index.lookup([b])["a"] == PrefixMatch(*[int(tier is t) for t in Tier])}
        assert believed <= held[tier]
        if not stream.events.lost_batches:
            expected = held[Tier.GPU] if tier is Tier.GPU else held[Tier.HOST] - held[Tier.GPU]
            assert believed == expected
    if replays and not oldest:
        assert stream.events.lost_batches == 0


def own_hash(parent, tokens):
    return hash((parent, tuple(tokens)))


def test_foreign_hashes_become_those_of_the_router():
    tokens = tuple(range(12))
    own = [own_hash(None, tokens[:4])]
    own.append(own_hash(own[0], tokens[4:8]))
    own.append(own_hash(own[1], tokens[8:]))
    stream = Stream(translate=(translate := ForeignHashes(own_hash, block_tokens=4)))
    stream.receive(0, BlockStored((b"f0", b"f1"), None, tokens[:8], 4))
    stream.receive(1, BlockStored((b"f2",), b"f1", tokens[8:], 4))
    assert stream.holds(*own) == 3
    stream.receive(
        2, BlockStored((b"f9",), b"unknown", tokens[:4], 4), BlockStored((b"f8",), None, tokens[:4], 4, lora_id=1)
    )
    assert translate.untranslated_blocks == 2
    stream.receive(3, BlockRemoved((b"f1", b"never seen")))
    assert stream.holds(*own) == 1
    stream.receive(4, BlockStored((b"g",), None, tokens[:8], 8))  # of another block size: counts as lost
    assert (stream.holds(*own), stream.events.lost_batches) == (0, 1)
    stream.receive(
        5, BlockStored((b"f0",), None, tokens[:4], 4), AllBlocksCleared(), BlockStored((b"f0",), None, tokens[:4], 4)
    )
    assert stream.holds(*own) == 1


def test_translations_are_bounded():
    translate = ForeignHashes(own_hash, block_tokens=1, max_blocks=2)
    translate(EventBatch(0.0, (BlockStored((1, 2, 3), None, (7, 8, 9), 1),)))
    (event,) = translate(EventBatch(1.0, (BlockRemoved((1, 2, 3)),))).events
    assert len(event.block_hashes) == 2


def test_bad_input_is_refused():
    index = PrefixIndex()
    with pytest.raises(ValueError, match="'a' is not in the index"):
        EngineEvents(index, "a", lambda: 0.0)
    stream = Stream()
    with pytest.raises(ValueError, match="sequence=-1"):
        stream.receive(-1, ts=0.0)
    with pytest.raises(ValueError, match="patience=-1"):
        EngineEvents(stream.index, "a", lambda: 0.0, patience=-1)
