"""The messages of a mean without waiting, in memory: exact over those named, whoever fails, stops, joins."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_adpsgd.errors import NonFiniteModelError
from hvd_adpsgd.training import async_mean
from hvd_adpsgd.training.async_mean import Mean, Means

TIMEOUT_S = 5.0


class Job:
    """Leaders 0, 1, ...; leader 0 asks. A message arrives in the next turn."""

    def __init__(self, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(async_mean, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.newcomers: list[object] = []
        self.means = [Means(self.newcomers, lambda: None) for _ in range(n)]
        self.living, self.under_way, self.most = set(range(n)), set[int](), 0
        self.boxes: list[list[tuple[int, object]]] = [[] for _ in range(n)]
        others = {rank: rank for rank in range(1, n)}
        self.mean = Mean(others, TIMEOUT_S, lambda means: means[0].tolist())
        self.mean.add(0, 3, self.model(0))
        self.means[0].begin((0, 7), self.mean, lambda: [(2, [0]), (3, [0])])

    @staticmethod
    def model(rank: int) -> list[np.ndarray]:
        return [np.array([1e8 * rank + 0.25, -rank], dtype=np.float64)]

    def copied(self, rank: int, number: int) -> tuple[int, list[np.ndarray]] | None:
        """Of the averaging 2; 1 is another model, and 3 ends a step while 2 is in one."""
        assert number != 1
        if number == 3:
            return None
        self.under_way.add(rank)
        self.most = max(self.most, len(self.under_way))
        return 10 + rank, self.model(rank)

    def turn(self, *, steps: set[int], talking: set[int] | None = None) -> None:
        """Let the leaders in `steps` end step 10 + rank, and those in `talking` exchange messages."""
        for rank in sorted(steps):
            for number in (1, 3, 2):
                copied = functools.partial(self.copied, rank)
                self.means[rank].contribute(number, lambda _, n=number, f=copied: f(n))
        for rank in sorted(self.living if talking is None else talking):
            box, self.boxes[rank] = self.boxes[rank], []
            for to, message in self.means[rank].talk(self.living, box):  # type: ignore[arg-type]
                self.boxes[to].append((rank, message))
            self.under_way -= set(self.mean.steps)

    def expect(self, ranks: list[int]) -> None:
        assert self.mean.done() and not self.mean.cancel()
        assert self.mean.steps == {r: 10 + r if r else 3 for r in ranks}
        assert self.mean.result() == np.mean([self.model(r)[0] for r in ranks], axis=0).tolist()
        assert self.most <= 2
        for _ in range(3):
            self.turn(steps=self.living)
        assert not any(self.means[rank].is_open for rank in self.living)  # nothing is kept


def test_the_mean_is_that_of_all_contributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies at most are under way; leader 2 ends its step late, and the others' arrive meanwhile."""
    job = Job(6, monkeypatch)
    for turn in range(20):
        job.turn(steps={1, 3, 4, 5} | ({2} if turn > 12 else set()))
        assert turn != 12 or set(job.mean.steps) == {0, 1, 3, 4, 5}
    job.expect([0, 1, 2, 3, 4, 5])
    assert not job.mean.left_out


@pytest.mark.parametrize("when", range(5))
def test_a_failed_leader_is_left_out_unless_its_copy_is_there(
    when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(3, monkeypatch)
    for turn in range(12):
        if turn == when:
            job.living.remove(2)
            job.boxes = [[m for m in box if m[0] != 2] for box in job.boxes]
        job.turn(steps=job.living - {0})
    left = 2 not in job.mean.steps
    assert left == (when < 3) and job.mean.left_out == ({2: "ended"} if left else {})
    job.expect([0, 1] if left else [0, 1, 2])


@pytest.mark.parametrize("sends", [True, False])
def test_a_stopped_leader_is_left_out_in_time(sends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer stopped, or all of its process; and it returns, with a copy that comes too late."""
    job = Job(3, monkeypatch)
    for _ in range(8):
        job.turn(steps={1}, talking=None if sends else {0, 1})
        job.now += 0.5
    assert not job.mean.done()
    job.now += TIMEOUT_S
    job.turn(steps=set())
    assert job.mean.left_out == {2: "late"}
    job.expect([0, 1])


@pytest.mark.parametrize("when", range(1, 6))
def test_what_new_connections_lose_is_asked_again(
    when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(4, monkeypatch)
    for turn in range(16):
        if turn == when:
            job.boxes = [[] for _ in job.boxes]
            job.newcomers.append({9})
        job.turn(steps={1, 2, 3})
    job.expect([0, 1, 2, 3])


def test_a_model_that_is_not_finite_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2, monkeypatch)
    job.model = lambda rank: [np.array([np.nan if rank else 0.25, 0.0])]  # type: ignore[method-assign]
    for _ in range(4):
        job.turn(steps={1})
    assert job.mean.left_out == {1: "not finite"}
    job.expect([0])
    alone = Mean({}, TIMEOUT_S, list)
    alone.add(0, 1, [np.array([np.inf])])
    alone.progress({0}, 0.0)
    with pytest.raises(NonFiniteModelError, match="not finite"):
        alone.result()
