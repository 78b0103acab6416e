"""When the learners meet in hvd.admit, if its calls do not wait for each other: a state machine.

Leaders ask each other at their calls. A leader that has a reason to meet, such as a joining super learner
that is ready, asks all others; each answers at its next call. When all have answered, the leader calls them
together, for the time at which the slowest has made one more call; each waits from its last call before that
time on. When all are in, and have answered once more, the meeting begins.

    a leader with a reason   ASK ->   <- HERE   GO ->  waits   <- IN   ASK ->  <- HERE   BEGIN ->  meets
    every other leader                (at a call)              (at a call)                         meets

After a meeting all make their calls at the same moments, so few wait for long. The clocks of hosts may
differ: then a leader waits earlier or later than would be best.

Nobody waits for long for a leader that is stopped, or cut off. One that does not answer is not waited for
at all; answers that are too old are asked for again, three times. One that stops after its answer is waited
for in vain for two intervals between calls and a second: then the leader that has called calls off (OFF),
and all train on. If that leader is the one that has stopped, the others leave by themselves (OUT). After a
meeting that was called off the next one has twice the patience, up to MOST_PATIENCE times, as calls may
take unequally long. A leader that others wait for in another operation goes there, and waits for the
meeting again from its next call on.

BEGIN holds also for a leader that has just left: it meets at its next call. Who stops later than its last
HERE, or is a mate of a leader, is waited for in the meeting. If the leader that asks fails, another one asks.
A message about a meeting that is over means nothing.
"""

from collections.abc import Collection, Iterable
from enum import IntEnum
from typing import NamedTuple

# Seconds, and intervals between calls, for which answers hold: a leader that has been silent for longer may
# have stopped since. After as long another leader asks, too, and a meeting is called off.
_HOLDS_S, _HOLDS_INTERVALS = 1.0, 2.0
MOST_PATIENCE = 8
_EARLY = 0.75  # of an interval: one that has more time left makes one more call before it waits
_RENEWALS = 3  # complete sets of answers that were too old, after which a leader calls all the same


class Word(IntEnum):
    """What a leader says to others.

    ASK, HERE: it asks, and answers. GO, OFF: it calls all together, and calls that off. IN, OUT: it waits,
    and waits no longer. BEGIN: all are in.
    """

    ASK = 0
    HERE = 1
    GO = 2
    IN = 3
    OUT = 4
    OFF = 5
    BEGIN = 6


class Said(NamedTuple):
    """A message from one leader to another.

    Attributes:
        meeting: number of the operation over all learners with which the last meeting ended, 0 before the
            first one; equal on all learners.
        word: see Word.
        round: number of the question, of the leader that asks.
        seconds: between the sender's calls: the smaller of the last two, as a stop is none. Of GO: for how
            long all wait.
        clock: when it was said, of time.time; of GO.
        slowest: seconds between the calls of the slowest leader; of GO.
    """

    meeting: int
    word: Word
    round: int
    seconds: float
    clock: float = 0.0
    slowest: float = 0.0


Messages = list[tuple[int, Said]]  # with their receivers, or senders


