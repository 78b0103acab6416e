"""Steps in a job of one super learner: Horovod's, and checks that torch's users expect."""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from hvd_adpsgd.inner import backend, horovod
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.strategies import Strategy
from hvd_adpsgd.training.gradients import bits_of
from hvd_adpsgd.training.inner_averaging import gradients_of, is_compared, refuse_different
from hvd_adpsgd.training.parameters import AveragingSpec
from hvd_adpsgd.training.peer_watch import watch_peers
from hvd_adpsgd.training.reducer import Group, Reducer
from hvd_adpsgd.training.sharded import require_not_replaced
from hvd_adpsgd.training.super_learner import SuperLearner
from hvd_adpsgd.training.timeline import StepRecord

log = logging.getLogger("hvd_adpsgd")


class _AllSteps:
    """The steps of all optimizers, which nothing stops; `step` counts averaged sets of gradients."""

    number = step = 0

    def retire(self, why: str) -> None: ...

    stop = retire


_inner: SuperLearner | None = None  # of all optimizers, in the World of `local_peers`


def local_peers(world: World) -> SuperLearner | None:
    """Return what ends a wait for a peer that makes fewer steps; None alone, and without shared memory."""
    global _inner
    if world.inner_size == 1 or len({placement.host for placement in world.placements}) > 1:
        return None
    if _inner is None or _inner.world is not world:
        _inner = SuperLearner(world, _AllSteps())
        world.collectives.asked.append(_inner.mates.asks)
        world.collectives.steps.append(_inner.averaged_sets)
        watch_peers(_inner)
    return _inner


class PlainReducer(Reducer):
    """Averages the gradients of an optimizer in a job of one super learner; `inner`: see `local_peers`."""

    inner: SuperLearner | None = None

    @contextlib.contextmanager
    def _inside(self) -> Iterator[SuperLearner | None]:
        """Yield `inner`, if its World is the present one; raise what has ended the super learner, if so."""
        world = worlds.is_initialized() and worlds.current()
        inner = self.inner if self.inner and self.inner.world is world else None
        require_whole = inner.require_whole if inner else bool
        require_whole()  # Horovod may be over, and wait for ever
        try:
            yield inner
        except (horovod.HorovodInternalError, ValueError):  # ValueError: Horovod was shut down
            require_whole()
            raise

    def _submit(self, group: Group) -> None:
        with self._inside():
            super()._submit(group)

    def before_zero_grad(self) -> None:
        with self._inside():
            super().before_zero_grad()

    def finish(self) -> None:
        with self._inside() as inner:
            if inner is not None:
                inner.mates.submitted()
                inner.await_mates(self.is_reduced)
            super().finish()
            if inner is not None:
                inner.mates.averaged()
                inner.steps.step = inner.mates.sets


class Alone:
    """The steps of an optimizer in a job of one super learner.

    Args:
        world: the World of this learner.
        spec: with what the optimizer was wrapped.

    Attributes:
        is_closed: whether close() was called.
    """

    def __init__(self, world: World, spec: AveragingSpec):
        self.is_closed = False
        self._world = weakref.ref(world)
        self._unseen = list(spec.trained)  # until the first step has looked at the model
        self._record = StepRecord(world) if world.config.timeline is not None else None
        self._made = self._compared = 0

    @property
    def is_in_use(self) -> bool:
        """Whether the optimizer is not closed, and hvd.shutdown() was not called since the wrapping."""
        is_running = worlds.is_initialized() and worlds.current() is self._world()
        return is_running and not self.is_closed

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that writes its block into the timeline, if there is one."""
        return self._record.part(name, self._made) if self._record else contextlib.nullcontext()

    def step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        """Average gradients as Horovod does, and step."""
        if self._unseen:
            require_not_replaced(self._unseen)
            self._unseen = []
        with self.part("inner_allreduce"):
            optimizer._reducer.before_step()
        with self.part("optimizer"):
            loss = optimizer._parent.step(optimizer, closure)
        self._made += 1
        return loss

    def compare(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """In some steps, compare the gradients of all learners, which the script averages; a step hook.

        Raises:
            GradientOrderError: on all learners, if they differ.
        """
        step, self._compared = self._compared, self._compared + 1
        if not is_compared(step):
            return
        bits = bits_of(gradients_of(optimizer.param_groups))
        if len(set(horovod.allgather_object(bits))) > 1:
            refuse_different(optimizer.param_groups, step, 0)


_said_nothing_to_average = False


def say_nothing_to_average(world: World, strategy: Strategy) -> None:
    """Warn once per process, on learner 0, if a strategy has no second super learner to average with."""
    global _said_nothing_to_average
    if world.rank > 0 or _said_nothing_to_average:
        return
    if strategy.averages != "nothing":
        _said_nothing_to_average = True
        log.warning(
            "one super learner of %d learner%s: nothing to average between super learners; %s averages the "
            "gradients. HVD_ADPSGD_SUPER_LEARNER_SIZE=k cuts a host into super learners of k.",
            world.size,
            "" if world.size == 1 else "s",
            "Horovod" if backend() == "horovod" else "torch.distributed",
        )
