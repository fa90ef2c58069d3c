"""KV events on the wire: vLLM's msgpack batches over ZMQ (needs the extra `serving`: msgspec, pyzmq)."""

from .codec import decode_batch, decode_sequence, encode_batch, encode_sequence, engine_of_topic, topic_of
from .publisher import KVEventPublisher
from .subscriber import KVEventSubscriber, Message, follow

__all__ = [
    "KVEventPublisher",
    "KVEventSubscriber",
    "Message",
    "decode_batch",
    "decode_sequence",
    "encode_batch",
    "encode_sequence",
    "engine_of_topic",
    "follow",
    "topic_of",
]
