"""What happened to the cached blocks of a tier, for whoever keeps an index of it elsewhere.

The events of vLLM's ``kv_events``, as plain data: a publisher encodes them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlocksStored:
    """Consecutive blocks of one sequence can be found now."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    """Hash of the block before the first of them; None at the start of a sequence."""
    token_ids: tuple[int, ...]
    """``block_size`` a block."""
    block_size: int
    medium: str


@dataclass(frozen=True)
class BlocksRemoved:
    """These blocks can no longer be found in this medium; another may still have them."""

    hashes: tuple[bytes, ...]
    medium: str


@dataclass(frozen=True)
class BlocksCleared:
    """No block can be found in this medium any more."""

    medium: str


CacheEvent = BlocksStored | BlocksRemoved | BlocksCleared
