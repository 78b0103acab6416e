"""The positions that one sampler of this process takes: Parts on the leader, Steps on all learners.

    leader    Parts  --take-->  Steps  --Appended-->  Steps of the other learners of the super learner
                                       <--Wanted----

A sampler takes its steps on the script's thread (`next`). Messages are exchanged by `talk`, on the thread of
the channel or of an operation over all learners.
"""

import bisect
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hvd_adpsgd.data.parts import Consumed, Parts
from hvd_adpsgd.data.ranges import Ranges, merged
from hvd_adpsgd.data.steps import Steps
from hvd_adpsgd.errors import StrategyMismatchError

_WINDOW = 16  # steps whose times give the rate
_INSIDE_S = 0.1  # the other learners of a super learner ask for positions so much ahead
_LOOK_S = 0.2  # between two looks of a waiting sampler for an error
Groups = Sequence[Sequence[int]]  # ranks of the learners of each super learner, by super_rank


class View(NamedTuple):
    """The super learners that live, by super_rank; the last two: since the last View."""

    groups: Groups  # of all super learners
    living: frozenset[int]
    joined: frozenset[int] = frozenset()
    is_anew: bool = False  # whether all have made new connections


class Wanted(NamedTuple):
    """A learner tells its leader how many steps of an epoch it needs."""

    epoch: int
    steps: int


class Appended(NamedTuple):
    """A leader tells the other learners the positions from number `first` on."""

    epoch: int
    first: int
    ranges: Ranges
    ended: bool
    marks: list[tuple[int, int]]  # as in Steps


