"""Meetings of hvd.admit(blocking=False), with leaders of different speed, that stop and that fail."""

import heapq
import itertools
import random

import pytest

from hvd_adpsgd.joining.meetings import MOST_PATIENCE, Meetings, Said, Word

DELAY_S = 0.01  # longest time of a message, and between two looks of a leader that waits


class Job:
    """Leaders that call, exchange messages, and wait for each other in a meeting.

    Attributes:
        stopped: by leader, until when it is stopped.
        skew: of the clock of each leader, in seconds.
        since: by leader that waits or has met, since when.
        entered: when each leader of the present meeting has entered it.
        ended: (time, since when each leader waited) of the meetings that are over.
        in_vain: (leader, from, until) of each wait that was not for a meeting.
    """

    def __init__(self, seed: int, intervals: list[float]) -> None:
        self.chance, self.intervals = random.Random(seed), intervals
        self.leaders = [Meetings(rank) for rank in range(len(intervals))]
        self.inbox: list[list[tuple[float, int, Said]]] = [[] for _ in intervals]
        self.stopped: dict[int, float] = {}  # until when
        self.failed: set[int] = set()
        self.wants: set[int] = set()
        self.regular = False  # whether intervals do not vary
        self.skew = [0.0] * len(intervals)
        self.since: dict[int, float] = {}
        self.in_vain: list[tuple[int, float, float]] = []
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
        leader = self.leaders[rank]
        arrived = [m for m in self.inbox[rank] if m[0] <= self.now]
        self.inbox[rank] = [m for m in self.inbox[rank] if m[0] > self.now]
        others = [i for i in range(len(self.leaders)) if i != rank and i not in self.failed]
        heard = [m[1:] for m in arrived]
        if leader.waits:
            meets, said = leader.waited(self.now, others, heard)
        else:
            is_first = rank < min(others, default=rank + 1)
            clock = self.now + self.skew[rank]
            meets, said = leader.called(
                self.now, others, heard, rank in self.wants, is_first, clock
            )
        for to, what in said:
            at = self.now + self.chance.uniform(0, DELAY_S)
            before = max((m[0] for m in self.inbox[to] if m[1] == rank), default=0.0)
            self.inbox[to].append((max(at, before), rank, what))  # in order
        if meets or leader.waits:
            self.since.setdefault(rank, self.now)
        elif rank in self.since:
            self.in_vain.append((rank, self.since.pop(rank), self.now))
        if leader.waits:
            self._later(self.now + DELAY_S, rank)
        elif not meets:
            varies = 1.0 if self.regular else self.chance.uniform(0.9, 1.1)
            self._later(self.now + self.intervals[rank] * varies, rank)
        else:
            self.entered[rank] = self.now
            self.end_if_all_are_in()

    def end_if_all_are_in(self) -> None:
        living = set(range(len(self.leaders))) - self.failed
        if living <= self.entered.keys():
            self.ended.append((self.now, self.since))
            self.entered, self.since, self.wants = {}, {}, set()
            for rank in living:
                self.leaders[rank].met(len(self.ended))
                self._later(self.now + self.intervals[rank], rank)

    def fail(self, rank: int) -> None:
        self.failed.add(rank)
        self.entered.pop(rank, None)
        self.since.pop(rank, None)


SPEEDS = ([1.0, 1.0, 1.0], [0.2, 1.0, 5.0, 0.3], [0.5] * 16)


@pytest.mark.parametrize("intervals", SPEEDS)
@pytest.mark.parametrize("seed", range(8))
def test_all_meet_soon_and_the_others_wait_for_one_interval(
    seed: int, intervals: list[float]
) -> None:
    job = Job(seed, intervals)
    job.run(3 * max(intervals))  # they know their intervals
    for number in range(1, 6):
        job.run(job.now + 3.0)
        assert len(job.ended) == number - 1  # no meeting without a reason
        began = job.now
        job.wants = {job.chance.randrange(len(intervals))}
        job.run(began + 100.0)
        assert len(job.ended) == number, seed
        ended, since = job.ended[-1]
        # intervals vary by 0.1; a leader may come a quarter of one later
        slowest = 1.35 * max(intervals)
        assert ended - min(since.values()) <= slowest + 9 * DELAY_S
        assert not job.in_vain
        assert ended - began <= 10 * slowest + 2.0  # also if it first waits for another one to ask


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("fast", [False, True])
def test_leaders_in_step_wait_for_a_fraction_of_an_interval(seed: int, fast: bool) -> None:
    """As after a meeting; also with one that is ten times as fast."""
    job = Job(seed, [1.0] * 5 + [0.1] * fast)
    job.regular, job._calls = True, []
    for rank in range(len(job.intervals)):
        job._later(1.0 + job.chance.uniform(0, 2 * DELAY_S), rank)
    job.run(4.5)
    job.wants = {job.chance.randrange(5)}
    job.run(30.0)
    [(ended, since)] = job.ended
    assert max(ended - began for began in since.values()) < 0.2, (seed, ended, since)
    assert not job.in_vain


