"""Dynamic data sharding under drawn speeds, delays, kills, stops and joins: every position is counted."""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_adpsgd.data import parts as module
from hvd_adpsgd.data.parts import Parts
from hvd_adpsgd.data.ranges import EPOCH, Ranges, merged, without
from hvd_adpsgd.data.steps import Steps

TICK_S = 0.02  # between two polls of a super learner
GIVEN_UP_S = 600.0


class Broken(AssertionError): ...


class Super:
    """One super learner: its Parts, and a trainer that takes steps of `step_s`."""

    def __init__(self, job: Job, rank: int, learners: int, step_s: float, founds: bool) -> None:
        self.job, self.rank, self.learners, self.step_s = job, rank, learners, step_s
        self.parts = job.kind(rank, job.founders if founds else None, lambda epoch: job.size)
        self.parts.step = self.parts.lead = learners * job.each
        self.parts.lead *= 1 + int(0.1 / step_s)
        self.parts.rate = learners * job.each / step_s
        self.inbox: list[tuple[int, int, Any]] = []
        self.view: set[int] = {rank}
        self.noticed: set[Super] = set()
        self.connections = job.connections
        self.epoch, self.step, self.trained = -1, 0, 0
        self.stopped_until = 0.0
        self.is_over = self.is_dead = self.is_done = False
        self.idle_s, self.idle_since = 0.0, 0.0
        self.yielded: Counter[int] = Counter()
        self.ended: list[float] = []
        self.finished: set[int] = set()  # epochs that it has ended

    def begins(self) -> None:
        """Begin the next epoch; the last one begins when all faults are over and noticed."""
        if self.epoch + 2 == self.job.epochs and self.job.now < self.job.quiet_from:
            self.job.at(self.job.quiet_from, self.begins)
            return
        self.epoch, self.step = self.epoch + 1, 0
        if self.epoch == self.job.epochs:
            self.is_done = True
            if self.job.each > 1:  # else none leaves, so that what is lost is not found in the end
                self.parts.report(leaves=True)
            return
        self.steps = Steps(self.learners, self.job.each)
        self.breaks_at, self.pause_s = self.job.draw_break(self)
        self.parts.begin(self.epoch)
        self.idle_since = self.job.now
        self.trains()

    def trains(self) -> None:
        """Take the next step, or look again a little later."""
        if self.is_dead or self.is_done or self.is_frozen(self.trains):
            return
        needed = (self.step + 1) * self.learners * self.job.each
        if self.step == self.breaks_at:
            self.parts.leave(self.steps.end(self.step))
            self.job.draw_fault_at_break()
            self.job.after(self.pause_s, self.begins)
            return
        if (missing := needed - self.steps.number) > 0 and self.breaks_at is not None:
            missing += self.learners * self.job.each  # for other learners, which ask ahead
        self.steps.append(self.parts.take(missing))
        self.steps.ended = self.parts.ended
        shares = [self.steps.of_step(self.step, i) for i in range(self.learners)]
        if shares[0] is None:
            self.job.after(TICK_S / 2, self.trains)
            return
        self.idle_s = max(self.idle_s, self.job.now - self.idle_since)
        if not shares[0]:
            self.ended.append(self.job.now)
            self.finished.add(self.epoch)
            self.begins()
            return
        runs = self.steps.between(self.step * self.learners * self.job.each, needed)
        assert {run_ for share in shares for run_ in positions(share or [])} == set(positions(runs))
        self.yielded.update(positions(runs))
        self.step += 1
        self.job.after(self.step_s * self.job.draw.uniform(0.9, 1.1), lambda: self.steps_with(runs))

    def steps_with(self, runs: Ranges) -> None:
        if self.is_dead or self.is_frozen(lambda: self.steps_with(runs)):
            return
        self.parts.consume(runs)
        self.job.consumed += runs
        self.idle_since = self.job.now
        self.trains()

    def is_frozen(self, then: Callable[[], None]) -> bool:
        if self.stopped_until > self.job.now:
            self.job.at(self.stopped_until, then)
            self.idle_since = self.stopped_until
            return True
        return False

    def ticks(self) -> None:
        if self.is_dead or self.is_frozen(self.ticks):
            return
        for sender, connections, message in self.inbox:
            if connections == self.connections:
                self.parts.receive(sender, message, self.job.now)
        self.inbox = [letter for letter in self.inbox if letter[1] > self.connections]
        for receiver, message in self.parts.poll(self.job.now):
            self.job.sends(self, receiver, message)
        self.job.after(TICK_S, self.ticks)

    def sees(self, view: set[int], joined: set[int] = frozenset(), anew: bool = False) -> None:  # type: ignore[assignment]
        self.view = set(view)
        self.parts.members(self.view, self.job.ring, joined, anew)


