"""Point-to-point messages between all learners, and the agreements that consist of such messages.

One private communicator carries the messages. ULFM's revoke, shrink and agree are never called on it: while
several threads use MPI, Open MPI's agree gives different answers on different learners, and shrink calls it.

    Messages      sends, receives, knows which learners have failed, moves the agreement's messages
    Attempt       one attempt at an operation: collectives of the learners that are alive (attempt.py)

Every attempt ends with one agreement, so an attempt has the number of its decision. A message carries the
number of its attempt in its tag. A message of an attempt that is over is received and dropped; one of the
next attempt is kept. There are no messages of later attempts, because a decision needs all votes.
"""

import pickle
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvd_adpsgd.engine.agreement import Agreement, Decision
from hvd_adpsgd.errors import LearnerFailedError, TransportError
from hvd_adpsgd.messaging.mpi_transport import Bytes, Transport, transport_of

# flags of a vote: this learner has the result; this learner has raised no error
COMPLETE, NO_ERROR = 1, 2

# MPI tag of a message = number of its attempt % _SPAN * CHANNELS + channel; UCX allows tags below 2^23
_SPAN, CHANNELS = 2**13, 2**9
# channels of messages; from FIRST_PHASE on, one for each collective of an attempt at an operation, in turn
_AGREEMENT, _ABANDON, _LAST, _LEAVES, _WAITS, _BETWEEN, FIRST_PHASE = range(7)
# how learners leave: they were told to, because of a failure, or after shutdown()
_TOLD, _FAILS, _FINISHES = range(3)
FEW = 16  # up to so many learners, each learner sends to all: fewer steps, but n^2 messages
_SHORTEST_PAUSE_S, _BUSY_PAUSE_S, _LONGEST_PAUSE_S = 1e-6, 2e-5, 1e-3
_PATIENCE_S = 1.0  # longest wait for the message with the error for which a learner left an attempt


class AttemptAbandonedError(Exception):
    """A learner has left this attempt at an operation, or has failed; never raised to the user.

    Attributes:
        reason: (class name, text, rank) of the error for which a learner has left the attempt, or None.
        is_told: whether that learner has notified all others that it has left.
    """

    def __init__(self, reason: tuple[str, str, int] | None = None, is_told: bool = False):
        super().__init__(reason)
        self.reason, self.is_told = reason, is_told


def _unreadable(error: Exception) -> TransportError:
    return TransportError(
        f"a message of another learner cannot be read ({error}). Run the same release on all of them."
    )


