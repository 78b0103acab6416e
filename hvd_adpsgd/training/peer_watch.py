"""Ends a wait for a local peer that cannot come.

Where DistributedDataParallel, fully_shard or the script averages gradients, torch waits for a local peer
(another learner of the super learner) half an hour, and this library is not asked. But torch numbers the
operations of a group. So this learner waits without end for a local peer that has begun fewer of them and
will begin no further one before this learner does something else:

    this learner: backward() of step 11, operation 31        peer: 10 steps, 30 operations; hvd.barrier()
    waits in torch for the peer's operation 31               waits for this learner to enter the barrier

Numbers alone do not tell: operations between two peers count, too, so learners may differ in them for good.
So the thread that trains must also be in a call of torch that waits for peers.

A peer in an operation over all learners reports it in messages (`Collectives.require_step`). A peer in an
operation inside the super learner cannot: its thread is in Horovod. So each watch finds where the thread that
trains is, and writes that to a board in shared memory (`PeerBoard`), for its peers. They read on `Mates`
whether they have begun that operation, too. So they end also the wait of this library for a peer's gradients.

An error that one learner detects it writes to the board, too: all learners of the super learner raise it. A
watch counts its looks there: a process in which it looks no more is stopped, or hangs.

Weaknesses: a wait in `work.wait()` that the script calls itself is not noticed. A script that begins an
operation of torch asynchronously, enters an operation over all learners seconds later, and on a local peer
does both in the other order, is taken for such a wait.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import weakref
from types import FrameType
from typing import Any

from hvd_adpsgd.collectives.collectives import Made
from hvd_adpsgd.collectives.usage import module_of as _module
from hvd_adpsgd.engine.shared_memory import shared_table
from hvd_adpsgd.errors import AdpsgdError, CollectiveMismatchError
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.torch_group import begun_inside, interrupt_group
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.lifecycle import preemption
from hvd_adpsgd.lifecycle.membership import Membership
from hvd_adpsgd.lifecycle.shutdown import finishes_within
from hvd_adpsgd.messaging.host_barrier import fence
from hvd_adpsgd.messaging.mpi_transport import exited
from hvd_adpsgd.training.super_learner import SuperLearner, horovods, leaves, leaves_early

log = logging.getLogger("hvd_adpsgd")

_PERIOD_S = 1.0  # between two checks; a wait is noticed at the second or third one
# modules in which torch waits for peers; those that save may just write
_WAITS = re.compile(r"/torch/(autograd|distributed(?!/checkpoint)|nn/parallel)/")
_STOPPED_S = 10.0  # least time after which a peer that stands still counts as stopped
_LONGEST_S = 5.0  # longest wait for the end of Horovod
_FOREVER = 2**62  # more operations than there are
_COUNTED = -1, "torch"  # what `Collectives.steps` counts here; no optimizer has this number
# modules above the line of the script that is in an operation; of these, modules of Horovod
_LIBRARIES = ("hvd_adpsgd.", "horovod.", "torch.", "threading", "concurrent.", "contextlib")
_INSIDE = ("horovod.", "hvd_adpsgd.inner.over_torch.")
_OPERATIONS, _WRAPPERS = ("hvd_adpsgd.torch.", "hvd_adpsgd.joining.", *_INSIDE), ("checked", "told")

_TEXT_NBYTES = 1000
_NUMBERS = "ended", "begun", "failed", "looks", "pid", "pids"
COLUMNS = (*((name, "i8") for name in _NUMBERS), ("text", f"S{_TEXT_NBYTES}"))
_watches: weakref.WeakKeyDictionary[Membership, _PeerWatch] = weakref.WeakKeyDictionary()


def watch_peers(super_learner: SuperLearner) -> None:
    """Watch the local peers until shutdown(). All learners of the super learner call this together."""
    world = super_learner.world
    watch = _watches.get(world.membership)
    if watch is None:
        watch = _watches[world.membership] = _PeerWatch(world)
    watch.steps_with(super_learner)


def hear(world: World) -> None:
    """Poll for an error that another learner of this super learner has reported: later calls raise it."""
    if (watch := _watches.get(world.membership)) is not None:
        watch.hear()


class _PeerWatch:
    """A thread that checks once a second whether this learner waits for a peer that cannot come."""

    def __init__(self, world: World):
        self._world = world
        self._board = PeerBoard(world)
        self._names = begun_inside(world).keys()  # learners make later groups at different times
        self._all: weakref.WeakSet[SuperLearner] = weakref.WeakSet()  # those of all optimizers
        self._progress_before: tuple[int, int] | None = None
        self._elsewhere_before: dict[int, str] = {}
        # by peer: its looks, own looks since the last of them
        self._still: dict[int, tuple[int, int]] = {}
        self._over = threading.Event()
        world.collectives.steps.append(self._operations_begun)
        world.collectives.before.append(self._before_operation)
        world.teardown.at_shutdown(self._enter_shutdown)
        self._checks = threading.Thread(target=self._run, name="hvd_adpsgd.peers", daemon=True)

    def steps_with(self, super_learner: SuperLearner) -> None:
        """Note that the calling thread makes steps with an optimizer of this super learner."""
        super_learner.find_cause = self.hear
        self._super_learner = weakref.ref(super_learner)
        self._all.add(super_learner)
        self._thread = threading.get_ident()
        if not self._checks.is_alive() and not self._over.is_set():
            self._checks.start()

    def _begun(self) -> int:
        """Return how many operations this learner has begun; _FOREVER once it has destroyed a group."""
        begun = begun_inside(self._world)
        if not begun.keys() >= self._names:
            return _FOREVER
        return sum(begun[name] for name in self._names)

    def _is_in_torch(self) -> bool:
        """Whether the thread that trains is in a call of torch that may wait for peers."""
        frame = sys._current_frames().get(self._thread)
        where = "" if frame is None else frame.f_code.co_filename
        return _WAITS.search(where) is not None

    def _calls(self) -> tuple[list[FrameType], str]:
        """Return the calls of libraries that the thread that trains is in, and the script's line of them."""
        frame, calls = sys._current_frames().get(self._thread), []
        while frame is not None and _module(frame).startswith(_LIBRARIES):
            calls.append(frame)
            frame = frame.f_back
        return calls, "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def _operation(self) -> str:
        """Return the operation inside the super learner in which the thread that trains is, "" if in none."""
        calls, line = self._calls()
        if not any(_module(call).startswith(_INSIDE) for call in calls):
            return ""
        names = [call.f_code.co_name for call in calls if _module(call).startswith(_OPERATIONS)]
        return f"{[name for name in names if name not in _WRAPPERS][-1]} at {line}"

    def _position(self) -> tuple[str, Any]:
        """Return where this learner's training is, for messages, and what its peers have submitted."""
        super_learner = self._super_learner()
        if super_learner is None:
            return "after training", None
        return f"step {super_learner.steps.step}", super_learner.mates

    def _operations_begun(self) -> Made:
        return Made(_COUNTED, self._thread, self._begun())

    def _run(self) -> None:
        try:
            while not self._over.wait(_PERIOD_S):
                if worlds.is_initialized():
                    self._world = worlds.current()  # another one after super learners have joined
                self._check(self._world)
        except AdpsgdError as error:
            if not self._over.is_set():
                self._end_waits(error)
        finally:
            self._board.mine["looks"] = -1

    def _check(self, world: World) -> None:
        """Raise LearnerFailedError or CollectiveMismatchError if this learner waits without end."""
        if (cause := self._reported()) is not None:
            raise cause
        self._write_position()
        self._require_peers()
        self._kill_stopped()
        where, mates = self._position()
        awaiting = [each.mates for each in list(self._all) if each.waits]
        mates = awaiting[0] if awaiting else mates
        begun = self._begun()
        progress, before = (begun, 0 if mates is None else mates.sets), self._progress_before
        self._progress_before = progress
        elsewhere_before, self._elsewhere_before = self._elsewhere_before, {}
        if progress != before:  # this learner does not wait, or not for long
            return
        late: list[int] = mates.late() if awaiting else []
        if 0 < begun < _FOREVER and self._is_in_torch():
            self._check_torch(world, begun, where, mates)
            late = [i for i, count in enumerate(self._board.column("begun")) if count < begun]
        self._elsewhere_before = self._elsewhere(late, mates)
        for peer, operation in self._elsewhere_before.items():
            if elsewhere_before.get(peer) == operation:
                raise self._crossed(world, where, peer, operation)

    def _write_position(self) -> None:
        """Write to the board where this learner is: what it has begun before, first."""
        operation = self._operation()
        self._board.mine["begun"] = self._begun()
        self._board.write(operation)

    def _check_torch(self, world: World, begun: int, where: str, mates: Any) -> None:
        """Raise if a peer with fewer operations has ended, or is in an operation over all learners."""
        ended = self._board.column("ended")
        ranks = world.groups[world.super_rank]
        if failed := self._failed():
            preemption.block_if_leaving()
            raise leaves(world, where, {ranks[peer] for peer in failed})
        for peer, count in enumerate(ended):
            if 0 < count <= begun:
                after = "" if mates is None else f" after {mates.submitted_by(peer)} steps"
                raise leaves_early(world, where, peer, after)
        try:
            peers = [rank for rank in ranks if rank != world.rank]
            world.collectives.require_step(_COUNTED, begun - 1, peers)
        except CollectiveMismatchError as error:
            raise horovods(CollectiveMismatchError)(f"{where}: {error}") from None

    def _elsewhere(self, late: list[int], mates: Any) -> dict[int, str]:
        """Return the operation inside the super learner in which each of `late` waits alone, if it does."""
        alone = set() if mates is None else set(mates.ahead()).intersection(late)
        texts = {peer: self._board.text(peer) for peer in sorted(alone)}
        return {peer: text for peer, text in texts.items() if text}

    def _crossed(self, world: World, where: str, peer: int, operation: str) -> AdpsgdError:
        return horovods(CollectiveMismatchError)(
            f"{where}: an operation of a super learner and a step wait for each other: learner "
            f"{world.groups[world.super_rank][peer]} is in {operation}, and learner {world.rank} waits for "
            f"its gradients, at {self._calls()[1]}. Call the operation on all learners of the super learner, "
            "after the same number of steps."
        )

    def _require_peers(self) -> None:
        """Raise LearnerFailedError if a peer has failed that has begun fewer operations of torch.

        torch's own error has ended the wait for them, maybe before a check. Called before each operation over
        all learners, too: another super learner may come to that much later.
        """
        begun, failed = self._board.column("begun"), self._failed()
        if any(begun[i] < self._begun() < _FOREVER for i in failed):
            preemption.block_if_leaving()
            ranks = self._world.groups[self._world.super_rank]
            raise leaves(self._world, self._position()[0], {ranks[i] for i in failed})

    def _kill_stopped(self) -> None:
        """Kill peers whose watches have not looked for failure_timeout_s: stopped processes, or such as hang.

        Counted in looks of this learner, which may have been stopped, too. A killed one has failed for all.
        """
        self._board.mine["looks"] += 1
        world = self._world
        longest = max(_STOPPED_S, world.config.failure_timeout_s) // _PERIOD_S
        for peer, look in enumerate(self._board.column("looks")):
            last, still = self._still.get(peer, (look, -1))
            still = still + 1 if look == last >= 0 else 0
            self._still[peer] = look, still
            is_here = self._board.column("pids")[peer] == self._board.mine["pids"]
            if still == longest and is_here and world.config.wire == "tcp":
                log.error(
                    "learner %d has stood still for %d s (it was stopped, or hangs), and is killed: its "
                    "super learner has failed. Raise HVD_ADPSGD_FAILURE_TIMEOUT_S if learners stand still "
                    "for so long.",
                    world.groups[world.super_rank][peer],
                    still,
                )
                os.kill(self._board.column("pid")[peer], signal.SIGKILL)

    def _failed(self) -> list[int]:
        """Return the inner ranks of peers whose process has exited without shutdown()."""
        inner = self._world.inner
        ended = self._board.column("ended")
        return [peer for peer in exited(inner, range(len(ended))) if not ended[peer]]

    def _before_operation(self) -> None:
        if (cause := self.hear()) is not None:
            raise cause
        try:
            self._require_peers()
        except AdpsgdError as error:
            raise self._break(error) from None

    def _reported(self) -> AdpsgdError | None:
        text = self._board.error()
        return None if text is None else horovods(CollectiveMismatchError)(text)

    def hear(self) -> AdpsgdError | None:
        """Return the error that a learner has reported, if any: all later calls raise it."""
        cause = self._reported()
        return None if cause is None else self._break(cause)

    def _break(self, error: AdpsgdError) -> AdpsgdError:
        """Let what the script calls of this library raise `error`; return it."""
        for each in list(self._all):
            each.broken = each.broken or error
        self._world.membership.fail([self._world.rank])
        self._world.collectives.leave(error)
        return error

    def _end_waits(self, error: AdpsgdError) -> None:
        """End the waits of this super learner's learners; what their scripts call next raises `error`."""
        if self._is_in_torch():
            log.error(
                "%s: %s torch.distributed's wait ends with an error of its own.",
                type(error).__name__,
                error,
            )
        self._break(error)
        if isinstance(error, CollectiveMismatchError):
            self._board.report(str(error))
        interrupt_group(self._world)
        if horovod.mpi_enabled():  # Horovod over MPI has no connections that break
            finishes_within(horovod.shutdown, _LONGEST_S)

    def _enter_shutdown(self) -> None:
        self._board.mine["ended"] = 1 + self._begun()
        self._over.set()
        self._checks.join(2 * _PERIOD_S)