class Job:
    """A job drawn from a seed; `kind` is the class under test."""

    def __init__(
        self, seed: int, kind: type[Parts] = Parts, faults: bool = True, **given: Any
    ) -> None:
        self.draw = draw = random.Random(seed)
        self.kind, self.now, self._heap, self._order = kind, 0.0, [], itertools.count()
        self.founders = self.ring = given.get("n", draw.choice((1, 2, 3, 5, 8)))
        self.epochs = given.get("epochs", draw.choice((2, 3, 4)))
        self.each = draw.choice((1, 2, 5))
        self.size = given.get("size", draw.choice((0, 1, 7, 60, 200)))
        self.connections, self.consumed = 0, []
        self.breaks = random.Random(seed)  # in half of the jobs some leave epochs early
        self.break_rate = given.get("break_rate", 0.5 * (faults and seed % 2))
        self._last: dict[tuple[int, int], float] = {}
        self.delay_s = given.get("delay_s", draw.choice((0.002, 0.02, 0.1)))
        self.quiet_from = 0.0
        self.all: list[Super] = []
        self.present: dict[int, Super] = {}
        speeds = given.get("speeds") or [
            draw.choice((0.01, 0.05, 0.15)) for _ in range(self.founders)
        ]
        for rank, step_s in enumerate(speeds):
            learners = given.get("learners", draw.choice((1, 1, 2, 3)))
            self.present[rank] = Super(self, rank, learners, step_s, True)
        self.all += self.present.values()
        for one in self.all:
            self.starts(one)
        for one in self.all:
            one.sees(set(self.present))
        if faults:
            self.draw_faults()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def sends(self, sender: Super, receiver: int, message: Any) -> None:
        pair = sender.rank, receiver
        when = max(self._last.get(pair, 0.0), self.now + self.draw.expovariate(1 / self.delay_s))
        self._last[pair] = when
        connections, target = sender.connections, self.present.get(receiver)

        def arrives() -> None:
            if target is not None and connections >= target.connections:
                target.inbox.append((sender.rank, connections, message))

        if not (sender.is_dead and self.draw.random() < 0.5):
            self.at(when, arrives)

    def starts(self, one: Super) -> None:
        self.after(self.draw.uniform(0, TICK_S), one.ticks)
        self.after(self.draw.uniform(0, 2 * TICK_S), one.begins)

    def run(self) -> None:
        while not all(one.is_done or one.is_dead for one in self.all):
            self.step()
            if self.now > GIVEN_UP_S:
                raise Broken("the job does not end")

    def step(self) -> None:
        self.now, _, what = heapq.heappop(self._heap)
        what()

    def draw_break(self, one: Super) -> tuple[int | None, float]:
        """Return the step before which a super learner leaves an epoch, but the last, and its pause."""
        breaks = one.epoch < self.epochs - 1 and self.breaks.random() < self.break_rate
        at = self.breaks.choice((0, 1, 2, 5, 20)) if breaks else None
        return at, self.breaks.choice((0.0, 0.3, 3.0))

    def draw_fault_at_break(self) -> None:
        fault = self.breaks.choice((self.kills, self.joins))
        if self.breaks.random() < 0.4:
            self.after(self.breaks.uniform(0, 5 * self.delay_s), fault)

    def draw_faults(self) -> None:
        rate = sum(one.parts.rate for one in self.all)
        until = 0.7 * (self.epochs - 1) * self.size / rate
        for _ in range(self.draw.choice((0, 1, 2, 3))):
            fault = self.draw.choice((self.kills, self.stops, self.suspects, self.joins))
            self.at(self.draw.uniform(0, until), fault)

    def living(self) -> list[Super]:
        return [one for one in self.present.values() if not one.is_dead]

    def victim(self) -> Super | None:
        """Return a super learner that may fail: one of two or more, before any begins the last epoch."""
        if any(one.epoch == self.epochs - 1 for one in self.living()):
            return None
        sound = [one for one in self.living() if not one.is_over and not one.is_done]
        return self.draw.choice(sound) if len(sound) > 1 else None

    def kills(self) -> None:
        if (one := self.victim()) is not None:
            one.is_dead = one.is_over = True
            self.is_noticed(one)

    def stops(self) -> None:
        if (one := self.victim()) is not None:
            self.stop(one, self.draw.choice((0.3, 3.0, 10.0)))

    def stop(self, one: Super, seconds: float) -> None:
        one.stopped_until = self.now + seconds
        self.quiet_from = max(self.quiet_from, one.stopped_until + 1)

    def suspects(self) -> None:
        """One takes another for failed, which is alive; in the end it is excluded."""
        if (one := self.victim()) is not None:
            one.is_over = True
            if self.draw.random() < 0.5:
                self.stop(one, self.draw.choice((0.3, 3.0)))
            self.is_noticed(one)
            self.after(self.draw.uniform(0, 4), lambda: setattr(one, "is_dead", True))

    def is_noticed(self, one: Super) -> None:
        """The others notice that it has failed, each at its own moment; it may be replaced later."""
        most = self.draw.choice((0.05, 0.5, 3.0))
        latest = 0.0
        for other in self.living():
            if other is not one:
                seconds = self.draw.uniform(0, most)
                latest = max(latest, seconds)
                self.after(seconds, lambda other=other: self.notices(other, one))
        self.quiet_from = max(self.quiet_from, self.now + latest + 5)
        if self.draw.random() < 0.5:
            self.after(latest + self.draw.uniform(0, 2), lambda: self.joins(one))

    def notices(self, other: Super, one: Super) -> None:
        if other.stopped_until > self.now:
            self.at(other.stopped_until, lambda: self.notices(other, one))
            return
        other.noticed.add(one)
        if one.rank in other.view and self.present[one.rank] is one:
            other.sees(other.view - {one.rank})

    def joins(self, replaced: Super | None = None) -> None:
        """A super learner joins, at a meeting: all make new connections, each at its own moment."""
        living = [one for one in self.living() if not one.is_over]
        if (
            any(one.stopped_until > self.now for one in living)
            or not living
            or any(one.connections != self.connections or one.is_done for one in living)
            or any(one.epoch == self.epochs - 1 and self.break_rate for one in living)
        ):
            return
        self.quiet_from = max(self.quiet_from, self.now + self.break_rate)
        for one in self.living():
            if one.is_over:  # excluded at the latest by this operation
                one.is_dead = True
        rank = replaced.rank if replaced else self.ring
        self.ring = max(self.ring, rank + 1)
        self.connections += 1
        learners = self.draw.choice((1, 2))
        one = Super(self, rank, learners, self.draw.choice((0.01, 0.05, 0.15)), False)
        members = {other.rank for other in living} | {rank}

        def goes_over(other: Super, connections: int = self.connections) -> None:
            if other.is_dead:
                return
            other.connections = connections
            view = {r for r in members if self.present[r] not in other.noticed}
            other.sees(view, {rank} if other is not one else set(), True)
            if other is one:
                self.starts(one)

        for other in [*living, one]:
            other.connections = self.connections - 1
            self.after(self.draw.uniform(0, 0.1), lambda other=other: goes_over(other))
        self.all.append(one)
        self.present[rank] = one

    def check(self) -> None:
        counts: Counter[int] = Counter()
        for one in self.all:
            if not one.is_over:
                counts.update(one.yielded)
        if counts and max(counts.values()) > 1:
            raise Broken(f"taken twice: {[key for key, n in counts.items() if n > 1][:5]}")
        ended = set().union(*(one.finished for one in self.all if not one.is_over))
        whole = [(EPOCH * epoch, EPOCH * epoch + self.size) for epoch in sorted(ended)]
        if missing := without(whole, merged(self.consumed)):
            raise Broken(f"lacks {missing[:5]} of {self.size} positions")