@pytest.mark.parametrize("seed", range(40))
def test_clocks_of_hosts_may_differ(seed: int) -> None:
    job = Job(seed, [1.0, 0.7, 0.2, 3.0])
    job.skew = [job.chance.uniform(-5.0, 5.0) for _ in job.skew]
    job.run(12.0)
    job.wants = {job.chance.randrange(4)}
    job.run(200.0)
    assert len(job.ended) == 1 and not job.since
    ended, since = job.ended[0]
    waits = [ended - began for began in since.values()] + [b - a for _, a, b in job.in_vain]
    assert max(waits) < 1.0 + 2 * 3.3 + 6 * DELAY_S


@pytest.mark.parametrize("seed", range(8))
def test_nobody_waits_for_a_stopped_leader(seed: int) -> None:
    job = Job(seed, [0.5, 1.0, 0.2, 0.7])
    job.run(3.0)
    job.stopped[job.chance.randrange(4)] = 60.0
    job.wants = {0, 1, 2, 3} - job.stopped.keys()
    job.run(60.0)
    assert not job.since and not job.ended and not job.in_vain
    job.run(80.0)
    (_, since), *more = job.ended
    assert min(since.values()) > 60.0 and not more


@pytest.mark.parametrize("intervals", [[0.5, 1.0, 0.2, 0.7], [1.0] * 16])
@pytest.mark.parametrize("seed", range(50))
def test_one_that_stops_at_any_moment_is_waited_for_only_shortly(
    seed: int, intervals: list[float]
) -> None:
    """Before and after its answer, whether or not it has called the others. All meet when it is back."""
    job = Job(seed, intervals)
    job.run(4.0)
    asks, stops = job.chance.sample(range(len(intervals)), 2)
    job.wants = {asks}
    job.run(4.0 + job.chance.uniform(0.0, 3.0 * max(intervals)))
    who = job.chance.choice([asks, stops])
    begun = bool(job.ended or job.entered)  # then the others wait for it in the meeting
    job.stopped[who] = job.now + 60.0
    job.run(job.now + 60.0)
    longest = 1.0 + 2 * 1.1 * max(intervals) + 6 * DELAY_S
    assert begun or job.since.keys() <= {who}, seed
    waits = [ends - since for rank, since, ends in job.in_vain if rank != who]
    assert max(waits, default=0.0) <= longest, seed
    job.run(job.now + 30.0 * max(intervals))
    assert len(job.ended) == 1 and not job.since, seed


def test_a_meeting_is_called_off_and_the_next_one_has_twice_the_patience() -> None:
    """Leader 1 answers, and its calls then take 100 s: after some meetings in vain it comes."""
    job = Job(0, [0.5, 0.5])
    job.run(3.0)
    job.wants, job.intervals[1] = {0}, 100.0
    job.run(10_000.0)
    assert len(job.ended) == 1
    waits = [ends - since for rank, since, ends in job.in_vain if rank == 0]
    assert waits == sorted(waits) and waits[0] < 5.0, waits


def test_patience_ends() -> None:
    """Leader 1 always answers, and never comes: no wait exceeds MOST_PATIENCE times the first one."""
    caller, waits, now = Meetings(0), [], 1.0
    for i in range(12):
        caller.called(now, [1], [], True, True)
        here = Said(0, Word.HERE, i + 1, 0.5)
        _, [(_, go)] = caller.called(now + 0.5, [1], [(1, here)], True, True, now + 0.5)
        waits.append(go.seconds)
        caller.called(now + 1.0, [1], [], True, True, now + 1.0)
        assert caller.waits
        _, said = caller.waited(now + 1.0 + go.seconds + 0.01, [1], [])
        assert (1, Said(0, Word.OFF, i + 1, 0.5)) in said and not caller.waits
        now += go.seconds + 1.0
    assert waits[:4] == [waits[0] * 2**k for k in range(4)]
    assert max(waits) == waits[-1] == MOST_PATIENCE * waits[0]


def test_begin_holds_for_one_that_has_just_left() -> None:
    leader = Meetings(1)
    go = Said(0, Word.GO, 1, 3.0)
    assert leader.called(1.0, [0], [(0, go)], False, False) == (
        False, [(0, Said(0, Word.IN, 1, 0.0))]
    )  # fmt: skip
    assert leader.waits
    assert leader.waited(4.1, [0], []) == (False, [(0, Said(0, Word.OUT, 1, 0.0))])
    assert not leader.waits
    assert leader.called(5.0, [0], [(0, Said(0, Word.BEGIN, 1, 0.0))], False, False)[0]


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
    assert len(job.ended) == done + 1 and not job.since, seed


