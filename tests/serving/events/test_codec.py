"""KV events as bytes: against messages written out by hand from the format, and against whatever else may come."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

msgspec = pytest.importorskip("msgspec")

from serving.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch  # noqa: E402
from serving.events import (  # noqa: E402
    decode_batch,
    decode_sequence,
    encode_batch,
    encode_sequence,
    engine_of_topic,
    topic_of,
)


def text(value):
    assert len(value) < 32
    return bytes([0xA0 + len(value)]) + value.encode()


NIL = b"\xc0"
TS = b"\xcb" + struct.pack(">d", 1.5)
BATCH = EventBatch(
    1.5,
    (
        BlockStored((1, b"\xff\x00"), None, (7, 300, 9, 70_000), 2),
        BlockRemoved((2**64 - 1,), "CPU"),
        AllBlocksCleared(),
    ),
    3,
)
# [..] of n elements is 0x90 + n, {..} is 0x80 + n, bin 8 is 0xc4, uint 16, 32 and 64 are 0xcd, 0xce and 0xcf.
HASHES = b"\x92\x01\xc4\x02\xff\x00"
TOKENS = b"\x94\x07\xcd\x01\x2c\x09\xce\x00\x01\x11\x70"
GONE = b"\x91\xcf" + b"\xff" * 8
POSITIONAL = (
    b"\x93" + TS + b"\x93"
    + b"\x9a" + text("BlockStored") + HASHES + NIL + TOKENS + b"\x02" + NIL + text("GPU") + NIL * 3
    + b"\x94" + text("BlockRemoved") + GONE + text("CPU") + NIL
    + b"\x91" + text("AllBlocksCleared")
    + b"\x03"
)  # fmt: skip
STORED_MAP = (
    b"\x88" + text("type") + text("BlockStored")
    + text("block_hashes") + HASHES + text("parent_block_hash") + NIL + text("token_ids") + TOKENS
    + text("block_size") + b"\x02" + text("lora_id") + NIL + text("medium") + text("GPU") + text("lora_name") + NIL
)  # fmt: skip
REMOVED_MAP = (
    b"\x83" + text("type") + text("BlockRemoved") + text("block_hashes") + GONE + text("medium") + text("CPU")
)  # fmt: skip
EVENT_MAPS = b"\x93" + STORED_MAP + REMOVED_MAP + b"\x81" + text("type") + text("AllBlocksCleared")
MAPS = b"\x83" + text("ts") + TS + text("events") + EVENT_MAPS + text("data_parallel_rank") + b"\x03"


def test_bytes_are_those_of_the_format():
    assert encode_batch(BATCH) == POSITIONAL


@pytest.mark.parametrize(
    "payload", [POSITIONAL, b"\x93" + TS + EVENT_MAPS + b"\x03", MAPS], ids=["arrays", "mixed", "maps"]
)
def test_all_three_forms_are_read(payload):
    assert decode_batch(payload) == BATCH


def test_fields_that_older_versions_lack_and_newer_ones_append():
    older = b"\x92" + TS + b"\x92" + b"\x96" + text("BlockStored") + b"\x91\x05" + NIL + b"\x92\x07\x08" + b"\x02" + NIL
    older += b"\x92" + text("BlockRemoved") + b"\x91\x05"
    stored = BlockStored((5,), None, (7, 8), 2, medium=None)
    assert decode_batch(older) == EventBatch(1.5, (stored, BlockRemoved((5,), None)))
    newer = (
        b"\x94" + TS + b"\x91" + b"\x96" + text("BlockRemoved") + b"\x91\x05" + text("GPU") + NIL + b"\x91\x01" + NIL
    )
    assert decode_batch(newer + NIL + text("more")) == EventBatch(1.5, (BlockRemoved((5,), "GPU"),))
    named = b"\x83" + text("ts") + TS + text("events") + b"\x91" + b"\x83" + text("type") + text("BlockRemoved")
    named += text("block_hashes") + b"\x91\x05" + text("new_field") + b"\x01" + text("unknown") + b"\x90"
    assert decode_batch(named) == EventBatch(1.5, (BlockRemoved((5,), None),))


hashes = st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=40)
medium = st.none() | st.text(max_size=8)
removed = st.builds(BlockRemoved, st.lists(hashes, max_size=5).map(tuple), medium, st.none() | st.integers(0, 3))


@st.composite
def stored(draw):
    blocks, size = draw(st.lists(hashes, max_size=4)), draw(st.integers(1, 5))
    tokens = draw(st.lists(st.integers(0, 200_000), min_size=len(blocks) * size, max_size=len(blocks) * size))
    more = draw(st.sampled_from([{}, {"lora_id": 2, "lora_name": "ad", "extra_keys": (("salt",), None)}]))
    return BlockStored(tuple(blocks), draw(st.none() | hashes), tuple(tokens), size, medium=draw(medium), **more)


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(stored() | removed | st.builds(AllBlocksCleared, medium), max_size=6),
    st.none() | st.integers(0, 64),
)
@settings(max_examples=150, deadline=None)
def test_reading_gives_what_was_written(ts, events, rank):
    batch = EventBatch(ts, tuple(events), rank)
    assert decode_batch(encode_batch(batch)) == batch


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        POSITIONAL[:-2],
        POSITIONAL + b"\x00",
        b"\x93" + TS + b"\x91\x91" + text("BlockMoved") + NIL,
        b"\x93" + TS + b"\x91\x90" + NIL,
        b"\x93" + TS + b"\x91" + NIL + NIL,
        b"\x93" + TS + b"\x91\x92" + text("BlockRemoved") + b"\x91" + text("no hash") + NIL,
        b"\x92\xcb" + struct.pack(">d", float("nan")) + b"\x90",
        b"\x92" + TS + b"\x91\x95" + text("BlockStored") + b"\x91\x05" + NIL + b"\x91\x07" + b"\x02",
        b"\x92" + TS + b"\x91\x95" + text("BlockStored") + b"\x91\x05" + NIL + b"\x90" + b"\x00",
        b"\x91" * 5000,
    ],
)
def test_anything_else_is_a_value_error(payload):
    with pytest.raises(ValueError):
        decode_batch(payload)


@given(st.binary(max_size=80) | st.integers(0, len(MAPS) - 1).flatmap(
    lambda at: st.sampled_from([POSITIONAL, MAPS]).flatmap(
        lambda whole: st.binary(min_size=1, max_size=2).map(lambda new: whole[:at] + new + whole[at + 1 :])
    )
))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_damaged_messages_are_read_or_refused(payload):
    try:
        batch = decode_batch(payload)
    except ValueError:
        return
    assert isinstance(batch, EventBatch)


def test_what_msgpack_can_not_hold_is_refused():
    for wrong in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match="can not be encoded"):
            encode_batch(EventBatch(0.0, (BlockRemoved((wrong,)),)))


def test_frames_of_sequence_and_topic():
    assert encode_sequence(258) == b"\0\0\0\0\0\0\1\2"
    assert decode_sequence(encode_sequence(2**63 - 1)) == 2**63 - 1
    for wrong in (-1, 2**63):
        with pytest.raises(ValueError, match="outside"):
            encode_sequence(wrong)
    for frame in (b"", b"\0" * 7, b"\0" * 9, b"\xff" * 8):
        with pytest.raises(ValueError, match="no sequence number"):
            decode_sequence(frame)
    assert topic_of("prefill-0", "org/model@v2") == "kv@prefill-0@org/model@v2"
    assert engine_of_topic("kv@prefill-0@org/model@v2") == ("prefill-0", "org/model@v2")
    for engine in ("", "a@b"):
        with pytest.raises(ValueError, match="name without @"):
            topic_of(engine, "m")
    for topic in ("", "kv", "kv@a", "kv@@m", "kw@a@m"):
        with pytest.raises(ValueError, match="is not kv@"):
            engine_of_topic(topic)
