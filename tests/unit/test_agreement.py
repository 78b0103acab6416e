"""Agreement explored exhaustively: the compiled core itself, its state copied at every branch.

Members vote, messages arrive in any order that keeps each channel's, members crash between any two messages,
and each survivor detects a crash at a time of its own.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import Any

import pytest

from hvd_adpsgd.engine.agreement import Agreement

# The AND of the flags shows whose votes were counted.
FLAGS = (0b11110, 0b11101, 0b11011, 0b10111)
DIGESTS = (5, 5, 6, 5)

Channels = tuple[tuple[bytes, ...], ...]  # from i to j at place i * n + j


@dataclass(frozen=True)
class Job:
    """One state of all members and of the messages between them.

    Attributes:
        members: the cores; None once crashed.
        channels: messages on their way.
        decided: of each member, its decisions in order.
        liars: (member, peer) of false suspicions so far.
    """

    members: tuple[Agreement | None, ...]
    channels: Channels
    decided: tuple[tuple[Any, ...], ...]
    liars: tuple[tuple[int, int], ...] = ()

    def key(self) -> tuple[Any, ...]:
        states = tuple(m and m.state() for m in self.members)
        return states, self.channels, self.decided, self.liars

    def living(self) -> list[int]:
        return [i for i, m in enumerate(self.members) if m is not None and not m.excluded]


@dataclass(frozen=True)
class Exploration:
    """What may happen.

    Attributes:
        n: members.
        decisions: how many each makes.
        crashes, false_suspicions: at most so many.
        direct: as of Agreement.
    """

    n: int = 3
    decisions: int = 1
    crashes: int = 2
    false_suspicions: int = 0
    direct: bool = False

    def run(self) -> int:
        """Explore every state; returns their number."""
        members = tuple(Agreement(self.n, i, self.direct) for i in range(self.n))
        first = Job(members, ((),) * self.n**2, ((),) * self.n)
        seen, todo = {first.key()}, [first]
        while todo:
            job = todo.pop()
            moved = False
            for after, is_progress in self.nexts(job):
                moved |= is_progress
                key = after.key()
                if key not in seen:
                    seen.add(key)
                    self.check(after)
                    todo.append(after)
            if not moved:
                self.check_end(job)
        return len(seen)

    def nexts(self, job: Job) -> Iterator[tuple[Job, bool]]:
        """The states after one event, and whether the event is one that must happen."""
        for i, member in enumerate(job.members):
            if member is None or member.excluded:
                continue
            if not member.voted and member.number < self.decisions:
                core = member.copy()
                core.vote(FLAGS[i], DIGESTS[i])
                yield from self.act(job, i, core)
            for peer in range(self.n):
                if peer in member.suspected or peer == i:
                    continue
                if job.members[peer] is None:
                    core = member.copy()
                    core.failed(peer)
                    yield from self.act(job, i, core)
                elif len(job.liars) < self.false_suspicions:
                    core = member.copy()
                    core.failed(peer)
                    lied = replace(job, liars=(*job.liars, (i, peer)))
                    yield from ((after, False) for after, _ in self.act(lied, i, core))
        for place, messages in enumerate(job.channels):
            source, target = divmod(place, self.n)
            member = job.members[target]
            if messages and member is not None:
                core = member.copy()
                core.receive(source, messages[0])
                rest = put(job.channels, place, messages[1:])
                yield from self.act(replace(job, channels=rest), target, core)

    def act(self, job: Job, i: int, core: Agreement) -> Iterator[tuple[Job, bool]]:
        """Member i did something: it sends all that follows, or crashes before one of these messages.

        A crash at any other time differs from one of these only in when the peers detect it."""
        outgoing = core.take_outgoing()
        may_crash = self.n - sum(m is not None for m in job.members) < self.crashes
        for sent in range(len(outgoing) + 1) if may_crash and outgoing else ():
            yield self.crash(self.send(job, i, outgoing[:sent]), i), False
        yield self.send(job, i, outgoing, core), True

    def send(
        self, job: Job, i: int, outgoing: list[tuple[int, bytes]], core: Agreement | None = None
    ) -> Job:
        channels = job.channels
        for peer, message in outgoing:
            if job.members[peer] is not None:
                place = i * self.n + peer
                channels = put(channels, place, (*channels[place], message))
        decided = job.decided
        if core is not None and core.number > len(decided[i]) and not core.excluded:
            decided = put(decided, i, (*decided[i], core.decision(core.number - 1)))
        members = job.members if core is None else put(job.members, i, core)
        return Job(members, channels, decided, job.liars)

    def crash(self, job: Job, i: int) -> Job:
        """Nothing more reaches it; what it has sent may still arrive."""
        channels = tuple(
            () if place % self.n == i else messages for place, messages in enumerate(job.channels)
        )
        return replace(job, members=put(job.members, i, None), channels=channels)

    def check(self, job: Job) -> None:
        """No two members decide differently, and every decision follows from the votes it counts."""
        ranks = job.living() if job.liars else range(self.n)
        for number in range(self.decisions):
            made = {job.decided[i][number] for i in ranks if len(job.decided[i]) > number}
            assert len(made) <= 1, f"decision {number} split: {made}, false suspicions {job.liars}"
            for decision in made:
                self.check_decision(job, decision)

    def check_decision(self, job: Job, decision: Any) -> None:
        counted = [i for i in range(self.n) if i not in decision.failed]
        flag = reduce(and_, (FLAGS[i] for i in counted), 0xFFFFFFFF)
        assert decision.flag == flag, decision
        assert decision.equal == (len({DIGESTS[i] for i in counted}) == 1), decision
        suspects = {peer for _, peer in job.liars}
        named = {i for i in decision.failed if job.members[i] is not None}
        assert named <= suspects, f"{decision} names living members {named} as failed"

    def check_end(self, job: Job) -> None:
        """Nothing more will happen: every living member has decided, or was told that it is excluded."""
        suspects = {peer for _, peer in job.liars}
        for i, member in enumerate(job.members):
            if member is None:
                continue
            if member.excluded:
                assert i in suspects, f"member {i} is excluded, false suspicions {job.liars}"
            else:
                assert len(job.decided[i]) == self.decisions, f"member {i} waits for ever: {job}"


def put(row: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*row[:place], value, *row[place + 1 :])


EXPLORED = (
    Exploration(),
    Exploration(false_suspicions=1),
    Exploration(decisions=3),
    Exploration(direct=True),
    Exploration(false_suspicions=1, crashes=0, direct=True),
    Exploration(decisions=2, direct=True),
)
EXPLORED_AT_LENGTH = (
    Exploration(decisions=2, false_suspicions=1, crashes=1),
    Exploration(decisions=2, false_suspicions=1),
    Exploration(n=4, crashes=2),
    Exploration(n=4, crashes=1, false_suspicions=1),
    Exploration(decisions=3, direct=True),
    Exploration(false_suspicions=1, crashes=1, direct=True),
    Exploration(false_suspicions=1, direct=True),
    Exploration(decisions=2, false_suspicions=1, crashes=1, direct=True),
)


@pytest.mark.parametrize(
    "exploration",
    [*EXPLORED, *(pytest.param(e, marks=pytest.mark.extended) for e in EXPLORED_AT_LENGTH)],
    ids=str,
)
def test_every_order_of_messages_crashes_and_detections(exploration: Exploration) -> None:
    began = time.monotonic()
    states = exploration.run()
    print(f"\n{exploration}: {states:,} states in {time.monotonic() - began:.1f} s")
    assert states > 100


def test_misuse_is_refused() -> None:
    core = Agreement(3, 1)
    with pytest.raises(ValueError, match="me=3"):
        Agreement(3, 3)
    for peer, message in [(0, b""), (0, b"\0" * 40), (0, b"x" * 40), (1, b"\1" * 40)]:
        with pytest.raises(ValueError, match="malformed"):
            core.receive(peer, message)
    with pytest.raises(ValueError, match="allowed are the peers"):
        core.failed(1)
    assert core.vote(1) == 0
    with pytest.raises(RuntimeError, match="has voted"):
        core.vote(1)
    assert core.decision(0) is None


@pytest.mark.parametrize("direct", [False, True])
def test_many_members_and_a_failure_in_the_middle(direct: bool) -> None:
    """130 members: sets are lists. Members 0 and 77 crash before they vote."""
    n, dead = 130, {0, 77}
    members = [Agreement(n, i, direct=direct) for i in range(n)]
    for i in set(range(n)) - dead:
        for peer in dead:
            members[i].failed(peer)
        members[i].vote(1, 9)
    deliver(members, dead)
    for i in set(range(n)) - dead:
        assert members[i].decision(0) == (0, 1, True, (0, 77))
    assert Agreement(1, 0).vote(1) == 0


def deliver(members: list[Agreement], dead: set[int]) -> None:
    """Until nothing is on its way."""
    moved = True
    while moved:
        moved = False
        for i, member in enumerate(members):
            for peer, message in member.take_outgoing() if i not in dead else ():
                moved = True
                if peer not in dead:
                    members[peer].receive(i, message)


def test_only_votes_for_this_decision_and_the_next_are_honest() -> None:
    """The decision under way needs every member's vote: nobody can have voted for one after the next."""
    member, speaker = Agreement(3, 0), Agreement(3, 2)
    speaker.vote(1)
    (_, vote), *_ = speaker.take_outgoing()
    for number in (-1, 2, 2**62):
        with pytest.raises(ValueError, match="malformed"):
            member.receive(2, number.to_bytes(8, sys.byteorder, signed=True) + vote[8:])
    member.receive(2, vote)
    member.receive(2, (1).to_bytes(8, sys.byteorder) + vote[8:])