def test_a_late_message_of_a_meeting_that_is_over_means_nothing() -> None:
    leader = Meetings(1)
    assert leader.called(1.0, [0], [(0, Said(0, Word.BEGIN, 1, 0.5))], False, False)[0]
    leader.met(7)
    assert leader.called(2.0, [0], [(0, Said(0, Word.BEGIN, 1, 0.5))], False, False) == (False, [])
    meets, said = leader.called(3.0, [0], [(0, Said(7, Word.ASK, 4, 0.5))], False, False)
    assert not meets and said == [(0, Said(7, Word.HERE, 4, 1.0))]


def test_a_meeting_that_gives_way_is_made_up_for() -> None:
    """Until it has ended, each call meets again."""
    leader = Meetings(1)
    assert leader.called(1.0, [0], [(0, Said(0, Word.BEGIN, 1, 0.5))], False, False)[0]
    assert leader.called(2.0, [0], [], False, False)[0]


def test_an_answer_is_old_when_another_one_comes_after_a_stop() -> None:
    """Leader 1 has stopped since it answered, leader 2 answers an hour late: 1 is asked again."""
    leader, others = Meetings(0), [1, 2]

    def call(now: float, *heard: tuple[int, Said]) -> tuple[bool, list[tuple[int, Said]]]:
        return leader.called(now, others, heard, wants=True, first=True, clock=now)

    call(1.0)
    call(2.0, (1, Said(0, Word.HERE, 1, 1.0)))
    for now in range(3, 3600):
        assert not call(float(now))[0]
    meets, said = call(3600.0, (2, Said(0, Word.HERE, 1, 1.0)))
    assert not meets and said == [(1, Said(0, Word.ASK, 1, 1.0))]
    meets, said = call(3601.0, (1, Said(0, Word.HERE, 1, 1.0)))
    assert not meets and not leader.waits and {rank for rank, _ in said} == {1, 2}
    assert call(3602.0) == (False, []) and leader.waits
    _, said = leader.waited(3602.1, others, [(i, Said(0, Word.IN, 1, 1.0)) for i in others])
    assert {rank for rank, what in said if what.word == Word.ASK} == {1, 2}
    meets, said = leader.waited(3602.2, others, [(i, Said(0, Word.HERE, 1, 1.0)) for i in others])
    assert meets and {rank for rank, what in said if what.word == Word.BEGIN} == {1, 2}


def test_a_stop_is_no_interval_between_calls() -> None:
    leader = Meetings(0)
    for now in (1.0, 2.0, 3600.0):
        _, said = leader.called(now, [1], [(1, Said(0, Word.ASK, 1, 1.0))], False, False)
    assert said == [(1, Said(0, Word.HERE, 1, 1.0))]


def test_one_that_gives_way_comes_back_at_its_next_call() -> None:
    """The meeting is not called off; the leader that has called waits for it again."""
    leader, caller = Meetings(1), Meetings(0)
    caller.called(1.0, [1], [], True, True)
    _, [(_, go)] = caller.called(1.5, [1], [(1, Said(0, Word.HERE, 1, 0.5))], True, True, 1.5)
    assert leader.called(1.9, [0], [(0, go)], False, False, 1.9)[1] == [
        (0, Said(0, Word.IN, 1, 0.0))
    ]
    caller.called(2.0, [1], [], True, True, 2.0)
    out = leader.waited(2.1, [0], [], gives_way=True)[1]
    assert out == [(0, Said(0, Word.OUT, 1, 0.0))] and not leader.waits
    _, said = caller.waited(2.2, [1], [(1, Said(0, Word.IN, 1, 0.0)), (1, out[0][1])])
    assert caller.waits and not said
    caller.waited(2.3, [1], [], gives_way=True)
    _, [(_, go)] = caller.called(2.9, [1], [], True, True, 2.9)  # again, as others may have left
    assert go.word == Word.GO
    _, [(_, again)] = leader.called(3.0, [0], [(0, go)], False, False, 3.0)
    assert again.word == Word.IN and leader.waits
    _, [(_, asks)] = caller.waited(3.1, [1], [(1, again)])
    _, [(_, here)] = leader.waited(3.2, [0], [(0, asks)])
    meets, [(_, begins)] = caller.waited(3.3, [1], [(1, here)])
    assert meets and leader.waited(3.4, [0], [(0, begins)])[0]


def test_two_that_answer_in_turn_cannot_put_the_meeting_off_for_ever() -> None:
    """Leaders 1 and 2 call in bursts of their own: whenever one answers, the answer of the other is old."""
    leader, others, now, said = Meetings(0), [1, 2], 1.0, []
    leader.called(now, others, [], True, True)
    for i in range(20):
        now += 1.0
        leader.called(now, others, [], True, True)
        now += 9.0
        heard = [(i % 2 + 1, Said(0, Word.HERE, 1, 0.1))]
        _, said = leader.called(now, others, heard, True, True, now)
        if said and said[0][1].word == Word.GO:
            break
    leader.called(now + 1.0, others, [], True, True, now + 1.0)
    assert leader.waits and {what.word for _, what in said} == {Word.GO}
