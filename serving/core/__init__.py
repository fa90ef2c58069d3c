"""What decides in an engine or a router, without I/O: plain classes over integers. Knows no model."""

from .block_hashes import CacheIdentity, TokenBlocks
from .block_pool import BlockPool
from .cache_events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from .prefix_cache import Admission, PrefixCache, PrefixStats, Restore

__all__ = [
    "Admission",
    "BlockPool",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "CacheEvent",
    "CacheIdentity",
    "PrefixCache",
    "PrefixStats",
    "Restore",
    "TokenBlocks",
]