class Sharding:
    """What one sampler of this process takes.

    Args:
        rank, groups: of this learner, of all super learners.
        parts: number of super learners at the job's start; None on a learner that has joined since.
        wake: called when there are messages to send.
        size: returns the number of positions of an epoch.
        each: number of positions of a learner per step; 0: one, the same for all of the super learner.
        drops_last: whether a shorter last step is left out.
        made: returns how many batches the optimizer has made; None without one: what is yielded is consumed.
    """

    def __init__(
        self,
        rank: int,
        groups: Groups,
        parts: int | None,
        wake: Callable[[], object],
        size: Callable[[int], int],
        each: int,
        drops_last: bool,
        made: Callable[[], int | None],
    ) -> None:
        super_rank = next(i for i, group in enumerate(groups) if rank in group)
        self._mates = groups[super_rank]
        self._is_leader = rank == self._mates[0]
        # that a step is divided among, and which of them this one is
        self._learners, self._learner = (
            (len(self._mates), list(self._mates).index(rank)) if each else (1, 0)
        )
        self._view = View(groups, frozenset())  # until the first `talk`
        self._each, self._drops_last, self._made, self._wake = max(1, each), drops_last, made, wake
        self.parts = Parts(super_rank, parts, size)
        self.parts.step = self.parts.lead = self._each * self._learners
        self.error: Exception | None = None  # raised by `next` while it waits
        self.identity: Any = None  # names the data; equal on all learners
        self.mismatch = ""  # why it is not
        self._changed = threading.Condition()
        self._steps: dict[int, Steps] = {}
        self.epoch: int | None = None
        self._left: int | None = None  # an epoch whose loop is over on this learner
        # steps of the epoch that are yielded, that were asked for, whose successor was asked for, that are
        # known as consumed here; batches that the optimizer had made before
        self.step = self._asked = self._done = self._consumed = self._made_before = 0
        self._samples_before = 0  # of the job, at the end of the epoch before
        self._is_reported = False  # whether all steps of the epoch are, as consumed
        self._wanted: dict[int, int] = defaultdict(int)  # steps, by epoch
        self._sent: dict[int, tuple[int, bool]] = {}  # by epoch, what the others were sent
        # of the latest steps that were made: their number, and the time, waits left out
        self._times: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._waited_s = 0.0
        self._out: list[tuple[int, Any]] = []

    @property
    def is_open(self) -> bool:
        """Whether this learner is in an epoch."""
        return self.epoch is not None and not self._of(self.epoch).ended

    def begin(self, epoch: int) -> Iterator[Ranges]:
        """Begin an epoch, and return its steps; the epoch before is over on this learner."""
        with self._changed:
            self._samples_before = self._samples(self.step)
            if self.epoch is not None and self._is_leader:
                self._consume(self.step)
                self._leave(self.epoch)
                self._append()
            self._steps = {e: s for e, s in self._steps.items() if e in (self.epoch, epoch)}
            self.epoch, self._made_before, self._is_reported = epoch, self._made() or 0, False
            self.step = self._asked = self._done = self._consumed = 0
            self._times.clear()
            if self._is_leader:
                self.parts.begin(epoch)
            self._turn()
        return self._loop(epoch)

    def _loop(self, epoch: int) -> Iterator[Ranges]:
        try:
            yield from iter(self.next, [])
        finally:  # also if the script breaks its loop; the garbage collector may call this: no lock
            self._left = epoch

    def next(self) -> Ranges:
        """Return this learner's positions of its next step; [] after the last."""
        with self._changed:
            if self.mismatch:
                raise StrategyMismatchError(self.mismatch)
            assert self.epoch is not None
            steps, asked_at = self._of(self.epoch), time.monotonic()
            self._done, self._asked = self.step, self.step + 1
            self._turn()
            while (ranges := steps.of_step(self.step, self._learner)) is None:
                if self.error is not None:
                    raise self.error
                self._changed.wait(_LOOK_S)
                self._turn()
            now = time.monotonic()
            self._waited_s += now - asked_at
            self._note_time(now - self._waited_s)
            self.step += bool(ranges)
            return ranges

    def talk(self, view: View, heard: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Handle messages; return those to send, with the ranks of their receivers."""
        with self._changed:
            if view != self._view:
                self._look(view)
            for rank, message in heard:
                self._receive(rank, message)
            self._count()
            self._turn()
            out, self._out = self._out, []
            self._changed.notify_all()
            return out

    def close(self) -> None:
        """Report what was consumed, before this learner leaves."""
        with self._changed:
            if self._is_leader:
                self._count()
                self.parts.report(leaves=True)

    def consumed(self) -> Ranges:
        """Return the positions that are known as consumed by the job."""
        with self._changed:
            self._count()
            own = self._of(self.epoch).made(0, self._done) if self.epoch is not None else []
            return merged(self.parts.consumed, [] if self._is_leader else own)

    def samples(self) -> int:
        """Return how many samples the job has made: the same on all learners of this super learner.

        Their leader sends its count with the positions of a step; it is that of the newest step made here. In
        an epoch without a step, each learner counts what is reported to it.
        """
        with self._changed:
            made = self._made()
            if made is None or made < self._made_before:  # the latter: a new optimizer
                return self._samples(self.step)
            return self._samples(made - self._made_before)

    def _samples(self, made: int) -> int:
        step = min(made, self.step) - 1
        if self.epoch is None or not (steps := self._of(self.epoch)).number:  # no step: the others'
            return max(self._samples_before, self.parts.samples)
        return self._samples_before if step < 0 else steps.samples(step)

    def _of(self, epoch: int) -> Steps:
        if epoch not in self._steps:
            self._steps[epoch] = Steps(self._learners, self._each, self._drops_last)
        return self._steps[epoch]

    def _look(self, view: View) -> None:
        is_anew = view.is_anew or not self._view.living
        self._view = view._replace(joined=frozenset(), is_anew=False)
        if is_anew:
            for former in (self._out, self._sent, self._wanted):
                former.clear()
        if self._is_leader:
            self.parts.members(view.living, len(view.groups), view.joined, is_anew)

    def _receive(self, rank: int, message: Any) -> None:
        if isinstance(message, Wanted):
            self._wanted[message.epoch] = max(self._wanted[message.epoch], message.steps)
        elif isinstance(message, Appended):
            steps, sent = self._of(message.epoch), Steps(1, 1)
            sent.append(message.ranges)
            steps.marks += [mark for mark in message.marks if mark[0] >= steps.number]
            steps.append(sent.between(steps.number - message.first, sent.number))
            steps.ended = message.ended
        elif self._is_leader:
            sender = next(i for i, group in enumerate(self._view.groups) if rank in group)
            self.parts.receive(sender, message, time.monotonic())
        elif isinstance(message, Consumed):
            self.parts.note(message.ranges)

    def _turn(self) -> None:
        """Take positions that are needed, and make the messages that are due."""
        if not self._is_leader:
            self._want()
        elif self._view.living:
            if (step_s := self._step_s()) is not None:
                self.parts.rate = self.parts.step / step_s
                ahead = math.ceil(2 * self.parts.answer_s / step_s)  # steps, until an answer comes
                self.parts.lead = self.parts.step * max(1, ahead)
            if self.epoch is not None and self._left == self.epoch:
                self._leave(self.epoch)
            self._append()
            for i, message in self.parts.poll(time.monotonic()):
                number = None if isinstance(message, Consumed) else 1  # all may be asked for it
                self._out += [(rank, message) for rank in self._view.groups[i][:number]]
            if self.parts.ended:
                self._append()
        if self._out:
            self._wake()

    def _note_time(self, now: float) -> None:
        made = self._made()
        number = self.step if made is None else made
        if self._times and number < self._times[-1][0]:  # a new optimizer
            self._times.clear()
        if (
            not self._times or number > self._times[-1][0]
        ):  # else it is prefetched, faster than a step
            self._times.append((number, now))

    def _step_s(self) -> float | None:
        """Return the time of a step, of late; None before the third."""
        if len(self._times) < 3:
            return None
        (first, began), (last, ended) = self._times[0], self._times[-1]
        return max(1e-5, (ended - began) / (last - first))

    def _count(self) -> None:
        """Note which steps are consumed: of those yielded, as many as the optimizer has made."""
        if self.epoch is None or not self._is_leader:
            return
        made = self._made()
        self._consume(self._done if made is None else min(self.step, made - self._made_before))
        is_over = self._of(self.epoch).ended and self._consumed == self.step == self._done
        if is_over and not self._is_reported:
            self._is_reported = True
            self.parts.report()

    def _consume(self, steps: int) -> None:
        if self.epoch is not None and steps > self._consumed:
            self.parts.consume(self._of(self.epoch).made(self._consumed, steps))
            self._consumed = steps

    def _leave(self, epoch: int) -> None:
        """Let the other super learners have what this one was given of an epoch and does not take."""
        self.parts.leave(self._of(epoch).end(self.step))
        self._left = None

    def _append(self) -> None:
        """Take the positions that the learners of this super learner need, and send them."""
        if self.epoch is None:
            return
        steps = self._of(self.epoch)
        if not steps.ended:
            needed = max(self._asked, self._wanted[self.epoch]) * self.parts.step - steps.number
            if needed > 0 and (taken := self.parts.take(needed)):
                self._count()
                steps.marks.append((steps.number, self.parts.samples))
                steps.append(taken)
            steps.ended = self.parts.ended
        first, ended = self._sent.get(self.epoch, (0, False))
        if len(self._mates) > 1 and (first, ended) != (steps.number, steps.ended):
            self._sent[self.epoch] = steps.number, steps.ended
            ranges = steps.between(first, steps.number)
            marks = steps.marks[bisect.bisect_left(steps.marks, (first, 0)) :]
            message = Appended(self.epoch, first, ranges, steps.ended, marks)
            self._out += [(rank, message) for rank in self._mates[1:]]

    def _want(self) -> None:
        """Ask the leader for the steps that this learner makes while the answer travels."""
        if self.epoch is not None and not self._of(self.epoch).ended:
            ahead = 1 + math.ceil(_INSIDE_S / max(self._step_s() or _INSIDE_S, 1e-3))
            if self.step + ahead > self._wanted[self.epoch]:
                self._wanted[self.epoch] = self.step + ahead + ahead // 4
                self._out.append((self._mates[0], Wanted(self.epoch, self._wanted[self.epoch])))
