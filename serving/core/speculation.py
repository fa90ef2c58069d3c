"""Prompts that were just sent to an engine: it will hold their blocks before its events say so.

Without this a burst of requests that share a new prefix (subagents of one session) would spread over all engines.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from cptools.integers import require_int

from .kv_events import BlockHash, Clock, shared_blocks


class SpeculativeChains:
    """Chains sent to engines in the last seconds. A lookup costs some comparisons for each. Not thread-safe.

    Args:
        clock: seconds that never go back.
        seconds: how long a chain is believed, after the engine should have it.
        max_chains: kept at once; the oldest go first.
    """

    def __init__(self, clock: Clock, *, seconds: float = 2.0, max_chains: int = 1024) -> None:
        if not seconds >= 0:
            raise ValueError(f"seconds={seconds} is negative")
        self.seconds, self.max_chains = seconds, require_int("max_chains", max_chains, minimum=1)
        self._clock = clock
        self._chains: OrderedDict[Hashable, tuple[float, str, tuple[BlockHash, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chains)

    def add(self, key: Hashable, engine: str, hashes: Sequence[BlockHash], *, delay: float = 0.0) -> None:
        """An engine was sent a prompt with these blocks, and will have them in about ``delay`` seconds.

        A key that is there already is replaced."""
        self._chains.pop(key, None)
        self._chains[key] = (self._clock() + delay + self.seconds, engine, tuple(hashes))
        if len(self._chains) > self.max_chains:
            self._chains.popitem(last=False)

    def drop(self, key: Hashable) -> None:
        """It will not happen: the request was refused or cancelled."""
        self._chains.pop(key, None)

    def drop_engine(self, engine: str) -> None:
        for key in [key for key, (_, name, _) in self._chains.items() if name == engine]:
            del self._chains[key]

    def covered(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """For each engine with such a chain, how many leading blocks of ``hashes`` it will hold soon."""
        now = self._clock()
        for key in [key for key, (expiry, _, _) in self._chains.items() if expiry <= now]:
            del self._chains[key]
        best = dict.fromkeys((engine for _, engine, _ in self._chains.values()), 0)
        for _, engine, chain in self._chains.values():
            # Only a longer share than the best one counts: one comparison settles most chains.
            known = best[engine]
            if known < min(len(chain), len(hashes)) and chain[known] == hashes[known]:
                best[engine] = shared_blocks(chain, hashes)
        return {engine: blocks for engine, blocks in best.items() if blocks}
