"""What one pass of residency decided: frozen, and all that an engine and its workers need of it."""

from __future__ import annotations

from dataclasses import dataclass

from .copies import CopyPlan


@dataclass(frozen=True)
class Admitted:
    """A request that left the queue. It computes from position ``cached_tokens`` on; its `Places` are all new."""

    request: int
    cached_tokens: int
    """Rows that are there, of a shared prefix or from before it was preempted."""


@dataclass(frozen=True)
class TableUpdate:
    """Where a block of a running request can be read from now on; -1 = not there."""

    request: int
    block: int
    gpu_page: int
    index_page: int
    host_page: int


@dataclass(frozen=True)
class HotRegion:
    """GPU pages of a request's hot rows from now on: hot slot h is row h % page_size of ``pages[h // page_size]``.

    A new region is empty and its LRU starts anew. No pages: the region was given back.
    """

    request: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Places:
    """Where each block of a request can be read, in order; -1 = not there. A running request finds each block's index
    keys on the GPU and its rows on the GPU or, with a hot region, in host memory."""

    gpu_pages: tuple[int, ...]
    index_pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    hot_pages: tuple[int, ...]


@dataclass(frozen=True)
class ResidencyPlan:
    """One pass. Tables and hot regions change before the next step runs; copies obey the order of `CopyPlan`."""

    granted: tuple[int, ...]
    """Requests that may write the rows they asked for."""
    waiting: tuple[int, ...]
    """Running requests that asked for rows and must ask again."""
    admitted: tuple[Admitted, ...]
    """Now running: asking for rows is possible from the next pass on."""
    preempted: tuple[int, ...]
    """Back in the queue, since the pass before; what is `admitted` comes after."""
    updates: tuple[TableUpdate, ...]
    hot: tuple[HotRegion, ...]
    copies: tuple[CopyPlan, ...]


@dataclass
class Counters:
    """Totals since the start, in pages unless said otherwise."""

    mirrored: int = 0
    fetched: int = 0
    dropped: int = 0
    failed_copies: int = 0
    """Copies, not pages."""
    damaged: int = 0
    """Blocks whose host copy turned out to hold other bytes."""
    discarded: int = 0
    """Blocks given up while no running request used them: kept prefixes, and rows that a request computes again."""
    recomputed_tokens: int = 0
    preemptions: int = 0
    hot_regions: int = 0
