"""How often exchanges correct the chunks of a model."""

import pytest

from hvd_adpsgd.engine.arrivals import NONE, Arrivals, Pace


def test_corrections_of_one_step_are_added_those_of_steps_are_averaged() -> None:
    """A pause takes in corrections between two steps; they count as those of the step before."""
    pace = Pace()
    assert pace.after(0.5, step=1) == 0.5
    assert pace.after(0.25, step=1) == 0.75
    assert pace.after(0.0, step=2) == 0.375
    for step in range(3, 200):
        last = pace.after(0.25, step)
    assert last == pytest.approx(0.25, rel=0.01)


def test_a_pace_outlives_a_pause_without_corrections() -> None:
    assert Arrivals(2.0, 0.5).plus(NONE) == Arrivals(2.0, 0.5)
    assert Arrivals(2.0, 0.5).plus(Arrivals(1.0, 0.25)) == Arrivals(3.0, 0.25)
