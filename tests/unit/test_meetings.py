"""Meetings of hvd.admit(blocking=False), with leaders of different speed, that stop and that fail."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest

from hvd_adpsgd.joining.meetings import Meetings, Said, Word

DELAY_S = 0.01  # longest time of a message


class Job:
    """Leaders that call, exchange messages, and wait for each other in a meeting.

    Attributes:
        entered: when each leader of the present meeting has entered it.
        ended: (time, when each leader entered) of the meetings that are over.
    """

    def __init__(self, seed: int, intervals: list[float]) -> None:
        self.chance, self.intervals = random.Random(seed), intervals
        self.leaders = [Meetings(rank) for rank in range(len(intervals))]
        self.inbox: list[list[tuple[float, int, Said]]] = [[] for _ in intervals]
        self.stopped: dict[int, float] = {}  # until when
        self.failed: set[int] = set()
        self.wants: set[int] = set()
        self.entered: dict[int, float] = {}
        self.ended: list[tuple[float, dict[int, float]]] = []
        self.now, self._order = 0.0, itertools.count()
        self._calls: list[tuple[float, int, int]] = []
        for rank, interval in enumerate(intervals):
            self._later(self.chance.uniform(0, interval), rank)

    def _later(self, at: float, rank: int) -> None:
        heapq.heappush(self._calls, (at, next(self._order), rank))

    def run(self, until: float) -> None:
        while self._calls and self._calls[0][0] <= until:
            self.now, _, rank = heapq.heappop(self._calls)
            if rank in self.failed:
                continue
            if self.now < self.stopped.get(rank, 0.0):
                self._later(self.stopped[rank] + DELAY_S, rank)
            else:
                self._call(rank)
        self.now = until

    def _call(self, rank: int) -> None:
        arrived = [m for m in self.inbox[rank] if m[0] <= self.now]
        self.inbox[rank] = [m for m in self.inbox[rank] if m[0] > self.now]
        others = [i for i in range(len(self.leaders)) if i != rank and i not in self.failed]
        meets, said = self.leaders[rank].called(
            self.now, others, [m[1:] for m in arrived], rank in self.wants, rank < min(others)
        )
        for to, what in said:
            at = self.now + self.chance.uniform(0, DELAY_S)
            self.inbox[to].append((at, rank, what))
        if not meets:
            self._later(self.now + self.intervals[rank] * self.chance.uniform(0.9, 1.1), rank)
            return
        self.entered[rank] = self.now
        self.end_if_all_are_in()

    def end_if_all_are_in(self) -> None:
        living = set(range(len(self.leaders))) - self.failed
        if living <= self.entered.keys():
            self.ended.append((self.now, self.entered))
            self.entered, self.wants = {}, set()
            for rank in living:
                self.leaders[rank].met(len(self.ended))
                self._later(self.now + self.intervals[rank], rank)

    def fail(self, rank: int) -> None:
        self.failed.add(rank)
        self.entered.pop(rank, None)


SPEEDS = ([1.0, 1.0, 1.0], [0.2, 1.0, 5.0, 0.3], [0.5] * 16)


@pytest.mark.parametrize("intervals", SPEEDS)
@pytest.mark.parametrize("seed", range(8))
def test_all_meet_soon_and_the_others_wait_for_one_interval(
    seed: int, intervals: list[float]
) -> None:
    job = Job(seed, intervals)
    for number in range(1, 6):
        job.run(job.now + 3.0)
        assert len(job.ended) == number - 1  # no meeting without a reason
        began = job.now
        job.wants = {job.chance.randrange(len(intervals))}
        job.run(began + 100.0)
        assert len(job.ended) == number, seed
        ended, entered = job.ended[-1]
        slowest = 1.1 * max(intervals)
        assert ended - min(entered.values()) <= slowest + 2 * DELAY_S
        assert ended - began <= 10 * slowest + 2.0  # also if it first waits for another one to ask


@pytest.mark.parametrize("seed", range(8))
def test_nobody_waits_for_a_stopped_leader(seed: int) -> None:
    job = Job(seed, [0.5, 1.0, 0.2, 0.7])
    job.run(3.0)
    job.stopped[job.chance.randrange(4)] = 60.0
    job.wants = {0, 1, 2, 3} - job.stopped.keys()
    job.run(60.0)
    assert not job.entered and not job.ended
    job.run(80.0)
    (_, entered), *more = job.ended
    assert min(entered.values()) > 60.0 and not more


@pytest.mark.parametrize("seed", range(100))
def test_whoever_asks_may_fail_at_any_moment(seed: int) -> None:
    """Between its question and the meeting too; all others want a meeting then."""
    job = Job(seed, [0.5, 0.6, 0.4])
    job.run(3.0)
    job.wants = {0}
    job.run(3.0 + job.chance.uniform(0.0, 3.0))
    done = len(job.ended)
    job.fail(0)
    job.end_if_all_are_in()
    job.wants = {1, 2}
    job.run(30.0)
    assert len(job.ended) == done + 1 and not job.entered, seed


def test_a_late_message_of_a_meeting_that_is_over_means_nothing() -> None:
    leader = Meetings(1)
    assert leader.called(1.0, [0], [(0, Said(0, Word.GO, 1, 0.5))], False, False)[0]
    leader.met(7)
    assert leader.called(2.0, [0], [(0, Said(0, Word.GO, 1, 0.5))], False, False) == (False, [])
    meets, said = leader.called(3.0, [0], [(0, Said(7, Word.ASK, 4, 0.5))], False, False)
    assert not meets and said == [(0, Said(7, Word.HERE, 4, 1.0))]


def test_a_meeting_that_gives_way_is_made_up_for() -> None:
    """Until it has ended, each call meets again."""
    leader = Meetings(1)
    assert leader.called(1.0, [0], [(0, Said(0, Word.GO, 1, 0.5))], False, False)[0]
    assert leader.called(2.0, [0], [], False, False)[0]


def test_an_answer_is_old_when_another_one_comes_after_a_stop() -> None:
    """Leader 1 has stopped since it answered, leader 2 answers an hour late: 1 is asked again."""
    leader, others = Meetings(0), [1, 2]

    def call(now: float, *heard: tuple[int, Said]) -> tuple[bool, list[tuple[int, Said]]]:
        return leader.called(now, others, heard, wants=True, first=True)

    call(1.0)
    call(2.0, (1, Said(0, Word.HERE, 1, 1.0)))
    for now in range(3, 3600):
        assert not call(float(now))[0]
    meets, said = call(3600.0, (2, Said(0, Word.HERE, 1, 3598.0)))
    assert not meets and said == [(1, Said(0, Word.ASK, 1, 1.0))]
    meets, said = call(3601.0, (1, Said(0, Word.HERE, 1, 1.0)))
    assert meets and {rank for rank, _ in said} == {1, 2}


def test_a_stop_is_no_interval_between_calls() -> None:
    leader = Meetings(0)
    for now in (1.0, 2.0, 3600.0):
        _, said = leader.called(now, [1], [(1, Said(0, Word.ASK, 1, 1.0))], False, False)
    assert said == [(1, Said(0, Word.HERE, 1, 1.0))]
