"""The fluid model that measurements are held against."""

import pytest

from benchmarks.limit import fluid_step, straight_line, wire_seconds

ONE = [1.0, 1.0]  # two layers, a second each


def test_a_wire_that_costs_nothing_leaves_the_computing_time():
    assert fluid_step([1.0, 2.0], [3.0, 4.0], [0.0, 0.0]) == pytest.approx(10)


def test_one_layer_cannot_overlap_with_anything():
    assert fluid_step([1.0], [2.0], [4.0]) == pytest.approx(7)
    assert straight_line([1.0], [2.0], [4.0]) == 7


def test_the_last_layers_round_trip_hides_behind_the_first_layers():
    # Its gradient is there after three of four seconds, and its weights are needed one second into the next step.
    assert fluid_step(ONE, ONE, [0.0, 2.0]) == pytest.approx(4)
    assert fluid_step(ONE, ONE, [0.0, 3.0]) == pytest.approx(5)


def test_the_first_layers_round_trip_cannot_be_hidden():
    assert fluid_step(ONE, ONE, [1.0, 0.0]) == pytest.approx(5)


def test_a_forward_pass_that_waits_for_all_weights_is_slower():
    assert fluid_step(ONE, ONE, [0.0, 3.0], next_forward=False) == pytest.approx(6)


def test_serving_what_is_needed_first_is_faster():
    # The first layer's second of link comes in the middle of the last layer's three, or after them.
    assert fluid_step(ONE, ONE, [1.0, 3.0]) == pytest.approx(6)
    assert fluid_step(ONE, ONE, [1.0, 3.0], urgent_first=False) == pytest.approx(7)


def test_a_slow_wire_is_the_limit_itself_but_for_what_nothing_overlaps():
    # Nothing is on the link during the first layer's forward pass and the last layer's backward pass, at least.
    assert 100 < fluid_step([0.1] * 10, [0.2] * 10, [10.0] * 10) < 103


@pytest.mark.parametrize("who, factor", [("server", 3), ("all", 4 / 3)])
def test_what_the_busiest_link_carries(who, factor):
    assert wire_seconds([6e6, 3e6], 1e6, 3, who) == pytest.approx([6 * factor, 3 * factor])


def test_the_numbers_of_the_design():
    """Eight layers of 1 MiB and a small one, 0.9 s of computing, three clients of one server at 200 Mbit/s."""
    sizes = [(512 * 512 + 512) * 4] * 8 + [(512 * 10 + 10) * 4]
    forward = [0.3 * size / sum(sizes) for size in sizes]
    backward = [2 * seconds for seconds in forward]
    wire = wire_seconds(sizes, 24.5e6, 3)
    assert sum(wire) == pytest.approx(1.03, abs=0.005)
    assert fluid_step(forward, backward, wire) == pytest.approx(1.14, abs=0.005)
    overlap = fluid_step(forward, backward, wire, urgent_first=False, next_forward=False)
    assert overlap == pytest.approx(1.41, abs=0.005)
    assert straight_line(forward, backward, wire) == pytest.approx(1.93, abs=0.005)
