"""From what an engine's block pools report to what its publisher sends."""

from __future__ import annotations

from collections.abc import Iterable

from .cache_events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from .kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, tier_of


def published(events: Iterable[CacheEvent]) -> tuple[KVEvent, ...]:
    """Events of `BlockPool`s, of all tiers in the order in which they happened, as KV events.

    Raises ValueError for a pool whose medium no router would know.
    """
    return tuple(_published(event) for event in events)


def _published(event: CacheEvent) -> KVEvent:
    if not isinstance(event, BlocksStored | BlocksRemoved | BlocksCleared):
        raise ValueError(f"{type(event).__name__} is no event of a block pool")
    if tier_of(event.medium) is None:
        raise ValueError(f"medium={event.medium!r} is no tier of a router")
    if isinstance(event, BlocksStored):
        return BlockStored(event.hashes, event.parent, event.token_ids, event.block_size, medium=event.medium)
    if isinstance(event, BlocksRemoved):
        return BlockRemoved(event.hashes, event.medium)
    return AllBlocksCleared(event.medium)
