"""An engine's KV events over ZMQ: a PUB socket for what happens, a ROUTER socket for what somebody missed."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import Self

import zmq

from cptools.integers import require_int
from serving.core.kv_events import EventBatch

from .codec import END_OF_REPLAY, decode_sequence, encode_batch, encode_sequence

_POLL_MS = 50


class KVEventPublisher:
    """Publishes batches, numbered from 0, and replays the last ones. Owns its sockets and a thread; close it.

    A subscriber that is slow or late misses batches: ZMQ drops rather than waits. It sees the gap in the numbers and
    asks for a replay: the frames (empty, first number); the answers are (empty, number, batch) for each batch that is
    still kept, then (empty, -1, nothing). This is vLLM's protocol.

    Args:
        topic: of all batches, `topic_of(engine, model)`.
        address: to bind; 0 as port takes a free one. Anybody who reaches it reads hashes and token ids.
        replay_batches: kept.
    """

    def __init__(
        self,
        topic: str,
        *,
        address: str = "tcp://127.0.0.1:0",
        replay_address: str = "tcp://127.0.0.1:0",
        replay_batches: int = 10_000,
    ) -> None:
        require_int("replay_batches", replay_batches, minimum=1)
        self._topic = topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=replay_batches)
        self._next, self._lock, self._closing = 0, threading.Lock(), threading.Event()
        self._context = zmq.Context()
        try:
            self._events, self.endpoint = self._bound(zmq.PUB, address)
            self._replays, self.replay_endpoint = self._bound(zmq.ROUTER, replay_address)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._answer, name=f"replay {topic}", daemon=True)
        self._thread.start()

    def publish(self, batch: EventBatch) -> int:
        """Send a batch; returns its number. Does not wait for anybody. From one thread at a time."""
        if self._closing.is_set():
            raise ValueError("this publisher is closed")
        payload = encode_batch(batch)
        sequence, frame = self._next, encode_sequence(self._next)
        with self._lock:
            self._kept.append((frame, payload))
        self._events.send_multipart((self._topic, frame, payload))
        self._next += 1
        return sequence

    def close(self) -> None:
        """Waits for a replay under way. Twice is once."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bound(self, kind: int, address: str) -> tuple[zmq.Socket[bytes], str]:
        socket = self._context.socket(kind)
        socket.set_hwm(100_000)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ValueError(f"address={address!r} can not be bound: {error}") from error
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _answer(self) -> None:
        """The thread: answers requests for a replay; what is no such request gets no answer."""
        while not self._closing.is_set():
            if not self._replays.poll(_POLL_MS):
                continue
            frames = self._replays.recv_multipart()
            try:
                client, empty, number = frames
                first = decode_sequence(number)
            except ValueError:
                continue
            with self._lock:
                kept = list(self._kept)
            for frame, payload in kept:
                if decode_sequence(frame) >= first:
                    self._replays.send_multipart((client, empty, frame, payload))
            self._replays.send_multipart((client, empty, END_OF_REPLAY, b""))