class PeerBoard:
    """What the learners of a super learner know of each other's operations in torch: a row of each, shared.

    Columns of a learner's row:

        ended       0 until the learner enters shutdown(), then 1 + the number of operations it had begun
        begun       number of operations of torch that it has begun, up to a second ago
        failed      1 once it has detected an error that ends the super learner
        looks       number of looks of its watch at this board; -1 after the last one
        pid, pids   of its process, and the namespace that this number is of
        text        that error; before, the operation inside the super learner that it is in, or ""
    """

    def __init__(self, world: World):
        self._rows = shared_table(COLUMNS, world.inner)
        self.mine = self._rows[world.inner_rank]
        self.mine["pid"], self.mine["pids"] = os.getpid(), os.stat("/proc/self/ns/pid").st_ino

    def column(self, name: str) -> list[int]:
        """Return what all learners have in a column."""
        values: list[int] = self._rows[name].tolist()
        return values

    def write(self, text: str) -> None:
        """Write this learner's text."""
        self.mine["text"] = text.encode()[:_TEXT_NBYTES]

    def text(self, peer: int) -> str:
        """Return a learner's text, which that one may just be writing."""
        text: bytes = self._rows["text"][peer]
        return text.decode(errors="replace")

    def report(self, error: str) -> None:
        """Write an error that this learner has detected, for good."""
        self.write(error)
        fence()
        self.mine["failed"] = 1

    def error(self) -> str | None:
        """Return the error that a learner has reported."""
        failed = self.column("failed")
        fence()
        return self.text(failed.index(1)) if any(failed) else None
