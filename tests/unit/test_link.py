"""The network is measured once, and the sizes of messages follow from that."""

from __future__ import annotations

import math
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from mpipipe import link
from mpipipe.link import Link, Sizes, choose_sizes
from mpipipe.transport.inproc import Network

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SECONDS = 60.0  # for what takes a fraction of one where nothing else runs

RATES = st.floats(1e5, 1e11)
OVERHEADS = st.floats(0, 1e-2)
MODELS = st.integers(0, 200 * GIB)
CLIENTS = st.integers(1, 500)


# --------------------------------------------------------------------------------------------------------------- sizes


@settings(max_examples=40, deadline=None)
@given(rate=RATES, overhead=OVERHEADS, nbytes=MODELS, clients=CLIENTS)
def test_sizes_are_whole_pages_within_bounds_and_settings_that_may_be_made(rate, overhead, nbytes, clients):
    sizes = choose_sizes(Link(rate, overhead), nbytes, clients)
    assert 16 * KIB <= sizes.piece_bytes <= 4 * MIB and sizes.piece_bytes % 4096 == 0
    assert sizes.fuse_bytes == sizes.piece_bytes // 4
    assert sizes.credit_bytes == 3 * sizes.piece_bytes
    assert all(type(size) is int for size in (sizes.piece_bytes, sizes.fuse_bytes, sizes.credit_bytes))


@settings(max_examples=40, deadline=None)
@given(rate=RATES, overhead=OVERHEADS, nbytes=MODELS, clients=CLIENTS, factor=st.floats(1, 1000))
def test_pieces_grow_with_the_rate_the_overhead_and_the_model(rate, overhead, nbytes, clients, factor):
    def piece(rate: float, overhead: float, nbytes: int) -> int:
        return choose_sizes(Link(rate, overhead), nbytes, clients).piece_bytes

    chosen = piece(rate, overhead, nbytes)
    assert piece(rate * factor, overhead, nbytes) >= chosen
    assert piece(rate, overhead * factor, nbytes) >= chosen
    assert piece(rate, overhead, int(nbytes * factor)) >= chosen


@settings(max_examples=40, deadline=None)
@given(rate=RATES, overhead=OVERHEADS, nbytes=MODELS, clients=CLIENTS, more=CLIENTS)
def test_pieces_do_not_grow_with_the_number_of_clients(rate, overhead, nbytes, clients, more):
    sizes = [choose_sizes(Link(rate, overhead), nbytes, n).piece_bytes for n in (clients, clients + more)]
    assert sizes[0] >= sizes[1]


@settings(max_examples=40, deadline=None)
@given(rate=RATES, overhead=OVERHEADS, nbytes=st.integers(1, GIB), clients=CLIENTS)
def test_a_model_does_not_fall_into_many_hundreds_of_pieces(rate, overhead, nbytes, clients):
    sizes = choose_sizes(Link(rate, overhead), nbytes, clients)
    assert nbytes / sizes.piece_bytes <= 1.25 * 256  # a size is rounded down to whole pages of 4 KiB


def test_within_bounds_pieces_grow_as_the_square_root_of_what_the_link_and_the_model_are():
    def piece(rate: float = 1e9, nbytes: int = 8 * MIB, clients: int = 1) -> float:
        return choose_sizes(Link(rate, 0.0), nbytes, clients).piece_bytes

    one = piece()
    assert 64 * KIB < one < 2 * MIB, "not within bounds"
    assert piece(rate=4e9) == pytest.approx(2 * one, abs=8192)
    assert piece(nbytes=32 * MIB) == pytest.approx(2 * one, abs=8192)
    assert piece(clients=4) == pytest.approx(one / 2, abs=8192)


def test_sizes_go_with_the_piece():
    assert Sizes.of(1 << 20) == Sizes(piece_bytes=1 << 20, fuse_bytes=1 << 18, credit_bytes=3 << 20)


# ------------------------------------------------------------------------------------------------------------ measuring


class Measured:
    """A measurement on an in-process network."""

    def __init__(self, clients: int, seed: int | None = None, delay: float = 0.0) -> None:
        self.sent: Counter[tuple[int, int]] = Counter()  # messages by (source, destination)
        self.network = Network(clients + 1, seed=seed, delay=delay)
        ranks = range(1, clients + 1)
        channels = [self._counted(t.rank, t.open_channel()) for t in self.network.transports]
        functions: dict[int, Any] = {rank: lambda r=rank: link.take_part(channels[r], 0) for rank in ranks}
        try:
            self.link = run_ranks({0: lambda: link.measure(channels[0], ranks), **functions}, SECONDS)[0]
            self._check_that_nothing_is_left(channels)
        finally:
            self.network.close()

    def _counted(self, rank: int, channel: Any) -> Any:
        isend = channel.isend

        def counted(dest: int, *args: Any) -> None:
            self.sent[rank, dest] += 1
            isend(dest, *args)

        channel.isend = counted
        return channel

    def _check_that_nothing_is_left(self, channels: Any) -> None:
        """The channel can be used for other things: the next message is not taken by a receive that was left over."""
        for source, dest in [(0, 1), (1, 0), (0, len(channels) - 1)]:
            arrived, buffer = threading.Event(), np.zeros(3, np.uint8)
            channels[dest].irecv(source, 0, buffer, arrived.set)
            channels[source].isend(dest, 0, np.array([1, 2, 3], np.uint8), lambda: None)
            assert arrived.wait(SECONDS) and buffer.tolist() == [1, 2, 3]


@pytest.mark.parametrize("clients,seed", [(1, None), (1, 0), (3, None), (3, 1), (4, 2)])
def test_a_network_is_measured_with_all_clients_whatever_the_order_of_delivery(clients, seed):
    measured = Measured(clients, seed).link
    assert 0 < measured.rate < math.inf and 0 < measured.overhead < SECONDS


def test_clients_send_as_much_as_they_get():
    sent = Measured(2, seed=0).sent
    # The server also says what comes next, in each round and at the end; and this test has sent three messages.
    assert sent[1, 0] - 1 == sent[2, 0] > 0
    told = [sent[0, 1] - sent[1, 0], sent[0, 2] - sent[2, 0]]
    assert 3 <= min(told) and max(told) <= 10


def test_what_each_message_costs_shows_in_the_overhead_and_bounds_the_rate():
    slow = Measured(1, delay=0.001).link
    # The network rests for a millisecond after each delivery; a stream of n messages each way takes 2 n of them.
    assert slow.overhead >= 0.9e-3
    assert slow.rate <= 1.1 * 4 * MIB / 2e-3
