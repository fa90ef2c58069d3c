"""The events of one engine, put in order and applied to the index, or found to be missing.

Batches are numbered from 0. They may come twice, out of order, or never; the engine may have restarted and count anew.
The index must never believe for long what an engine does not hold, so what can not be made whole is forgotten: an
engine whose events are lost looks emptier than it is, which costs time and no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from cptools.integers import require_int

from .kv_events import Clock, EventBatch
from .prefix_index import PrefixIndex

Translate: TypeAlias = Callable[[EventBatch], EventBatch]


class EngineEvents:
    """Batches of one engine on their way into a `PrefixIndex`. No I/O. Not thread-safe.

        events.receive(sequence, batch)      # of the subscription
        if events.wanted is not None:        # batches are missing: ask for those from this number on
            for sequence, batch in replay(events.wanted): events.receive(sequence, batch)
            events.replay_ended()            # what did not come will not come
        events.poll()                        # now and then: gives up on what is missing for too long

    While batches are missing the engine is not `sure`: it keeps what it was known to hold, and later batches wait.

    Args:
        index, engine: the engine is in the index.
        clock: seconds that never go back.
        patience: seconds to wait for missing batches.
        max_waiting: batches that wait at most, at least as many as a publisher replays.
        translate: called with each batch, in order, before it is applied (`ForeignHashes`). A batch for which it raises
            ValueError counts as lost.
    """

    def __init__(
        self,
        index: PrefixIndex,
        engine: str,
        clock: Clock,
        *,
        patience: float = 1.0,
        max_waiting: int = 20_000,
        translate: Translate | None = None,
    ) -> None:
        if engine not in index.engines:
            raise ValueError(f"engine {engine!r} is not in the index; there are {sorted(index.engines)}")
        if not patience >= 0:
            raise ValueError(f"patience={patience} is negative")
        self.engine, self.patience = engine, patience
        self.max_waiting = require_int("max_waiting", max_waiting, minimum=1)
        self.repeated_batches = self.lost_batches = self.restarts = 0
        self._index, self._clock, self._translate = index, clock, translate
        self._next = 0
        self._newest = float("-inf")  # time stamp of what was applied
        self._waiting: dict[int, EventBatch] = {}
        self._deadline = float("inf")

    @property
    def wanted(self) -> int | None:
        """The first missing batch where later ones are here, else None."""
        return self._next if self._waiting else None

    @property
    def next_sequence(self) -> int:
        """The number of the batch that would be applied at once."""
        return self._next

    @property
    def sure(self) -> bool:
        return not self._waiting

    def receive(self, sequence: int, batch: EventBatch) -> None:
        """Take a batch, from the subscription or a replay.

        A number that was there already is a repetition, unless the batch is younger than all that was applied: then the
        engine restarted, and everything from before is forgotten. A restart whose first batches are lost as well looks
        like a gap: who watches the process says `lost`.
        """
        require_int("sequence", sequence, minimum=0)
        if sequence < self._next and batch.ts > self._newest:
            self.restarts += 1
            self.lost()
        if sequence < self._next or sequence in self._waiting:
            self.repeated_batches += 1
            return
        if not self._waiting:
            self._deadline = self._clock() + self.patience
        self._waiting[sequence] = batch
        self._apply_ready()
        if len(self._waiting) > self.max_waiting:
            self._skip()

    def replay_ended(self) -> None:
        """The publisher sent all that it still has: what is missing now is gone."""
        while self._waiting:
            self._skip()

    def poll(self) -> None:
        """Give up on batches that are missing for longer than ``patience``."""
        if self._waiting and self._clock() >= self._deadline:
            self._skip()

    def lost(self) -> None:
        """The engine is gone or began anew: it holds nothing, and counts from 0."""
        self._index.clear(self.engine)
        self._waiting.clear()
        self._next, self._newest = 0, float("-inf")

    def _apply_ready(self) -> None:
        while (batch := self._waiting.pop(self._next, None)) is not None:
            try:
                own = batch if self._translate is None else self._translate(batch)
            except ValueError:
                self.lost_batches += 1
                self._index.clear(self.engine)
            else:
                self._index.apply(self.engine, own.events)
            self._newest = max(self._newest, batch.ts)
            self._next += 1
            self._deadline = self._clock() + self.patience

    def _skip(self) -> None:
        """Forget what the engine holds, and go on behind the hole."""
        first = min(self._waiting)
        self.lost_batches += first - self._next
        self._index.clear(self.engine)
        self._next = first
        self._apply_ready()
