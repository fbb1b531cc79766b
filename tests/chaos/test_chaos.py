"""Some of the runs of ``make chaos``: each has to end as is stated for its kind."""

import pytest

from tests.chaos import inprocess, launched

# Clients die and the others go on; the server dies, and the same script goes on; SIGTERM.
SEEDS = [launched.KINDS.index(kind) for kind in ("some_clients_die", "the_server_dies", "terminated")]


@pytest.mark.parametrize("seed", SEEDS, ids=[launched.KINDS[seed] for seed in SEEDS])
def test_chaos_ends_as_it_has_to(seed):
    outcome = launched.run(seed)
    assert outcome.ok, outcome.detail


@pytest.mark.parametrize("seed", range(60))
def test_chaos_between_threads_ends_as_it_has_to(seed):
    outcome = inprocess.run(seed)
    assert outcome.ok, f"{outcome.faults}: {outcome.outcome}\n{outcome.detail}"
