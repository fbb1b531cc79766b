"""The rules of synchronous training: what users may rely on whatever the order in which the network delivers."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import plan_of
from simulation import Simulation, play

from mpipipe.errors import ProtocolError
from mpipipe.protocol import messages as m
from mpipipe.protocol.client import ClientMachine
from mpipipe.protocol.server import ServerMachine

KIB_IN_FLOATS = 256
LARGE_CREDIT = 1 << 30

# Buckets of one to four pieces of 1 KiB.
PLANS = st.lists(st.integers(1, 4), min_size=1, max_size=8).map(
    lambda pieces: plan_of([n * KIB_IN_FLOATS for n in pieces], piece_bytes=1024)
)
CREDITS = st.sampled_from([1024, 1500, 3000, LARGE_CREDIT])
SEEDS = st.integers(0, 2**32)


def uneven_steps(most_clients: int = 5, most_steps: int = 4, most_phases: int = 3, least: int = 0):
    """For each client its number of steps in each phase."""
    return st.integers(1, most_phases).flatmap(
        lambda phases: st.lists(
            st.lists(st.integers(least, most_steps), min_size=phases, max_size=phases),
            min_size=1,
            max_size=most_clients,
        )
    )


# ------------------------------------------------------------------------------------------- whatever the order


@settings(max_examples=100, deadline=None)
@given(plan=PLANS, steps=uneven_steps(), credit=CREDITS, seed=SEEDS, lockstep=st.booleans())
def test_every_bucket_is_updated_once_a_step_with_all_that_take_part_and_nothing_is_left_over(
    plan, steps, credit, seed, lockstep
):
    play(plan, steps, credit, seed, lockstep=lockstep).check_the_end()


@settings(max_examples=50, deadline=None)
@given(plan=PLANS, clients=st.integers(1, 5), steps=st.integers(1, 4), credit=CREDITS, seed=SEEDS)
def test_nobody_is_told_to_follow_where_all_take_the_same_number_of_steps(plan, clients, steps, credit, seed):
    world = play(plan, [[steps]] * clients, credit, seed)
    world.check_the_end()
    assert not any(world.told.values())


@settings(max_examples=50, deadline=None)
@given(plan=PLANS, steps=uneven_steps(most_phases=1, least=1), credit=CREDITS, seed=SEEDS)
def test_a_client_that_has_left_gets_the_weights_of_every_step_that_it_missed(plan, steps, credit, seed):
    world = play(plan, [[1], *steps], credit, seed)
    world.check_the_end()
    longest = max(own for (own,) in steps)
    assert world.told[1] == list(range(1, longest))
    assert world.clients[1].delivered == [list(range(longest)) for _ in plan.buckets]


def test_a_phase_without_any_step_ends_too():
    world = play(plan_of([10, 10]), [[0, 2, 0], [0, 1, 0]], LARGE_CREDIT, seed=1)
    world.check_the_end()
    assert world.phases_ended == [0, 2, 2]


def test_a_plan_without_buckets_has_phases_without_steps():
    world = play(plan_of([]), [[0, 0], [0, 0]], LARGE_CREDIT, seed=1)
    world.check_the_end()


# --------------------------------------------------------------------------------- buckets don't wait for one another


@settings(max_examples=60, deadline=None)
@given(
    plan=PLANS.filter(lambda plan: len(plan.buckets) > 1),
    clients=st.integers(1, 4),
    credit=CREDITS,
    seed=SEEDS,
    data=st.data(),
)
def test_a_bucket_goes_all_the_way_round_while_another_one_of_the_same_step_is_kept_back(
    plan, clients, credit, seed, data
):
    late = data.draw(st.integers(0, len(plan.buckets) - 1))
    slow = data.draw(st.integers(1, clients))
    world = Simulation(plan, [[2]] * clients, credit, seed, lockstep=True)
    world.hold(lambda client, bucket, step: (client, bucket, step) == (slow, late, 1))
    world.run()
    for bucket in range(len(plan.buckets)):
        reached = [client.machine.step_of(bucket) for client in world.clients.values()]
        assert reached == [1 if bucket == late else 2] * clients, world.where()
    assert world.server.waiting_for() == {slow: [late]}
    world.release()
    world.run()
    world.check_the_end()


@settings(max_examples=30, deadline=None)
@given(plan=PLANS, clients=st.integers(2, 5), credit=CREDITS, seed=SEEDS, data=st.data())
def test_nothing_is_updated_before_the_last_client_has_sent_its_gradient(plan, clients, credit, seed, data):
    slow = data.draw(st.integers(1, clients))
    world = Simulation(plan, [[2]] * clients, credit, seed)
    world.hold(lambda client, bucket, step: client == slow)
    world.run()
    assert not world.reduced and world.steps_begun == [0]
    assert world.server.waiting_for() == {slow: list(range(len(plan.buckets)))}
    world.release()
    world.run()
    world.check_the_end()


# --------------------------------------------------------------------------------------------------------- departures


@settings(max_examples=60, deadline=None)
@given(plan=PLANS, clients=st.integers(1, 5), steps=st.integers(0, 3), credit=CREDITS, seed=SEEDS)
def test_clients_whose_scripts_end_after_the_same_number_of_steps_do_no_harm(plan, clients, steps, credit, seed):
    world = play(plan, [[1, steps]] * clients, credit, seed, departing=True)
    assert world.failures == []
    world.check_the_end()


@settings(max_examples=100, deadline=None)
@given(plan=PLANS, steps=uneven_steps(most_clients=4), credit=CREDITS, seed=SEEDS)
def test_the_run_fails_where_one_clients_script_has_ended_and_another_goes_on(plan, steps, credit, seed):
    world = play(plan, steps, credit, seed, departing=True)
    last = [own[-1] for own in steps]
    assert bool(world.failures) == (len(set(last)) > 1), world.where()
    if world.failures:
        gone = {rank for rank, own in enumerate(last, start=1) if own < max(last)}
        named = {int(rank) for rank in re.findall(r"rank (\d+)", world.failures[0])}
        assert named and named <= gone
        assert "optimizer.finish" in world.failures[0]


def two_clients_after_one_step() -> ServerMachine:
    machine = ServerMachine(plan_of([4]), [1, 2], LARGE_CREDIT)
    one_step(machine, [1, 2])
    return machine


def one_step(machine: ServerMachine, clients: list[int]) -> list[m.ServerCommand]:
    (piece,) = plan_of([4]).pieces
    commands = [c for client in clients for c in machine.handle(m.GradientReceived(client, piece))]
    for event in (m.Reduced(0), m.Updated(0), m.BroadcastDone(piece)):
        commands += machine.handle(event)
    return commands


def failures(commands: list[m.ServerCommand]) -> list[str]:
    return [command.message for command in commands if isinstance(command, m.Fail)]


def test_the_run_fails_if_the_departure_is_known_before_the_others_gradient():
    machine, (piece,) = two_clients_after_one_step(), plan_of([4]).pieces
    assert failures(machine.handle(m.ClientDeparted(1, 1))) == []
    (message,) = failures(machine.handle(m.GradientReceived(2, piece)))
    assert "rank 1 ended after 1 steps" in message and "step 2" in message


def test_the_run_fails_if_the_departure_is_known_after_the_others_gradient():
    machine, (piece,) = two_clients_after_one_step(), plan_of([4]).pieces
    assert failures(machine.handle(m.GradientReceived(2, piece))) == []
    (message,) = failures(machine.handle(m.ClientDeparted(1, 1)))
    assert "rank 1 ended after 1 steps" in message and "step 2" in message


def test_a_client_that_met_the_others_at_the_end_of_a_phase_may_end_its_script_if_no_step_follows():
    machine = two_clients_after_one_step()
    machine.handle(m.ClientLeft(1, 1))
    assert machine.handle(m.ClientLeft(2, 1)) == [m.PhaseEnded(1)]
    machine.handle(m.PhaseOpened())
    assert failures(machine.handle(m.ClientDeparted(1, 1))) == []
    assert failures(machine.handle(m.ClientDeparted(2, 1))) == []


def test_the_run_fails_if_a_step_follows_in_a_later_phase():
    machine, (piece,) = two_clients_after_one_step(), plan_of([4]).pieces
    for event in (m.ClientLeft(1, 1), m.ClientLeft(2, 1), m.PhaseOpened(), m.ClientDeparted(1, 1)):
        assert failures(machine.handle(event)) == []
    (message,) = failures(machine.handle(m.GradientReceived(2, piece)))
    assert "rank 1" in message


# ------------------------------------------------------------------------------------------- commands, one by one


def test_a_receive_for_every_client_and_piece_is_posted_before_anybody_begins():
    plan = plan_of([4, 2 * KIB_IN_FLOATS], piece_bytes=1024)
    machine = ServerMachine(plan, [3, 1, 2], LARGE_CREDIT)
    posted = [(command.client, command.piece.index) for command in machine.start()]
    assert sorted(posted) == [(client, tag) for client in (1, 2, 3) for tag in (0, 1, 2)]


def test_gradients_are_summed_in_rank_order_whatever_the_order_of_arrival():
    (piece,) = plan_of([4]).pieces
    for order in ([1, 2, 3], [3, 1, 2], [2, 3, 1]):
        machine = ServerMachine(plan_of([4]), [2, 3, 1], LARGE_CREDIT)
        commands = [c for client in order for c in machine.handle(m.GradientReceived(client, piece))]
        assert commands == [m.StepBegan(0), m.Reduce(0, 0, (1, 2, 3))]


def test_the_server_says_whom_it_waits_for():
    plan = plan_of([4, 4])
    machine = ServerMachine(plan, [1, 2], LARGE_CREDIT)
    assert machine.waiting_for() == {}
    machine.handle(m.GradientReceived(1, plan.pieces[0]))
    assert machine.waiting_for() == {1: [1], 2: [0, 1]}
    machine.handle(m.GradientReceived(2, plan.pieces[0]))
    assert machine.waiting_for() == {1: [1], 2: [1]}


def test_a_client_is_ready_for_new_weights_before_it_sends_its_gradient():
    machine, (piece,) = ClientMachine(plan_of([4]), LARGE_CREDIT), plan_of([4]).pieces
    assert machine.handle(m.GradientReady(0)) == [m.ReceiveWeights(piece), m.SendGradient(piece, 0)]


def test_a_client_has_no_number_of_steps_in_the_middle_of_one():
    machine = ClientMachine(plan_of([4]), LARGE_CREDIT)
    assert machine.steps == 0
    machine.handle(m.GradientReady(0))
    with pytest.raises(ProtocolError, match="in the middle of a step"):
        _ = machine.steps


# ------------------------------------------------------------------------------------- what cannot happen is an error


def server_in_the_middle() -> tuple[ServerMachine, m.Piece, m.Piece]:
    """Clients 1 and 2, two buckets; client 1 has sent bucket 0 of step 0."""
    plan = plan_of([4, 4])
    machine = ServerMachine(plan, [1, 2], LARGE_CREDIT)
    machine.handle(m.GradientReceived(1, plan.pieces[0]))
    return machine, *plan.pieces


def refused(machine: ServerMachine | ClientMachine, event: object, *words: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        machine.handle(event)
    for word in words:
        assert word in str(caught.value)


def test_a_gradient_sent_twice_is_refused():
    machine, piece, _ = server_in_the_middle()
    refused(machine, m.GradientReceived(1, piece), "rank 1", "bucket 0", "step 0", "twice")


def test_a_gradient_for_which_no_receive_is_posted_is_refused():
    machine, piece, _ = server_in_the_middle()
    machine.handle(m.GradientReceived(2, piece))
    refused(machine, m.GradientReceived(1, piece), "rank 1", "bucket 0")


def test_a_gradient_of_a_client_that_has_left_is_refused():
    machine, _, other = server_in_the_middle()
    machine.handle(m.ClientLeft(2, 0))
    refused(machine, m.GradientReceived(2, other), "rank 2", "bucket 1", "left")


def test_a_client_cannot_leave_before_a_step_for_which_it_has_sent_a_gradient():
    machine, _, _ = server_in_the_middle()
    refused(machine, m.ClientLeft(1, 0), "rank 1", "bucket 0", "step 0")


def test_a_client_cannot_leave_twice():
    machine, _, _ = server_in_the_middle()
    machine.handle(m.ClientLeft(2, 0))
    refused(machine, m.ClientLeft(2, 0), "rank 2", "twice")


def test_a_bucket_cannot_be_summed_unasked():
    machine, _, _ = server_in_the_middle()
    refused(machine, m.Reduced(0), "bucket 0")


def test_a_bucket_cannot_be_updated_unasked_or_twice():
    machine, piece, _ = server_in_the_middle()
    refused(machine, m.Updated(0), "bucket 0")
    for event in (m.GradientReceived(2, piece), m.Reduced(0), m.Updated(0)):
        machine.handle(event)
    refused(machine, m.Updated(0), "bucket 0", "twice")


def test_a_bucket_cannot_be_updated_before_its_gradients_have_been_summed():
    machine, piece, _ = server_in_the_middle()
    machine.handle(m.GradientReceived(2, piece))
    refused(machine, m.Updated(0), "bucket 0")


def test_a_gradient_of_a_rank_that_is_no_client_is_refused():
    machine, piece, _ = server_in_the_middle()
    refused(machine, m.GradientReceived(7, piece), "rank 7", "bucket 0")


def test_a_rank_that_is_no_client_cannot_leave():
    machine, _, _ = server_in_the_middle()
    refused(machine, m.ClientLeft(7, 0), "rank 7")


def test_a_broadcast_that_was_not_started_cannot_be_done():
    machine, piece, _ = server_in_the_middle()
    refused(machine, m.BroadcastDone(piece), "bucket 0")


def test_a_phase_cannot_be_opened_before_the_one_before_has_ended():
    machine, _, _ = server_in_the_middle()
    machine.handle(m.ClientLeft(2, 0))
    refused(machine, m.PhaseOpened())


def test_a_client_cannot_make_a_gradient_before_it_has_the_weights_of_the_last_step():
    machine = ClientMachine(plan_of([4, 4]), LARGE_CREDIT)
    machine.handle(m.GradientReady(1))
    refused(machine, m.GradientReady(1), "bucket 1", "step 0")


def test_weights_for_which_a_client_does_not_wait_are_refused():
    machine, (piece,) = ClientMachine(plan_of([4]), LARGE_CREDIT), plan_of([4]).pieces
    refused(machine, m.WeightsReceived(piece), "bucket 0", "step 0")


def test_a_gradient_that_was_not_sent_cannot_have_left():
    machine, (piece,) = ClientMachine(plan_of([4]), LARGE_CREDIT), plan_of([4]).pieces
    refused(machine, m.GradientSent(piece), "bucket 0")


@pytest.mark.parametrize("step", [1, 5])
def test_a_client_cannot_follow_a_step_that_is_not_its_next(step):
    machine = ClientMachine(plan_of([4]), LARGE_CREDIT)
    refused(machine, m.StepToFollow(step), f"step {step}", "bucket 0")


def test_the_machines_refuse_each_others_events():
    machine, piece, _ = server_in_the_middle()
    refused(machine, m.GradientReady(0), "GradientReady")
    refused(ClientMachine(plan_of([4]), LARGE_CREDIT), m.GradientReceived(1, piece), "GradientReceived")


def test_the_same_seed_gives_the_same_run():
    plan, steps = plan_of([4, KIB_IN_FLOATS]), [[2, 1], [3, 0]]
    first, second = (Simulation(plan, steps, 1024, seed=7) for _ in range(2))
    first.run()
    second.run()
    assert first.random.random() == second.random.random() != random.Random(7).random()
