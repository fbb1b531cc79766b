"""The in-process network keeps what MPI promises, and nothing more."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest

from mpipipe.transport.inproc import Network

SECONDS = 10.0


def number(value: int) -> np.ndarray:
    return np.array([value], np.uint8)


@pytest.fixture
def network():
    made: list[Network] = []

    def make(*args, **kwargs) -> Network:
        made.append(Network(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def wait(semaphore: threading.Semaphore, times: int) -> None:
    for _ in range(times):
        assert semaphore.acquire(timeout=SECONDS)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_messages_of_one_sender_and_tag_arrive_in_order(network, seed):
    a, b = (transport.open_channel() for transport in network(2, seed=seed).transports)
    done, buffers = threading.Semaphore(0), [number(0) for _ in range(10)]
    for value, buffer in enumerate(buffers):
        a.isend(1, 5, number(value), lambda: None)
        b.irecv(0, 5, buffer, done.release)
    wait(done, 10)
    assert [int(buffer[0]) for buffer in buffers] == list(range(10))


def test_messages_under_different_tags_overtake_each_other(network):
    def order(seed: int) -> tuple[int, ...]:
        a, b = (transport.open_channel() for transport in network(2, seed=seed).transports)
        arrived: queue.Queue[int] = queue.Queue()
        for tag in range(4):
            b.irecv(0, tag, number(0), lambda tag=tag: arrived.put(tag))
        for tag in range(4):
            a.isend(1, tag, number(tag), lambda: None)
        return tuple(arrived.get(timeout=SECONDS) for _ in range(4))

    assert len({order(seed) for seed in range(10)}) > 1


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_message_is_sent_when_it_has_met_a_receive_and_not_before(network, seed):
    a, b = (transport.open_channel() for transport in network(2, seed=seed).transports)
    sent, buffer = threading.Event(), number(0)
    a.isend(1, 3, number(7), sent.set)
    assert not sent.wait(0.05)
    b.irecv(0, 3, buffer, lambda: None)
    assert sent.wait(SECONDS) and int(buffer[0]) == 7


class Listener:
    """Everything that comes from some ranks, as (first byte, buffer)."""

    def __init__(self, channel, sources: list[int], depth: int, nbytes: int = 4) -> None:
        self.channel = channel
        self.got: queue.Queue[np.ndarray] = queue.Queue()
        for source in sources:
            channel.listen(source, nbytes, depth, self.got.put)

    def take(self) -> np.ndarray:
        return self.got.get(timeout=SECONDS)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("depth", [1, 3])
def test_whoever_listens_gets_every_message_of_a_rank_under_any_tag_in_order_by_tag(network, seed, depth):
    a, b = (transport.open_channel() for transport in network(2, seed=seed).transports)
    listener = Listener(b, [0], depth)
    for value in range(12):
        a.isend(1, value % 3, number(value), lambda: None)
    got = []
    for _ in range(12):
        buffer = listener.take()
        got.append(int(buffer[0]))
        b.release(buffer)
    assert sorted(got) == list(range(12))
    for tag in range(3):
        assert [value for value in got if value % 3 == tag] == list(range(tag, 12, 3))


def test_messages_under_different_tags_overtake_each_other_on_their_way_to_a_listener(network):
    def order(seed: int) -> tuple[int, ...]:
        a, b = (transport.open_channel() for transport in network(2, seed=seed).transports)
        for tag in range(4):
            a.isend(1, tag, number(tag), lambda: None)
        listener = Listener(b, [0], depth=2)
        return tuple(int(listener.take()[0]) for _ in range(4))

    assert len({order(seed) for seed in range(10)}) > 1


def test_messages_may_be_shorter_than_the_longest_one(network):
    a, b = (transport.open_channel() for transport in network(2).transports)
    listener = Listener(b, [0], depth=1, nbytes=8)
    for length in (8, 1, 5):
        a.isend(1, 0, np.full(length, length, np.uint8), lambda: None)
        buffer = listener.take()
        assert buffer[:length].tolist() == [length] * length and buffer.size >= length


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_buffer_is_not_filled_again_before_it_is_given_back(network, seed):
    a, *_, b = (transport.open_channel() for transport in network(3, seed=seed).transports)
    listener = Listener(b, [0, 1], depth=2)
    kept = []
    for value in range(10):
        a.isend(2, value, number(value), lambda: None)
        kept.append((value, listener.take()))
    assert [int(buffer[0]) for _, buffer in kept] == [value for value, _ in kept]
    assert len({buffer.ctypes.data for _, buffer in kept}) == 10
    for _, buffer in kept:
        b.release(buffer)
    seen = [buffer for _, buffer in kept]  # kept alive, so that no other buffer can be in the same place
    for value in range(10, 40):
        a.isend(2, value, number(value), lambda: None)
        buffer = listener.take()
        assert int(buffer[0]) == value
        seen.append(buffer)
        b.release(buffer)
    assert len({buffer.ctypes.data for buffer in seen}) <= 10 + 2 * 2, "what was given back is not used again"


def test_no_more_messages_are_taken_at_a_time_than_receives_are_posted(network):
    entered, let_through, got = threading.Semaphore(0), threading.Event(), queue.Queue()

    def slow(buffer: np.ndarray) -> None:
        got.put(int(buffer[0]))
        entered.release()
        let_through.wait(SECONDS)

    a, b = (transport.open_channel() for transport in network(2).transports)
    b.listen(0, 1, 1, slow)
    for value in range(3):
        a.isend(1, value, number(value), lambda: None)
    wait(entered, 1)
    assert not entered.acquire(timeout=0.05)
    let_through.set()
    assert [got.get(timeout=SECONDS) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("depth", [1, 3])
def test_while_a_rank_is_paused_no_more_comes_from_it_than_receives_are_posted_and_then_everything(
    network, seed, depth
):
    a, b = (transport.open_channel() for transport in network(2, seed=seed).transports)
    listener, got = Listener(b, [0], depth), []

    def take(times: int) -> None:
        for _ in range(times):
            buffer = listener.take()
            got.append(int(buffer[0]))
            b.release(buffer)

    b.pause(0)
    for value in range(12):
        a.isend(1, value % 3, number(value), lambda: None)
    take(depth)
    with pytest.raises(queue.Empty):
        listener.got.get(timeout=0.05)
    b.resume(0)
    take(12 - depth)
    assert sorted(got) == list(range(12))
    for tag in range(3):
        assert [value for value in got if value % 3 == tag] == list(range(tag, 12, 3))


def test_after_a_pause_as_many_receives_are_posted_as_before(network):
    a, b = (transport.open_channel() for transport in network(2).transports)
    listener = Listener(b, [0], depth=2)
    for _ in range(3):
        b.pause(0)
        b.resume(0)  # nothing has come in between
        b.pause(0)
        b.pause(0)
        for value in range(4):
            a.isend(1, value, number(value), lambda: None)
        assert [int(listener.take()[0]) for _ in range(2)] == [0, 1]
        with pytest.raises(queue.Empty):
            listener.got.get(timeout=0.05)
        b.resume(0)
        assert [int(listener.take()[0]) for _ in range(2)] == [2, 3]


def test_the_pause_of_one_rank_holds_up_no_other(network):
    a, b, c = (transport.open_channel() for transport in network(3, seed=0).transports)
    listener = Listener(c, [0, 1], depth=1)
    c.pause(0)
    a.isend(2, 0, number(1), lambda: None)
    assert int(listener.take()[0]) == 1
    sent = threading.Event()
    a.isend(2, 0, number(2), sent.set)
    for value in range(10, 15):
        b.isend(2, 0, number(value), lambda: None)
    assert [int(listener.take()[0]) for _ in range(5)] == list(range(10, 15))
    assert not sent.is_set(), "its sender believes that it has arrived"
    c.resume(0)
    assert int(listener.take()[0]) == 2 and sent.wait(SECONDS)


def test_a_message_is_withheld_as_long_as_the_network_is_told_to(network):
    held = {1}
    made = network(2, seed=0, hold=lambda source, dest, tag: tag in held)
    a, b = (transport.open_channel() for transport in made.transports)
    sent, got = threading.Semaphore(0), queue.Queue()
    for tag in (1, 2):
        b.irecv(0, tag, number(0), lambda tag=tag: got.put(tag))
        a.isend(1, tag, number(5), sent.release)
    assert got.get(timeout=SECONDS) == 2
    with pytest.raises(queue.Empty):
        got.get(timeout=0.05)
    wait(sent, 1)
    assert not sent.acquire(blocking=False), "the sender of a message that is on its way believes it has arrived"
    held.clear()
    made.look_again()
    assert got.get(timeout=SECONDS) == 1
    wait(sent, 1)


def test_a_message_that_is_withheld_holds_up_those_of_its_tag_only_and_keeps_its_place(network):
    held = {1}
    made = network(2, seed=1, hold=lambda source, dest, tag: tag in held)
    a, b = (transport.open_channel() for transport in made.transports)
    listener = Listener(b, [0], depth=2)
    for tag, value in [(1, 10), (1, 11), (2, 20), (2, 21)]:
        a.isend(1, tag, number(value), lambda: None)
    assert [int(listener.take()[0]) for _ in range(2)] == [20, 21]
    held.clear()
    made.look_again()
    assert [int(listener.take()[0]) for _ in range(2)] == [10, 11]


def test_control_messages_are_kept_until_there_is_a_handler_and_arrive_in_order(network):
    a, b = network(2, seed=0).transports
    for value in range(5):
        a.send_control(1, {"value": value})
    got: queue.Queue[tuple[int, int]] = queue.Queue()
    b.on_control(lambda source, message: got.put((source, message["value"])))
    assert [got.get(timeout=SECONDS) for _ in range(5)] == [(0, value) for value in range(5)]


def test_a_message_can_be_lost_and_its_sender_does_not_notice(network):
    a, b = (t.open_channel() for t in network(2, drop=lambda source, dest, tag: tag == 1).transports)
    sent, got = threading.Semaphore(0), threading.Semaphore(0)
    for tag in (0, 1):
        b.irecv(0, tag, number(0), got.release)
        a.isend(1, tag, number(1), sent.release)
    wait(sent, 2)
    wait(got, 1)
    assert not got.acquire(timeout=0.05)


def test_nothing_comes_from_a_rank_that_was_killed(network):
    made = network(3)
    channels = [transport.open_channel() for transport in made.transports]
    got: queue.Queue[int] = queue.Queue()
    made.kill(1)
    for rank in (1, 2):
        channels[0].irecv(rank, 0, number(0), lambda rank=rank: got.put(rank))
        channels[rank].isend(0, 0, number(1), lambda: None)
    assert got.get(timeout=SECONDS) == 2
    with pytest.raises(queue.Empty):
        got.get(timeout=0.05)


def test_two_channels_do_not_mix(network):
    a, b = network(2, seed=0).transports
    pairs = [(a.open_channel(), b.open_channel()) for _ in range(2)]
    done, buffers = threading.Semaphore(0), [number(0), number(0)]
    for (_, receiver), buffer in zip(pairs, buffers, strict=True):
        receiver.irecv(0, 0, buffer, done.release)
    for value, (sender, _) in reversed(list(enumerate(pairs))):
        sender.isend(1, 0, number(value), lambda: None)
    wait(done, 2)
    assert [int(buffer[0]) for buffer in buffers] == [0, 1]
