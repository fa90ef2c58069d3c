"""Where the requests of a session went, and whether their prompts go on from one another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cptools.integers import require_int

from .kv_events import BlockHash, Clock


@dataclass(frozen=True)
class _Last:
    time: float
    engines: tuple[str, ...]
    first_block: BlockHash | None


class Sessions:
    """The last dispatch of each session. Not thread-safe.

    diverged: requests whose very first block differs from that of the session's request before. An agent that sends its
    history again shares it, so a high share of them means a prompt that begins with something volatile
    (`serving.core.volatile_headers`).

    Args:
        clock: seconds that never go back.
        seconds: after which a session is forgotten.
        max_sessions: kept at once; those longest without a request go first.
    """

    def __init__(self, clock: Clock, *, seconds: float = 3600.0, max_sessions: int = 65_536) -> None:
        if not seconds >= 0:
            raise ValueError(f"seconds={seconds} is negative")
        self.seconds, self.max_sessions = seconds, require_int("max_sessions", max_sessions, minimum=1)
        self.continued = self.diverged = 0
        self._clock = clock
        self._last: OrderedDict[str, _Last] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def engines(self, session: str | None) -> tuple[str, ...]:
        """The engines that served the session's last request."""
        last = None if session is None else self._last.get(session)
        return () if last is None or self._clock() >= last.time + self.seconds else last.engines

    def dispatched(self, session: str, engines: Sequence[str], hashes: Sequence[BlockHash]) -> None:
        last, first = self._last.pop(session, None), hashes[0] if hashes else None
        if last is not None and last.first_block is not None and first is not None:
            if first == last.first_block:
                self.continued += 1
            else:
                self.diverged += 1
        self._last[session] = _Last(self._clock(), tuple(engines), first)
        if len(self._last) > self.max_sessions:
            self._last.popitem(last=False)
