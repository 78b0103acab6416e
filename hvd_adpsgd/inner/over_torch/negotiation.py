"""The two threads of each learner: one agrees with its super learner on what runs next, one runs it."""

import asyncio
import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvd_adpsgd.inner.over_torch.link import Link
from hvd_adpsgd.inner.over_torch.names import HorovodInternalError, LearnerEndedError
from hvd_adpsgd.inner.over_torch.pending import Pending
from hvd_adpsgd.inner.over_torch.requests import Decision, Order, Request
from hvd_adpsgd.inner.over_torch.transfers import Transfers, Work

log = logging.getLogger("hvd_adpsgd")

_STALL_S, _STALL_LOOK_S = 60.0, 15.0  # as Horovod's stall check; between two looks for what stalls

# Messages, each a JSON list that begins with one of these words:
#   ask     to learner 0    an announcement
#   run     from learner 0  what all run next
#   stop    both ways       a learner calls shutdown(), so no more operations run; from learner 0 its rank
#   broken  to learner 0    an operation failed on this learner
#   failed  from learner 0  the rank of a learner that has ended or on which an operation failed, and which
#   ended   to learner 0    this learner runs nothing any more
#   close   from learner 0  no learner runs anything any more
#   lost    of a listener   the connection has ended


class Negotiation:
    """Runs the operations of one learner in an order that its super learner agrees on.

    Learner 0 decides as soon as it has nothing to run, so what is announced meanwhile is decided together,
    and reduced together.

    Args:
        rank: this learner's rank in the super learner.
        names: ranks in the job of the learners of the super learner, for messages.
        connections: by rank: of learner 0 to all others, of every other learner to 0.
        transfers: runs the operations.
        interrupt: ends an operation that waits for a learner that has ended.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[int],
        connections: dict[int, socket.socket],
        transfers: Transfers,
        interrupt: Callable[[], object],
    ):
        self._rank, self._connections, self._transfers = rank, connections, transfers
        self._links: dict[int, Link] = {}
        self._names = names
        self._interrupt = interrupt
        self._order = Order(names)
        self._lock = threading.Lock()
        self._pending: dict[str, Pending] = {}  # by name, until they are decided; guarded by _lock
        self._loop = asyncio.new_event_loop()
        # (rank, message) that has come; None: the other thread has run a batch
        self._heard: asyncio.Queue[tuple[int, list[Any]] | None] = asyncio.Queue()
        self._batches: queue.SimpleQueue[list[Work] | None] = queue.SimpleQueue()
        self._undone = 0  # batches that are decided and not run; guarded by _lock
        self._decided: list[Pending] = []  # of these batches; guarded by _lock
        # why no operation runs any more; guarded by _lock
        self._over: HorovodInternalError | None = None
        self._failed = False  # a learner has ended, or an operation has failed: nothing more is run
        self._has_run = self._has_said = False  # nothing runs any more; the others know
        self._awaited = set(connections)  # learners that have not said "ended"
        self._told: dict[str, float] = {}  # when an operation that waits was first seen
        self._look = 0.0  # when to look again for operations that stall, of time.monotonic
        self._runner = threading.Thread(target=self._run, name="hvd_adpsgd.inner.run", daemon=True)
        self._agreer = threading.Thread(
            target=self._agree, name="hvd_adpsgd.inner.agree", daemon=True
        )
        self._runner.start()
        self._agreer.start()

    def begin(self, pending: Pending) -> None:
        """Announce an operation.

        Raises:
            HorovodInternalError: if an operation of this name is pending, or none runs any more.
        """
        name = pending.request.name
        with self._lock:
            if self._over is not None:
                raise type(self._over)(*self._over.args)
            if name in self._pending:
                raise HorovodInternalError(
                    f"{pending.request.kind} {name!r}: an operation of this name is pending. Wait for it "
                    "first, or give this one another name."
                )
            self._pending[name] = pending
        self._post((self._rank, ["ask", *pending.request]))

    def stop(self) -> None:
        """End both threads, on all learners of the super learner; wait until this learner's have ended."""
        self._post((self._rank, ["stop"]))
        self._agreer.join()

    def _post(self, heard: tuple[int, list[Any]] | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._heard.put_nowait, heard)

    def _agree(self) -> None:
        why = HorovodInternalError("Horovod has been shut down.")
        try:
            self._loop.run_until_complete(self._agree_until_closed())
        except Exception as error:  # none is expected; without this, learners would wait for ever
            why = HorovodInternalError(f"the super learner's agreement failed: {error!r}")
            self._batches.put(None)
        self._fail(why, decided_too=True)
        for connection in self._connections.values():
            connection.close()
        self._loop.close()

    async def _agree_until_closed(self) -> None:
        for rank, connection in self._connections.items():
            self._links[rank] = Link(*await asyncio.open_connection(sock=connection))
        listening = [self._loop.create_task(self._listen(*each)) for each in self._links.items()]
        while not self._has_said or self._awaited:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STALL_LOOK_S):
                    if (heard := await self._heard.get()) is not None:
                        self._handle(*heard)
            if self._rank == 0:
                self._decide()
                self._tell_stalled()
            if self._has_run and not self._has_said:
                self._has_said = True
                self._say_ended()
        for task in listening:
            task.cancel()
        for link in self._links.values():
            await link.close()

    async def _listen(self, rank: int, link: Link) -> None:
        with contextlib.suppress(EOFError):
            while True:
                self._heard.put_nowait((rank, await link.receive()))
        self._heard.put_nowait((rank, ["lost"]))

    def _handle(self, rank: int, message: list[Any]) -> None:
        word, *rest = message
        own = rank == self._rank
        if own and self._rank > 0:
            self._send(message)
        elif word == "ask":
            self._order.ask(rank, Request(*rest))
        elif word == "stop" and self._over is None:
            if self._rank == 0:
                self._send(["stop", rank])
            self._end(self._stopped_by(rest[0] if rest else rank), decided_too=False)
        elif word == "run":
            self._start([Decision(Request(*request), *more) for request, *more in rest[0]])
        elif word == "broken":
            self._tell_failed(
                rank, f"an operation failed on learner {self._names[rank]}: {rest[0]}"
            )
        elif word == "lost":
            self._lost(rank)
        elif word == "failed":
            self._end_without(*rest)
        elif word == "ended":
            self._awaited.discard(rank)
            if self._has_said:
                self._say_ended()
        elif word == "close":
            self._awaited.clear()

    def _stopped_by(self, rank: int) -> HorovodInternalError:
        if rank == self._rank:
            return HorovodInternalError("Horovod has been shut down.")
        return LearnerEndedError(
            f"learner {self._names[rank]} of this super learner has shut down: its script has ended or "
            f"failed, or it called hvd.shutdown(), and learner {self._names[self._rank]} waits for it in an "
            "operation. Make the same number of steps on all learners of a super learner; or "
            "call hvd.join() after the last step, if this library averages the gradients."
        )

    def _lost(self, rank: int) -> None:
        """Note that the connection with a learner has ended."""
        self._awaited.discard(rank)
        self._tell_failed(rank, f"learner {self._names[rank]} of this super learner has ended")
        if self._has_said:
            self._say_ended()

    def _tell_failed(self, rank: int, why: str) -> None:
        if self._rank == 0:
            self._send(["failed", rank, why])
        self._end_without(rank, why)

    def _end_without(self, rank: int, why: str) -> None:
        self._failed = True
        self._end(LearnerEndedError(why), decided_too=True)
        self._transfers.abort()
        self._interrupt()

    def _end(self, why: HorovodInternalError, decided_too: bool) -> None:
        """Begin to end: fail what is pending, decide nothing new; what is decided runs if all are alive."""
        ends = self._over is None
        self._fail(why, decided_too)
        if ends:
            self._batches.put(None)

    def _say_ended(self) -> None:
        """Tell learner 0 that this one runs nothing; from learner 0, tell all that nothing runs anywhere."""
        if self._rank > 0:
            self._send(["ended"])
        elif not self._awaited:
            self._send(["close"])

    def _fail(self, why: HorovodInternalError, decided_too: bool) -> None:
        with self._lock:
            self._over = self._over or why
            pendings = [*self._pending.values(), *(self._decided if decided_too else ())]
            self._pending = {}
        for pending in pendings:
            pending.fail(why)

    def _send(self, message: list[Any]) -> None:
        for link in self._links.values():
            link.send(message)

    def _decide(self) -> None:
        if self._undone or self._over is not None:
            return
        decided = self._order.decide()
        for each in decided:
            self._told.pop(each.request.name, None)
        if decided:
            self._send(["run", decided])
            self._start(decided)

    def _start(self, decided: list[Decision]) -> None:
        """Hand decided operations to the thread that runs them; without a pending one during join()."""
        with self._lock:
            self._undone += 1
            works = [(each, self._pending.pop(each.request.name, None)) for each in decided]
            self._decided += [pending for _, pending in works if pending is not None]
        self._batches.put(works)

    def _tell_stalled(self) -> None:
        """Warn of an operation for which some learners have waited a minute; Horovod does, too."""
        now = time.monotonic()
        if now < self._look:
            return
        self._look = now + _STALL_LOOK_S
        waiting = dict(self._order.waiting())
        self._told = {name: self._told.get(name, now) for name in waiting}
        for name, since in self._told.items():
            if now - since > _STALL_S:
                self._told[name] = float("inf")
                log.warning(
                    "operation %r has waited %g s for learners %s of this super learner, which have not "
                    "called it. Call it on all learners: look for a branch that only some take.",
                    name,
                    _STALL_S,
                    [self._names[rank] for rank in waiting[name]],
                )

    def _run(self) -> None:
        while (works := self._batches.get()) is not None:
            broken = (
                "" if self._failed else self._transfers.run([w for w in works if not w[0].error])
            )
            if broken:
                self._post((self._rank, ["broken", broken]))
            for decision, pending in works:
                if decision.error and pending is not None:
                    pending.fail(HorovodInternalError(decision.error))
            with self._lock:
                self._undone -= 1
                self._decided = [pending for pending in self._decided if not pending.done()]
            self._post(None)
        self._has_run = True
        self._post(None)
