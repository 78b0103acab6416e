"""Ends a wait in torch.distributed for a local peer that cannot come.

Where DistributedDataParallel, fully_shard or the script averages gradients, torch waits for a local peer
(another learner of the super learner) half an hour, and this library is not asked. But torch numbers the
operations of a group. So this learner waits without end for a local peer that has begun fewer of them and
will begin no further one before this learner does something else:

    this learner: backward() of step 11, operation 31        peer: 10 steps, 30 operations; hvd.barrier()
    waits in torch for the peer's operation 31               waits for this learner to enter the barrier

Numbers alone do not tell: operations between two peers count, too, so learners may differ in them for good.
So the thread that trains must also be in a call of torch that waits for peers.

Weaknesses: a wait in `work.wait()` that the script calls itself is not noticed. A script that begins an
operation of torch asynchronously, enters an operation over all learners seconds later, and on a local peer
does both in the other order, is taken for such a wait.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import weakref
from typing import Any

from hvd_adpsgd.collectives.collectives import Made
from hvd_adpsgd.engine.shared_memory import shared_counters
from hvd_adpsgd.errors import AdpsgdError, CollectiveMismatchError
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.torch_group import begun_inside, interrupt_group
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.lifecycle import preemption
from hvd_adpsgd.lifecycle.membership import Membership
from hvd_adpsgd.messaging.mpi_transport import failed_comm_ranks
from hvd_adpsgd.training.presence import live
from hvd_adpsgd.training.super_learner import SuperLearner, horovods, leaves, leaves_early

__all__ = ["watch_peers"]

log = logging.getLogger("hvd_adpsgd")

_LOOK_S = 1.0  # between two looks; a wait is noticed at the second or third one
# modules in which torch waits for peers; those that save may just write
_WAITS = re.compile(r"/torch/(autograd|distributed(?!/checkpoint)|nn/parallel)/")
_FOREVER = 2**62  # more operations than there are
_COUNTED = -1, "torch"  # what `Collectives.steps` counts here; no optimizer has this number

_watches: weakref.WeakKeyDictionary[Membership, _PeerWatch] = weakref.WeakKeyDictionary()


def watch_peers(super_learner: SuperLearner) -> None:
    """Watch the local peers until shutdown(). All learners of the super learner call this together."""
    world = super_learner.world
    watch = _watches.get(world.membership)
    if watch is None:
        watch = _watches[world.membership] = _PeerWatch(world)
    watch.steps_with(super_learner)


class _PeerWatch:
    """A thread that looks once a second whether this learner waits in torch for a peer that cannot come.

    Learners share a counter each: 0 until the learner enters shutdown(), then 1 + the number of operations
    that it had begun.
    """

    def __init__(self, world: World):
        self._world, self._me = world, world.inner_rank
        self._ended = shared_counters(1, world.inner)[:, 0]
        self._names = begun_inside(world).keys()  # learners make later groups at different times
        self._begun_before = _FOREVER
        self._over = threading.Event()
        world.collectives.steps.append(self._made)
        world.teardown.at_shutdown(self._enter_shutdown)
        self._looks = threading.Thread(target=self._run, name="hvd_adpsgd.peers", daemon=True)

    def steps_with(self, super_learner: SuperLearner) -> None:
        """Note that the calling thread makes steps with an optimizer of this super learner."""
        self._super_learner = weakref.ref(super_learner)
        self._thread = threading.get_ident()
        if not self._looks.is_alive() and not self._over.is_set():
            self._looks.start()

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

    def _made(self) -> Made:
        return Made(_COUNTED, self._thread, self._begun())

    def _enter_shutdown(self) -> None:
        self._ended[self._me] = 1 + self._begun()
        self._over.set()
        self._looks.join(2 * _LOOK_S)

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            if worlds.is_initialized():
                self._world = worlds.current()  # another one after super learners have joined
            try:
                self._look(self._world)
            except AdpsgdError as error:
                if not self._over.is_set():
                    self._end(error)
                return

    def _look(self, world: World) -> None:
        """Raise LearnerFailedError or CollectiveMismatchError if this learner waits without end."""
        begun, before = self._begun(), self._begun_before
        self._begun_before = begun
        if begun != before or begun == _FOREVER:  # this learner does not wait, or not for long
            return
        if not self._is_in_torch():
            return
        ended = self._ended.tolist()
        ranks = world.groups[world.super_rank]
        where, mates = self._position()
        failed = {ranks[i] for i in failed_comm_ranks(world.inner) if not ended[i]}
        if failed:
            preemption.block_if_leaving()
            raise leaves(world, where, failed)
        for peer, count in enumerate(ended):
            if 0 < count <= begun:
                after = "" if mates is None else f" after {mates.submitted_by(peer)} steps"
                raise leaves_early(world, where, peer, after)
        try:
            peers = [rank for rank in ranks if rank != world.rank]
            world.collectives.require_step(_COUNTED, begun - 1, peers)
        except CollectiveMismatchError as error:
            world.membership.fail([world.rank])
            world.collectives.leave(str(error))
            raise horovods(CollectiveMismatchError)(f"{where}: {error}") from None

    def _position(self) -> tuple[str, Any]:
        """Return where this learner's training is, for messages, and what its peers have made."""
        its = self._super_learner()
        return ("after training", None) if its is None else (f"step {its.step()}", its.mates)

    def _end(self, error: AdpsgdError) -> None:
        """End the wait, with torch's error; what the script calls of this library raises `error` then."""
        log.error(
            "%s: %s torch.distributed's wait ends with an error of its own.",
            type(error).__name__,
            error,
        )
        for averaging in live():
            averaging.super_learner.broken = error
        interrupt_group(self._world)
