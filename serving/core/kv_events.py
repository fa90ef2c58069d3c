"""What an engine says about its prefix cache: vLLM's KV events, as plain values.

A block is `block_size` consecutive tokens of a prompt, behind everything before it: its hash is made of the hash of the
block before (the parent) and of its own tokens, so equal hashes mean equal prefixes. The index takes hashes as they
are, integers or bytes. `serving.events.codec` has the bytes of these events on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

BlockHash: TypeAlias = int | bytes
Clock: TypeAlias = Callable[[], float]
"""Seconds that never go back, such as `time.monotonic`."""


class Tier(Enum):
    """Where a block lies; the value is the medium of its events."""

    GPU = "GPU"
    HOST = "CPU"


def tier_of(medium: str | None) -> Tier | None:
    """The tier of an event's medium: the GPU where none is named, None for media that the router knows no price of."""
    return {"GPU": Tier.GPU, "CPU": Tier.HOST}.get((medium or "GPU").upper())


def shared_blocks(a: Sequence[BlockHash], b: Sequence[BlockHash], a_start: int = 0, b_start: int = 0) -> int:
    """Blocks that two chains share from ``a[a_start]`` and ``b[b_start]`` on.

    Equal hashes mean equal prefixes, so halving finds the end: a dozen comparisons for thousands of blocks.
    """
    low, high = 0, min(len(a) - a_start, len(b) - b_start)
    while low < high:
        middle = (low + high + 1) // 2
        if a[a_start + middle - 1] == b[b_start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class BlockStored:
    """Blocks of one chain, one behind the other, that are in a tier now.

    token_ids: of all these blocks, so that readers may hash them in their own way. extra_keys: one entry a block.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = Tier.GPU.value
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks that left a tier."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = Tier.GPU.value
    group_idx: int | None = None


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing is left in a tier. vLLM names none and means its GPUs; None is taken for all tiers."""

    medium: str | None = None


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True)
class EventBatch:
    """Events that happened together, in order. ts: seconds of the engine's wall clock when it sent them."""

    ts: float
    events: tuple[KVEvent, ...]
    data_parallel_rank: int | None = None
