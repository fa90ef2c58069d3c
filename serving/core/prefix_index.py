"""Which engine holds how much of a prompt, and where: the longest leading run of its blocks.

A table from hash to mask would cost a cold memory access or two for each block: 10 ms for 16,384 blocks (measured). So
blocks stand in *segments*: stretches of one chain, in order, each with a bit a block for every engine and tier. Equal
hashes mean equal prefixes; hence a dozen comparisons say how far a prompt follows a segment, and counting ones says how
far each engine goes along. A lookup costs some microseconds for each segment on the prompt's way: one for every place
where another prompt branched off, and one in 4,096 blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cptools.integers import require_int

from .kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent, Tier, shared_blocks, tier_of

_SEGMENT_BLOCKS = 4096  # bounds the integers whose bits are the blocks of a segment


@dataclass(frozen=True)
class PrefixMatch:
    """What of a prompt an engine can begin with, without a hole.

    gpu_blocks: from the first on. host_blocks: behind these, in host memory, to be restored.
    """

    gpu_blocks: int = 0
    host_blocks: int = 0

    @property
    def blocks(self) -> int:
        return self.gpu_blocks + self.host_blocks


class _Segment:
    """Consecutive blocks of one chain. held: for each engine and tier, bit i for block i."""

    __slots__ = ("hashes", "held")

    def __init__(self) -> None:
        self.hashes: list[BlockHash] = []
        self.held: dict[str, dict[Tier, int]] = {}

    def kept(self) -> int:
        """Blocks up to the last one that some engine holds."""
        return max((bits.bit_length() for tiers in self.held.values() for bits in tiers.values()), default=0)


class PrefixIndex:
    """Longest-prefix index over block hashes. No I/O, no clock. Not thread-safe.

    A block that an engine stored twice (two copies, in one tier) is gone when it was removed twice. Tiers are counted
    apart: leaving the GPU does not take a block out of host memory.

    Args:
        max_blocks: different hashes kept, of about 250 bytes each. Beyond it those are forgotten that no lookup met for
            longest, from the ends of chains, so that what is left are prefixes.
    """

    def __init__(self, *, max_blocks: int = 4_000_000) -> None:
        self.max_blocks = require_int("max_blocks", max_blocks, minimum=1)
        self.evicted_blocks = 0
        self.unknown_removals = 0  # of blocks that were never reported, or forgotten
        self._where: dict[BlockHash, tuple[_Segment, int]] = {}
        self._segments: OrderedDict[_Segment, None] = OrderedDict()  # least recently met first
        self._copies: dict[str, Counter[tuple[Tier, BlockHash]]] = {}  # beyond the first

    def __len__(self) -> int:
        """Different hashes kept; a few of them, inside of chains, may be held by no engine any more."""
        return len(self._where)

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(self._copies)

    def blocks(self, engine: str, tier: Tier) -> int:
        """Different hashes that a tier of an engine holds. Walks over all segments."""
        self._check(engine)
        held = (segment.held[engine][tier] for segment in self._segments if engine in segment.held)
        return sum(bits.bit_count() for bits in held)

    def add_engine(self, engine: str) -> None:
        if engine in self._copies:
            raise ValueError(f"engine {engine!r} is in the index already")
        self._copies[engine] = Counter()

    def remove_engine(self, engine: str) -> None:
        """Forget an engine. Costs as `clear`."""
        self.clear(engine)
        del self._copies[engine]

    def apply(self, engine: str, events: Iterable[KVEvent]) -> None:
        """Events of one engine, in the order in which they happened.

        Media without a tier here and KV-cache groups other than the first are left out.
        """
        for event in events:
            if isinstance(event, AllBlocksCleared):
                cleared = tier_of(event.medium)
                if event.medium is None:
                    self.clear(engine)
                elif cleared is not None:
                    self.clear(engine, cleared)
            elif not event.group_idx and (tier := tier_of(event.medium)) is not None:
                if isinstance(event, BlockStored):
                    self.store(engine, tier, event.block_hashes, parent=event.parent_block_hash)
                elif isinstance(event, BlockRemoved):
                    self.remove(engine, tier, event.block_hashes)

    def store(self, engine: str, tier: Tier, hashes: Sequence[BlockHash], *, parent: BlockHash | None = None) -> None:
        """Consecutive blocks of one chain, behind ``parent``, are in a tier of an engine."""
        self._check(engine)
        before = self._where.get(parent) if parent is not None else None
        start = 0
        while start < len(hashes):
            place = self._where.get(hashes[start])
            if place is None:
                segment, begin = self._room_behind(before)
                stop = start
                while stop < len(hashes) and hashes[stop] not in self._where and len(segment.hashes) < _SEGMENT_BLOCKS:
                    self._where[hashes[stop]] = (segment, len(segment.hashes))
                    segment.hashes.append(hashes[stop])
                    stop += 1
                count = stop - start
            else:
                segment, begin = place
                count = shared_blocks(segment.hashes, hashes, begin, start)
            self._mark(engine, tier, segment, begin, count)
            before = (segment, begin + count - 1)
            start += count
        while len(self._where) > self.max_blocks:
            self._evict(len(self._where) - self.max_blocks)

    def remove(self, engine: str, tier: Tier, hashes: Iterable[BlockHash]) -> None:
        """Blocks that the tier does not hold are counted in ``unknown_removals``, and nothing else happens."""
        self._check(engine)
        copies = self._copies[engine]
        changed: dict[_Segment, None] = {}
        for block in hashes:
            segment, offset = self._where.get(block, (None, 0))
            bits = segment.held.get(engine, {}).get(tier, 0) if segment else 0
            if segment is None or not bits >> offset & 1:
                self.unknown_removals += 1
            elif copies[tier, block] > 1:
                copies[tier, block] -= 1
            elif copies[tier, block]:
                del copies[tier, block]
            else:
                segment.held[engine][tier] = bits & ~(1 << offset)
                changed[segment] = None
        for segment in changed:
            self._cut(segment, segment.kept())

    def clear(self, engine: str, tier: Tier | None = None) -> None:
        """The engine holds nothing any more, in a tier or in none. Walks over all segments."""
        self._check(engine)
        tiers = list(Tier) if tier is None else [tier]
        copies = self._copies[engine]
        for copy in [copy for copy in copies if copy[0] in tiers]:
            del copies[copy]
        for segment in [segment for segment in self._segments if engine in segment.held]:
            left = {name: 0 if name in tiers else bits for name, bits in segment.held[engine].items()}
            segment.held[engine] = left
            if not any(left.values()):
                del segment.held[engine]
            self._cut(segment, segment.kept())

    def lookup(self, hashes: Sequence[BlockHash], covered: Mapping[str, int] | None = None) -> dict[str, PrefixMatch]:
        """The match of every engine with a prompt's chain of block hashes. What it meets counts as in use.

        covered: blocks from the first on that engines will hold soon (`SpeculativeChains.covered`). They count as on
        the GPU, whatever events say, and what events say goes on behind them.
        """
        reach = {engine: min((covered or {}).get(engine, 0), len(hashes)) for engine in self._copies}
        on_gpu = dict(reach)
        going, met = list(reach), []
        while going and (position := min(reach[engine] for engine in going)) < len(hashes):
            segment, offset = self._where.get(hashes[position], (None, 0))
            end = position
            if segment is not None:
                end += shared_blocks(segment.hashes, hashes, offset, position)
                met.append(segment)
                for engine in going:
                    if reach[engine] < end and (tiers := segment.held.get(engine)):
                        at = offset - position  # of the prompt's first block, in the segment
                        if on_gpu[engine] == reach[engine]:
                            reach[engine] += _ones(tiers[Tier.GPU], at + reach[engine], end - reach[engine])
                            on_gpu[engine] = reach[engine]
                        reach[engine] += _ones(tiers[Tier.HOST], at + reach[engine], end - reach[engine])
            going = [engine for engine in going if reach[engine] >= end > position or reach[engine] > end]
        for segment in reversed(met):  # the root last: a prefix outlives what stands behind it
            self._segments.move_to_end(segment)
        return {engine: PrefixMatch(on_gpu[engine], reach[engine] - on_gpu[engine]) for engine in reach}

    def _check(self, engine: str) -> None:
        if engine not in self._copies:
            raise ValueError(f"engine {engine!r} is not in the index; there are {sorted(self._copies)}")

    def _room_behind(self, before: tuple[_Segment, int] | None) -> tuple[_Segment, int]:
        """The segment in which a block behind another one goes, and its place there: a new one after a branch."""
        if before is not None:
            segment, offset = before
            if offset == len(segment.hashes) - 1 and len(segment.hashes) < _SEGMENT_BLOCKS:
                return segment, offset + 1
        segment = _Segment()
        self._segments[segment] = None
        return segment, 0

    def _mark(self, engine: str, tier: Tier, segment: _Segment, begin: int, count: int) -> None:
        tiers = segment.held.setdefault(engine, dict.fromkeys(Tier, 0))
        new = ((1 << count) - 1) << begin
        twice = tiers[tier] & new
        tiers[tier] |= new
        while twice:
            offset = twice.bit_length() - 1
            self._copies[engine][tier, segment.hashes[offset]] += 1
            twice ^= 1 << offset
        self._segments.move_to_end(segment)

    def _cut(self, segment: _Segment, keep: int) -> None:
        """Forget the blocks of a segment from ``keep`` on."""
        for block in segment.hashes[keep:]:
            del self._where[block]
        del segment.hashes[keep:]
        if not keep:
            del self._segments[segment]

    def _evict(self, blocks: int) -> None:
        segment = next(iter(self._segments))
        keep = max(0, len(segment.hashes) - blocks)
        self.evicted_blocks += len(segment.hashes) - keep
        for engine, tiers in segment.held.items():
            for tier, bits in tiers.items():
                tiers[tier] = bits & ((1 << keep) - 1)
                for block in segment.hashes[keep:] if self._copies[engine] else ():
                    self._copies[engine].pop((tier, block), None)
        self._cut(segment, keep)


def _ones(bits: int, first: int, most: int) -> int:
    """How many bits are set from ``first`` on without a hole, ``most`` at the most."""
    bits >>= first
    return min((bits ^ (bits + 1)).bit_length() - 1, most)
