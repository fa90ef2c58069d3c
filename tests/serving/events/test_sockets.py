"""Publisher and subscriber over loopback: what is missed comes again, what is broken breaks nothing."""

import threading
import time

import pytest

pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")

from serving.core.engine_events import EngineEvents  # noqa: E402
from serving.core.kv_events import BlockStored, EventBatch  # noqa: E402
from serving.core.prefix_index import PrefixIndex  # noqa: E402
from serving.events import KVEventPublisher, KVEventSubscriber, encode_batch, encode_sequence, follow, topic_of  # noqa: E402
from serving.events.codec import END_OF_REPLAY  # noqa: E402

TOPIC = topic_of("e", "model")


def batch(number):
    return EventBatch(float(number), (BlockStored((number,), None, (1, 2), 2),), 0)


def index_of_one():
    index = PrefixIndex()
    index.add_engine("e")
    return index, EngineEvents(index, "e", time.monotonic)


def connect(publisher, subscriber, first):
    """Publish from number ``first`` on until something arrives: a subscription takes a moment. The first message."""
    for number in range(first, first + 500):
        assert publisher.publish(batch(number)) == number
        if (message := subscriber.receive(0.02)) is not None:
            return message
    raise AssertionError("nothing arrived")


def test_late_subscriber_gets_everything():
    with KVEventPublisher(TOPIC) as publisher:
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")
        for number in range(20):
            publisher.publish(batch(number))
        with KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint, topic="kv@") as subscriber:
            message = connect(publisher, subscriber, 20)
            assert (message.topic, message.batch) == (TOPIC, batch(message.sequence))
            assert message.sequence >= 20
            index, events = index_of_one()
            events.receive(message.sequence, message.batch)
            last = publisher.publish(batch(10_000))
            while events.sure is False or not index.lookup([10_000])["e"].blocks:
                follow(subscriber, events, timeout=0.1)
            assert all(index.lookup([number])["e"].blocks for number in range(last))
            assert (events.lost_batches, subscriber.unreadable) == (0, 0)


def test_publisher_that_kept_less_gives_what_it_has():
    with KVEventPublisher(TOPIC, replay_batches=3) as publisher:
        for number in range(10):
            publisher.publish(batch(number))
        with KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
            assert [message.sequence for message in subscriber.replay(2, 5.0)] == [7, 8, 9]
            assert [message.sequence for message in subscriber.replay(9, 5.0)] == [9]
            assert list(subscriber.replay(10, 5.0)) == []


def test_replay_of_a_dead_publisher_ends_in_time_and_the_next_one_works():
    with KVEventPublisher(TOPIC) as publisher:
        endpoint, replay_endpoint = publisher.endpoint, publisher.replay_endpoint
        publisher.publish(batch(0))
    with KVEventSubscriber(endpoint, replay_endpoint) as subscriber:
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"from 0 on did not end within 0\.2 s"):
            list(subscriber.replay(0, 0.2))
        assert time.monotonic() - start < 5
        with KVEventPublisher(TOPIC, address=endpoint, replay_address=replay_endpoint) as restarted:
            restarted.publish(batch(0))
            assert [message.batch for message in subscriber.replay(0, 10.0)] == [batch(0)]


def test_unreadable_messages_leave_holes_that_a_replay_or_giving_up_ends():
    with zmq.Context() as context, context.socket(zmq.PUB) as events_socket, context.socket(zmq.ROUTER) as replays:
        events_socket.linger = replays.linger = 0
        port, replay_port = (socket.bind_to_random_port("tcp://127.0.0.1") for socket in (events_socket, replays))
        with KVEventSubscriber(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}", topic="kv@") as subscriber:
            for _ in range(500):
                events_socket.send_multipart([b"kv@e@m", encode_sequence(0), encode_batch(batch(0))])
                if (message := subscriber.receive(0.02)) is not None:
                    break
            while subscriber.receive(0.1) is not None:
                pass
            index, events = index_of_one()
            events.receive(0, message.batch)
            topic = b"kv@e@m"
            for frames in (
                [topic],
                [topic, b"short", b""],
                [topic, b"\xff" * 8, b""],
                [topic, encode_sequence(1), b"\xc1 no msgpack"],
                [b"other@topic", encode_sequence(1), encode_batch(batch(1))],
                [topic, encode_sequence(2), encode_batch(batch(2))],
            ):
                events_socket.send_multipart(frames)
            replay = subscriber.replay(1, 5.0)
            messages = [subscriber.receive(5.0), subscriber.receive(5.0)]
            assert [(m.sequence, m.batch) for m in messages] == [(1, None), (2, batch(2))]
            assert subscriber.unreadable == 4
            events.receive(2, messages[1].batch)
            assert events.wanted == 1
            # The publisher can not read it either: the replay brings the same bytes.
            started = []

            def answer():
                client, empty, number = replays.recv_multipart()
                started.append(number)
                replays.send_multipart([client, empty, encode_sequence(1), b"\xc1 no msgpack"])
                replays.send_multipart([client, empty, END_OF_REPLAY, b""])

            thread = threading.Thread(target=answer)
            thread.start()
            assert [(m.sequence, m.batch) for m in replay] == [(1, None)]
            thread.join(10)
            assert started == [encode_sequence(1)]
            events.replay_ended()
            assert (index.lookup([0])["e"].blocks, index.lookup([2])["e"].blocks) == (0, 1)


def test_requests_that_are_none_do_not_stop_the_replays():
    with KVEventPublisher(TOPIC) as publisher, zmq.Context() as context, context.socket(zmq.DEALER) as client:
        publisher.publish(batch(0))
        client.linger = 0
        client.connect(publisher.replay_endpoint)
        for frames in ([b""], [b"", b"short"], [b"", b"\xff" * 8], [b"", encode_sequence(0), b"more"]):
            client.send_multipart(frames)
        client.send_multipart([b"", encode_sequence(0)])
        answers = []
        while not answers or answers[-1][1] != END_OF_REPLAY:
            assert client.poll(10_000)
            answers.append(client.recv_multipart())
        assert answers == [[b"", encode_sequence(0), encode_batch(batch(0))], [b"", END_OF_REPLAY, b""]]


def test_follow_gives_up_where_nobody_replays():
    with KVEventPublisher(TOPIC) as publisher:
        for number in range(5):
            publisher.publish(batch(number))
        with KVEventSubscriber(publisher.endpoint) as subscriber:
            message = connect(publisher, subscriber, 5)
            index = PrefixIndex()
            index.add_engine("e")
            events = EngineEvents(index, "e", time.monotonic, patience=0.0)
            events.receive(message.sequence, message.batch)
            follow(subscriber, events, timeout=0.05)
            assert events.sure
            assert index.lookup([message.sequence])["e"].blocks == 1
            assert events.lost_batches >= 5
            with pytest.raises(ValueError, match="no replay_endpoint"):
                next(subscriber.replay(0, 1.0))


def test_addresses_that_do_not_work_and_use_after_close():
    with KVEventPublisher(TOPIC) as publisher:
        with pytest.raises(ValueError, match="can not be bound"):
            KVEventPublisher(TOPIC, address=publisher.endpoint)
        with pytest.raises(ValueError, match="can not be bound"):
            KVEventPublisher(TOPIC, replay_address="nonsense")
    with pytest.raises(ValueError, match="is closed"):
        publisher.publish(batch(0))
    publisher.close()
    with pytest.raises(ValueError, match="can not be connected"):
        KVEventSubscriber("nonsense")
    subscriber = KVEventSubscriber("tcp://127.0.0.1:9")
    subscriber.close()
    subscriber.close()
