"""When the learners meet in hvd.admit, if its calls do not wait for each other: a state machine.

Leaders ask each other at their calls, and never wait. A leader that has a reason to meet, such as a joining
super learner that is ready, asks all others; each answers at its next call. When all have answered, it says
so, and meets; all others meet at their first call after they have heard that.

    a leader with a reason    ASK ->    <- HERE    GO ->    meets
    every other leader                  (at a call)         meets at its next call

So nobody waits for a learner that is stopped, or cut off: it does not answer. A leader that has answered
calls again within one interval of its calls, and the others wait for it until then. If the leader that asks
fails, another one asks. A message about a meeting that is over means nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import IntEnum
from typing import NamedTuple

__all__ = ["Meetings", "Said", "Word"]

# Seconds, and intervals between calls, for which answers hold: a leader that has been silent for longer may
# have stopped since. After as long another leader asks, too.
_HOLDS_S, _HOLDS_INTERVALS = 1.0, 2.0


class Word(IntEnum):
    """What a leader says to others: it asks, answers, or says that all meet."""

    ASK = 0
    HERE = 1
    GO = 2


class Said(NamedTuple):
    """A message from one leader to another.

    Attributes:
        meeting: number of the operation over all learners with which the last meeting ended, 0 before the
            first one; equal on all learners.
        word: see Word.
        round: number of the question, of the leader that asks.
        interval: seconds between the sender's calls: the smaller of the last two, as a stop is none.
    """

    meeting: int
    word: Word
    round: int
    interval: float


class Meetings:
    """Decides at each call of one leader whether it meets the others.

    Args:
        me: rank of this leader.
    """

    def __init__(self, me: int) -> None:
        self.me = me
        self._meeting = 0  # see Said
        self._goes = False  # whether all are to meet
        self._called, self._interval, self._last = 0.0, 0.0, 0.0
        self._wanted = 0.0  # since when this leader has had a reason; 0: none
        self._heard = 0.0  # when another leader last asked
        self._round, self._asked = 0, 0.0  # of the question of this leader; 0 s: none is open
        self._answers: dict[int, tuple[float, float]] = {}  # to it, by rank: when heard, interval

    def called(
        self,
        now: float,
        others: Collection[int],
        heard: Iterable[tuple[int, Said]],
        wants: bool,
        first: bool,
    ) -> tuple[bool, list[tuple[int, Said]]]:
        """Note a call of hvd.admit; return whether to meet, and the messages to send, with their receivers.

        Args:
            now: seconds, of time.monotonic.
            others: ranks of the other living leaders, as this one knows them.
            heard: (rank, what it said) since the last call.
            wants: whether this leader has a reason to meet.
            first: whether it asks at once; others wait whether somebody else does.
        """
        if self._called:
            self._interval = min(now - self._called, self._last or now - self._called)
            self._last = now - self._called
        self._called = now
        said: list[tuple[int, Said]] = []
        for rank, what in heard:
            if what.meeting == self._meeting:
                said += self._hear(now, rank, what)
        self._wanted = (self._wanted or now) if wants else 0.0
        if self._goes or (wants and not others):
            return True, said
        if not wants:
            self._asked = 0.0
        elif not self._asked:
            if first or now - max(self._wanted, self._heard) > self._holds(0.0):
                said += self._ask(now, others)
        elif set(others) <= self._answers.keys():
            old = [rank for rank in others if self._is_old(now, *self._answers[rank])]
            if not old:
                # until they have met: the meeting may give way to another operation
                self._goes = True
                return True, said + [(rank, self._says(Word.GO, self._round)) for rank in others]
            for rank in old:  # it may have stopped since
                del self._answers[rank]
                said.append((rank, self._says(Word.ASK, self._round)))
        return False, said

    def met(self, meeting: int) -> None:
        """Note the end of a meeting, as all learners do; `meeting`: see Said."""
        self._meeting, self._goes = meeting, False
        self._asked = self._heard = self._wanted = 0.0
        self._answers.clear()

    def _hear(self, now: float, rank: int, what: Said) -> list[tuple[int, Said]]:
        if what.word == Word.ASK:
            self._heard = now
            return [(rank, self._says(Word.HERE, what.round))]
        if what.word == Word.HERE and what.round == self._round:
            self._answers[rank] = now, what.interval
        self._goes = self._goes or what.word == Word.GO
        return []

    def _says(self, word: Word, number: int) -> Said:
        return Said(self._meeting, word, number, self._interval)

    def _ask(self, now: float, others: Collection[int]) -> list[tuple[int, Said]]:
        self._round += 1
        self._asked = now
        self._answers.clear()
        return [(rank, self._says(Word.ASK, self._round)) for rank in others]

    def _is_old(self, now: float, heard: float, interval: float) -> bool:
        return now - heard > self._holds(interval)

    def _holds(self, interval: float) -> float:
        return _HOLDS_S + _HOLDS_INTERVALS * max(self._interval, interval)