class Meetings:
    """Decides at each call of one leader whether it meets the others.

    Args:
        me: rank of this leader.
    """

    def __init__(self, me: int) -> None:
        self.me = me
        self._meeting = 0  # see Said
        self._others: frozenset[int] = frozenset()
        self._called, self._interval, self._last = 0.0, 0.0, 0.0
        self._wanted = 0.0  # since when this leader has had a reason to meet; 0: none
        self._heard = 0.0  # when another leader last asked when to meet
        self._round, self._asked = 0, 0.0  # number and time of its open question; 0 s: none
        self._answers: dict[int, tuple[float, float]] = {}  # by rank: when heard, interval
        self._renewals = 0  # of the question, as answers were too old
        self._patience = 1  # factor of the time for which all wait, where this leader calls
        self._callers: dict[int, Said] = {}  # GO of each leader that has called, this one included
        self._informed: set[int] = set()  # leaders that know that this one is in
        self._in: set[int] = set()  # the leaders that are in, of those that this one has called
        self._asks_last = False  # whether this leader has asked again, as all are in
        self._ends = 0.0  # when this leader stops waiting; 0: it does not wait
        self._gave_way = False  # whether it has stopped waiting for a while
        self._begins = False  # whether all are to meet, at once or at their next call

    @property
    def waits(self) -> bool:
        """Whether this leader waits for the others: `waited` is to be called again and again."""
        return self._ends > 0.0

    def called(
        self,
        now: float,
        others: Collection[int],
        heard: Iterable[tuple[int, Said]],
        wants: bool,
        first: bool,
        clock: float = 0.0,
    ) -> tuple[bool, Messages]:
        """Note a call of hvd.admit; return whether to meet, and the messages to send, with their receivers.

        Args:
            now: seconds, of time.monotonic.
            others: ranks of the other living leaders, as this one knows them.
            heard: (rank, what it said) since the last call.
            wants: whether this leader has a reason to meet.
            first: whether it asks at once; others wait whether somebody else does.
            clock: the same moment, of time.time.
        """
        if self._called:
            self._interval = min(now - self._called, self._last or now - self._called)
            self._last = now - self._called
        self._called = now
        said = self._hear(now, others, heard)
        self._wanted = (self._wanted or now) if wants else 0.0
        if wants and not others:
            self._begins = True
        if not (self._begins or self._callers):
            said += self._seek(now, wants, first, clock)
        elif self.me in self._callers and self._gave_way:  # others may have left meanwhile
            said += self._to_all(self._callers[self.me])
        if self._callers and not self.waits and (self._gave_way or not self._is_early(clock)):
            self._gave_way = False
            self._ends = now + max(go.seconds for go in self._callers.values())
        return self._waited(now, said)

    def waited(
        self,
        now: float,
        others: Collection[int],
        heard: Iterable[tuple[int, Said]],
        gives_way: bool = False,
    ) -> tuple[bool, Messages]:
        """Look again while this leader waits; return the same as `called`.

        If it neither meets nor still waits (`waits`), it trains on.

        Args:
            now: see `called`.
            others: see `called`.
            heard: see `called`.
            gives_way: whether others wait for this leader elsewhere. It then waits from its next call on.
        """
        meets, said = self._waited(now, self._hear(now, others, heard))
        if gives_way and self.waits:
            said += self._goes_out()
            self._gave_way = True
        return meets, said

    def met(self, meeting: int) -> None:
        """Note the end of a meeting, as all learners do; `meeting`: see Said."""
        self._meeting = meeting
        self._begins = self._asks_last = self._gave_way = False
        self._patience = 1
        self._asked = self._heard = self._wanted = self._ends = 0.0
        for kept in (self._answers, self._callers, self._informed, self._in):
            kept.clear()

    def _hear(
        self, now: float, others: Collection[int], heard: Iterable[tuple[int, Said]]
    ) -> Messages:
        self._others = frozenset(others)
        said: Messages = []
        for rank, what in heard:
            if what.meeting == self._meeting:
                said += self._take_in(now, rank, what)
        for rank in [rank for rank in self._callers if rank not in self._others | {self.me}]:
            self._forget(rank)
        return said

    def _take_in(self, now: float, rank: int, what: Said) -> Messages:
        is_mine = what.round == self._round
        if what.word == Word.ASK:
            self._heard = now
            return [(rank, self._says(Word.HERE, what.round))]
        if what.word == Word.HERE and is_mine:
            self._answers[rank] = now, what.seconds
        elif what.word == Word.GO:
            self._forget(rank)
            self._callers[rank] = what
        elif what.word == Word.OFF and rank in self._callers:
            self._forget(rank)
        elif what.word == Word.IN and is_mine:
            self._in.add(rank)
        elif what.word == Word.OUT and is_mine:
            self._in.discard(rank)
            self._asks_last = False
        elif what.word == Word.BEGIN:
            self._begins = True
        return []

    def _seek(self, now: float, wants: bool, first: bool, clock: float) -> Messages:
        """Ask if there is a reason; when all have answered lately, call them together."""
        if not wants:
            self._asked = 0.0
        elif not self._asked:
            if first or now - max(self._wanted, self._heard) > self._holds(0.0):
                return self._ask(now)
        elif self._others <= self._answers.keys():
            old = [rank for rank in self._others if self._is_old(now, *self._answers[rank])]
            if not old or self._renewals == _RENEWALS:
                return self._call(clock)
            self._renewals += 1
            for rank in old:  # each may have stopped since
                del self._answers[rank]
            return [(rank, self._says(Word.ASK, self._round)) for rank in sorted(old)]
        return []

    def _ask(self, now: float) -> Messages:
        self._round += 1
        self._asked, self._renewals = now, 0
        self._answers.clear()
        self._in.clear()
        return self._to_all(self._says(Word.ASK, self._round))

    def _call(self, clock: float) -> Messages:
        slowest = max(self._interval, *(interval for _, interval in self._answers.values()))
        seconds = self._patience * self._holds(slowest)
        go = Said(self._meeting, Word.GO, self._round, seconds, clock, slowest)
        self._callers[self.me] = go
        return self._to_all(go)

    def _is_old(self, now: float, heard: float, interval: float) -> bool:
        return now - heard > self._holds(interval)

    def _holds(self, interval: float) -> float:
        return _HOLDS_S + _HOLDS_INTERVALS * max(self._interval, interval)

    def _is_early(self, clock: float) -> bool:
        """Whether this leader makes one more call before all are to be in; not if its clock is behind."""
        left = [go.clock + go.slowest - clock for go in self._callers.values() if clock >= go.clock]
        return bool(left) and min(left) > _EARLY * self._interval > 0

    def _waited(self, now: float, said: Messages) -> tuple[bool, Messages]:
        calls = self.waits and self.me in self._callers
        if calls and not self._begins and self._others <= self._in:
            said += self._begin()
        if self._begins:
            self._ends = 0.0
        elif self.waits and now > self._ends:
            said += self._leave()
        elif self.waits:
            called = [rank for rank in self._callers if rank not in {*self._informed, self.me}]
            self._informed.update(called)
            said += [(rank, self._says(Word.IN, self._callers[rank].round)) for rank in called]
            if not self._callers:  # all have called off
                self._ends = 0.0
        return self._begins, said

    def _begin(self) -> Messages:
        """Begin when all are in, and have answered once more: one may have stopped while it waited."""
        if not self._asks_last:
            self._asks_last = True
            self._answers.clear()
            return self._to_all(self._says(Word.ASK, self._round))
        self._begins = self._others <= self._answers.keys()
        return self._to_all(self._says(Word.BEGIN, self._round)) if self._begins else []

    def _leave(self) -> Messages:
        """Wait no longer, as somebody has not come."""
        said = self._call_off() if self.me in self._callers else []
        said += self._goes_out()
        self._callers.clear()
        return said

    def _goes_out(self) -> Messages:
        """Wait no longer, and tell those that have called."""
        told = sorted(self._informed)
        self._informed.clear()
        self._ends = 0.0
        return [(rank, self._says(Word.OUT, self._callers[rank].round)) for rank in told]

    def _call_off(self) -> Messages:
        """Call off the meeting that this leader has called; it asks again later."""
        self._forget(self.me)
        self._asked, self._asks_last = 0.0, False
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        return self._to_all(self._says(Word.OFF, self._round))

    def _forget(self, rank: int) -> None:
        """Forget that a leader has called."""
        self._callers.pop(rank, None)
        self._informed.discard(rank)

    def _says(self, word: Word, number: int) -> Said:
        return Said(self._meeting, word, number, self._interval)

    def _to_all(self, what: Said) -> Messages:
        return [(rank, what) for rank in sorted(self._others)]
