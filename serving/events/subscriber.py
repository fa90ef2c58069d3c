"""Reads the KV events of one engine, ours or vLLM's, and brings them into the router's index."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import zmq

from serving.core.engine_events import EngineEvents
from serving.core.kv_events import EventBatch

from .codec import END_OF_REPLAY, decode_batch, decode_sequence, encode_sequence


@dataclass(frozen=True)
class Message:
    """A batch as it came; batch is None where its bytes could not be read, which counts as not having come."""

    topic: str
    sequence: int
    batch: EventBatch | None


class KVEventSubscriber:
    """Subscribes to one publisher. Owns its sockets; close it. From one thread at a time.

    Args:
        endpoint, replay_endpoint: of the publisher; without the second, what was missed stays missed.
        topic: messages with a topic that begins so.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, *, topic: str = "") -> None:
        self.unreadable = 0  # messages
        self._context = zmq.Context()
        try:
            self._events = self._connected(zmq.SUB, endpoint)
            self._events.setsockopt(zmq.SUBSCRIBE, topic.encode())
            self._replay_endpoint = replay_endpoint
            self._replays = None if replay_endpoint is None else self._connected(zmq.DEALER, replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def can_replay(self) -> bool:
        return self._replay_endpoint is not None

    def receive(self, timeout: float) -> Message | None:
        """The next message, or None if none comes within ``timeout`` seconds. What has no number is skipped."""
        deadline = time.monotonic() + timeout
        while self._events.poll(_milliseconds(deadline)):
            frames = self._events.recv_multipart()
            if (message := self._message(frames)) is not None:
                return message
        return None

    def replay(self, first: int, timeout: float) -> Iterator[Message]:
        """Batches from number ``first`` on that the publisher still has, in order.

        Raises TimeoutError if it did not send all of them within ``timeout`` seconds, ValueError without an endpoint.
        """
        if self._replay_endpoint is None:
            raise ValueError("this subscriber has no replay_endpoint")
        if self._replays is None:  # answers of a replay that was given up may still come on the old socket
            self._replays = self._connected(zmq.DEALER, self._replay_endpoint)
        deadline, ended = time.monotonic() + timeout, False
        try:
            self._replays.send_multipart((b"", encode_sequence(first)), zmq.NOBLOCK)
            while self._replays.poll(_milliseconds(deadline)):
                frames = self._replays.recv_multipart()
                if len(frames) == 3 and frames[1] == END_OF_REPLAY:
                    ended = True
                    return
                if (message := self._message(frames)) is not None:
                    yield message
        except zmq.Again:
            pass
        finally:
            if not ended:
                self._replays.close(linger=0)
                self._replays = None
        raise TimeoutError(f"the replay from {first} on did not end within {timeout} s")

    def close(self) -> None:
        """Twice is once."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(100_000)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"endpoint={endpoint!r} can not be connected: {error}") from error
        return socket

    def _message(self, frames: list[bytes]) -> Message | None:
        try:
            topic, number, payload = frames
            sequence = decode_sequence(number)
        except ValueError:
            self.unreadable += 1
            return None
        try:
            batch = decode_batch(payload)
        except ValueError:
            self.unreadable += 1
            batch = None
        return Message(topic.decode(errors="replace"), sequence, batch)


def follow(subscriber: KVEventSubscriber, events: EngineEvents, *, timeout: float, replay_timeout: float = 1.0) -> int:
    """Bring what arrives within ``timeout`` seconds into the index; returns how many batches.

    Where batches are missing it asks for a replay once, and waits ``replay_timeout`` seconds for it; what does not come
    by then is given up, as `EngineEvents.replay_ended` says.
    """
    deadline, count = time.monotonic() + timeout, 0
    while (message := subscriber.receive(deadline - time.monotonic())) is not None:
        count += _take(events, message)
        if (first := events.wanted) is not None and subscriber.can_replay:
            try:
                for missed in subscriber.replay(first, replay_timeout):
                    count += _take(events, missed)
            except TimeoutError:
                pass
            events.replay_ended()
        if time.monotonic() >= deadline:
            break
    events.poll()
    return count


def _take(events: EngineEvents, message: Message) -> bool:
    if message.batch is not None:
        events.receive(message.sequence, message.batch)
    return message.batch is not None


def _milliseconds(deadline: float) -> int:
    return max(0, round((deadline - time.monotonic()) * 1000))
