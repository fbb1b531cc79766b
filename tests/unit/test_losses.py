"""What clients that are lost leave behind: whole steps, and nobody who waits for them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from losses import Loss, SimulationWithLosses, play_with_losses
from ranks import plan_of
from simulation import PACES

from mpipipe.errors import ProtocolError
from mpipipe.protocol import messages as m
from mpipipe.protocol.plan import Plan
from mpipipe.protocol.server import ServerMachine

KIB_IN_FLOATS = 256
LARGE_CREDIT = 1 << 30

# Buckets of one to five pieces of at most 1 KiB, which the server updates as a whole or piece by piece.
PLANS = st.builds(
    lambda sizes, divisible: plan_of(sizes, piece_bytes=1024, divisible=divisible),
    st.lists(st.sampled_from([1, 256, 512, 767, 1280]), min_size=1, max_size=3),
    st.booleans(),
)
CREDITS = st.sampled_from([600, 1024, 1500, 3000, LARGE_CREDIT])
SEEDS = st.integers(0, 2**32)
# What a loss may follow upon, and after how many of them.
MOMENTS = {
    "event": 0, "ClientLeft": 3, "Reduce": 15, "Reduced": 15, "HandOver": 10, "Updated": 10, "MustRedo": 2, "Redo": 2,
    "StepBegan": 4, "StepReduced": 4, "PhaseEnded": 2, "PhaseOpened": 1,
}  # fmt: skip


@st.composite
def runs(draw: st.DrawFn) -> SimulationWithLosses:
    """A run that has not begun; its clients take as many steps as each other, or not."""
    plan = draw(PLANS)
    clients, phases = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    if draw(st.booleans()):
        steps = [draw(st.lists(st.integers(1, 3), min_size=phases, max_size=phases))] * clients
    else:
        steps = draw(st.lists(st.lists(st.integers(0, 3), min_size=phases, max_size=phases), min_size=1, max_size=4))
    losses = []
    # Of a message there are two events on either side, of a gradient one more, and so there are of its weights.
    events = sum(sum(own) for own in steps) * 5 * len(plan.pieces) + 2 * len(steps) * phases
    for _ in range(draw(st.integers(1, 3))):
        few = draw(st.integers(1, len(steps)))
        lost = draw(st.sets(st.integers(1, len(steps)), min_size=1, max_size=few))
        of = draw(st.sampled_from(["event", *MOMENTS]))
        number = draw(st.integers(1, MOMENTS[of])) if MOMENTS[of] else draw(st.integers(0, 100)) * events // 100
        losses.append(Loss(tuple(sorted(lost)), number, of, given_up=draw(st.booleans())))
    longest = max(own[-1] for own in steps)
    may_depart = [rank for rank, own in enumerate(steps, start=1) if own[-1] == longest]
    return SimulationWithLosses(
        plan,
        steps,
        draw(CREDITS),
        draw(SEEDS),
        losses,
        pace=draw(st.sampled_from(PACES)),
        posted=draw(st.sampled_from([0, 0, 1, 3])),
        together=draw(st.booleans()),
        overlap=draw(st.sampled_from([True, True, False])),
        departing=may_depart if draw(st.booleans()) else (),
    )


# ------------------------------------------------------------------------------------------- whatever the order


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(world=runs())
def test_a_lost_clients_gradient_is_in_a_step_whole_or_not_at_all_and_nobody_waits_for_it(world):
    world.run()
    assert not world.failures
    world.check_the_end()


@settings(max_examples=500, deadline=None)
@given(plan=PLANS, clients=st.integers(2, 4), credit=CREDITS, seed=SEEDS, pace=st.sampled_from(PACES), data=st.data())
def test_those_that_are_left_do_all_their_steps_whoever_is_lost_in_the_middle_of_one(
    plan, clients, credit, seed, pace, data
):
    ranks = data.draw(st.permutations(range(1, clients + 1)))
    lost = ranks[: data.draw(st.integers(1, clients - 1))]
    number = st.integers(1, 2 * len(plan.pieces))
    losses = [Loss((client,), data.draw(number), "Reduce", given_up=data.draw(st.booleans())) for client in lost]
    world = play_with_losses(plan, [[2]] * clients, credit, seed, losses, pace=pace)
    assert world.phases_ended == [2]
    assert all(clients for _, clients in world.redone)


def test_the_runs_have_all_kinds_of_losses_in_them():
    plan, again, cancelled, discarded, whole = plan_of([256, 1280], 1024, divisible=True), 0, 0, 0, 0
    for seed in range(60):
        losses = [Loss((1,), seed % 9 + 1, "Reduce"), Loss((2,), seed % 7 + 6, "Reduced")]
        world = play_with_losses(plan, [[2, 1], [3, 1], [1, 1]], LARGE_CREDIT, seed, losses)
        again += any(clients for _, clients in world.redone)
        cancelled += any(not clients for _, clients in world.redone)
        discarded += bool(world.discarded)
        whole += any(set(clients) & world.lost for _, clients in world.redone)
    assert min(again, cancelled, discarded, whole) > 0


# ------------------------------------------------------------------------------------------------- losses, one by one


class Server:
    """A server machine whose sums are done when the test says so, or at once."""

    def __init__(self, plan: Plan, clients: int, *, at_once: bool = True) -> None:
        self.machine = ServerMachine(plan, range(1, clients + 1), LARGE_CREDIT, survive=True)
        self.plan, self._at_once = plan, at_once

    def __call__(self, event: m.ServerEvent) -> list[m.ServerCommand]:
        """All that it says, but for what is about the pace of clients."""
        commands = []
        for command in self.machine.handle(event):
            if not isinstance(command, m.Pause | m.Resume | m.AskFor):
                commands.append(command)
            if isinstance(command, m.Reduce) and self._at_once:
                commands += self(m.Reduced(command.piece))
        return commands

    def gradients(self, step: int, *pieces: int, of: tuple[int, ...]) -> list[m.ServerCommand]:
        """These pieces of these clients come in."""
        events = [m.GradientReceived(client, self.plan.pieces[piece], step) for piece in pieces for client in of]
        return [command for event in events for command in self(event)]

    def weights(self, step: int, *units: int, to: tuple[int, ...]) -> None:
        """These units are updated, and these clients have got them."""
        for unit in units:
            sent = self(m.Updated(unit, step))
            assert {command.client for command in sent if isinstance(command, m.SendWeights)} == set(to)
            for piece in self.plan.units[unit].pieces:
                for client in to:
                    self(m.WeightsSent(client, piece))

    def lose(self, client: int) -> list[m.ServerCommand]:
        return self(m.ClientLost(client))


def of_kind(kind: type, commands: list[m.ServerCommand]) -> list[m.ServerCommand]:
    return [command for command in commands if isinstance(command, kind)]


THREE = plan_of([4, 4, 4])


def test_a_client_that_is_lost_before_anything_is_in_no_step():
    server = Server(THREE, 2)
    assert server.lose(1) == []
    first, *_ = THREE.pieces
    commands = server.gradients(0, 0, of=(2,))
    assert commands == [m.StepBegan(0), m.Reduce(first, 0, (2,)), m.HandOver(0, 0)]
    assert server.machine.waiting_for() == {2: [1, 2]}


def test_a_client_that_is_lost_twice_is_lost_once():
    server = Server(THREE, 2)
    server.gradients(0, 0, of=(1,))
    assert server.lose(1) != []
    assert server.lose(1) == []


def test_a_client_that_is_lost_after_it_has_sent_all_of_a_step_is_in_it_and_in_no_other_one():
    server = Server(THREE, 2)
    server.gradients(0, 0, 1, 2, of=(1,))
    assert server.lose(1) == []
    commands = server.gradients(0, 0, 1, 2, of=(2,))
    assert of_kind(m.Reduce, commands) == [m.Reduce(piece, 0, (1, 2)) for piece in THREE.pieces]
    assert not of_kind(m.Redo, commands)
    server.weights(0, 0, 1, 2, to=(2,))
    assert m.Reduce(THREE.pieces[0], 1, (2,)) in server.gradients(1, 0, of=(2,))


def test_what_a_client_has_sent_of_a_step_is_forgotten_where_nothing_is_summed_and_no_step_is_done_again():
    server = Server(THREE, 2)
    server.gradients(0, 0, 1, of=(1,))
    server.gradients(0, 2, of=(2,))
    first, second, third = THREE.pieces
    assert server.lose(1) == [
        m.Discard(1, first), m.Discard(1, second), m.Reduce(third, 0, (2,)), m.HandOver(2, 0)
    ]  # fmt: skip
    assert m.StepReduced(0) in (commands := server.gradients(0, 0, 1, of=(2,)))
    assert not of_kind(m.Redo, commands)


def test_a_step_of_which_a_piece_is_summed_with_a_client_that_is_lost_is_done_again_with_the_others():
    server = Server(THREE, 3)
    server.gradients(0, 0, of=(1, 2, 3))
    server.gradients(0, 1, of=(1, 2))
    first, second, third = THREE.pieces
    assert server.lose(2) == [m.Discard(2, second), m.MustRedo(0)]
    assert not of_kind(m.Redo, server.gradients(0, 1, of=(3,)))
    assert server.gradients(0, 2, of=(1, 3))[-4:] == [
        m.Reduce(third, 0, (1, 3)), m.HandOver(2, 0), m.Redo(0, (1, 3)), m.StepReduced(0)
    ]  # fmt: skip


def test_a_step_whose_only_client_is_lost_is_not_to_be_and_may_be_another_ones():
    server = Server(THREE, 2)
    server(m.ClientLeft(2, 0))
    server.gradients(0, 0, of=(1,))
    server(m.Updated(0, 0))
    assert server.lose(1) == [m.MustRedo(0), m.Redo(0, ()), m.PhaseEnded(0)]
    assert server.machine.waiting_for() == {} and server.machine.began == 0
    server(m.PhaseOpened())
    assert server.gradients(0, 0, of=(2,))[:2] == [m.StepBegan(0), m.Reduce(THREE.pieces[0], 0, (2,))]


def test_a_step_that_is_not_to_be_does_not_take_the_last_updates_of_the_one_before():
    server = Server(THREE, 1)
    server.gradients(0, 0, 1, 2, of=(1,))
    server.weights(0, 0, to=(1,))
    server.gradients(1, 0, of=(1,))
    assert of_kind(m.Redo, server.lose(1)) == [m.Redo(1, ())]
    assert server(m.Updated(1, 0)) == []
    assert server(m.Updated(2, 0)) == [m.PhaseEnded(1)]


def test_of_two_clients_lost_in_the_same_step_the_one_that_has_sent_all_is_in_it():
    server = Server(THREE, 3)
    server.gradients(0, 0, of=(1, 2, 3))
    server.gradients(0, 1, 2, of=(1,))
    first, second, third = THREE.pieces
    assert server.lose(2) == [m.MustRedo(0)]
    assert server.lose(1) == []
    commands = server.gradients(0, 1, 2, of=(3,))
    assert of_kind(m.Reduce, commands) == [m.Reduce(second, 0, (1, 3)), m.Reduce(third, 0, (1, 3))]
    assert of_kind(m.Redo, commands) == [m.Redo(0, (1, 3))]


def test_that_a_step_will_be_done_again_is_said_once_however_many_are_lost():
    server = Server(THREE, 3)
    server.gradients(0, 0, of=(1, 2, 3))
    assert server.lose(2) == [m.MustRedo(0)]
    assert server.lose(3) == []
    assert of_kind(m.Redo, server.gradients(0, 1, 2, of=(1,))) == [m.Redo(0, (1,))]


def test_all_that_are_in_a_step_may_be_lost_and_it_is_done_with_those_that_have_sent_all():
    server = Server(THREE, 2)
    server.gradients(0, 0, of=(1, 2))
    server.gradients(0, 1, 2, of=(1,))
    server.lose(1)
    commands = server.lose(2)
    assert of_kind(m.Redo, commands) == [m.Redo(0, (1,))]
    assert commands[-1] == m.StepReduced(0)
    for unit in range(3):
        commands = server(m.Updated(unit, 0))
    assert commands == [m.PhaseEnded(1)]


def test_a_piece_that_is_being_summed_when_a_client_is_lost_counts_as_summed():
    server = Server(THREE, 2, at_once=False)
    server.gradients(0, 0, of=(1, 2))
    assert server.lose(1) == [m.MustRedo(0)]
    first, second, third = THREE.pieces
    assert server(m.Reduced(first)) == [m.HandOver(0, 0)]
    server.gradients(0, 1, 2, of=(2,))
    server(m.Reduced(second))
    assert server(m.Reduced(third)) == [m.HandOver(2, 0), m.Redo(0, (2,)), m.StepReduced(0)]


def test_a_client_that_has_sent_all_is_in_the_step_where_a_piece_is_still_being_summed():
    server = Server(THREE, 1, at_once=False)
    server.gradients(0, 0, 1, 2, of=(1,))
    assert server.lose(1) == []
    for piece in THREE.pieces:
        commands = server(m.Reduced(piece))
    assert commands == [m.HandOver(2, 0), m.StepReduced(0)]


def test_a_phase_does_not_end_before_the_sums_of_a_step_that_is_not_to_be_are_done():
    server = Server(THREE, 1, at_once=False)
    server.gradients(0, 0, 1, of=(1,))
    first, second, _ = THREE.pieces
    assert server.lose(1) == [m.MustRedo(0), m.Redo(0, ())]
    assert server(m.Reduced(first)) == []
    assert server(m.Reduced(second)) == [m.PhaseEnded(0)]


def test_pieces_of_the_next_step_wait_for_all_of_this_one_and_those_of_a_client_that_is_lost_are_forgotten():
    server = Server(THREE, 3)
    server.gradients(0, 0, 1, of=(1, 2, 3))
    server.gradients(0, 2, of=(1, 2))
    server.weights(0, 0, to=(1, 2, 3))
    first, _, third = THREE.pieces
    assert server.gradients(1, 0, of=(1, 2, 3)) == []
    # Client 1 has sent all of step 0, client 3 has not.
    assert server.lose(1) == [m.Discard(1, first)]
    assert server.lose(3)[:4] == [m.Discard(3, first), m.MustRedo(0), m.Reduce(third, 0, (1, 2)), m.HandOver(2, 0)]


def test_the_next_step_begins_with_what_has_come_of_it_once_this_one_is_summed():
    server = Server(THREE, 2)
    server.gradients(0, 0, 1, of=(1, 2))
    server.gradients(0, 2, of=(1,))
    server.weights(0, 0, to=(1, 2))
    server.gradients(1, 0, of=(1, 2))
    first, _, third = THREE.pieces
    assert server.gradients(0, 2, of=(2,)) == [
        m.Reduce(third, 0, (1, 2)), m.HandOver(2, 0), m.StepReduced(0), m.StepBegan(1), m.Reduce(first, 1, (1, 2)),
        m.HandOver(0, 1),
    ]  # fmt: skip


def test_a_step_that_only_a_lost_client_had_begun_is_not_to_be_once_the_others_have_left():
    server = Server(THREE, 2)
    server.gradients(0, 0, 1, 2, of=(1, 2))
    server.weights(0, 0, 1, 2, to=(1, 2))
    assert server.gradients(1, 0, of=(1,)) == [m.StepBegan(1)]
    assert server.lose(1) == [m.Discard(1, THREE.pieces[0])]
    assert server.machine.waiting_for() == {2: [0, 1, 2]}
    assert server(m.ClientLeft(2, 1)) == [m.MustRedo(1), m.Redo(1, ()), m.PhaseEnded(1)]


def test_questions_are_right_after_a_step_that_was_not_to_be():
    plan = plan_of([3 * KIB_IN_FLOATS, 2 * KIB_IN_FLOATS], 1024)
    machine = ServerMachine(plan, [1, 2, 3], LARGE_CREDIT, survive=True)
    first, second, third, other, _ = plan.pieces
    for event in (m.ClientLeft(2, 0), m.ClientLeft(3, 0), m.GradientReceived(1, first, 0), m.Reduced(first)):
        machine.handle(event)
    assert m.PhaseEnded(0) in machine.handle(m.ClientLost(1))
    machine.handle(m.PhaseOpened())
    for piece in (first, second):
        for client in (2, 3):
            machine.handle(m.GradientReceived(client, piece, 0))
        machine.handle(m.Reduced(piece))
    machine.handle(m.GradientReceived(3, third, 0))
    assert m.AskFor(2, third, 0) in machine.handle(m.GradientReceived(2, other, 0))


def test_nobody_pauses_for_a_client_that_is_lost():
    plan = plan_of([5 * KIB_IN_FLOATS], 1024)
    machine = ServerMachine(plan, [1, 2], 2048, survive=True)
    machine.handle(m.GradientReceived(1, plan.pieces[0], 0))
    commands = [c for piece in plan.pieces[1:4] for c in machine.handle(m.GradientReceived(2, piece, 0))]
    assert m.Pause(2) in commands or m.Pause(2) in machine.handle(m.GradientReceived(2, plan.pieces[4], 0))
    assert m.Resume(2) in machine.handle(m.ClientLost(1))


def test_weights_that_were_under_way_to_a_lost_client_may_arrive_or_not():
    server = Server(THREE, 2)
    server.gradients(0, 0, of=(1, 2))
    server(m.Updated(0, 0))
    server.lose(1)
    assert server(m.WeightsSent(1, THREE.pieces[0])) == []


@pytest.mark.parametrize("ends", [m.ClientLeft, m.ClientDeparted])
def test_a_client_that_has_ended_its_phase_may_be_lost(ends):
    server = Server(plan_of([4]), 2)
    server.gradients(0, 0, of=(1, 2))
    server.weights(0, 0, to=(1, 2))
    server(ends(1, 1))
    assert server.lose(1) == []
    assert server(m.ClientLeft(2, 1)) == [m.PhaseEnded(1)]


def test_a_client_that_is_lost_between_phases_does_not_come_back():
    server = Server(plan_of([4]), 2)
    server(m.ClientLeft(1, 0))
    assert server(m.ClientLeft(2, 0)) == [m.PhaseEnded(0)]
    assert server.lose(1) == []
    server(m.PhaseOpened())
    assert server.machine.waiting_for() == {}
    server.gradients(0, 0, of=(2,))
    assert server.machine.waiting_for() == {}
    assert server(m.Updated(0, 0)) == [m.SendWeights(2, server.plan.pieces[0], 0)]


def test_a_rank_that_is_no_client_cannot_be_lost():
    with pytest.raises(ProtocolError, match="rank 7"):
        Server(THREE, 2).lose(7)
