"""Copies of pages between GPU and host memory: what a worker is told, what it answers, and who still waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class CopyKind(Enum):
    MIRROR = "GPU to host"
    FETCH = "host to GPU"


@dataclass(frozen=True)
class PageRun:
    """``count`` pages from ``source`` on go to as many from ``target`` on, in every layer that has such pages."""

    source: int
    target: int
    count: int


@dataclass(frozen=True)
class CopyPlan:
    """One copy, the same on every rank of the KV group: each moves its own shard of the pages. No layer is named.

    Order, on each rank: a copy runs behind all steps that were launched before the plan, and steps launched later need
    not wait for it. Its pages, sources and targets, are used for nothing else until every rank has reported `CopyDone`,
    whatever becomes of the requests.

    Attributes:
        rows: runs of pages of attention rows; GPU pages on one side, host pages on the other, by ``kind``.
        index: runs of pages of index keys, likewise; the host page of a block holds both parts.
    """

    copy: int
    kind: CopyKind
    rows: tuple[PageRun, ...]
    index: tuple[PageRun, ...]


@dataclass(frozen=True)
class CopyDone:
    """What a rank answers when its share of a copy is over.

    Attributes:
        ok: False = nothing may be assumed of any target; the copy is tried again when it is needed.
        damaged: host pages that a fetch found to hold other bytes than were put there (a checksum). What they held is
            gone: nobody reads it, and requests compute it again.
    """

    copy: int
    rank: int
    ok: bool = True
    damaged: tuple[int, ...] = ()


@dataclass(frozen=True)
class CopyEnd:
    """What all ranks together answered."""

    ok: bool
    damaged: frozenset[int]


def page_runs(pairs: Iterable[tuple[int, int]]) -> tuple[PageRun, ...]:
    """(source, target) pages, each source and target once, as maximal runs in ascending order of the sources."""
    runs: list[PageRun] = []
    start = target = count = 0
    for source, to in sorted(pairs):
        if count and source == start + count and to == target + count:
            count += 1
            continue
        if count:
            runs.append(PageRun(start, target, count))
        start, target, count = source, to, 1
    if count:
        runs.append(PageRun(start, target, count))
    return tuple(runs)


class CopyReports:
    """Which ranks have yet to report which copy."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._last = 0
        self._missing: dict[int, set[int]] = {}
        self._ends: dict[int, CopyEnd] = {}

    def __len__(self) -> int:
        """Copies under way."""
        return len(self._missing)

    def open(self) -> int:
        """A new copy, which every rank will report; its number is never used again."""
        self._last += 1
        self._missing[self._last] = set(range(self._ranks))
        self._ends[self._last] = CopyEnd(True, frozenset())
        return self._last

    def report(self, done: CopyDone) -> CopyEnd | None:
        """Count a report: None while ranks are missing, then how the copy ended.

        Raises ValueError, changing nothing, for a copy that is not under way and for a rank that has reported or that
        there is not.
        """
        missing = self._missing.get(done.copy)
        if missing is None:
            raise ValueError(f"copy {done.copy} is not under way")
        if done.rank not in missing:
            raise ValueError(f"copy {done.copy} does not wait for rank {done.rank}, but for {sorted(missing)}")
        missing.discard(done.rank)
        end = self._ends[done.copy]
        if not done.ok or done.damaged:
            end = self._ends[done.copy] = CopyEnd(end.ok and done.ok, end.damaged.union(done.damaged))
        if missing:
            return None
        del self._missing[done.copy]
        return self._ends.pop(done.copy)
