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
    a, b = (transport.open_channel(1) for transport in network(2, seed=seed).transports)
    done, buffers = threading.Semaphore(0), [number(0) for _ in range(10)]
    for value, buffer in enumerate(buffers):
        a.isend(1, 5, number(value), lambda: None)
        b.irecv(0, 5, buffer, done.release)
    wait(done, 10)
    assert [int(buffer[0]) for buffer in buffers] == list(range(10))


def test_messages_under_different_tags_overtake_each_other(network):
    def order(seed: int) -> tuple[int, ...]:
        a, b = (transport.open_channel(1) for transport in network(2, seed=seed).transports)
        arrived: queue.Queue[int] = queue.Queue()
        for tag in range(4):
            b.irecv(0, tag, number(0), lambda tag=tag: arrived.put(tag))
        for tag in range(4):
            a.isend(1, tag, number(tag), lambda: None)
        return tuple(arrived.get(timeout=SECONDS) for _ in range(4))

    assert len({order(seed) for seed in range(10)}) > 1


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_every_rank_gets_the_broadcasts_of_a_lane_in_order(network, seed):
    channels = [transport.open_channel(2) for transport in network(3, seed=seed).transports]
    done = threading.Semaphore(0)
    taken = {(rank, lane): [number(99) for _ in range(4)] for rank in (1, 2) for lane in (0, 1)}
    for (rank, lane), buffers in taken.items():
        for buffer in buffers:
            channels[rank].ibcast(lane, 0, buffer, done.release)
    for value in range(4):
        for lane in (1, 0):
            channels[0].ibcast(lane, 0, number(10 * lane + value), done.release)
    wait(done, 4 * (4 + 2))
    for (_, lane), buffers in taken.items():
        assert [int(buffer[0]) for buffer in buffers] == [10 * lane + value for value in range(4)]


def test_control_messages_are_kept_until_there_is_a_handler_and_arrive_in_order(network):
    a, b = network(2, seed=0).transports
    for value in range(5):
        a.send_control(1, {"value": value})
    got: queue.Queue[tuple[int, int]] = queue.Queue()
    b.on_control(lambda source, message: got.put((source, message["value"])))
    assert [got.get(timeout=SECONDS) for _ in range(5)] == [(0, value) for value in range(5)]


def test_a_message_can_be_lost_and_its_sender_does_not_notice(network):
    a, b = (t.open_channel(1) for t in network(2, drop=lambda source, dest, tag: tag == 1).transports)
    sent, got = threading.Semaphore(0), threading.Semaphore(0)
    for tag in (0, 1):
        b.irecv(0, tag, number(0), got.release)
        a.isend(1, tag, number(1), sent.release)
    wait(sent, 2)
    wait(got, 1)
    assert not got.acquire(timeout=0.05)


def test_nothing_comes_from_a_rank_that_was_killed(network):
    made = network(3)
    channels = [transport.open_channel(1) for transport in made.transports]
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
    pairs = [(a.open_channel(1), b.open_channel(1)) for _ in range(2)]
    done, buffers = threading.Semaphore(0), [number(0), number(0)]
    for (_, receiver), buffer in zip(pairs, buffers, strict=True):
        receiver.irecv(0, 0, buffer, done.release)
    for value, (sender, _) in reversed(list(enumerate(pairs))):
        sender.isend(1, 0, number(value), lambda: None)
    wait(done, 2)
    assert [int(buffer[0]) for buffer in buffers] == [0, 1]
