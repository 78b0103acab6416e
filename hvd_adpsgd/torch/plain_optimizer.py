"""The wrapped optimizer of a job of one super learner: Horovod's, adapted to what torch's users expect."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_adpsgd.inner import backend, horovod
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.strategies import Strategy
from hvd_adpsgd.training.gradients import bits_of
from hvd_adpsgd.training.inner_averaging import (
    Reducible,
    drop_gradients,
    drop_hooks,
    gradients_of,
    introduce,
    is_compared,
    lay_out_gradient,
    refuse_different,
    require_no_handles,
)
from hvd_adpsgd.training.optimizer_state import keeping_held, reunite
from hvd_adpsgd.training.sharded import require_not_replaced
from hvd_adpsgd.training.timeline import StepRecord

__all__ = [
    "become_plain",
    "is_plain_in_use",
    "pass_on",
    "plain_step",
    "record_parts",
    "say_nothing_to_average",
]

log = logging.getLogger("hvd_adpsgd")


def pass_on(wrapped: Any) -> None:
    """Give Horovod's wrapped optimizer close(), and leave it as it is otherwise."""
    kind = type(wrapped)
    kind.close, kind._closed = _plain_close, False


def become_plain(
    wrapped: Any,
    parent: type[torch.optim.Optimizer],
    named: Iterable[tuple[str, torch.Tensor]],
    compares: bool = False,
) -> None:
    """Adapt Horovod's wrapped optimizer, in a job of one super learner, to what torch's users expect.

    Changes the class that Horovod has made for this instance: step hooks run once, and a script may derive
    from the class.

    Args:
        wrapped: the optimizer that Horovod has made.
        parent: the user's class.
        named: names and parameters that it trains.
        compares: whether the script averages gradients, so that the learners compare them in some steps.
    """
    kind = type(wrapped)
    pass_on(wrapped)
    kind._parent = parent
    kind._unseen = list(named)  # until the first step has looked at the model
    kind.zero_grad, kind.load_state_dict = _plain_zero_grad, _plain_load_state_dict
    kind.add_param_group = _plain_add_param_group
    kind.step = plain_step
    _repair(wrapped)
    if compares:
        wrapped.register_step_pre_hook(_Comparison())


class _Comparison:
    """A step hook that compares the gradients of all learners, which the script averages, in some steps."""

    def __init__(self) -> None:
        self._steps = 0

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Compare the gradients, if it is the turn of this step.

        Raises:
            GradientOrderError: on all learners, if they differ.
        """
        step, self._steps = self._steps, self._steps + 1
        if (
            is_compared(step)
            and len(set(horovod.allgather_object(bits_of(gradients_of(optimizer))))) > 1
        ):
            refuse_different(optimizer, step, 0)


def _plain_close(self: Any) -> None:
    self._closed = True
    drop_hooks(self)


def is_plain_in_use(world: weakref.ref[World], wrapped: Any) -> bool:
    """Whether the wrapped optimizer is not closed, and hvd.shutdown() was not called since the wrapping."""
    return not wrapped._closed and worlds.is_initialized() and worlds.current() is world()


def plain_step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    _synchronize_for_step(self)
    return self._parent.step(self, closure)


def _plain_zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
    require_no_handles(self)
    self._parent.zero_grad(self, *args, **kwargs)


def _plain_add_param_group(self: Any, param_group: dict[str, Any]) -> None:
    self._parent.add_param_group(self, param_group)
    _introduce_added(self)


def _introduce_added(self: Any) -> None:
    """Average the gradients of parameters that Horovod's constructor has not seen."""
    if not self._grad_accs:  # one learner, or the script averages gradients
        return
    known = self._requires_update
    for group in self.param_groups:
        added = [p for p in group["params"] if p.requires_grad and p not in known]
        introduce(self, {p: f"allreduce.added.{len(known) + j}" for j, p in enumerate(added)}, True)


def _plain_load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
    drop_gradients(self)
    reunite(self)
    _introduce_added(self)
    with keeping_held(self):
        self._parent.load_state_dict(self, *args, **kwargs)


def _repair(wrapped: Any) -> None:
    """Let the optimizer accept bfloat16 and non-contiguous gradients, which Horovod refuses."""
    kind = type(wrapped)
    wrapped._compression = Reducible(wrapped._compression)
    reduce, reduce_group = kind._allreduce_grad_async, kind._grouped_allreduce_grad_async

    def allreduce_grad_async(self: Any, parameter: torch.Tensor) -> Any:
        lay_out_gradient(parameter)
        return reduce(self, parameter)

    def grouped_allreduce_grad_async(self: Any, parameters: tuple[torch.Tensor, ...]) -> Any:
        for parameter in parameters:
            lay_out_gradient(parameter)
        return reduce_group(self, parameters)

    kind._allreduce_grad_async = allreduce_grad_async
    kind._grouped_allreduce_grad_async = grouped_allreduce_grad_async


def record_parts(wrapped: Any, record: StepRecord) -> None:
    """In a job of one super learner, write the parts of the wrapped optimizer's steps into the timeline."""
    kind = type(wrapped)  # Horovod made this class for this instance
    horovods_synchronize, horovods_step = kind.synchronize, kind.step
    made = 0

    def synchronize(self: Any) -> None:
        with record.part("inner_allreduce", made):
            horovods_synchronize(self)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        nonlocal made
        _synchronize_for_step(self)
        with record.part("optimizer", made):
            loss = self._parent.step(self, closure)
        made += 1
        return loss

    step.hooked = getattr(horovods_step, "hooked", False)  # type: ignore[attr-defined]
    kind.synchronize, kind.step = synchronize, step


def _synchronize_for_step(self: Any) -> None:
    reunite(self)
    if self._unseen:
        require_not_replaced(self._unseen)
        self._unseen = []
    if self._should_synchronize:
        if self._synchronized:
            warnings.warn(
                # Horovod's words, which scripts filter by; then this library's
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code. "
                "Put step() in `with optimizer.skip_synchronize():`, or it averages the gradients again.",
                stacklevel=3,  # the line that calls step()
            )
        self.synchronize()
    self._synchronized = False


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
