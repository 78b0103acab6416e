"""The messages of a mean without waiting, in memory: exact over those named, whoever fails, stops, joins."""

import functools
import random
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_adpsgd.errors import NonFiniteModelError
from hvd_adpsgd.training import async_mean
from hvd_adpsgd.training.async_mean import Mean

TIMEOUT_S = 5.0


class Job:
    """Leaders 0, 1, ...; leader 0 asks. A message arrives in the next turn."""

    def __init__(
        self, n: int, monkeypatch: pytest.MonkeyPatch, module: ModuleType = async_mean
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.newcomers: list[object] = []
        self.means = [module.Means(self.newcomers, lambda: None) for _ in range(n)]
        self.living, self.under_way, self.most = set(range(n)), set[int](), 0
        self.boxes: list[list[tuple[int, object]]] = [[] for _ in range(n)]
        others = {rank: rank for rank in range(1, n)}
        self.mean = module.Mean(others, TIMEOUT_S, lambda means: means[0].tolist())
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
            self.under_way &= self.living - {*self.mean.steps, *self.mean.left_out}

    def expect(self, ranks: list[int]) -> None:
        assert self.mean.done() and not self.mean.cancel()
        assert self.mean.steps == {r: 10 + r if r else 3 for r in ranks}
        assert self.mean.result() == np.mean([self.model(r)[0] for r in ranks], axis=0).tolist()
        assert self.most <= 2 or self.newcomers  # what is asked again may be copied again
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


class Scenario:
    """A job drawn from a seed: messages arrive late, in order; leaders fail, stop, lose what is under way."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.rng, n = random.Random(seed), 2 + seed % 5
        self.job = Job(n, monkeypatch, module)
        others = range(1, n)
        self.fails = {rank for rank in others if self.rng.random() < 0.2}
        self.stops = {rank for rank in others if self.rng.random() < 0.2}
        self.loses = self.rng.random() < 0.5  # what is under way, with new connections
        self.late: list[list[tuple[int, object]]] = [[] for _ in range(n)]

    def chosen(self, ranks: set[int], share: float = 0.5) -> set[int]:
        return {rank for rank in ranks if self.rng.random() < share}

    def arrive(self) -> None:
        """Deliver the messages of some senders."""
        for rank, (late, box) in enumerate(zip(self.late, self.job.boxes, strict=True)):
            late += box
            of = self.chosen(self.job.living)
            self.job.boxes[rank] = [message for message in late if message[0] in of]
            self.late[rank] = [message for message in late if message[0] not in of]

    def run(self) -> None:
        job, stopped = self.job, set[int]()
        for turn in range(300):
            self.arrive()
            if turn < 30:
                if self.loses and self.rng.random() < 0.1:
                    job.newcomers.append({9})
                    self.late, job.boxes = ([[] for _ in job.means] for _ in range(2))
                    job.under_way.clear()
                job.living -= self.chosen(self.fails, 0.1)
                stopped |= self.chosen(self.stops, 0.1)
            busy = self.chosen(job.living - stopped)
            job.turn(steps=busy, talking=busy | {0})
            job.now += TIMEOUT_S / 40 if turn > 100 else 0
            assert turn != 100 or stopped or job.mean.done()
        mean = job.mean
        late = {rank for rank, why in mean.left_out.items() if why == "late"}
        ended = {rank for rank, why in mean.left_out.items() if why == "ended"}
        assert late <= stopped and not ended & job.living
        assert {*mean.steps, *late, *ended} == set(range(len(job.means)))
        assert len(mean.steps) + len(late) + len(ended) == len(job.means)
        job.living -= stopped  # which keep what they were asked
        job.expect(sorted(mean.steps))


def test_every_mean_is_exact_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100):
        Scenario(seed, monkeypatch, async_mean).run()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mean.asked.clear()", "pass"),
        ("if self.asked.pop(rank, None) is not None:", "if rank in self._missing or self.steps:"),
        ("or now > self.asked.get(rank, now)", ""),
        ("_AT_ONCE = 2", "_AT_ONCE = 3"),
        ("                    del self._asked[key]", "                    pass"),
        ("total / len(self.steps)", "total / (len(self.steps) + len(self.left_out))"),
        ("for key, ask in self._asked.items() if key[0] in living}", "for key, ask in ()}"),
    ],
)
def test_a_fault_in_the_messages_is_found(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(str(async_mean.__file__)).read_text()
    assert source.count(old) == 1
    mutant: Any = ModuleType("mutant")
    exec(source.replace(old, new), mutant.__dict__)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(100):
            Scenario(seed, monkeypatch, mutant).run()


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