def positions(runs: Ranges) -> list[int]:
    return [i for pair in runs for i in range(*pair)]


def ran(*arguments: Any, **given: Any) -> Job:
    job = Job(*arguments, **given)
    job.run()
    job.check()
    return job


@pytest.mark.parametrize("block", range(4))
def test_every_position_is_taken_once_whatever_fails(block: int) -> None:
    for seed in (1128, 1502, *range(75 * block, 75 * (block + 1))):  # 2: all founders fail at once
        ran(seed)


@pytest.mark.extended
@pytest.mark.parametrize("block", range(20))
def test_every_position_is_taken_once_in_many_jobs(block: int) -> None:
    for seed in range(1000 + 200 * block, 1000 + 200 * (block + 1)):
        ran(seed)


def require_together(kind: type[Parts] = Parts) -> None:
    """All end each epoch within a step of the slowest, and an answer, of each other."""
    for seed, slow in itertools.product(range(5), (0.05, 0.15)):
        speeds = [0.05, slow, 0.05, 0.05]
        given = {"n": 4, "size": 400, "epochs": 3, "delay_s": 0.01, "learners": 1}
        job = ran(seed, kind, faults=False, speeds=speeds, **given)
        for ends in zip(*(one.ended for one in job.all), strict=True):
            if max(ends) - min(ends) > 1.1 * slow + 0.1:
                raise Broken(f"ends of an epoch, {slow} s per step: {ends}")


