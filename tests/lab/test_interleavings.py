"""Every interleaving of small jobs of real engines: no promise is broken, and everyone ends."""

from collections import Counter

import pytest
from hvd_adpsgd_lab.simulation.exploration import AT_LENGTH, IN_BRIEF, Exploration, chosen, table
from hvd_adpsgd_lab.simulation.explore import Explorer
from hvd_adpsgd_lab.simulation.ledger import BrokenPromise

from hvd_adpsgd.errors import ConfigError

# (state of the exchange, what comes) that the jobs must meet.
MUST_MEET = {
    ("asked", "ASK"),
    ("asked", "NO"),
    ("asked", "BYE"),
    ("asked", "failure"),
    ("running", "CUT"),
    ("running", "failure"),
    ("held", "CUT_SEEN"),
    ("held", "failure"),
    ("closing", "failure"),
    ("none", "CUT"),
    ("none", "YES"),
    ("none", "NO"),
}


def test_every_interleaving() -> None:
    coverage: Counter[tuple[str, str]] = Counter()
    explored = [job.run() for job in IN_BRIEF]
    for each in explored:
        assert each.states > 1000, each.job
        coverage += each.coverage
    print(f"\n{table(explored)}\n{sorted(coverage.items())}")
    assert not MUST_MEET - set(coverage)


@pytest.mark.extended
@pytest.mark.parametrize("job", AT_LENGTH, ids=lambda job: job.name)
def test_every_interleaving_at_length(job: Exploration) -> None:
    explored = job.run()
    print(f"\n{table([explored])}")
    assert explored.states > 1000


def test_a_state_without_a_way_on_is_told_with_the_way_to_it() -> None:
    """The second trainer waits for an engine at rest that nobody has paused."""
    with pytest.raises(BrokenPromise, match="nothing can happen") as broken:
        Exploration("stuck", ("o", "or")).run()
    story = str(broken.value).splitlines()
    assert "  0 trainer" in story and any("sends ASK 1 to" in line for line in story)


def test_states_reached_on_two_ways_are_compared() -> None:
    explorer = Explorer(("ool", "ool"), ([1], [0]), chunks=1)
    explorer.explore()
    assert explorer.compared > 50


def test_a_job_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"four.*two-crash"):
        chosen(["four"])
