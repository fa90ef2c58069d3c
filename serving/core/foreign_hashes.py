"""Events of an engine that hashes blocks in its own way, told in the router's hashes.

Engines of another make (vLLM's hash depends on its seed and its version) still say which tokens a block holds. From
these, and from the parent's translation, the router's own hash of the same block follows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from cptools.integers import require_int

from .kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, EventBatch, KVEvent


class ForeignHashes:
    """Translates batches of one engine; they must come in order. Not thread-safe.

    What can not be translated is left out, so that the engine looks emptier than it is: blocks behind an unknown
    parent, and blocks whose hash covers more than tokens (adapters, salts, images).

    Args:
        hash_block: (hash of the block before or None, tokens of the block) -> the router's hash.
        block_tokens: of the router; the engine's block size must be the same.
        max_blocks: translations kept, the oldest go first.
    """

    def __init__(
        self,
        hash_block: Callable[[BlockHash | None, Sequence[int]], BlockHash],
        *,
        block_tokens: int,
        max_blocks: int = 1_000_000,
    ) -> None:
        self.block_tokens = require_int("block_tokens", block_tokens, minimum=1)
        self.max_blocks = require_int("max_blocks", max_blocks, minimum=1)
        self.untranslated_blocks = 0
        self._hash_block = hash_block
        self._own: OrderedDict[BlockHash, BlockHash] = OrderedDict()

    def __call__(self, batch: EventBatch) -> EventBatch:
        """Raises ValueError for blocks of another size, before any change."""
        for event in batch.events:
            if isinstance(event, BlockStored) and event.block_size != self.block_tokens:
                raise ValueError(f"blocks of {event.block_size} tokens, where the router has {self.block_tokens}")
        return replace(batch, events=tuple(own for event in batch.events if (own := self._event(event)) is not None))

    def _event(self, event: KVEvent) -> KVEvent | None:
        if isinstance(event, AllBlocksCleared):
            return event
        if isinstance(event, BlockRemoved):
            known = tuple(self._own[block] for block in event.block_hashes if block in self._own)
            return replace(event, block_hashes=known)
        parent = event.parent_block_hash
        more = event.lora_id is not None or event.lora_name is not None or any(event.extra_keys or ())
        if more or not event.token_ids or (parent is not None and parent not in self._own):
            self.untranslated_blocks += len(event.block_hashes)
            return None
        before = first = None if parent is None else self._own[parent]
        own: list[BlockHash] = []
        for i, block in enumerate(event.block_hashes):
            before = self._hash_block(before, event.token_ids[i * event.block_size : (i + 1) * event.block_size])
            own.append(before)
            self._own[block] = before
            self._own.move_to_end(block)
        while len(self._own) > self.max_blocks:
            self._own.popitem(last=False)
        return replace(event, block_hashes=tuple(own), parent_block_hash=first)