def require_no_wait(kind: type[Parts] = Parts) -> None:
    """While one is stopped for 40 s, no other waits for longer than the time after which it is given up."""
    for seed in range(5):
        job = Job(
            seed, kind, faults=False, n=4, size=300, epochs=3, speeds=[0.05] * 4, delay_s=0.01
        )
        stopped = job.all[seed % 4]
        job.at(0.4, lambda: job.stop(stopped, 40.0))  # noqa: B023
        job.run()
        job.check()
        waited = max(one.idle_s for one in job.all if one is not stopped)
        if waited > 2 * module.LEAST_PATIENCE_S:
            raise Broken(f"others waited for {waited:.1f} s")


def require_given_back(kind: type[Parts] = Parts) -> None:
    """What one held that leaves its loop is trained with although it does nothing for 20 s."""
    for step in range(40):
        given = {"n": 3, "size": 100, "epochs": 2, "delay_s": 0.1, "learners": 1}
        job = Job(step, kind, faults=False, speeds=[0.02, 0.06, 0.06], **given)
        one = job.all[0]
        job.draw_break = lambda who: (step if who is one and one.epoch == 0 else None, 20.0)  # type: ignore[method-assign]  # noqa: B023
        while job.now < 15:
            job.step()
        if missing := without([(0, job.size)], merged(job.consumed)):
            raise Broken(f"kept {missing}")
        job.run()
        job.check()


def require_counted(kind: type[Parts] = Parts) -> None:
    for seed in (889, 2779, *range(400)):  # 2: what meets a break rarely
        ran(seed, kind)


@pytest.mark.parametrize("holds", [require_together, require_no_wait, require_given_back])
def test_speeds_and_stops(holds: Callable[[], None]) -> None:
    holds()


def test_what_is_given_back_is_sent_again_over_new_connections() -> None:
    parts = Parts(0, 2, lambda _: 100)
    parts.members({0, 1}, 2)
    parts.begin(0)
    parts.take(50)  # the part that it serves

    def asks() -> list[Any]:
        return [m for _, m in parts.poll(0.0) if isinstance(m, module.Ask)]

    for granted, left in (([], 50), ([(50, 60)], 40)):
        parts.receive(1, module.Give(asks()[0].number, 1, granted, left), 0.0)
    parts.leave([])
    assert [ask.back for ask in asks()] == [[(50, 60)]]
    parts.begin(1)
    parts.members({0, 1}, 2, anew=True)
    assert [ask.back for ask in asks()] == [[(50, 60)]]


# what is changed in hvd_adpsgd/data/parts.py, and what finds it
MUTANTS = {
    "what a failed one held is lost": (
        require_counted, "without(held, self.consumed)", "[]",
    ),
    "a new server does not ask": (
        require_counted, "set() if is_first else set(self._living - {self.me})", "set()",
    ),
    "it is not told what is held": (require_counted, "Holds(part, held,", "Holds(part, [],"),
    "former servers still give": (
        require_counted, "(self._asks, self._left, self._back)", "(self._left, self._back)",
        " or self._servers[message.part] != rank", "",
    ),
    "a repeated question is answered anew": (
        require_counted, "if answer is None or answer.number != ask.number", "if True",
    ),
    "questions are not repeated": (require_counted, "for ask, _ in self._asks.values()", "for ask, _ in ()"),
    "an epoch has no end": (require_counted, "if self.ended or self.epoch", "if self.epoch"),
    "another's later epoch hides the first": (require_counted, "self._begun.add(epoch)", "pass"),
    "left over positions are not given": (
        require_counted, "any(a <= e < b for a, b in self._ended)", "False",
    ),
    "ends of epochs are not told": (require_counted, "merged(self._ended, message.ended)", "[]"),
    "own positions are not given back": (
        require_counted, "self._free_again(self._served[part], self.me, ranges)", "pass",
    ),
    "others' positions are not given back": (require_counted, "elif back :=", "elif False and (back :=",
        "_of_part(part, ranges):", "_of_part(part, ranges)):"),
    "late grants are kept": (require_given_back, "if self.ended or ask.epoch != self.epoch:", "if False:"),
    "what is not held is freed": (require_counted, "in without(held, kept) if", "in ranges if"),
    "what is given back is held": (
        require_counted, "self._granted = without(self._granted, ranges)", "pass",
    ),
    "the slow get as much as the fast": (
        require_together, "int(left * (ask.rate or usual) / (2 * total))", "left // 2",
    ),
    "silent servers are waited for": (require_no_wait, "max(LEAST_PATIENCE_S,", "max(100.0,"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_broken_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finds, *texts = MUTANTS[mutant]
    source = Path(module.__file__).read_text()
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    changed = types.ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", changed)
    exec(source, changed.__dict__)
    with pytest.raises(Broken):
        finds(changed.Parts)
