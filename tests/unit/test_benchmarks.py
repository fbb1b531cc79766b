"""What the benchmarks do without MPI and TensorFlow: rows, sizes, limits and efficiencies, the table, the hosts."""

import os
import subprocess
import sys

import pytest

from benchmarks import broadcast, cost, driver, hosts, report, rows, shapes
from benchmarks.rows import Row


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_the_full_set_has_every_model_at_every_rate_on_every_number_of_hosts(mpi):
    found = {(row.model, row.hosts, row.rate) for row in rows.everything(mpi)}
    for model, ratio in {"resnet": 0.5, "mlp": 1, "transformer": 2, "embedding": 8}.items():
        assert Row(model, 4, "1gbit", mpi).ratio == ratio
        assert {(model, count, rate) for count in (2, 4, 8) for rate in ("100mbit", "1gbit", None)} <= found
    assert len(rows.everything(mpi)) == len(found)
    assert set(rows.quick(mpi)) <= set(rows.goals(mpi)) <= set(rows.everything(mpi))


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.parametrize("wanted", [1e6, 8e6, 32e6])
def test_a_row_has_the_communication_it_says(name, wanted):
    """Sizes are whole numbers, so the bytes are about those wanted."""
    size = shapes.shape(name, wanted).size
    weights = {
        "mlp": shapes.MLP_LAYERS * size**2,
        "resnet": 676 * size**2,
        "transformer": 12 * shapes.TRANSFORMER_BLOCKS * size**2,
        "embedding": shapes.EMBEDDING_WIDTH * size,
        "emulated": shapes.EMULATED_LAYERS * size,
    }[name]
    assert 4 * weights == pytest.approx(wanted, rel=0.25)


def test_the_busiest_link_and_the_ratio_set_bytes_and_computing():
    row = Row("transformer", 4, "100mbit", "openmpi")
    wire = row.clients * row.weight_bytes(12e6) / 12e6
    assert wire == pytest.approx(0.6)
    assert wire / row.computing(wire) == pytest.approx(2)


def _summary():
    """Two equal layers, 1 s of computing and 1 s of link with one server; 2 / 3 of it with an all-reduce."""
    steps = {
        "computing": [1.0, 1.0, 1.0],
        "computing, all ranks": [1.2, 1.2, 1.2],
        "mpipipe": [1.6, 1.5, 2.0],
        "straight line": [2.5, 2.4, 2.6],
        "mpi4py all-reduce": [2.0, 2.0, 2.0],
    }
    shares = ([1 / 6, 1 / 6], [1 / 3, 1 / 3])
    return driver.summary(Row("mlp", 4, "200mbit", "openmpi"), 6e6, [1e6, 1e6], shares, steps)


def test_efficiency_is_limit_over_step_with_the_columns_own_computing_and_wire():
    result = _summary()
    server, everyone = result["columns"]["mpipipe"], result["columns"]["mpi4py all-reduce"]
    assert result["wire"] == {"server": pytest.approx(1.0), "all": pytest.approx(0.5)}
    # 1/3 of forward passes, 1/3 of the last layer's backward pass, 1/3 of the first one's, its 1/2 of link; during the
    # first layer's backward pass 1/3 of the last layer's 1/2 is sent and during the first forward pass the rest.
    assert server["limit"] == pytest.approx(1.5)
    assert server["median"] == 1.6 and (server["min"], server["max"]) == (1.5, 2.0)
    assert server["efficiency"] == pytest.approx(1.5 / 1.6)
    assert everyone["computing"] == 1.2 and everyone["limit"] == pytest.approx(1.2 + 0.25)
    assert server["faster"] == pytest.approx(2.5 / 1.6)
    assert result["ratio"] == pytest.approx(1)


def _result():
    row = Row("mlp", 4, "200mbit", "openmpi")
    return {"title": row.title, "bytes": 2e6, "batch": 7, "failed": {"ddp": "why"}, **_summary()}


def test_the_table_has_every_column_its_efficiency_and_what_has_failed():
    text = report.table([_result()])
    (line,) = (line for line in text.splitlines() if " mpipipe " in line)
    assert line.split() == ["mpipipe", "1.500", "1.600", "1.500", "2.000", "-", "-", "0.94", "1.56"]
    assert "mlp 4 hosts 200mbit openmpi" in text
    assert "ddp: failed" in text


def test_goals_are_reached_or_missed_by_the_measured_numbers():
    result = {**_result(), "row": vars(Row("mlp", 4, "200mbit", "openmpi"))}
    limit, straight = report.goals([result]).splitlines()
    assert limit.startswith("MISSED") and limit.endswith("at most 1.05: 1.07")
    assert straight.startswith("MISSED") and straight.endswith("at least 1.6: 1.56")
    result["ratio"] = 2.0  # then it only may not be slower
    (straight,) = report.goals([result]).splitlines()
    assert straight.startswith("reached") and straight.endswith("at least 1.0: 1.56")


def test_batch_sizes_are_found_by_a_line_through_what_was_seen():
    assert driver._where({32: 0.1}, 0.2) == pytest.approx(64)
    assert driver._where({10: 0.2, 20: 0.3}, 0.6) == pytest.approx(50)
    assert driver._where({10: 0.3, 20: 0.2}, 0.5) == pytest.approx(30)  # noise: larger batches cannot be faster


@pytest.mark.parametrize("size", range(2, 17))
def test_a_binomial_tree_reaches_every_rank_once(size):
    reached = [child for rank in range(size) for child in broadcast.children(rank, size)]
    assert sorted(reached) == list(range(1, size))
    assert all(rank in broadcast.children(broadcast.parent(rank), size) for rank in range(1, size))


def test_the_slope_is_microseconds_for_one_more():
    lines = cost.table(
        [
            {"buckets": n, "plain": 1e-3, "step": 1e-3 + n * 5e-6, "overhead": n * 5e-6, "server": {}, "client": {}}
            for n in (10, 100, 1000)
        ],
        "buckets",
    ).splitlines()
    (line,) = (line for line in lines if "overhead" in line)
    assert line.split() == ["overhead", "50", "500", "5000", "5.0"]


def test_a_job_that_fails_says_what_it_printed_and_one_that_is_late_is_ended():
    with hosts.Place() as place:
        with pytest.raises(RuntimeError, match="ended with 3(.|\n)*why"):
            place.start(hosts.Launch("none"), 2, [sys.executable, "-c", "print('why'); raise SystemExit(3)"]).wait(20)
        job = place.start(hosts.Launch("none"), 1, ["sleep", "60"])
        with pytest.raises(RuntimeError, match="not done in time"):
            job.wait(0.1)
        assert not job.running


@pytest.mark.skipif(bool(hosts.why_no_hosts()), reason=hosts.why_no_hosts())
def test_hosts_have_links_of_their_rate_and_leave_nothing_behind():
    try:
        place = hosts.Hosts(2, "100mbit").__enter__()
    except RuntimeError as error:
        pytest.skip(f"no network namespaces here: {error}")
    name = place._bridge
    try:
        assert 10e6 < driver.link_rate(place) < 12.6e6
        place.start(hosts.Launch("none"), 2, ["sleep", "60"])
    finally:
        place.__exit__(None, None, None)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"{name}-" not in left
    assert not os.path.exists(f"/sys/class/net/{name}")
    assert not place.folder.exists()
