"""What the ranks agree on, and the rounds in which they meet outside the steps."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ranks import Ranks, dense, image_of, image_of_rows, run_ranks

from mpipipe import link
from mpipipe import session as sessions
from mpipipe.config import Config
from mpipipe.context import Context
from mpipipe.errors import DisagreementError, MpipipeError
from mpipipe.protocol.plan import VariableSpec
from mpipipe.session import Inbox, ServerSession
from mpipipe.timeline import chrome
from mpipipe.transport.inproc import Network
from mpipipe.wire import plain, rows
from mpipipe.wire.header import HEADER_BYTES

SECONDS = 20.0

# With these nobody has to measure the network.
SIZES = {"piece_bytes": 4 << 20, "fuse_bytes": 16 << 10, "credit_bytes": 32 << 20}

# What the optimizers of all ranks have in common.
RULES = {"average": "clients", "gradient_accumulation_steps": 1}


class World:
    """One context a rank, on an in-process network."""

    def __init__(self, size: int, seed: int | None = 0, **settings: Any) -> None:
        self.network = Network(size, seed=seed)
        config = Config(**{**SIZES, **settings})
        self.contexts = [Context(config, transport) for transport in self.network.transports]
        self.sessions: list[Any] = [context.new_session() for context in self.contexts]

    def start(self, act: Callable[[int, Any], Any]) -> Ranks:
        """``act(rank, session)`` on every rank."""
        return Ranks({rank: lambda r=rank: act(r, self.sessions[r]) for rank in range(self.network.size)})

    def run(self, act: Callable[[int, Any], Any], seconds: float = SECONDS) -> dict[int, Any]:
        """What ``act(rank, session)`` returned on every rank, or the exception that it raised."""
        return self.start(act).join(seconds)


@pytest.fixture
def world():
    made: list[World] = []

    def make(size: int = 4, seed: int | None = 0, **settings: Any) -> World:
        made.append(World(size, seed, **settings))
        return made[-1]

    yield make
    for each in made:
        each.network.close()


def agree(
    rank: int,
    session: Any,
    variables: list[VariableSpec],
    divisible: bool = False,
    rules: dict[str, Any] = RULES,
    exact: Sequence[int] = (),
    sum_rows: bool = True,
) -> None:
    if rank == 0:
        session.agree(variables, exact, rules, divisible=divisible, sum_rows=sum_rows)
    else:
        session.agree(variables, exact, rules)


def assert_all_disagree(outcomes: dict[int, Any], *words: str) -> None:
    assert {type(outcome) for outcome in outcomes.values()} == {DisagreementError}, outcomes
    assert len({str(outcome) for outcome in outcomes.values()}) == 1, "the ranks got different messages"
    for word in words:
        assert word in str(outcomes[0])


# -------------------------------------------------------------------------------------------------------------- agree


def test_ranks_with_the_same_model_agree_although_layers_are_numbered_differently(world):
    outcomes = world().run(lambda rank, session: agree(rank, session, dense(f"dense_{rank}", 3, 4)))
    assert outcomes == dict.fromkeys(range(4))


def test_another_shape_is_an_error_on_all_ranks_that_names_the_layer_the_shapes_and_the_ranks(world):
    def act(rank: int, session: Any) -> None:
        agree(rank, session, dense("first", 3, 4) + dense("second", 4, 6 if rank == 2 else 5) + dense("third", 5, 1))

    assert_all_disagree(
        world().run(act), "'second'", "second/kernel (4, 5) float32 on ranks 0, 1, 3", "(4, 6) float32 on rank 2"
    )


def test_another_dtype_is_an_error_on_all_ranks(world):
    def act(rank: int, session: Any) -> None:
        agree(rank, session, dense("a", 3, 4, "float32" if rank else "bfloat16"))

    assert_all_disagree(world().run(act), "'a'", "bfloat16 on rank 0", "float32 on ranks 1, 2, 3")


@pytest.mark.parametrize("longer", [0, 2])
def test_a_missing_layer_is_an_error_on_all_ranks(world, longer):
    def act(rank: int, session: Any) -> None:
        agree(rank, session, dense("a", 3, 4) + (dense("b", 4, 5) if rank == longer else []))

    assert_all_disagree(world(3).run(act), "'b'", "no such variable", f"b/kernel (4, 5) float32 on rank {longer}")


def test_ranks_that_differ_in_different_places_are_not_lumped_together(world):
    def act(rank: int, session: Any) -> None:
        agree(rank, session, dense("a", 3, 5 if rank == 1 else 4) + dense("b", 4, 7 if rank == 2 else 6))

    outcomes = world(4).run(act)
    assert_all_disagree(outcomes, "'a'", "(3, 5) float32 on rank 1")
    assert "(3, 5) float32 on ranks 1, 2" not in str(outcomes[0]), outcomes[0]


def test_ranks_that_differ_differently_in_one_place_are_each_told_apart(world):
    def act(rank: int, session: Any) -> None:
        agree(rank, session, dense("a", 3, 4 + rank))

    assert_all_disagree(world(3).run(act), "(3, 4) float32 on rank 0", "(3, 5) float32 on rank 1", "(3, 6)")


def test_ranks_with_different_versions_do_not_train_together(world, monkeypatch):
    made = world(3)
    say = made.sessions[2]._say
    made.sessions[2]._say = lambda dest, kind, content: say(dest, kind, {**content, "version": "0.0"})
    outcomes = made.run(lambda rank, session: agree(rank, session, dense("a", 3, 4)))
    assert_all_disagree(outcomes, "mpipipe 0.0 (rank 2)", "(rank 0)")


@pytest.mark.parametrize("other", [0, 2])
@pytest.mark.parametrize("name,value", [("average", "samples"), ("gradient_accumulation_steps", 3)])
def test_other_rules_on_one_rank_are_an_error_on_all_ranks_that_names_the_rule_and_both_values(
    world, other, name, value
):
    def act(rank: int, session: Any) -> None:
        agree(rank, session, dense("a", 3, 4), rules={**RULES, name: value} if rank == other else RULES)

    sides = [f"{value!r} (rank {other})", f"{RULES[name]!r} (rank {0 if other else 1})"]
    assert_all_disagree(world(3).run(act), f"different {name}", *sides)


def test_a_rule_that_one_rank_does_not_know_is_an_error_on_all_ranks(world):
    def act(rank: int, session: Any) -> None:
        agree(rank, session, dense("a", 3, 4), rules={**RULES, "loss_scale": 2.0} if rank == 0 else RULES)

    assert_all_disagree(world(3).run(act), "different loss_scale", "2.0 (rank 0)", "None (rank 1)")


def test_what_else_there_is_to_tell_reaches_the_other_side_both_ways(world):
    def act(rank: int, session: Any) -> Any:
        if rank:
            answer = session.agree(MODEL, (), RULES, rate=0.1 * rank, iterations=rank)
            return answer["rate"], answer["iterations"]
        said = session.agree(MODEL, (), RULES, divisible=False, sum_rows=True, rate=0.5, iterations=3)
        return {client: (message["rate"], message["iterations"]) for client, message in said.items()}

    assert world(3).run(act) == {0: {1: (0.1, 1), 2: (0.2, 2)}, 1: (0.5, 3), 2: (0.5, 3)}


@pytest.mark.parametrize("sum_rows", [False, True])
@pytest.mark.parametrize("average", ["clients", "samples"])
def test_how_gradients_are_averaged_and_whether_rows_are_summed_reaches_every_rank_and_its_engine(
    world, average, sum_rows
):
    made, rules = world(3), {**RULES, "average": average}
    made.run(lambda rank, session: agree(rank, session, MODEL, rules=rules, sum_rows=sum_rows))
    assert [session.sums_rows for session in made.sessions] == [sum_rows] * 3

    def wiring(rank: int, session: Any) -> tuple[str, bool]:
        wired = session._wiring(session.plan_for(["whole"] * 4))
        return wired.average, wired.sum_rows

    assert made.run(wiring) == dict.fromkeys(range(3), (average, sum_rows))


# ------------------------------------------------------------------------------------------- what the server decides


@pytest.mark.parametrize("divisible", [False, True])
def test_what_the_server_has_decided_is_what_all_ranks_go_by(world, divisible):
    made = world(3, piece_bytes=2048, wire="bf16", wire_weights="fp16", overlap=False, max_buckets=7, sparse=False)
    made.run(lambda rank, session: agree(rank, session, dense("a", 3, 4), divisible))
    agreed = {
        **SIZES, "piece_bytes": 2048, "max_buckets": 7, "divisible": divisible,
        "wire": "bf16", "wire_weights": "fp16", "overlap": False, "sparse": False, "sum_rows": True,
        "average": "clients",
    }  # fmt: skip
    for session in made.sessions:
        assert {name: session._agreed[name] for name in agreed} == agreed
        assert not session.overlaps and not session.sparse and session.sums_rows
        assert session.plan_for(["whole"] * 2).divisible == divisible


@pytest.mark.parametrize("name,value", [("piece_bytes", 4096), ("wire", "bf16"), ("on_nonfinite", "skip")])
def test_a_setting_that_is_not_the_same_on_all_ranks_is_an_error_that_names_it(world, name, value):
    made = world(3)
    ours = getattr(made.contexts[0].config, name)
    changed = dataclasses.replace(made.contexts[2].config, **{name: value})  # as if one rank had the variable
    made.contexts[2].config = changed
    outcomes = made.run(lambda rank, session: agree(rank, session, dense("a", 3, 4)))
    said = f"the ranks have different settings: {name} is {ours!r} (rank 0) and {value!r} (rank 2)"
    assert [str(outcome) for outcome in outcomes.values()] == [said] * 3


def test_settings_that_concern_one_rank_only_may_differ(world):
    made = world(3)
    made.contexts[1].config = dataclasses.replace(made.contexts[1].config, stall_abort=0.0, quiet=False)
    assert made.run(lambda rank, session: agree(rank, session, dense("a", 3, 4))) == dict.fromkeys(range(3))


@pytest.mark.parametrize("given", [set(SIZES), {"piece_bytes"}])
def test_nobody_measures_the_network_where_the_size_of_a_piece_is_set(world, monkeypatch, given):
    monkeypatch.setattr(link, "measure", lambda *_: pytest.fail("it is measured"))
    made = world(3, **{name: size if name in given else None for name, size in SIZES.items()})
    assert made.run(lambda rank, session: agree(rank, session, dense("a", 3, 4))) == dict.fromkeys(range(3))
    assert made.contexts[0].link is None


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_sizes_that_are_not_set_follow_from_the_network_as_it_is_measured(world, seed):
    made = world(4, seed, piece_bytes=None, fuse_bytes=None, credit_bytes=None)
    assert made.run(lambda rank, session: agree(rank, session, MODEL), seconds=60.0) == dict.fromkeys(range(4))
    measured = made.contexts[0].link
    chosen = link.choose_sizes(measured, sum(v.nbytes for v in MODEL), 3)
    for session in made.sessions:
        for name in SIZES:
            assert session._agreed[name] == getattr(chosen, name)


def test_the_network_is_measured_once_in_a_run_and_sizes_follow_from_each_optimizers_model(world, monkeypatch):
    made = world(2, piece_bytes=None)
    measured = link.Link(rate=1e6, overhead=1e-3)
    calls: list[object] = []

    def measure(channel: Any, clients: Any) -> link.Link:
        calls.append(clients)
        measure_in_fact(channel, clients)
        return measured

    measure_in_fact = link.measure
    monkeypatch.setattr(link, "measure", measure)
    large = dense("large", 1000, 1000)

    def act(rank: int, session: Any) -> list[int]:
        second = made.contexts[rank].new_session()
        agree(rank, session, MODEL)
        agree(rank, second, large)
        return [each._agreed["piece_bytes"] for each in (session, second)]

    expected = [link.choose_sizes(measured, sum(v.nbytes for v in m), 1).piece_bytes for m in (MODEL, large)]
    assert expected[0] < expected[1]
    assert made.run(act, seconds=60.0) == {0: expected, 1: expected}
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["piece_bytes", "fuse_bytes", "credit_bytes"])
def test_a_size_that_is_set_is_kept_where_others_follow_from_the_network(world, name):
    made = world(2, **{**dict.fromkeys(SIZES), name: 123456})
    made.contexts[0].link = link.Link(rate=1e8, overhead=1e-5)
    made.run(lambda rank, session: agree(rank, session, MODEL))
    chosen = link.choose_sizes(made.contexts[0].link, sum(v.nbytes for v in MODEL), 1)
    assert made.sessions[1]._agreed[name] == 123456
    if name != "piece_bytes":
        assert made.sessions[1]._agreed["piece_bytes"] == chosen.piece_bytes


def test_sizes_that_are_not_set_fit_the_piece_that_is(world):
    made = world(2, **{**dict.fromkeys(SIZES), "piece_bytes": 1 << 20})
    made.contexts[0].link = link.Link(rate=1e6, overhead=1e-5)
    made.run(lambda rank, session: agree(rank, session, MODEL))
    # As the table of settings says: a quarter of a piece, and four pieces.
    assert {name: made.sessions[1]._agreed[name] for name in SIZES} == {
        "piece_bytes": 1 << 20, "fuse_bytes": 1 << 18, "credit_bytes": 3 << 20
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------- whole arrays

ARRAYS = [
    lambda rank: np.arange(12, dtype=np.float32).reshape(3, 4) + rank,
    lambda rank: np.float64(rank) + np.zeros(()),
    lambda rank: np.zeros((0, 3), np.float32),
    lambda rank: np.array([rank, -1], np.int64),
    lambda rank: np.array([rank == 0, True]),
    lambda rank: np.array([1.5 + rank], ml_dtypes.bfloat16),
    lambda rank: np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3) * (rank + 1)),
]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_every_client_gets_the_servers_arrays(world, seed):
    def act(rank: int, session: Any) -> Any:
        agree(rank, session, dense("a", 3, 4))
        arrays = [make(rank) for make in ARRAYS]
        return session.send_arrays(arrays) if rank == 0 else list(session.receive_arrays(arrays))

    outcomes = world(4, seed).run(act)
    assert outcomes.pop(0) is None
    for arrays in outcomes.values():
        for array, make in zip(arrays, ARRAYS, strict=True):
            expected = make(0)
            assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
            assert array.tobytes() == expected.tobytes()


def test_arrays_can_be_sent_to_some_clients_only_and_each_keeps_the_order(world):
    def act(rank: int, session: Any) -> Any:
        agree(rank, session, dense("a", 3, 4))
        if rank == 0:
            for number, clients in enumerate([[1, 3], [2], None, []]):
                session.send_arrays([np.full(3, number, np.float32)], clients)
            return None
        return [float(next(session.receive_arrays([np.zeros(3, np.float32)]))[0]) for _ in range(2)]

    assert world(4).run(act) == {0: None, 1: [0.0, 2.0], 2: [1.0, 2.0], 3: [0.0, 2.0]}


def test_receiving_leaves_the_arrays_that_were_given_as_they_are(world):
    given = [np.full(3, rank, np.float32) for rank in range(3)]

    def act(rank: int, session: Any) -> None:
        agree(rank, session, dense("a", 3, 4))
        if rank:
            list(session.receive_arrays([given[rank]]))
        else:
            session.send_arrays([given[0]])

    assert world(3).run(act) == dict.fromkeys(range(3))
    assert [array.tolist() for array in given] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


def test_at_the_end_of_a_phase_floats_are_averaged_and_other_arrays_are_the_first_clients(world):
    states = [
        [np.full((2, 2), 10.0**rank, np.float32), np.array([rank]), np.array(rank, np.float16)] for rank in range(4)
    ]

    def act(rank: int, session: Any) -> Any:
        agree(rank, session, dense("a", 3, 4))
        if rank:
            return session.end_phase(states[rank], logs={"loss": float(rank)}, samples=rank)
        said = session.collect_phase(states[0])
        means, logs = session.mean_arrays(states[0]), session.mean_logs()
        session.answer_phase(said, lambda: pytest.fail("nobody has to catch up"), iterations=7)
        return means, logs

    outcomes = world().run(act)
    means, logs = outcomes[0]
    expected = np.float32((10.0 + 100.0 + 1000.0) / 3)
    assert [mean.tolist() for mean in means] == [[[expected] * 2] * 2, [1], 2.0]
    assert [mean.dtype for mean in means] == [np.float32, np.int64, np.float16]
    assert logs == {"loss": pytest.approx((1 * 1 + 2 * 2 + 3 * 3) / 6)}
    for client in (1, 2, 3):
        assert outcomes[client]["iterations"] == 7 and not outcomes[client]["catch_up"]


def test_metrics_without_any_sample_are_left_out(world):
    session = world(3).sessions[0]
    session.latest = {1: ({"loss": 1.0}, 0), 2: ({"loss": 3.0, "accuracy": 0.5}, 0)}
    assert session.mean_logs() == {}
    session.latest = {1: ({"loss": 1.0}, 30), 2: ({"loss": 3.0, "accuracy": 0.5}, 10)}
    assert session.mean_logs() == {"loss": 1.5, "accuracy": 0.5}


# --------------------------------------------------------------------------------------------------------------- open

MODEL = dense("a", 3, 4) + dense("b", 4, 300)


def test_ranks_that_open_have_the_same_plan_made_with_the_servers_sizes(world):
    made = world(3, piece_bytes=1024)

    def act(rank: int, session: Any) -> Any:
        # Keras may have numbered the layers of this rank differently.
        agree(rank, session, [VariableSpec(f"r{rank}/{v.path}", v.shape, v.dtype) for v in MODEL])
        if rank == 0:
            return session.open(lambda *_: None)
        return session.open(["whole", "none", "whole", "whole"], rank == 2, lambda *_: None)

    assert made.run(act) == dict.fromkeys(range(3), True)  # one rank's first gradients are of no use: all skip them
    assert len({session.plan.digest for session in made.sessions}) == 1
    plan = made.sessions[1].plan
    assert plan.has_gradient == (True, False, True, True)
    assert max(piece.nbytes for piece in plan.pieces) <= 1024


def test_first_gradients_are_used_where_all_ranks_had_the_servers_weights(world):
    def act(rank: int, session: Any) -> Any:
        agree(rank, session, MODEL)
        return session.open(*([] if rank == 0 else [["whole"] * 4, False]), lambda *_: None)

    assert world(3).run(act) == dict.fromkeys(range(3), False)


def test_a_variable_that_gets_a_gradient_on_one_rank_only_is_an_error_that_names_it_and_the_ranks(world):
    def act(rank: int, session: Any) -> None:
        agree(rank, session, MODEL)
        if rank == 0:
            session.open(lambda *_: None)
        else:
            session.open(["whole", "whole", "none" if rank == 2 else "whole", "whole"], False, lambda *_: None)

    assert_all_disagree(world().run(act), "b/kernel gets a gradient on rank 1 but none on rank 2")


@pytest.mark.parametrize("one,another", [("rows", "whole"), ("whole", "rows")])
def test_a_variable_that_gets_rows_on_one_rank_and_all_of_it_on_another_is_an_error_that_names_it_and_the_ranks(
    world, one, another
):
    def act(rank: int, session: Any) -> None:
        agree(rank, session, MODEL)
        if rank == 0:
            session.open(lambda *_: None)
        else:
            session.open(["whole", "whole", another if rank == 2 else one, "whole"], False, lambda *_: None)

    words = {"rows": "for some of its rows", "whole": "for all of it"}
    assert_all_disagree(
        world().run(act), f"b/kernel gets a gradient {words[one]} on rank 1 but one {words[another]} on rank 2"
    )


def test_a_variable_that_gets_rows_on_one_rank_and_none_on_another_is_an_error_that_names_it_and_the_ranks(world):
    def act(rank: int, session: Any) -> None:
        agree(rank, session, MODEL)
        if rank == 0:
            session.open(lambda *_: None)
        else:
            session.open(["none" if rank == 1 else "rows", *["whole"] * 3], False, lambda *_: None)

    assert_all_disagree(world().run(act), "a/kernel gets a gradient on rank 2 but none on rank 1")


def test_variables_of_rows_and_exact_ones_are_buckets_of_their_own_in_the_plan_of_every_rank(world):
    def act(rank: int, session: Any) -> Any:
        agree(rank, session, MODEL, exact=[3])
        if rank == 0:
            session.open(lambda *_: None)
        else:
            session.open(["rows", "whole", "whole", "whole"], False, lambda *_: None)
        return [(bucket.variables, bucket.exact, bucket.row_bytes) for bucket in session.plan.buckets]

    expected = [((0,), True, 16), ((1, 2), False, 0), ((3,), True, 0)]
    assert world(3).run(act) == dict.fromkeys(range(3), expected)


def opening(steps: Callable[[int, Any], Any], divisible: bool = False) -> Callable[[int, Any], Any]:
    """Agree, open, then ``steps(rank, session)``. The server's update is: weights are minus the mean gradient."""

    def act(rank: int, session: Any) -> Any:
        agree(rank, session, MODEL, divisible)
        if rank == 0:
            done: dict[int, int] = {}  # steps by unit
            session.newest = [np.zeros(variable.shape, np.float32) for variable in MODEL]

            def update(number: int, mean: Any) -> None:
                unit, step = session.plan.units[number], done.get(number, 0)
                new = -plain.decode(mean, unit.dtype)
                at = 0
                for region in unit.regions:
                    session.newest[region.variable].reshape(-1)[region.start : region.stop] = new[at : at + region.size]
                    at += region.size
                session.engine.updated(number, step, image_of(unit.pieces, step, plain.encode(new)))
                done[number] = step + 1

            session.open(update)
            session.engine.start()
        else:
            session.delivered = threading.Semaphore(0)
            session.weights = {}
            session.done = 0

            def deliver(bucket: int, data: Any) -> None:
                session.weights[bucket] = data.copy()
                session.delivered.release()

            session.open(["whole"] * 4, False, deliver)
        return steps(rank, session)

    return act


