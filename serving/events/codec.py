"""Bytes of KV events, as vLLM publishes them and llm-d reads them.

A message has three frames: the topic `kv@<engine>@<model>`, the sequence number in 8 bytes, big-endian, and a batch in
msgpack. vLLM has written batches in three ways: everything as positional arrays; events as maps with their class under
"type" in a positional batch; everything as maps. All are read, with fields that later versions appended or earlier ones
left out. Written is the first, in full length, which every reader of these events knows.

    [ts, [["BlockStored", hashes, parent, token_ids, block_size, lora_id, medium, lora_name, extra_keys, group_idx],
          ["BlockRemoved", hashes, medium, group_idx], ["AllBlocksCleared"]], data_parallel_rank]
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from serving.core.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, EventBatch, KVEvent

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    medium: str | None = None


class _StoredMap(msgspec.Struct, tag="BlockStored"):
    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    medium: str | None = None


class _BatchArray(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _BatchMap(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_batch_array = msgspec.msgpack.Decoder(_BatchArray)
_batch_map = msgspec.msgpack.Decoder(_BatchMap)
_event_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_event_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_encoder = msgspec.msgpack.Encoder()


def encode_batch(batch: EventBatch) -> bytes:
    """A batch as positional arrays. Raises ValueError for what msgpack can not hold, such as a hash beyond 64 bits."""
    try:
        return _encoder.encode([batch.ts, [_positional(event) for event in batch.events], batch.data_parallel_rank])
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a batch of {len(batch.events)} events can not be encoded: {error}") from error


def decode_batch(payload: bytes) -> EventBatch:
    """A batch in any of the three forms.

    Raises ValueError for anything else, events of an unknown kind included: a reader that skipped them would believe
    something else than the engine. A store with fewer tokens than its blocks have is refused as well.
    """
    try:
        batch = (_batch_map if _is_map(payload) else _batch_array).decode(payload)
        events = [(_event_map if _is_map(event := bytes(raw)) else _event_array).decode(event) for raw in batch.events]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{len(payload)} bytes are no batch of KV events: {error}") from error
    if not math.isfinite(batch.ts):
        raise ValueError(f"ts={batch.ts} of a batch of {len(events)} events is not finite")
    return EventBatch(batch.ts, tuple(_value(event) for event in events), batch.data_parallel_rank)


def encode_sequence(sequence: int) -> bytes:
    """Raises ValueError for a number that is no batch's."""
    if not 0 <= sequence < 1 << 63:
        raise ValueError(f"sequence={sequence} is outside [0, 2**63)")
    return sequence.to_bytes(8, "big")


def decode_sequence(frame: bytes) -> int:
    """Inverse of `encode_sequence`."""
    if len(frame) != 8 or frame[0] >= 0x80:
        raise ValueError(f"{frame[:16]!r} ({len(frame)} bytes) is no sequence number")
    return int.from_bytes(frame, "big")


def topic_of(engine: str, model: str) -> str:
    """The topic under which an engine publishes. The engine's name holds no @ and is not empty."""
    if not engine or "@" in engine:
        raise ValueError(f"engine={engine!r} must be a name without @")
    return f"kv@{engine}@{model}"


def engine_of_topic(topic: str) -> tuple[str, str]:
    """(engine, model): inverse of `topic_of`. The model's name may hold an @."""
    parts = topic.split("@", 2)
    if len(parts) != 3 or parts[0] != "kv" or not parts[1]:
        raise ValueError(f"topic={topic!r} is not kv@<engine>@<model>")
    return parts[1], parts[2]


def _is_map(message: bytes) -> bool:
    """Whether a msgpack value is a map: fixmap, map 16 or map 32."""
    return bool(message) and (message[0] & 0xF0 == 0x80 or message[0] in (0xDE, 0xDF))


def _positional(event: KVEvent) -> list[object]:
    name = type(event).__name__
    if isinstance(event, BlockStored):
        where = [event.lora_id, event.medium, event.lora_name, event.extra_keys, event.group_idx]
        return [name, event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, *where]
    if isinstance(event, BlockRemoved):
        return [name, event.block_hashes, event.medium, event.group_idx]
    return [name] if event.medium is None else [name, event.medium]  # what vLLM's readers know, where that says it


def _value(
    event: _StoredArray | _RemovedArray | _ClearedArray | _StoredMap | _RemovedMap | _ClearedMap,
) -> KVEvent:
    if isinstance(event, _StoredArray | _StoredMap):
        if event.block_size < 1 or len(event.token_ids) not in (0, len(event.block_hashes) * event.block_size):
            raise ValueError(
                f"{len(event.token_ids)} tokens in {len(event.block_hashes)} blocks of {event.block_size} tokens"
            )
        return BlockStored(
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
            event.lora_id,
            event.medium,
            event.lora_name,
            event.extra_keys,
            event.group_idx,
        )
    if isinstance(event, _RemovedArray | _RemovedMap):
        return BlockRemoved(event.block_hashes, event.medium, event.group_idx)
    return AllBlocksCleared(event.medium)
