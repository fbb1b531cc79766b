"""The rules of synchronous training: what users may rely on whatever the order in which the network delivers."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ranks import plan_of
from simulation import PACES, Simulation, play

from mpipipe.errors import ProtocolError
from mpipipe.protocol import messages as m
from mpipipe.protocol.client import ClientMachine
from mpipipe.protocol.plan import Piece, Plan
from mpipipe.protocol.server import ServerMachine

KIB_IN_FLOATS = 256
LARGE_CREDIT = 1 << 30

# Buckets of one to five pieces of at most 1 KiB, which the server updates as a whole or piece by piece.
PLANS = st.builds(
    lambda sizes, divisible: plan_of(sizes, piece_bytes=1024, divisible=divisible),
    st.lists(st.one_of(st.integers(1, 5 * KIB_IN_FLOATS), st.just(2 * KIB_IN_FLOATS)), min_size=1, max_size=6),
    st.booleans(),
)
CREDITS = st.sampled_from([600, 1024, 1500, 3000, LARGE_CREDIT])  # with the least, every large piece goes alone
SEEDS = st.integers(0, 2**32)
PACE = st.sampled_from(PACES)
POSTED = st.sampled_from([0, 0, 1, 3])  # with none, nothing at all comes from a client that is to pause


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


@settings(max_examples=150, deadline=None)
@given(plan=PLANS, steps=uneven_steps(), credit=CREDITS, seed=SEEDS, pace=PACE, inexact=st.booleans(), posted=POSTED)
def test_every_gradient_is_counted_once_every_unit_updated_once_a_step_and_nothing_is_left_over(
    plan, steps, credit, seed, pace, inexact, posted
):
    play(plan, steps, credit, seed, pace=pace, inexact=inexact, posted=posted).check_the_end()


@settings(max_examples=80, deadline=None)
@given(plan=PLANS, steps=uneven_steps(most_phases=2), credit=CREDITS, seed=SEEDS, pace=PACE)
def test_so_it_is_where_no_gradient_of_a_step_is_sent_before_all_are_ready(plan, steps, credit, seed, pace):
    play(plan, steps, credit, seed, pace=pace, overlap=False).check_the_end()


@settings(max_examples=30, deadline=None)
@given(plan=PLANS, clients=st.integers(1, 5), steps=st.integers(1, 4), credit=CREDITS, seed=SEEDS, pace=PACE)
def test_nobody_has_to_catch_up_where_all_take_the_same_number_of_steps(plan, clients, steps, credit, seed, pace):
    world = play(plan, [[steps, steps]] * clients, credit, seed, pace=pace)
    world.check_the_end()
    assert not any(world.caught_up.values())


@settings(max_examples=50, deadline=None)
@given(plan=PLANS, steps=uneven_steps(most_phases=1, least=2), credit=CREDITS, seed=SEEDS, pace=PACE)
def test_a_client_that_has_left_takes_no_part_in_further_steps_and_catches_up_at_the_end(
    plan, steps, credit, seed, pace
):
    world = play(plan, [[1], *steps], credit, seed, pace=pace)
    world.check_the_end()
    longest = max(own for (own,) in steps)
    assert world.clients[1].delivered == [[0] for _ in plan.buckets]
    assert world.caught_up[1] == [longest]
    assert {rank for rank, caught_up in world.caught_up.items() if not caught_up} == {
        rank for rank, (own,) in enumerate(steps, start=2) if own == longest
    }


def test_a_phase_without_any_step_ends_too():
    world = play(plan_of([10, 10]), [[0, 2, 0], [0, 1, 0]], LARGE_CREDIT, seed=1)
    world.check_the_end()
    assert world.phases_ended == [0, 2, 2]


@pytest.mark.parametrize("divisible", [False, True])
def test_a_plan_without_buckets_has_phases_without_steps(divisible):
    world = play(plan_of([], divisible=divisible), [[0, 2], [1, 0]], LARGE_CREDIT, seed=1)
    world.check_the_end()


# ------------------------------------------------------------------------------------ nobody waits for what he needn't


@settings(max_examples=50, deadline=None)
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
    world = Simulation(plan, [[2]] * clients, credit, seed, pace="step")
    world.hold(lambda what, client, bucket, step: (what, client, bucket, step) == ("gradient", slow, late, 1))
    world.run()
    for bucket in range(len(plan.buckets)):
        reached = [client.machine.step_of(bucket) for client in world.clients.values()]
        assert reached == [1 if bucket == late else 2] * clients, world.where()
    assert world.server.waiting_for() == {slow: [late]}
    world.release()
    world.run()
    world.check_the_end()


@settings(max_examples=30, deadline=None)
@given(plan=PLANS, clients=st.integers(2, 5), credit=CREDITS, seed=SEEDS, pace=PACE, data=st.data())
def test_nothing_is_updated_before_the_last_client_has_sent_its_gradient(plan, clients, credit, seed, pace, data):
    slow = data.draw(st.integers(1, clients))
    world = Simulation(plan, [[2]] * clients, credit, seed, pace=pace)
    world.hold(lambda what, client, bucket, step: (what, client) == ("gradient", slow))
    world.run()
    assert not world.reduced and world.steps_begun == [0]
    assert world.server.waiting_for() == {slow: list(range(len(plan.buckets)))}
    world.release()
    world.run()
    world.check_the_end()


@settings(max_examples=50, deadline=None)
@given(plan=PLANS, clients=st.integers(2, 5), credit=CREDITS, seed=SEEDS, pace=PACE, data=st.data())
def test_a_client_that_takes_none_of_its_weights_does_not_hold_up_those_of_the_others(
    plan, clients, credit, seed, pace, data
):
    slow = data.draw(st.integers(1, clients))
    world = Simulation(plan, [[2]] * clients, credit, seed, pace=pace)
    world.hold(lambda what, client, bucket, step: (what, client) == ("weights", slow))
    world.run()
    for rank, client in world.clients.items():
        assert client.delivered == [[] if rank == slow else [0] for _ in plan.buckets], world.where()
    assert world.server.waiting_for() == ({slow: list(range(len(plan.buckets)))} if len(world.steps_begun) > 1 else {})
    world.release()
    world.run()
    world.check_the_end()


@settings(max_examples=30, deadline=None)
@given(plan=PLANS, clients=st.integers(2, 4), steps=st.integers(2, 4), credit=CREDITS, seed=SEEDS, pace=PACE)
def test_the_others_go_on_without_a_client_that_has_left(plan, clients, steps, credit, seed, pace):
    world = Simulation(plan, [[1, 1], *[[steps, 1]] * (clients - 1)], credit, seed, pace=pace)
    world.hold(lambda what, client, bucket, step: client == 1 and step > 0)  # nothing more comes from it or gets to it
    world.run()
    assert world.phases_ended == [steps], world.where()
    assert world.server.waiting_for() == {1: list(range(len(plan.buckets)))}, "it has to come back for the next phase"
    world.release()
    world.run()
    world.check_the_end()


# ---------------------------------------------------------------------------------------------------------- divisible


@settings(max_examples=40, deadline=None)
@given(size=st.integers(KIB_IN_FLOATS + 1, 6 * KIB_IN_FLOATS), clients=st.integers(1, 3), credit=CREDITS, seed=SEEDS)
def test_pieces_of_a_divisible_plan_are_handed_over_one_by_one_and_others_only_as_a_whole_bucket(
    size, clients, credit, seed
):
    for divisible in (False, True):
        plan = plan_of([size], piece_bytes=1024, divisible=divisible)
        assert len(plan.pieces) > 1
        machine = ServerMachine(plan, range(1, clients + 1), credit)
        order = [(client, piece) for client in range(1, clients + 1) for piece in plan.pieces[:-1]]
        random.Random(seed).shuffle(order)
        handed = []
        for client, piece in order:
            for command in machine.handle(m.GradientReceived(client, piece, 0)):
                if isinstance(command, m.Reduce):
                    after = machine.handle(m.Reduced(command.piece))
                    handed += [command for command in after if not isinstance(command, m.Pause | m.Resume)]
        # All pieces but the last are in.
        expected = {m.HandOver(plan.unit_of[piece.index], 0) for piece in plan.pieces[:-1]} if divisible else set()
        assert set(handed) == expected and len(handed) == len(expected)


def test_new_weights_of_a_piece_leave_before_the_last_piece_of_the_gradient_has_come():
    plan = plan_of([3 * KIB_IN_FLOATS], piece_bytes=1024, divisible=True)
    machine = ServerMachine(plan, [1], LARGE_CREDIT)
    first, second, _ = plan.pieces
    machine.handle(m.GradientReceived(1, second, 0))
    assert machine.handle(m.Reduced(second)) == [m.HandOver(1, 0)]
    assert machine.handle(m.Updated(1, 0)) == [m.SendWeights(1, second, 0)]
    machine.handle(m.GradientReceived(1, first, 0))
    assert machine.handle(m.Reduced(first)) == [m.HandOver(0, 0)]


# ------------------------------------------------------------------------------------------------- priority and credit


def test_a_clients_urgent_gradient_overtakes_the_rest_of_a_large_one():
    plan = plan_of([4, 4 * KIB_IN_FLOATS], piece_bytes=1024)
    small, *large = plan.pieces
    machine = ClientMachine(plan, 1024)
    assert machine.handle(m.GradientReady(1, 0)) == [m.SendGradient(large[0], 0)]
    assert machine.handle(m.GradientReady(0, 0)) == []
    assert machine.handle(m.GradientSent(large[0])) == [m.SendGradient(small, 0)]


def test_new_weights_that_are_urgent_overtake_others_that_wait():
    plan = plan_of([4, 4 * KIB_IN_FLOATS], piece_bytes=1024)
    small, *large = plan.pieces
    machine = ServerMachine(plan, [1], 1024)
    for piece in plan.pieces:
        machine.handle(m.GradientReceived(1, piece, 0))
        machine.handle(m.Reduced(piece))
    assert machine.handle(m.Updated(1, 0)) == [m.SendWeights(1, large[0], 0)]
    assert machine.handle(m.Updated(0, 0)) == []
    assert machine.handle(m.WeightsSent(1, large[0])) == [m.SendWeights(1, small, 0)]


def test_each_client_has_a_credit_of_its_own():
    plan = plan_of([KIB_IN_FLOATS] * 2)
    first, second = plan.pieces
    machine = ServerMachine(plan, [1, 2], 1024)
    for piece in plan.pieces:
        for client in (1, 2):
            machine.handle(m.GradientReceived(client, piece, 0))
        machine.handle(m.Reduced(piece))
    assert machine.handle(m.Updated(0, 0)) == [m.SendWeights(1, first, 0), m.SendWeights(2, first, 0)]
    assert machine.handle(m.Updated(1, 0)) == []
    assert machine.handle(m.WeightsSent(2, first)) == [m.SendWeights(2, second, 0)]


def test_a_client_that_takes_nothing_lets_the_others_have_one_piece_at_a_time_and_all_again_when_it_takes_some():
    plan = plan_of([KIB_IN_FLOATS] * 6)
    machine = ServerMachine(plan, [1, 2], 2048)
    for piece in plan.pieces:
        for client in (1, 2):
            machine.handle(m.GradientReceived(client, piece, 0))
        machine.handle(m.Reduced(piece))
    sent = [command for unit in range(6) for command in machine.handle(m.Updated(unit, 0))]
    first, second, third, fourth, fifth, sixth = plan.pieces
    assert sent == [m.SendWeights(client, piece, 0) for piece in (first, second) for client in (1, 2)]
    assert machine.handle(m.WeightsSent(2, first)) == [m.SendWeights(2, third, 0)]
    assert machine.handle(m.WeightsSent(2, second)) == [m.SendWeights(2, fourth, 0)]
    assert machine.handle(m.WeightsSent(2, third)) == []  # the fourth is under way
    assert machine.handle(m.WeightsSent(2, fourth)) == [m.SendWeights(2, fifth, 0)]
    assert machine.handle(m.WeightsSent(1, first)) == [m.SendWeights(1, third, 0)]
    assert machine.handle(m.WeightsSent(1, second)) == [m.SendWeights(1, fourth, 0)]
    assert machine.handle(m.WeightsSent(1, third)) == [m.SendWeights(1, fifth, 0), m.SendWeights(2, sixth, 0)]


def order_of_sending(machine: ClientMachine, first: m.ClientCommand) -> list[Piece]:
    """What goes, one by one, until nothing is left."""
    commands = [first]
    for command in commands:
        assert isinstance(command, m.SendGradient)
        commands += machine.handle(m.GradientSent(command.piece))
    return [command.piece for command in commands]


def test_a_client_sends_next_what_it_is_asked_for():
    plan = plan_of([4, 4 * KIB_IN_FLOATS], piece_bytes=1024)
    small, *large = plan.pieces
    machine = ClientMachine(plan, 1024)
    (going,) = machine.handle(m.GradientReady(1, 0))
    machine.handle(m.GradientReady(0, 0))
    assert machine.handle(m.AskedFor(large[2], 0)) == []
    assert order_of_sending(machine, going) == [*large[:3], small, large[3]]


@pytest.mark.parametrize("step", [0, 2])
def test_a_client_does_nothing_about_a_question_of_another_step(step):
    plan = plan_of([4, 4 * KIB_IN_FLOATS], piece_bytes=1024)
    small, *large = plan.pieces
    machine = ClientMachine(plan, 1024)
    machine.handle(m.CaughtUp(1))
    (going,) = machine.handle(m.GradientReady(1, 1))
    machine.handle(m.GradientReady(0, 1))
    assert machine.handle(m.AskedFor(large[2], step)) == []
    assert order_of_sending(machine, going) == [large[0], small, *large[1:]]


def test_a_client_that_is_ahead_pauses_until_the_other_has_caught_up():
    plan = plan_of([4 * KIB_IN_FLOATS], piece_bytes=1024)
    machine = ServerMachine(plan, [1, 2], 2048)
    first, second, third, _ = plan.pieces
    assert machine.handle(m.GradientReceived(2, first, 0)) == [m.StepBegan(0)]
    assert machine.handle(m.GradientReceived(1, second, 0)) == []
    assert machine.handle(m.GradientReceived(1, third, 0)) == []
    assert machine.handle(m.GradientReceived(1, first, 0)) == [m.Pause(1), m.Reduce(first, 0, (1, 2))]
    assert machine.handle(m.Reduced(first)) == []
    assert machine.handle(m.GradientReceived(2, second, 0)) == [m.Resume(1), m.Reduce(second, 0, (1, 2))]


def test_without_overlap_gradients_go_when_all_are_ready_and_then_in_the_order_of_the_forward_pass():
    plan = plan_of([KIB_IN_FLOATS] * 3)
    machine = ClientMachine(plan, 1024, overlap=False)
    assert machine.handle(m.GradientReady(2, 0)) == machine.handle(m.GradientReady(1, 0)) == []
    order = machine.handle(m.GradientReady(0, 0))
    while len(order) < 3:
        order += machine.handle(m.GradientSent(order[-1].piece))
    assert order == [m.SendGradient(piece, 0) for piece in plan.pieces]


# ------------------------------------------------------------------------------------------------------ early gradients


def test_a_gradient_that_is_ready_before_its_buckets_old_weights_is_held_back_until_they_have_come():
    plan = plan_of([4, 2 * KIB_IN_FLOATS], piece_bytes=1024)
    _, first, second = plan.pieces
    machine = ClientMachine(plan, LARGE_CREDIT)
    machine.handle(m.GradientReady(1, 0))
    assert machine.handle(m.GradientReady(1, 1)) == []
    assert machine.handle(m.WeightsReceived(second, 0)) == []
    assert machine.handle(m.WeightsReceived(first, 0)) == [
        m.DeliverWeights(1, 0), m.SendGradient(first, 1), m.SendGradient(second, 1)
    ]  # fmt: skip
    assert not machine.between_steps


def test_a_gradient_two_steps_ahead_of_the_weights_is_refused():
    machine = ClientMachine(plan_of([4]), LARGE_CREDIT)
    machine.handle(m.GradientReady(0, 0))
    machine.handle(m.GradientReady(0, 1))
    refused(machine, m.GradientReady(0, 1), "bucket 0", "step 1")
    refused(machine, m.GradientReady(0, 2), "bucket 0", "step 2")


# --------------------------------------------------------------------------------------------------------- departures


@settings(max_examples=60, deadline=None)
@given(plan=PLANS, clients=st.integers(1, 5), steps=st.integers(0, 3), credit=CREDITS, seed=SEEDS, data=st.data())
def test_clients_whose_scripts_end_after_the_same_number_of_steps_do_no_harm(plan, clients, steps, credit, seed, data):
    departing = data.draw(st.sets(st.integers(1, clients), min_size=1))
    world = play(plan, [[1, steps]] * clients, credit, seed, departing=departing)
    assert world.failures == []
    world.check_the_end()


@settings(max_examples=100, deadline=None)
@given(plan=PLANS, steps=uneven_steps(most_clients=4), credit=CREDITS, seed=SEEDS, pace=PACE, data=st.data())
def test_the_run_fails_where_one_clients_script_has_ended_and_another_goes_on(plan, steps, credit, seed, pace, data):
    departing = data.draw(st.sets(st.integers(1, len(steps)), min_size=1))
    world = play(plan, steps, credit, seed, pace=pace, departing=departing)
    last = {rank: own[-1] for rank, own in enumerate(steps, start=1)}
    gone = {rank for rank in departing if last[rank] < max(last.values())}
    assert bool(world.failures) == bool(gone), world.where()
    if world.failures:
        named = {int(rank) for rank in re.findall(r"rank (\d+)", world.failures[0])}
        assert named and named <= gone
        assert "optimizer.finish" in world.failures[0]
    else:
        world.check_the_end()


def two_clients_after_one_step() -> ServerMachine:
    machine, (piece,) = ServerMachine(plan_of([4]), [1, 2], LARGE_CREDIT), plan_of([4]).pieces
    for client in (1, 2):
        machine.handle(m.GradientReceived(client, piece, 0))
    for event in (m.Reduced(piece), m.Updated(0, 0), m.WeightsSent(1, piece), m.WeightsSent(2, piece)):
        machine.handle(event)
    return machine


def failures(commands: list[m.ServerCommand]) -> list[str]:
    return [command.message for command in commands if isinstance(command, m.Fail)]


def test_the_run_fails_if_the_departure_is_known_before_the_others_gradient():
    machine, (piece,) = two_clients_after_one_step(), plan_of([4]).pieces
    assert failures(machine.handle(m.ClientDeparted(1, 1))) == []
    (message,) = failures(machine.handle(m.GradientReceived(2, piece, 1)))
    assert "rank 1 ended after 1 steps" in message and "step 2" in message


def test_the_run_fails_if_the_departure_is_known_after_the_others_gradient():
    machine, (piece,) = two_clients_after_one_step(), plan_of([4]).pieces
    assert failures(machine.handle(m.GradientReceived(2, piece, 1))) == []
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
    (message,) = failures(machine.handle(m.GradientReceived(2, piece, 1)))
    assert "rank 1" in message


def test_a_phase_does_not_end_before_all_weights_are_updated_and_have_arrived():
    machine, (piece,) = ServerMachine(plan_of([4]), [1, 2], LARGE_CREDIT), plan_of([4]).pieces
    machine.handle(m.GradientReceived(1, piece, 0))
    machine.handle(m.ClientLeft(2, 0))
    assert machine.handle(m.ClientLeft(1, 1)) == []
    assert machine.handle(m.Reduced(piece)) == [m.HandOver(0, 0)]
    assert machine.handle(m.Updated(0, 0)) == [m.SendWeights(1, piece, 0)]
    assert machine.handle(m.WeightsSent(1, piece)) == [m.PhaseEnded(1)]


def test_a_client_that_leaves_completes_the_steps_that_waited_for_it():
    plan = plan_of([4, 4])
    machine = ServerMachine(plan, [1, 2], LARGE_CREDIT)
    for piece in plan.pieces:
        machine.handle(m.GradientReceived(1, piece, 0))
    assert machine.handle(m.ClientLeft(2, 0)) == [m.Reduce(piece, 0, (1,)) for piece in plan.pieces]


# ------------------------------------------------------------------------------------------- commands, one by one


def test_gradients_are_summed_in_rank_order_whatever_the_order_of_arrival():
    (piece,) = plan_of([4]).pieces
    for order in ([1, 2, 3], [3, 1, 2], [2, 3, 1]):
        machine = ServerMachine(plan_of([4]), [2, 3, 1], LARGE_CREDIT)
        commands = [c for client in order for c in machine.handle(m.GradientReceived(client, piece, 0))]
        assert commands == [m.StepBegan(0), m.Reduce(piece, 0, (1, 2, 3))]


def test_the_server_says_whom_it_waits_for():
    plan = plan_of([4, 2 * KIB_IN_FLOATS], piece_bytes=1024)
    machine = ServerMachine(plan, [1, 2], LARGE_CREDIT)
    assert machine.waiting_for() == {}
    machine.handle(m.GradientReceived(1, plan.pieces[0], 0))
    assert machine.waiting_for() == {1: [1], 2: [0, 1]}
    machine.handle(m.GradientReceived(2, plan.pieces[0], 0))
    assert machine.waiting_for() == {1: [1], 2: [1]}
    machine.handle(m.GradientReceived(2, plan.pieces[1], 0))
    machine.handle(m.GradientReceived(2, plan.pieces[2], 0))
    assert machine.waiting_for() == {1: [1]}
    machine.handle(m.ClientLeft(2, 1))
    assert machine.waiting_for() == {1: [1]}


def test_a_client_has_no_number_of_steps_in_the_middle_of_one():
    machine = ClientMachine(plan_of([4]), LARGE_CREDIT)
    assert machine.steps == 0
    machine.handle(m.GradientReady(0, 0))
    with pytest.raises(ProtocolError, match="in the middle of a step"):
        _ = machine.steps


def test_a_client_is_in_the_middle_of_a_step_until_its_gradients_have_arrived():
    machine, (piece,) = ClientMachine(plan_of([4]), LARGE_CREDIT), plan_of([4]).pieces
    machine.handle(m.GradientReady(0, 0))
    machine.handle(m.WeightsReceived(piece, 0))
    assert not machine.between_steps
    machine.handle(m.GradientSent(piece))
    assert machine.between_steps and machine.steps == 1


def test_a_client_goes_on_from_the_step_that_it_has_caught_up_with():
    plan = plan_of([4, 4])
    machine = ClientMachine(plan, LARGE_CREDIT)
    assert machine.handle(m.CaughtUp(7)) == machine.handle(m.CaughtUp(7)) == []
    assert machine.steps == 7
    assert machine.handle(m.GradientReady(1, 7)) == [m.SendGradient(plan.pieces[1], 7)]


# ------------------------------------------------------------------------------------- what cannot happen is an error


@settings(max_examples=100, deadline=None)
@given(
    plan=PLANS,
    steps=uneven_steps(most_clients=3, most_steps=3, most_phases=2),
    seed=SEEDS,
    pace=PACE,
    chosen=st.integers(0, 2**32),
    change=st.sampled_from([-2, -1, 1, 2]),
)
def test_a_message_of_another_step_is_refused_whenever_it_comes(plan, steps, seed, pace, chosen, change):
    world = Simulation(plan, steps, 1500, seed, pace=pace)
    with_step: list[object] = []
    world.falsify(lambda event: with_step.append(event) or 0)
    world.run()
    assume(with_step)
    world, count = Simulation(plan, steps, 1500, seed, pace=pace), iter(range(len(with_step)))
    world.falsify(lambda event: change if next(count) == chosen % len(with_step) else 0)
    with pytest.raises(ProtocolError):
        world.run()


def server_in_the_middle() -> tuple[ServerMachine, Piece, Piece]:
    """Clients 1 and 2, two buckets; client 1 has sent bucket 0 of step 0."""
    plan = plan_of([4, 4])
    machine = ServerMachine(plan, [1, 2], LARGE_CREDIT)
    machine.handle(m.GradientReceived(1, plan.pieces[0], 0))
    return machine, *plan.pieces


def refused(machine: ServerMachine | ClientMachine, event: object, *words: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        machine.handle(event)
    for word in words:
        assert word in str(caught.value)


def test_a_gradient_sent_twice_is_refused():
    machine, piece, _ = server_in_the_middle()
    refused(machine, m.GradientReceived(1, piece, 0), "rank 1", "bucket 0", "step 0")


def test_a_gradient_is_refused_while_the_last_one_of_its_piece_is_summed():
    machine, piece, _ = server_in_the_middle()
    machine.handle(m.GradientReceived(2, piece, 0))
    for step in (0, 1):
        refused(machine, m.GradientReceived(1, piece, step), "rank 1", "bucket 0", f"step {step}")


@pytest.mark.parametrize("step", [-1, 1, 5])
def test_a_gradient_of_another_step_is_refused_by_name(step):
    machine, _, other = server_in_the_middle()
    refused(machine, m.GradientReceived(2, other, step), "rank 2", "piece 1", "bucket 1", f"step {step}", "step 0")


def test_a_gradient_of_a_client_that_has_left_is_refused():
    machine, _, other = server_in_the_middle()
    machine.handle(m.ClientLeft(2, 0))
    refused(machine, m.GradientReceived(2, other, 0), "rank 2", "bucket 1", "left")


def test_a_client_cannot_leave_before_a_step_for_which_it_has_sent_a_gradient():
    machine, _, _ = server_in_the_middle()
    refused(machine, m.ClientLeft(1, 0), "rank 1", "bucket 0", "step 0")


def test_a_client_cannot_leave_twice():
    machine, _, _ = server_in_the_middle()
    machine.handle(m.ClientLeft(2, 0))
    refused(machine, m.ClientLeft(2, 0), "rank 2", "twice")


def test_a_piece_cannot_be_summed_unasked_or_twice():
    machine, piece, _ = server_in_the_middle()
    refused(machine, m.Reduced(piece), "piece 0")
    machine.handle(m.GradientReceived(2, piece, 0))
    machine.handle(m.Reduced(piece))
    refused(machine, m.Reduced(piece), "piece 0")


def test_a_unit_cannot_be_updated_unasked_or_twice():
    machine, piece, _ = server_in_the_middle()
    refused(machine, m.Updated(0, 0), "unit 0", "step 0")
    for event in (m.GradientReceived(2, piece, 0), m.Reduced(piece), m.Updated(0, 0)):
        machine.handle(event)
    for step in (0, 1):
        refused(machine, m.Updated(0, step), "unit 0", f"step {step}")


@pytest.mark.parametrize("divisible", [False, True])
def test_a_unit_cannot_be_updated_before_all_its_gradients_have_been_summed(divisible):
    plan = plan_of([2 * KIB_IN_FLOATS], piece_bytes=1024, divisible=divisible)
    machine = ServerMachine(plan, [1], LARGE_CREDIT)
    machine.handle(m.GradientReceived(1, plan.pieces[0], 0))
    refused(machine, m.Updated(0, 0), "unit 0")
    machine.handle(m.Reduced(plan.pieces[0]))
    unfinished = 1 if divisible else 0
    refused(machine, m.Updated(unfinished, 0), f"unit {unfinished}")


def test_an_update_of_another_step_is_refused():
    machine, piece, _ = server_in_the_middle()
    machine.handle(m.GradientReceived(2, piece, 0))
    machine.handle(m.Reduced(piece))
    refused(machine, m.Updated(0, 1), "unit 0", "step 1", "step 0")


def test_a_gradient_of_a_rank_that_is_no_client_is_refused():
    machine, piece, _ = server_in_the_middle()
    refused(machine, m.GradientReceived(7, piece, 0), "rank 7", "bucket 0")


def test_a_rank_that_is_no_client_cannot_leave():
    machine, _, _ = server_in_the_middle()
    refused(machine, m.ClientLeft(7, 0), "rank 7")


def test_weights_that_were_not_sent_cannot_have_arrived():
    machine, piece, _ = server_in_the_middle()
    refused(machine, m.WeightsSent(1, piece), "bucket 0")


def test_a_phase_cannot_be_opened_before_the_one_before_has_ended():
    machine, _, _ = server_in_the_middle()
    machine.handle(m.ClientLeft(2, 0))
    refused(machine, m.PhaseOpened())


@pytest.mark.parametrize("step", [-1, 1, 5])
def test_a_clients_own_gradient_of_another_step_is_refused(step):
    refused(
        ClientMachine(plan_of([4, 4]), LARGE_CREDIT), m.GradientReady(1, step), "bucket 1", f"step {step}", "step 0"
    )


def test_weights_for_which_a_client_does_not_wait_are_refused():
    machine, (piece,) = ClientMachine(plan_of([4]), LARGE_CREDIT), plan_of([4]).pieces
    refused(machine, m.WeightsReceived(piece, 0), "bucket 0", "step 0")


@pytest.mark.parametrize("step", [-1, 1])
def test_weights_of_another_step_are_refused(step):
    machine, (piece,) = ClientMachine(plan_of([4]), LARGE_CREDIT), plan_of([4]).pieces
    machine.handle(m.GradientReady(0, 0))
    refused(machine, m.WeightsReceived(piece, step), "bucket 0", f"step {step}", "step 0")


def test_a_gradient_that_was_not_sent_cannot_have_arrived():
    machine, (piece,) = ClientMachine(plan_of([4]), LARGE_CREDIT), plan_of([4]).pieces
    refused(machine, m.GradientSent(piece), "bucket 0")


def test_a_client_can_catch_up_neither_in_the_middle_of_a_step_nor_backwards():
    machine = ClientMachine(plan_of([4]), LARGE_CREDIT)
    machine.handle(m.CaughtUp(3))
    refused(machine, m.CaughtUp(2), "3 steps", "2")
    machine.handle(m.GradientReady(0, 3))
    refused(machine, m.CaughtUp(4), "in the middle of a step")


def test_the_machines_refuse_each_others_events():
    machine, piece, _ = server_in_the_middle()
    refused(machine, m.GradientReady(0, 0), "GradientReady")
    refused(ClientMachine(plan_of([4]), LARGE_CREDIT), m.GradientReceived(1, piece, 0), "GradientReceived")


# -------------------------------------------------------------------------------------- the simulation is what it says


def test_the_same_seed_gives_the_same_run():
    plan, steps = plan_of([4, KIB_IN_FLOATS]), [[2, 1], [3, 0]]
    first, second = (play(plan, steps, 1024, seed=7) for _ in range(2))
    assert first.random.random() == second.random.random() != random.Random(7).random()
    assert first.events == second.events > 0


def test_clients_pause_and_are_asked_in_some_runs():
    plan = plan_of([2 * KIB_IN_FLOATS, 5 * KIB_IN_FLOATS], piece_bytes=1024)
    worlds = [play(plan, [[2]] * 3, 1024, seed) for seed in range(5)]
    assert any(world.pauses for world in worlds)
    assert any(world.asked for world in worlds)


def test_gradients_do_come_before_their_weights_in_some_runs():
    def early(plan: Plan, seed: int) -> bool:
        world = Simulation(plan, [[4]], LARGE_CREDIT, seed, pace="early")
        seen = False
        while world._pool:
            world._pool.pop(world.random.randrange(len(world._pool)))()
            seen |= bool(world.clients[1].early)
        return seen

    assert any(early(plan_of([4, 4]), seed) for seed in range(5))