def train_step(session: Any, value: float) -> None:
    buckets = session.plan.buckets
    for bucket in reversed(buckets):
        data = plain.encode(np.full(bucket.nbytes // 4, value, np.float32))
        session.engine.gradient(bucket.index, session.done, image_of(bucket.pieces, session.done, data))
    for _ in buckets:
        assert session.delivered.acquire(timeout=SECONDS)
    session.done += 1


def serve_phase(session: Any) -> int:
    """On the server: a phase; returns how many steps it had."""
    served = 0
    while session.wait_step():
        served += 1
    session.answer_phase(session.collect_phase([]), lambda: session.newest)
    return served


def end_phase(session: Any) -> tuple[int, set[float]]:
    """On a client: end a phase; returns the steps done by all, and the values of the weights caught up with."""
    answer = session.end_phase([], logs={}, samples=0)
    values: set[float] = set()
    if answer["catch_up"]:
        like = [np.zeros(variable.shape, np.float32) for variable in MODEL]
        values = {float(value) for array in session.receive_arrays(like) for value in np.unique(array)}
        session.engine.caught_up(answer["steps"])
        session.done = answer["steps"]
    assert session.steps_done() == session.done == answer["steps"]
    return answer["steps"], values


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("divisible", [False, True])
def test_clients_with_fewer_steps_get_the_newest_weights_at_the_end_of_the_phase(world, seed, divisible):
    def steps(rank: int, session: Any) -> Any:
        results = []
        for phase in range(2):
            own = rank if phase == 0 else 4 - rank
            if rank == 0:
                results.append(serve_phase(session))
                continue
            for step in range(own):
                train_step(session, float(10 * rank + step))
            results.append(end_phase(session))
        return results

    outcomes = world(4, seed, fuse_bytes=0, piece_bytes=1024).run(opening(steps, divisible))
    assert outcomes == {
        0: [3, 3],
        1: [(3, {-32.0}), (6, set())],
        2: [(3, {-32.0}), (6, {-12.0})],
        3: [(3, set()), (6, {-12.0})],
    }


def test_weights_that_were_rounded_on_the_wire_are_made_exact_at_the_end_of_the_phase_on_all_clients(world):
    value = 1.0 + 2.0**-20  # which bfloat16 does not have

    def steps(rank: int, session: Any) -> Any:
        if rank == 0:
            return serve_phase(session)
        train_step(session, value)
        rounded = {float(plain.decode(data, "float32")[0]) for data in session.weights.values()}
        return rounded, end_phase(session)

    outcomes = world(3, wire_weights="bf16").run(opening(steps))
    assert outcomes == {0: 1, 1: ({-1.0}, (1, {-value})), 2: ({-1.0}, (1, {-value}))}


def test_nobody_catches_up_after_a_phase_without_steps_however_weights_are_sent(world):
    def steps(rank: int, session: Any) -> Any:
        return end_phase(session) if rank else serve_phase(session)

    assert world(3, wire_weights="bf16").run(opening(steps)) == {0: 0, 1: (0, set()), 2: (0, set())}


@pytest.mark.parametrize("settings", [{"overlap": False}, {"wire": "bf16", "credit_bytes": 1024}])
def test_steps_are_done_with_whatever_settings(world, settings):
    def steps(rank: int, session: Any) -> Any:
        if rank == 0:
            return serve_phase(session)
        for step in range(3):
            train_step(session, float(step))
        end_phase(session)
        return {float(plain.decode(data, "float32")[0]) for data in session.weights.values()}

    made = world(3, fuse_bytes=0, **{"piece_bytes": 1024, **settings})
    assert made.run(opening(steps)) == {0: 3, 1: {-2.0}, 2: {-2.0}}
    plan = made.sessions[0].plan
    sent = made.sessions[1].engine.bytes_sent
    assert sent == 3 * (plan.nbytes // (2 if "wire" in settings else 1) + 16 * len(plan.pieces))


# A model of an embedding and a layer.
TABLE = [VariableSpec("table/embeddings", (50, 3), "float32"), *dense("a", 3, 4)]


def opening_table(steps: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
    """As :func:`opening`, for ``TABLE``, of whose embedding rows travel. A row is changed by minus its gradient."""

    def act(rank: int, session: Any) -> Any:
        agree(rank, session, TABLE)
        weights = session.newest = [np.zeros(variable.shape, np.float32) for variable in TABLE]
        if rank == 0:
            done = [0, 0]  # steps by unit

            def update(number: int, mean: Any) -> None:
                unit, step = session.plan.units[number], done[number]
                if unit.row_bytes:
                    indices, elements = rows.read(mean, unit.row_bytes)
                    weights[0][indices] -= elements.view(np.float32)
                    new = rows.write(indices, weights[0][indices].view(np.uint8))
                    image = image_of_rows(unit.pieces[0], step, new)
                else:
                    for region, part in zip(unit.regions, np.split(mean.view(np.float32), [12]), strict=True):
                        weights[region.variable] -= part.reshape(TABLE[region.variable].shape)
                    new = np.concatenate([plain.encode(weights[region.variable]) for region in unit.regions])
                    image = image_of(unit.pieces, step, new)
                session.engine.updated(number, step, image)
                done[number] += 1

            session.open(update)
            session.engine.start()
        else:
            session.delivered, session.done = threading.Semaphore(0), 0

            def deliver(bucket: int, data: Any) -> None:
                if bucket == 0:
                    indices, elements = rows.read(data, 12)
                    weights[0][indices] = elements.view(np.float32)
                    session.rows_received = len(indices)
                else:
                    kernel, bias = np.split(data.view(np.float32), [12])
                    weights[1], weights[2] = kernel.reshape(3, 4).copy(), bias.copy()
                session.delivered.release()

            session.open(["rows", "whole", "whole"], False, deliver)
        return steps(rank, session)

    return act


def train_step_of_table(session: Any, indices: list[int], value: float) -> None:
    """A step in which these rows, and all of the layer, get a gradient of this value."""
    of_rows = rows.write(np.array(indices, np.int64), np.full((len(indices), 3), value, np.float32).view(np.uint8))
    table, layer = session.plan.buckets
    of_layer = plain.encode(np.full(16, value, np.float32))
    session.engine.gradient(1, session.done, image_of(layer.pieces, session.done, of_layer))
    session.engine.gradient(0, session.done, image_of_rows(table.pieces[0], session.done, of_rows))
    for _ in range(2):
        assert session.delivered.acquire(timeout=SECONDS)
    session.done += 1


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("settings", [{}, {"credit_bytes": 1024, "piece_bytes": 1024}, {"overlap": False}])
def test_rows_that_have_a_gradient_are_updated_on_all_ranks_and_only_those_travel(world, seed, settings):
    def steps(rank: int, session: Any) -> Any:
        if rank == 0:
            while session.wait_step():
                pass
            session.answer_phase(session.collect_phase([]), lambda: session.newest)
        else:
            train_step_of_table(session, [7, 40 + rank], float(rank))
            assert session.rows_received == 3
            train_step_of_table(session, [], 0.0)
            assert session.rows_received == 0
            if rank == 2:
                train_step_of_table(session, [0], 4.0)
            answer = session.end_phase([], logs={}, samples=0)
            assert answer["catch_up"] == (rank == 1)
            if answer["catch_up"]:
                session.newest[:] = list(session.receive_arrays([np.zeros(v.shape, np.float32) for v in TABLE]))
                session.engine.caught_up(answer["steps"])
        return [array.tolist() for array in session.newest]

    table = np.zeros((50, 3), np.float32)
    table[[0, 7, 41, 42]] = [[-4.0], [-1.5], [-0.5], [-1.0]]
    expected = [table, np.full((3, 4), -5.5), np.full(4, -5.5)]
    made = world(3, seed, **settings)
    outcomes = made.run(opening_table(steps))
    assert outcomes == dict.fromkeys(range(3), [array.tolist() for array in expected])
    sent = [HEADER_BYTES + rows.PART_BYTES + n * (8 + 12) for n in (2, 0, 1)]
    assert made.sessions[1].engine.bytes_sent == sum(sent[:2]) + 2 * (HEADER_BYTES + 64)
    assert made.sessions[2].engine.bytes_sent == sum(sent) + 3 * (HEADER_BYTES + 64)


def test_other_state_than_the_servers_is_an_error_on_all_ranks_that_names_the_client(world):
    def steps(rank: int, session: Any) -> Any:
        if rank:
            return session.end_phase([np.zeros(2 + (rank == 2), np.float32)], logs={}, samples=0)
        assert not session.wait_step()
        return session.collect_phase([np.zeros(2, np.float32)])

    assert_all_disagree(world(3).run(opening(steps), seconds=8.0), "rank 2", "same model on every rank")


def without_steps(rank: int, session: Any) -> Any:
    """A phase in which no client does a step."""
    if rank:
        return session.end_phase([], logs={}, samples=0)["steps"]
    served = session.wait_step()
    session.answer_phase(session.collect_phase([]), lambda: pytest.fail("nobody has to catch up"))
    return served


def test_a_phase_without_steps_ends(world):
    assert world(3).run(opening(without_steps)) == {0: False, 1: 0, 2: 0}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def delay_the_servers_engine(monkeypatch: Any, until: Callable[[], bool]) -> None:
    """A server whose thread is held up just before it makes its engine, as on a machine with too many processes."""
    engine = sessions.ServerEngine

    def late(*args: Any) -> Any:
        wait_for(until)
        return engine(*args)

    monkeypatch.setattr(sessions, "ServerEngine", late)


def test_clients_that_end_a_phase_before_the_servers_engine_is_there_are_not_forgotten(world, monkeypatch):
    made = world(2)
    delay_the_servers_engine(monkeypatch, lambda: bool(made.sessions[0].inbox.waiting()))
    assert made.run(opening(without_steps), seconds=5.0) == {0: False, 1: 0}


def test_clients_whose_scripts_end_before_the_servers_engine_is_there_are_not_forgotten(world, monkeypatch):
    made = world(3)
    delay_the_servers_engine(monkeypatch, lambda: 1 in made.contexts[0]._departed)
    caught: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(threading, "excepthook", caught.put)

    def steps(rank: int, session: Any) -> None:
        if rank == 1:
            made.contexts[1].finalize()
        elif rank == 2:
            train_step(session, 1.0)

    made.start(opening(steps))
    try:
        error = caught.get(timeout=5.0)
    except queue.Empty:
        pytest.fail("the others wait for the client for ever")
    finally:
        made.contexts[1]._bye.set()
    assert "rank 1 ended after 0 steps" in str(error.exc_value)


def test_the_server_waits_for_first_metrics_but_not_long_for_a_client_that_goes_on_without_any(world):
    def steps(rank: int, session: Any) -> Any:
        if rank == 0:
            assert session.wait_step()
            session.wait_reports()
            return session.mean_logs()
        train_step(session, 1.0)
        if rank == 1:
            time.sleep(0.1)
            session.running({"loss": 2.0}, 10)
        else:
            wait_for(lambda: bool(made.sessions[0].latest))
        train_step(session, 1.0)
        return None

    made = world(3)
    assert made.run(opening(steps)) == {0: {"loss": 2.0}, 1: None, 2: None}


def test_a_client_that_waits_in_another_optimizers_round_while_a_step_waits_for_it_is_an_error(world, monkeypatch):
    caught: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(threading, "excepthook", caught.put)
    made = world(3)

    def steps(rank: int, session: Any) -> None:
        if rank == 1:
            train_step(session, 1.0)
        elif rank == 2:
            agree(rank, made.contexts[2].new_session(), MODEL)

    made.start(opening(steps))
    error = caught.get(timeout=SECONDS)
    assert error.exc_type is DisagreementError and error.thread.name.startswith("mpipipe-")
    assert "rank 2 is building its optimizer of another optimizer" in str(error.exc_value)


# ------------------------------------------------------------------------------------- ranks at different places


def test_a_client_at_another_round_is_an_error_on_all_ranks_that_says_who_is_where(world):
    def act(rank: int, session: Any) -> None:
        agree(rank, session, MODEL)
        if rank == 0:
            session.collect("fit")
        else:
            session.round("fit" if rank == 1 else "vote")

    assert_all_disagree(world(3).run(act), "rank 2 is after the callbacks of an epoch", "starting fit", "rank 0")


def test_a_client_that_comes_late_to_a_round_gets_the_error_too(world):
    def act(rank: int, session: Any) -> None:
        if rank == 0:
            session.collect("fit")
        if rank == 2:
            time.sleep(0.3)
        session.round("vote")

    assert_all_disagree(world(3).run(act), "rank 1 is after the callbacks of an epoch")


@pytest.mark.parametrize("others", [1, 2])
def test_a_client_whose_script_has_ended_while_the_server_waits_for_it_is_an_error_not_a_hang(world, others):
    made = world(others + 1)

    def act(rank: int, session: Any) -> None:
        if rank == 0:
            session.collect("fit")
        elif rank == others:
            made.contexts[rank].finalize()
        else:
            session.round("fit")

    ranks = made.start(act)
    try:
        outcomes = ranks.join(5.0, only={0, *range(1, others)})
    finally:
        made.contexts[others]._bye.set()
    assert_all_disagree({rank: outcomes[rank] for rank in range(others)}, f"rank {others}", "starting fit")


def test_messages_for_an_optimizer_that_the_server_has_not_made_yet_are_kept(world):
    made = world(2)

    def act(rank: int, _: Any) -> Any:
        if rank == 0:
            wait_for(lambda: bool(made.contexts[0]._early))
        session = made.contexts[rank].new_session()
        agree(rank, session, MODEL)
        return session.number

    assert made.run(act) == {0: 1, 1: 1}


def test_an_inbox_keeps_the_order_of_each_sender():
    inbox = Inbox()
    for number in range(3):
        inbox.put(1, {"kind": "vote", "number": number})
        inbox.put(2, {"kind": "batch", "number": 10 + number})
    assert [inbox.take(2)["number"] for _ in range(3)] == [10, 11, 12]
    assert inbox.waiting() == {1: "vote"}
    assert [inbox.take(1)["number"] for _ in range(3)] == [0, 1, 2]
    assert inbox.waiting() == {}


# ------------------------------------------------------------------------------------------------------------ contexts


def test_rank_0_serves_and_the_others_train(world):
    contexts = world(3).contexts
    assert [context.is_server for context in contexts] == [True, False, False]
    assert list(contexts[0].clients) == [1, 2] and not contexts[0].alone
    assert isinstance(world(2).sessions[0], ServerSession)


def test_a_single_rank_is_alone_serves_and_trains():
    context = Context(Config(), None)
    assert context.alone and context.is_server and list(context.clients) == [0]
    context.finalize()
    context.finalize()  # a second time does nothing


def test_all_ranks_leave_in_an_orderly_way(world):
    made = world(4)
    closed: list[int] = []
    for context in made.contexts:
        context.closers.append(lambda rank=context.rank: closed.append(rank))

    run_ranks({context.rank: context.finalize for context in made.contexts}, SECONDS)
    assert sorted(closed) == [0, 1, 2, 3]


def test_all_ranks_leave_in_an_orderly_way_after_training(world):
    made = world(3)

    def steps(rank: int, session: Any) -> None:
        if rank:
            train_step(session, 1.0)
        else:
            assert session.wait_step()
        made.contexts[rank].finalize()

    assert made.run(opening(steps)) == dict.fromkeys(range(3))


def test_a_run_with_a_timeline_leaves_one_of_all_ranks(world, tmp_path):
    made = world(3, timeline=str(tmp_path / "timeline"))

    def steps(rank: int, session: Any) -> None:
        if rank:
            train_step(session, 1.0)
        else:
            assert session.wait_step()
        made.contexts[rank].finalize()

    assert made.run(opening(steps)) == dict.fromkeys(range(3))
    run = chrome.read(tmp_path / "timeline" / "trace.json")
    timeline = run.timeline(0)
    assert timeline.servers == [0]
    assert [timeline.steps(client) for client in (1, 2)] == [[0], [0]]
    for bucket in made.sessions[0].plan.buckets:
        assert timeline.name(bucket.index) and len(timeline.marks(0, "received", bucket.index, 0)) == 2 * len(
            bucket.pieces
        )


def fail_by_raising(context: Context) -> None:
    """Instead of ending all processes."""

    def fail(message: str, code: int = 1) -> None:
        raise MpipipeError(f"{message} ({code})")

    context.fail = fail  # type: ignore[method-assign]


def test_a_server_whose_script_ends_while_a_client_waits_for_it_ends_the_run_and_says_where_the_client_is(world):
    made = world(3)
    fail_by_raising(made.contexts[0])

    def act(rank: int, session: Any) -> None:
        if rank == 0:
            made.contexts[0].finalize()
        elif rank == 2:
            session.round("fit")

    outcome = made.start(act).join(SECONDS, only={0, 1})[0]
    assert isinstance(outcome, MpipipeError) and "rank 2 is starting fit" in str(outcome)


def test_a_server_whose_script_ends_while_clients_train_on_ends_the_run(world):
    made = world(3)
    fail_by_raising(made.contexts[0])

    def steps(rank: int, session: Any) -> None:
        if rank == 0:
            made.contexts[0].finalize()
        else:
            train_step(session, 1.0)

    outcome = made.start(opening(steps)).join(SECONDS, only={0})[0]
    assert isinstance(outcome, MpipipeError) and "clients go on with another step" in str(outcome)


def test_a_server_whose_script_ends_while_clients_make_another_optimizer_ends_the_run(world):
    made = world(2)
    fail_by_raising(made.contexts[0])

    def act(rank: int, _: Any) -> None:
        if rank == 0:
            made.contexts[0].finalize()
        else:
            agree(rank, made.contexts[1].new_session(), MODEL)

    outcome = made.start(act).join(SECONDS, only={0})[0]
    assert isinstance(outcome, MpipipeError) and "rank 1 is building its optimizer" in str(outcome)


def test_a_script_that_ends_in_the_middle_of_training_or_with_an_exit_code_ends_the_run(world):
    made = world(3)
    for context in made.contexts:
        fail_by_raising(context)
    made.contexts[1].busy = "fit"
    with pytest.raises(MpipipeError, match=r"in the middle of fit.*\(1\)"):
        made.contexts[1].finalize()
    made.contexts[2].exit_code = 3
    with pytest.raises(MpipipeError, match=r"sys.exit\(3\).*\(3\)"):
        made.contexts[2].finalize()


def test_what_a_client_says_that_has_been_given_up_is_not_taken(world):
    made = world(3)
    server, session = made.contexts[0], made.sessions[0]
    server.lost.append(2)
    for client in (1, 2):
        server._dispatch(client, {"session": 0, "kind": "phase", "logs": {"loss": 1.0}, "samples": 8, "steps": 0})
    assert server.waiting() == {1: (0, "phase")}
    assert set(session.latest) == {1}


def test_ranks_that_die_after_their_scripts_have_ended_are_known_to_those_that_leave(world):
    made = world(3)
    server = made.contexts[0]
    server._dispatch(2, {"kind": "depart", "steps": {}})
    server.lose(2, "its process has died")
    assert server.lost == [] and server.incomplete
    made.contexts[1]._dispatch(0, {"kind": "bye", "lost": [2]})
    assert made.contexts[1].incomplete


def test_a_client_that_may_leave_does_not_mind_that_the_server_has_left(world, monkeypatch):
    made = world(3)
    failed: list[str] = []
    monkeypatch.setattr(made.contexts[1], "fail", failed.append)
    made.contexts[1].lose(0, "its process has died")
    assert len(failed) == 1
    made.contexts[1]._dispatch(0, {"kind": "bye", "lost": []})
    made.contexts[1].lose(0, "its process has died")
    assert len(failed) == 1