class Messages:
    """Messages between the learners of one communicator, which nothing else uses.

    Only one thread may use it at a time. A learner's rank in `comm` is called its place.

    Args:
        comm: private communicator, of mpi4py with errors returned, or over sockets.

    Attributes:
        agreement: the Agreement of all learners of `comm`.
        failed: places of learners that the transport or another learner has reported as failed, or that have
            left.
        left: places of learners that take part in no more operations: they have run shutdown(), or their
            super learner was sent SIGTERM. Their processes may still run.
        failing: places in `left` of learners that leave because of a failure.
        finished: places in `left` of learners that have run shutdown(), without a failure.
        abandoned: by number of an attempt that a learner has left: (class name, text, rank) of the error for
            which it did, or None.
        waiting: by place of a learner that waits in an attempt: the number of the attempt, and the facts that
            the learner has sent (`tell_waiting`).
        at_wait: called while this learner waits and no message arrives.
    """

    def __init__(self, comm: Any):
        self.comm = comm
        self.transport: Transport = transport_of(comm)
        self.place, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self.agreement = Agreement(self.size, self.place, direct=self.size <= FEW)
        self.failed: set[int] = set()
        self.left: set[int] = set()
        self.failing: set[int] = set()
        self.finished: set[int] = set()
        self.waiting: dict[int, tuple[int, Any]] = {}
        self.at_wait: Callable[[], object] = lambda: None
        self.abandoned: dict[int, tuple[str, str, int] | None] = {}
        self._inbox: dict[tuple[int, int, int], deque[Bytes]] = defaultdict(deque)
        self._between: dict[str, list[tuple[int, Any]]] = defaultdict(list)  # messages, by topic

    def send(self, place: int, channel: int, data: Any, number: int | None = None) -> None:
        """Send bytes without waiting. `data` must not change until `flush`.

        The message is sent also to a learner that is believed failed, unless the transport has reported it:
        it may be alive, and wait for the decision of the others. Nothing is sent to a learner that has left.
        """
        if place in self.left:
            return
        number = self.agreement.number if number is None else number
        self.transport.send(place, number % _SPAN * CHANNELS + channel, data)
        self._believe_reported()

    def flush(self, check: Callable[[], object] | None = None, ends: float | None = None) -> bool:
        """Wait until the buffers of all sent messages may be changed; return False if `ends` comes first."""
        return self.wait(lambda: not self.transport.is_sending, check, ends)

    def _send_agreement(self) -> None:
        for place, message in self.agreement.take_outgoing():
            self.send(place, _AGREEMENT, message)

    def wait(
        self,
        done: Callable[[], object],
        check: Callable[[], object] | None = None,
        ends: float | None = None,
    ) -> bool:
        """Receive messages until `done()`; sleep between polls, so that a waiting learner frees its core.

        Args:
            done: called after each poll; returns whether to stop.
            check: called after each poll if `done` returns False; may raise.
            ends: deadline, of time.monotonic; polls at least once. None: no deadline.

        Returns:
            Whether `done` has returned True, before the deadline.
        """
        pause = _SHORTEST_PAUSE_S
        while True:
            moved = self.poll()
            if done():
                return True
            if check is not None:
                check()
            if ends is not None and time.monotonic() > ends:
                return False
            if moved:
                pause = _SHORTEST_PAUSE_S
                continue
            if pause >= _LONGEST_PAUSE_S:
                self.look_around()
            is_busy = self.transport.is_busy
            self.transport.pause(min(pause, _BUSY_PAUSE_S) if is_busy else pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def poll(self) -> bool:
        """Receive all messages that have arrived; return whether any has."""
        moved = False
        for source, tag, buffer in self.transport.poll():
            moved = True
            self._take_in(source, tag, buffer)
        self._believe_reported()
        return moved

    def _take_in(self, source: int, tag: int, buffer: Bytes) -> None:
        channel = tag % CHANNELS
        if channel == _AGREEMENT:
            self._agree(source, buffer)
            return
        try:
            self._sort(source, tag, channel, buffer)
        except Exception as error:  # pickle raises exceptions of many classes
            raise _unreadable(error) from error

    def _sort(self, source: int, tag: int, channel: int, buffer: Bytes) -> None:
        """Note what a message says, or keep it for the attempt to which it belongs."""
        current = self.agreement.number
        number = current + (tag // CHANNELS - current + _SPAN // 2) % _SPAN - _SPAN // 2
        if channel == _LAST:
            self._inbox[0, _LAST, source].append(buffer)
        elif channel == _LEAVES:
            how, *leaving = np.frombuffer(buffer, dtype=np.int32).tolist()
            if how not in (_TOLD, _FAILS, _FINISHES) or not set(leaving) <= set(range(self.size)):
                raise ValueError(f"learners {leaving} of {self.size} leave, for reason {how}")
            self.left.update(leaving)
            self.failing.update(leaving if how == _FAILS else ())
            self.finished.update(leaving if how == _FINISHES else ())
            self.believe_failed(set(leaving))
        elif channel == _WAITS:
            self.waiting[source] = number, pickle.loads(buffer.tobytes())
        elif channel == _BETWEEN:
            topic, what = pickle.loads(buffer.tobytes())
            self._between[topic].append((source, what))
        elif channel == _ABANDON and number >= current - 1:
            reason = pickle.loads(buffer.tobytes())
            if reason is not None:
                name, text, rank = reason
                reason = str(name), str(text), int(rank)
            self.abandoned[number] = self.abandoned.get(number) or reason
        elif channel >= FIRST_PHASE and number >= current:
            self._inbox[number, channel, source].append(buffer)

    def _agree(self, source: int, message: Bytes) -> None:
        before = self.agreement.number
        try:
            self.agreement.receive(source, message.data)
        except ValueError as error:
            raise _unreadable(error) from None
        self._after_agreement(before)

    def _after_agreement(self, before: int) -> None:
        self._send_agreement()
        self.failed.update(self.agreement.suspected)
        if self.agreement.number > before:
            self._forget()
            self._relay()

    def _forget(self) -> None:
        """Drop messages and errors of attempts at operations that are over."""
        current = self.agreement.number
        for key in [k for k in self._inbox if k[1] != _LAST and k[0] < current]:
            del self._inbox[key]
        for number in [k for k in self.abandoned if k < current - 1]:
            del self.abandoned[number]

    def _relay(self) -> None:
        """Forward the last decision: a learner may still wait for it, and the coordinator may have failed.

        Otherwise that learner would wait until this one comes to its next operation. The decision is sent to
        the living learners 1, 2, 4, ... places further, which forward it as well.
        """
        message = self.agreement.last_commit()
        living = [i for i in range(self.size) if i not in self.failed or i == self.place]
        mine, step = living.index(self.place), 1
        while message and step < len(living):
            self.send(living[(mine + step) % len(living)], _AGREEMENT, message)
            step *= 2

    def recycle(self, buffer: Bytes) -> None:
        """Reuse the memory of a received message, whose bytes are no longer needed."""
        self.transport.recycle(buffer)

    def look_around(self) -> None:
        """Check for failed learners and call `at_wait`, after no message has arrived for a while."""
        self.look_for_failures()
        self.at_wait()

    def look_for_failures(self) -> None:
        """Update `failed` with the processes that the transport reports as failed."""
        self.transport.look_for_failures()
        self._believe_reported()

    def _believe_reported(self) -> None:
        if not self.transport.failed <= self.failed:
            self.believe_failed(self.transport.failed)

    def believe_failed(self, places: set[int]) -> None:
        """Mark the learners at `places` as failed, for good; the agreement's messages notify the rest."""
        before = self.agreement.number
        for place in sorted(places - self.failed):
            self.failed.add(place)
            self.agreement.failed(place)
        self._after_agreement(before)

    def check(self, number: int) -> None:
        """Raise AttemptAbandonedError if another learner has left attempt `number` at an operation."""
        if number in self.abandoned:
            raise AttemptAbandonedError(self.abandoned[number], is_told=True)

    def abandon(self, places: Sequence[int], reason: tuple[str, str, int] | None) -> None:
        """Notify the learners at `places` that this one leaves the attempt at an operation: all leave it."""
        message = pickle.dumps(reason)
        for place in places:
            if place != self.place:
                self.send(place, _ABANDON, message)

    def tell_waiting(self, facts: Any) -> None:
        """Notify all others that this learner waits in the running attempt at an operation; send `facts`."""
        message = pickle.dumps(facts)
        for place in range(self.size):
            if place != self.place:
                self.send(place, _WAITS, message)

    def say_between(self, topic: str, place: int, what: Any) -> None:
        """Send `what` to a learner, for `heard_between`; it belongs to no operation."""
        self.send(place, _BETWEEN, pickle.dumps((topic, what)))

    def heard_between(self, topic: str) -> list[tuple[int, Any]]:
        """Return (place, what) of the messages of `say_between` since the last call, after a `poll`."""
        return self._between.pop(topic, [])

    def is_awaited(self) -> bool:
        """Return whether another learner is known to be in the next attempt, which this one has not begun."""
        now = self.agreement.number
        keys = (key for key in self._inbox if key[1] >= FIRST_PHASE)
        inside = {place for number, _, place in keys if number == now}
        inside.update(place for place, (number, _) in self.waiting.items() if number == now)
        return not inside <= self.failed

    def reason(self, number: int) -> tuple[str, str, int] | None:
        """Return the error that ended attempt `number` at an operation, which comes within _PATIENCE_S."""
        self.wait(
            lambda: self.abandoned.get(number) is not None, ends=time.monotonic() + _PATIENCE_S
        )
        return self.abandoned.get(number)

    def take(self, number: int, channel: int, place: int) -> Bytes | None:
        """Return the next message of attempt `number` on `channel` from `place`; None if none has arrived."""
        arrived = self._inbox.get((number, channel, place))
        return arrived.popleft() if arrived else None

    def vote(self, flag: int, digest: int = 0) -> int:
        """Vote on the outcome of this attempt at an operation; return the number of the decision voted on."""
        before = self.agreement.number
        if self.agreement.excluded:  # this learner was declared failed: `decision` raises
            return before
        number = self.agreement.vote(flag, digest)
        self._after_agreement(before)
        return number

    def decision(self, number: int, ends: float | None = None) -> Decision | None:
        """Wait for the learners' decision `number`, and return it; None after `ends`, of time.monotonic.

        Raises:
            LearnerFailedError: if the other learners have declared this learner failed.
        """
        core = self.agreement
        self.wait(lambda: core.number > number or core.excluded, ends=ends)
        if core.excluded:
            raise LearnerFailedError(
                f"learner {self.place} of {self.size} was declared failed by its peers, because it was "
                "stopped or cut off for too long, and they continue without it. Start the job again, unless "
                "its script calls hvd.admit, which replaces it; if learners stand still for so long, raise "
                "OMPI_MCA_mpi_ft_detector_timeout, without MPI HVD_ADPSGD_FAILURE_TIMEOUT_S."
            )
        return core.decision(number)

    def leave(self, ends: float, fails: bool = False) -> None:
        """Notify the others that this learner takes part in no more operations: they do not wait for it."""
        self.announce_departure([self.place], _FAILS if fails else _FINISHES)
        self.flush(ends=ends)

    def announce_departure(self, places: Sequence[int], how: int = _TOLD) -> None:
        """Notify all other learners that the learners at `places` leave; callable on any thread, at any time.

        Args:
            places: places of the learners that leave.
            how: _TOLD, _FAILS or _FINISHES.
        """
        tag = self.agreement.number % _SPAN * CHANNELS + _LEAVES
        message = np.array([how, *places], dtype=np.int32).tobytes()
        for place in range(self.size):
            if place not in places:
                self.transport.send(place, tag, message)

    def close(self, ends: float) -> bool:
        """Receive all messages that others have sent to this learner; return whether `comm` can be freed.

        Otherwise a late message would be delivered to the next communicator that has the same number.
        """
        peers = [i for i in range(self.size) if i != self.place]
        for place in peers:
            self.send(place, _LAST, b"")

        def done() -> bool:
            return not self.transport.is_sending and all(
                place in self.failed or self._inbox.get((0, _LAST, place)) for place in peers
            )

        return self.wait(done, ends=ends) and not self.failed
