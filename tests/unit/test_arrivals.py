"""How often exchanges correct the chunks of a model."""

import pytest

from hvd_adpsgd.engine.shard_memory import NONE, Arrivals, ModelMemory, Pace


def test_corrections_of_one_step_are_added_those_of_steps_are_averaged() -> None:
    """A pause takes in corrections between two steps; they count as those of the step before."""
    pace = Pace()
    assert pace.mean_with(0.5, step=1) == 0.5
    assert pace.mean_with(0.25, step=1) == 0.75
    assert pace.mean_with(0.0, step=2) == 0.375
    for step in range(3, 200):
        last = pace.mean_with(0.25, step)
    assert last == pytest.approx(0.25, rel=0.01)


def test_a_pace_outlives_a_pause_without_corrections() -> None:
    assert Arrivals(2.0, 0.5).plus(NONE) == Arrivals(2.0, 0.5)
    assert Arrivals(2.0, 0.5).plus(Arrivals(1.0, 0.25)) == Arrivals(3.0, 0.25)


class Shard:
    """What ModelMemory reads of a shard's memory."""

    def __init__(self, has_rare: bool, arrived: Arrivals):
        self.has_rare, self._arrived = has_rare, arrived

    def extend(self, tensors: object) -> None:
        pass

    def take_arrivals(self) -> Arrivals:
        arrived, self._arrived = self._arrived, NONE
        return arrived


def test_of_shards_those_with_rare_chunks_count() -> None:
    """A shard without moments has exchanges of its own, which say nothing about them."""
    memory = ModelMemory(1024, None, leads=False)
    rare = [Shard(True, Arrivals(2.0, 0.5)), Shard(True, Arrivals(0.0, 0.25))]
    memory.shards = [Shard(False, Arrivals(9.0, 1.0)), *rare]  # type: ignore[list-item]
    memory.extend([])
    assert memory.take_arrivals() == Arrivals(2.0, 0.375)  # the mean of exchanges that arrived
    assert memory.take_arrivals() == NONE
    memory.shards = [Shard(False, Arrivals(1.0, 1.0)), Shard(False, Arrivals(3.0, 0.5))]  # type: ignore[list-item]
    memory.extend([])
    assert memory.take_arrivals() == Arrivals(2.0, 0.75)
