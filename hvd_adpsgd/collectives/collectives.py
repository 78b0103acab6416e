"""Operations over all learners, which continue over the surviving learners after a failure."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from hvd_adpsgd import errors
from hvd_adpsgd.collectives.call import Call, GaveWayError, compare
from hvd_adpsgd.collectives.fifo_lock import FifoLock
from hvd_adpsgd.collectives.topics import Topics
from hvd_adpsgd.collectives.usage import Caller, counted
from hvd_adpsgd.engine.agreement import Decision
from hvd_adpsgd.errors import (
    AdpsgdError,
    CollectiveMismatchError,
    LearnerFailedError,
    PeerFailedError,
    QuorumLostError,
    TransportError,
)
from hvd_adpsgd.lifecycle import preemption
from hvd_adpsgd.lifecycle.membership import Membership
from hvd_adpsgd.messaging.attempt import Attempt
from hvd_adpsgd.messaging.host_memory import Sharing, alone
from hvd_adpsgd.messaging.messages import COMPLETE, NO_ERROR, AttemptAbandonedError, Messages
from hvd_adpsgd.messaging.mpi_transport import exited, is_failure, is_of_mpi

T = TypeVar("T")

log = logging.getLogger("hvd_adpsgd")

_FLUSH_S = 1.0
# seconds in an operation after which a learner notifies the others that it waits in it
_LATE_S = 1.0
# Number of polls of the network after a departure is sent, as MPI opens connections; seconds between two.
_PUSHES, _PUSH_S = 20, 5e-3
_SERVE_S = 0.02  # between two exchanges of `topics` while this learner waits in an operation
_TOGETHER_S = 1.0  # longest wait for the decision of an operation that a failing step ends


class Made(NamedTuple):
    """How far a learner has come with an optimizer.

    Attributes:
        of: number of the optimizer's Averaging, and what is counted, "sets" or "steps"; the same on all
            learners for the same optimizer.
        thread: the thread that makes the optimizer's steps.
        steps: number of averaged sets of gradients, or of steps.
    """

    of: tuple[int, str]
    thread: int
    steps: int


class Collectives:
    """Operations over all learners, repeated over the surviving learners after a failure.

    Some learners may detect a failure while others complete the operation, and no learner knows whether the
    others have a result. So each attempt at an operation ends with an agreement (engine/agreement):

        1. all learners exchange their calls; a mismatch is an error on all of them;
        2. they run the operation over plain messages (messaging/messages); a learner that detects a failure,
           or gets an error, leaves the attempt and notifies the others, which leave it too;
        3. all learners agree whether all have the result, and which have failed;
        4. if not, the surviving learners make another attempt; after an error all of them raise.

    Every call, also one that raises, takes part in the same number of agreements on all learners. So the next
    operations of all learners match, also after an error.

    Threads: operations of several threads run one after the other, in the order in which they are requested.
    This order must be the same on all learners; otherwise they raise CollectiveMismatchError on all.

    Args:
        comm, ranks, on_failure, joining: see the attributes.
        plain: duplicate of `comm` that carries the messages of operations, and nothing else.
        rank, size: rank of this learner in the job, and number of learners of the job.
        membership: states of the job's super learners.
        shares: whether large arrays go through shared memory between learners of one host.
        quorum: the option `quorum` (see Config).

    Attributes:
        comm: MPI communicator of all learners, also of those that have failed since. For users and for
            benchmarks: no operation here uses it.
        ranks: ranks in the job of the learners that operations include.
        on_failure: what operations do once learners have failed: "continue" or "raise".
        joining: whether this learner's super learner is joining the job, and has not joined yet.
        asked: called when an operation over all learners, or inside the super learner, is requested.
        before: called before each operation over all learners, on the thread that requests it.
        steps: functions that return how many sets of gradients the super learner has averaged for an
            optimizer. If super learners wait for each other's steps, a second function per optimizer returns
            the number of steps made.
        topics: what exchanges messages between operations.
        newcomers: ranks of the learners that have joined, a set per replacement of the communicators.
        is_newcomer: whether this learner has joined a running job.
        lock: orders the operations of several threads; an operation that another thread will run later takes
            its number here.

    Source: Bland et al., Post-failure recovery of MPI communication capability, IJHPCA 2013 (which agrees and
        repeats over shrunk communicators).
    """

    def __init__(
        self,
        comm: Any,
        plain: Any,
        rank: int,
        ranks: tuple[int, ...],
        size: int,
        membership: Membership,
        on_failure: str,
        joining: bool,
        shares: bool = True,
        quorum: str | None = None,
    ):
        self.on_failure = on_failure
        self.asked: list[Callable[[], object]] = []
        self.before: list[Callable[[], object]] = []
        self.steps: list[Callable[[], Made]] = []
        self.topics = Topics(self.serve)
        self.newcomers: list[frozenset[int]] = []
        self.is_newcomer = joining
        self._between, self._served = threading.RLock(), 0.0
        self._rank, self._size, self._membership = rank, size, membership
        self.lock = FifoLock()
        self._quorum = quorum
        self._left: AdpsgdError | None = None  # why this learner takes part in no more operations
        self._sharing = Sharing(None if shares else alone())
        self._preparing = threading.RLock()
        self._inside: int | None = None  # the thread that runs an operation now
        self._blocked: set[int] = set()  # threads that wait for an operation, see `blocking`
        # of the operation that runs now: the line that calls it, and the time (monotonic) from which on this
        # learner notifies the others that it waits in the operation
        self._caller, self._late = Caller("", "", 0), 0.0
        # number of the attempt at an operation, and numbers of steps, that `_tell_late` has sent last
        self._told: tuple[int, Any] | None = None
        self._yields = False  # whether the operation that runs now yields
        self._finished: set[int] = set()  # see `finished`; of communicators before the present ones
        # number of the attempt at an operation that `require_step` has ended
        self._refused: int | None = None
        # Messages of replaced communicators; kept alive, as MPI may still read their buffers
        self._earlier: list[Messages] = []
        self.comm, self.messages = comm, self._over(plain)
        self.ranks, self._ranks, self.joining = ranks, ranks, joining

    def _over(self, plain: Any) -> Messages:
        messages = Messages(plain)
        messages.at_wait = self._look_around
        return messages

    def use(self, comm: Any, plain: Any, ranks: tuple[int, ...], size: int | None = None) -> None:
        """Replace the communicators by ones that include a super learner that has joined.

        Args:
            comm: see the attributes.
            plain: duplicate of `comm` that carries the messages of operations, and nothing else.
            ranks: rank in the job of each learner, by its rank in `comm` and in `plain`.
            size: number of learners of the job; None if it is unchanged.
        """
        self._size = size or self._size
        self.newcomers.append(frozenset(ranks) - set(self.ranks))
        self._finished = self.finished() - set(ranks)
        if not self.messages.flush(ends=time.monotonic() + _FLUSH_S):
            self._earlier.append(self.messages)
        self.comm, self.messages = comm, self._over(plain)
        self._told = self._refused = None
        self._sharing.forget()
        self.ranks, self._ranks, self.joining = ranks, ranks, False

    def finish(self, seconds: float) -> bool:
        """Wait for all operations requested so far; return False if they take more than `seconds`."""
        with self.lock.within(seconds) as are_over:
            return are_over

    def close(self, seconds: float) -> Any | None:
        """Return the private communicator of the operations, once all its messages have been received.

        All learners call this together, after their last operation; then the communicator can be freed.
        Returns None if an operation still uses it, a learner has failed, or `seconds` have passed.
        """
        ends = time.monotonic() + seconds
        self.topics.by_name.clear()
        with self.lock.within(seconds) as are_over:  # False if a thread is still in an operation
            return self.messages.comm if are_over and self.messages.close(ends) else None

    def run(self, call: Call | str, operation: Callable[[Attempt], T]) -> T:
        """Run an operation over all learners; all of them call this. `ranks` loses the learners that fail.

        Args:
            call: this learner's call, compared with those of the others; a string stands for a Call of that
                kind.
            operation: runs in the Attempt that it is given, whose `calls` are those of all learners. Must not
                change its input, because it may be repeated.

        Returns:
            What the operation returns; None from a call that `yields`, if others call another operation.

        Raises:
            CollectiveMismatchError: on all learners, if their calls differ.
            PeerFailedError: on all learners, if one has failed and `on_failure` is "raise".
            LearnerFailedError: if the others have declared this learner failed.
            AdpsgdError: of the class of the error given to `leave`, after or during that.
            QuorumLostError: on all remaining learners, if they are too few for `quorum`.
            TransportError: on all learners, if MPI fails on one.
            Exception: what the operation raises on this learner; on the other learners an exception of that
                class if it is one of hvd_adpsgd.errors, else TransportError.
        """
        call = Call(call) if isinstance(call, str) else call
        assert self._inside != threading.get_ident(), (
            "an operation over all learners inside another one"
        )
        with counted(call.kind) as caller:
            self.prepare()
            with self.blocking(), self.lock.turn():
                self._inside = threading.get_ident()
                self._caller, self._late = caller, time.monotonic() + _LATE_S
                self._yields = call.yields
                try:
                    return self._run(call, caller, operation)
                except _WithdrawnError:
                    self.messages.leave(time.monotonic() + _FLUSH_S, fails=True)
                    self.require_part(call.kind)
                    raise
                finally:
                    self._inside = None

    def prepare(self) -> None:
        """Call the functions in `asked` and `before`, unless the operation was prepared when requested."""
        if self.lock.is_taken():
            return
        self.asks()
        with self._preparing:
            for prepare in list(self.before):
                prepare()

    def asks(self) -> None:
        """Call the functions in `asked`: an operation over all learners or the super learner is requested."""
        for note in list(self.asked):
            note()

    def gather(self, doing: str, value: Any) -> list[Any]:
        """Return the values of the learners in `ranks`, in that order; all learners call this, see `run`.

        Values of learners that have failed during this gather are omitted.
        """
        call = Call(doing, private=value)
        calls = self.run(call, lambda attempt: dict(zip(attempt.ranks, attempt.calls, strict=True)))
        return [calls[rank].private for rank in self.ranks]

    def confer(
        self,
        doing: str,
        talk: Callable[[set[int], list[tuple[int, Any]]], tuple[bool, Sequence[tuple[int, Any]]]],
    ) -> bool:
        """Exchange messages between two operations, without waiting; return whether to begin one.

        Args:
            doing: name of the operation that may begin: it does if another learner waits in it.
            talk: called with the ranks of the learners that are not known to have ended, and the (rank,
                message) that others have sent; returns whether to begin the operation, and (rank, message)
                to send.
        """
        with self.between() as is_between:
            if not is_between:
                return False
            messages = self.messages
            messages.poll()
            messages.look_for_failures()
            core = messages.agreement
            if core.excluded or core.voted:  # the next operation raises, or ends an interrupted one
                return True
            begins, said = talk(*self._heard(doing))
            self._say(doing, said)
            return begins or any(
                number == core.number and caller[0] == doing
                for number, (caller, _) in messages.waiting.values()
            )

    @contextlib.contextmanager
    def between(self) -> Iterator[bool]:
        """Context manager that yields whether no operation runs; what happens inside is serialized."""
        with self._between, self.lock.within(0) as is_between:
            yield is_between

    def serve(self) -> None:
        """Exchange messages of `topics`, unless an operation runs, which does so itself while it waits."""
        with self.between() as is_between:
            if is_between and self.topics.by_name:
                self.messages.poll()
                self.messages.look_for_failures()
                self._serve()

    def _serve(self) -> None:
        for name, topic in list(self.topics.by_name.items()):
            self._say(name, topic.talk(*self._heard(name)))

    def _heard(self, topic: str) -> tuple[set[int], list[tuple[int, Any]]]:
        messages = self.messages
        living = {self._ranks[i] for i in range(messages.size) if i not in messages.failed}
        heard = [(self._ranks[place], what) for place, what in messages.heard_between(topic)]
        return living.intersection(self.ranks), heard

    def _say(self, topic: str, said: Sequence[tuple[int, Any]]) -> None:
        for rank, what in said:
            self.messages.say_between(topic, self._ranks.index(rank), what)

    def _look_around(self) -> None:
        """While this learner waits in an operation: serve, and notify the others that it waits."""
        now = time.monotonic()
        if self.topics.by_name and now - self._served > _SERVE_S:
            self._served = now
            self._serve()
        self._tell_late()

    @property
    def is_awaited(self) -> bool:
        """Whether another learner waits in the next operation; to be read in the `talk` of `confer`."""
        return self.messages.is_awaited()

    @property
    def number(self) -> int:
        """Number of the next operation over all learners; equal on all learners between two operations."""
        return self.messages.agreement.number

    def finished(self) -> set[int]:
        """Return the ranks of the learners that have run shutdown(), without a failure, as known here."""
        return self._finished | {self._ranks[place] for place in self.messages.finished}

    def note_finished(self, ranks: Collection[int]) -> None:
        """Note that other learners know these ranks as `finished`."""
        self._finished.update(ranks)

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """Context manager in which this thread waits for an operation: it makes no step before that ends."""
        self._blocked.add(threading.get_ident())
        try:
            yield
        finally:
            self._blocked.discard(threading.get_ident())

    def _tell_late(self) -> None:
        """Notify the others, which may wait for this learner's step, that it waits in an operation.

        Raises:
            _WithdrawnError: if another thread has called `leave`.
        """
        if self._left is not None and self._inside == threading.get_ident():
            raise _WithdrawnError
        if not (self.steps or self._yields) or time.monotonic() < self._late:
            return
        counts = [count() for count in self.steps]
        made = {its.of: its.steps for its in counts if its.thread in self._blocked}
        told = self.messages.agreement.number, made
        if told != self._told and (made or self._yields):
            self._told = told
            self.messages.tell_waiting((tuple(self._caller), made))

    def require_step(self, of: tuple[int, str], step: int, ranks: Collection[int]) -> None:
        """Raise if a learner whose step is awaited waits in an operation that this learner has not entered.

        Each would wait for the other: that learner makes no step before the operation is over, and this one
        enters no operation before that step. An operation of a thread that makes no steps does not count, on
        either learner. A learner that waits for a step of a learner that raises this error raises it too. The
        trainer calls this again and again while a step waits.

        Args:
            of: what counts the steps of the waiting optimizer, see Made.
            step: number of the awaited step; the first is 0.
            ranks: ranks of the learners whose step is awaited.

        Raises:
            CollectiveMismatchError: on this learner, and on all learners in the operation.
        """
        with self.between() as is_between:
            if is_between:
                self.messages.poll()
                self._require_step(of, step, ranks)

    def _require_step(self, of: tuple[int, str], step: int, ranks: Collection[int]) -> None:
        core = self.messages.agreement
        if core.excluded or (core.voted and self._refused != core.number):
            return
        error = self.messages.abandoned.get(core.number)
        if error is not None and error[0] == CollectiveMismatchError.__name__ and error[2] in ranks:
            raise self._refuse(CollectiveMismatchError(error[1]))
        for place, (number, (caller, made)) in self.messages.waiting.items():
            rank = self._ranks[place]
            if number != core.number or rank not in ranks or of not in made:
                continue
            if made[of] <= step:
                raise self._refuse(_crossed(rank, caller, made, self._rank, of, step))

    def _refuse(self, error: CollectiveMismatchError) -> CollectiveMismatchError:
        """End on all learners, with `error`, the operation that this one has not entered; return `error`."""
        core = self.messages.agreement
        if not core.voted:
            self._refused = core.number
            reason = type(error).__name__, str(error), self._rank
            self.messages.abandon(range(len(self._ranks)), reason)
            self.messages.vote(0)
            # the others need this learner's answers to decide; it stops answering after _TOGETHER_S, because
            # another learner may wait for it outside of the operation
            self._finish_interrupted(time.monotonic() + _TOGETHER_S)
        return error

    def announce_departure(self, ranks: Collection[int]) -> None:
        """Notify all other learners that the learners of `ranks` leave in order; callable on any thread."""
        self.messages.announce_departure([i for i, rank in enumerate(self._ranks) if rank in ranks])
        for _ in range(_PUSHES):  # messages move only while the network is polled, as `ended` does
            self.ended()
            time.sleep(_PUSH_S)

    def poll_departures(self) -> None:
        """Record which learners have left in order, unless an operation runs, which records them itself."""
        with self.between() as is_between:
            if is_between:
                self.messages.poll()
                self._note_left()

    def left(self) -> set[int]:
        """Return the ranks of the learners that have said that they leave in order."""
        with self.between() as is_between, contextlib.suppress(TransportError):
            if is_between:  # else the operation that runs receives the messages
                self.messages.poll()
        return self._left_in_order()

    def _left_in_order(self) -> set[int]:
        self._membership.note_failing({self._ranks[place] for place in self.messages.failing})
        return {self._ranks[place] for place in self.messages.left - self.messages.failing}

    def _note_left(self) -> set[int]:
        """Record in the membership the learners that have left in order; return their ranks."""
        left = self._left_in_order()
        self._membership.note_left(left)
        return left

    def leave(self, why: AdpsgdError) -> None:
        """Make later operations on this learner, and one that it waits in, raise an error like `why`.

        The other learners continue without this one: at once if it waits in an operation, else when its
        process ends. Callable on any thread.
        """
        self._left = why

    def require_part(self, doing: str) -> None:
        """Raise an error like that given to `leave`, if this learner has left."""
        if self._left is not None:
            raise type(self._left)(f"{doing}: {self._left}")

    def _run(self, call: Call, caller: Caller, operation: Callable[[Attempt], T]) -> T:
        self.require_part(call.kind)
        self._finish_interrupted()
        while True:
            self._require_quorum(call.kind)
            outcome = _Outcome[T]()
            number = self._attempt(call, caller, operation, outcome)
            decision = self._decision(number, outcome.ends)
            if decision is None:
                raise self._foreign(call.kind, number)
            has_fewer = self._continue_without(decision, call.kind)
            if decision.flag & COMPLETE == 0:
                self._sharing.forget()
            if has_fewer:
                self._require_quorum(call.kind)
            if decision.flag & NO_ERROR == 0:
                raise outcome.error or self._foreign(call.kind, number)
            if decision.flag & COMPLETE:
                if call.yields or not outcome.gave_way:
                    return outcome.get()
                continue  # those that gave way come to this operation later
            if not has_fewer:
                raise TransportError(
                    f"{call.kind}: a learner abandoned the operation, but no failure was detected. "
                    "Start the job again."
                )

    def _decision(self, number: int, ends: float | None = None) -> Decision | None:
        """Return decision `number` of the agreement; see Messages.decision."""
        try:
            return self.messages.decision(number, ends)
        except LearnerFailedError:
            preemption.block_if_leaving()  # a learner excluded because of SIGTERM exits here
            raise

    def _require_quorum(self, doing: str) -> None:
        """Raise QuorumLostError if too few super learners are left; all remaining learners raise alike."""
        if self._quorum is None or self.joining or not self.gone():
            return
        if self._membership.are_minority(self.ranks):
            raise QuorumLostError(
                f"{doing}: only learners {list(self.ranks)} of {self._size} are left, half or fewer of the "
                "super learners, and HVD_ADPSGD_QUORUM is majority. Save the model and exit; start the job "
                "again from the newest checkpoint."
            )

    def _attempt(
        self, call: Call, caller: Caller, operation: Callable[[Attempt], T], outcome: _Outcome[T]
    ) -> int:
        """Attempt the operation and vote on its outcome; return the number of the decision voted on."""
        places = [self._ranks.index(rank) for rank in self.ranks]
        attempt = Attempt(self.messages, places, self.ranks, sharing=self._sharing)
        try:
            self._require_all_learners(call.kind)
            compare(attempt, call, caller)
            outcome.result = operation(attempt)
            attempt.flush()
        except CollectiveMismatchError as error:  # all learners raise this error
            outcome.error = error
        except GaveWayError:  # all learners raise it
            outcome.gave_way = True
        except AttemptAbandonedError as left:
            if not left.is_told:
                attempt.abandon()
            if left.reason and left.reason[0] == CollectiveMismatchError.__name__:
                # whatever is decided, this learner raises; the others may come to the operation much later
                outcome.ends = time.monotonic() + _TOGETHER_S
            return self.messages.vote(0 if left.reason else NO_ERROR)
        except Exception as error:
            if is_failure(error):
                self.messages.look_for_failures()
                attempt.abandon()
                return self.messages.vote(NO_ERROR)
            outcome.error = self._named(call.kind, error)
        except _WithdrawnError:
            raise
        except BaseException as error:
            # raised by a signal: notify the other learners, and do not wait for the decision
            attempt.abandon(error)
            self.messages.vote(0)
            raise
        return self._vote(attempt, outcome.error)

    def _named(self, doing: str, error: Exception) -> Exception:
        """Return the error; an mpi4py exception becomes a TransportError."""
        if not is_of_mpi(error):
            return error
        named = TransportError(
            f"{doing}: MPI failed on learner {self._rank} ({error.Get_error_string()}). No learner "  # type: ignore[attr-defined]
            "has failed. Start the job again.",
            code=error.Get_error_class(),  # type: ignore[attr-defined]
        )
        named.__cause__ = error
        return named

    def _vote(self, attempt: Attempt, error: Exception | None) -> int:
        if error is None or isinstance(error, CollectiveMismatchError):
            return self.messages.vote(COMPLETE | NO_ERROR)
        attempt.abandon(error)
        return self.messages.vote(0)

    def _finish_interrupted(self, ends: float | None = None) -> None:
        """Wait for the decision of an operation that a signal or a failing step ended early here."""
        core = self.messages.agreement
        if core.voted:
            decision = self._decision(core.number, ends)
            self._sharing.forget()
            if decision is not None:
                self._continue_without(decision, "an interrupted operation")

    def _foreign(self, doing: str, number: int) -> Exception:
        """Return the error that another learner raised in attempt `number`."""
        reason = self.messages.reason(number)
        if reason is None:
            return TransportError(
                f"{doing}: the operation failed on another learner, whose own error tells why."
            )
        name, text, rank = reason
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, AdpsgdError):
            return kind(text)
        return TransportError(f"{doing}: learner {rank} raised {name}: {text}")

    def _continue_without(self, decision: Decision, doing: str) -> bool:
        """Remove the learners that a decision declares failed from `ranks`; return whether any was new."""
        failed = {self._ranks[place] for place in decision.failed}
        gone = sorted(failed.intersection(self.ranks))
        if not gone:
            return False
        preemption.block_if_leaving()  # a mate that was sent SIGTERM may have exited before this learner
        self.ranks = tuple(rank for rank in self.ranks if rank not in failed)
        self._membership.note_local_exits(set(gone) - self._note_left())
        self._membership.poll_sources()
        if self._rank == self.ranks[0]:
            self._tell_of(gone, doing)
        return True

    def _tell_of(self, gone: Sequence[int], doing: str) -> None:
        """Log that operations exclude the learners `gone`: as a warning, unless they have left in order."""
        if self._membership.have_left(gone):
            log.info(
                "%s: learners %s have left; the other %d continue.", doing, gone, len(self.ranks)
            )
            return
        log.warning(
            "%s: learners %s are gone; operations over all learners continue with the other %d.",
            doing,
            gone,
            len(self.ranks),
        )

    def _require_all_learners(self, doing: str) -> None:
        """Raise PeerFailedError if learners have failed and `on_failure` is "raise"; all raise alike."""
        gone = self.gone()
        if gone and self.on_failure == "raise" and not self.joining:
            raise PeerFailedError(
                f"{doing}: learners {sorted(gone)} of {self._size} are gone, and HVD_ADPSGD_ON_FAILURE or "
                'hvd.on_failure says "raise". Save the model and restart, or continue with the others '
                'inside `with hvd.on_failure("continue")`.'
            )

    @contextlib.contextmanager
    def instead(self, on_failure: str) -> Iterator[None]:
        """Context manager in which the attribute `on_failure` has the given value: "continue" or "raise"."""
        before, self.on_failure = self.on_failure, on_failure
        try:
            yield
        finally:
            self.on_failure = before

    def gone(self) -> set[int]:
        """Return the ranks of the learners that operations no longer include."""
        return set(range(self._size)) - set(self.ranks)

    def ended(self) -> set[int]:
        """Return the ranks of learners known to have exited, `gone` included. Does not block."""
        return self.gone() | exited(self.comm, self._ranks)


class _WithdrawnError(BaseException):
    """Another thread has found that this learner takes part in no more operations; never raised to users."""


class _Outcome(Generic[T]):
    """The result, or the error, of one attempt at an operation on this learner."""

    def __init__(self) -> None:
        self.result: T | None = None
        self.error: Exception | None = None
        self.ends: float | None = None  # until when this learner waits for the decision (monotonic)
        self.gave_way = False

    def get(self) -> T:
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]


def _crossed(
    rank: int,
    caller: Sequence[Any],
    made: dict[tuple[int, str], int],
    own: int,
    of: tuple[int, str],
    step: int,
) -> CollectiveMismatchError:
    """Return the error for a deadlock: learner `own` waits for step `step` (from 0) of learner `rank`.

    Learner `rank` waits in an operation, which `caller` describes. What it has `made`, and `of`: see Made.
    """
    operation, file, line = caller
    after, awaited = f"{made[of]} steps", f"for step {step + 1} of learner {rank}"
    if of[1] == "torch":
        steps = max((n for (_, kind), n in made.items() if kind == "sets"), default=0)
        after = f"{steps} steps and {made[of]} operations of its torch.distributed group"
        awaited = f"in operation {step + 1} of that group"
    return CollectiveMismatchError(
        f"an operation over all learners and a step wait for each other: learner {rank} is in {operation} at "
        f"{file}:{line} after {after}, and learner {own} waits {awaited}. "
        "Make the same number of steps before each operation over all learners: on all learners of a super "
        "learner, and with a strategy that waits for steps on all super learners."
    )
