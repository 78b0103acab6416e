"""hvd.join(), for learners of a super learner with unequal numbers of steps.

A learner that has called join() contributes zeros to the gradient averages of its mates, through Horovod, and
applies no corrections. If the leader has called it, no learner applies corrections: these accumulate in the
open slot until all learners have called join(). Then the model and the optimizer state of the learner that
made most steps are copied to the whole super learner.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from hvd_adpsgd.collectives.of_communicator import allgather_object
from hvd_adpsgd.errors import ModelMismatchError, StrategyMismatchError
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.inner.tensor_bytes import bytes_of
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.lifecycle.threads import in_thread
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.presence import first_name, live, stop_as_dropped, stop_unreferenced
from hvd_adpsgd.training.super_learner import meeting_of

_PIECE_NBYTES = 2**30  # largest size of one broadcast: MPI counts are 32 bits


@contextlib.contextmanager
def contributing_zeros(device: int) -> Iterator[None]:
    """Context manager of join(): contributes zeros to gradient averages until all mates have called join().

    Args:
        device: GPU of the zeros, see horovod.join.

    Raises:
        StrategyMismatchError: at once, for a strategy whose super learners wait for each other, and where
            this library does not average the gradients.
        LearnerFailedError: if a learner of this super learner has failed.
    """
    world = worlds.current()
    stop_unreferenced()
    averagings = live()
    optimizers = [averaging.optimizer() for averaging in averagings]  # keeps the optimizers alive
    for averaging in averagings:
        _require_asynchronous(averaging)
    for averaging in averagings:
        _begin(averaging)
    # in a thread, so that after an error nothing waits for it: another learner may never call join()
    waiting = in_thread("hvd_adpsgd.join", lambda: horovod.join(device))
    yield
    with contextlib.ExitStack() as stack:
        for averaging in averagings:
            stack.enter_context(averaging.super_learner.reducing())
        waiting.result()
    mine = {averaging.number: _Made.by(averaging) for averaging in averagings}
    with meeting_of(world, "join", "join"):
        told = allgather_object(world.inner, mine)
    dropped = [a for a in averagings if any(a.number not in its for its in told)]
    if any(its.keys() != mine.keys() for its in told):
        _require_equal(world, dropped)
    for averaging in averagings:
        if averaging not in dropped:
            with averaging.super_learner.meeting("join"):
                _end(averaging, [its[averaging.number] for its in told])
    del optimizers


def _require_equal(world: World, dropped: list[Averaging]) -> None:
    """Stop the averaging of optimizers that another learner has dropped; all learners call it together.

    Raises:
        ModelMismatchError: on all learners of the super learner, if one has made more steps with such an
            optimizer than another one.
    """
    uneven = [first_name(a) for a in dropped if a.super_learner.mates.are_uneven()]
    for averaging in dropped:
        stop_as_dropped(averaging, "join")
    with meeting_of(world, "join", "join"):
        told = [text for its in allgather_object(world.inner, uneven) for text in its]
    if told:
        raise ModelMismatchError(
            f"join(): a learner of super learner {world.super_rank} has dropped the optimizer of {told[0]} "
            "after fewer or more steps than another one: their models differ. Restart from a checkpoint, "
            "with a script that keeps the optimizer on all learners until join() has returned."
        )


def _require_asynchronous(averaging: Averaging) -> None:
    averaging.require_running()
    if averaging.world.inner_size > 1 and not averaging.spec.averages_gradients:
        raise StrategyMismatchError(
            f"join() after {averaging.step} steps on learner {averaging.world.rank}: "
            "DistributedDataParallel, fully_shard or the script averages gradients in the super learner "
            "(average_gradients=False), and none of them steps without a learner. Give all learners of a "
            "super learner the same number of batches and leave join() out, or let this library average the "
            "gradients."
        )
    if averaging.plan.in_step is not None:
        raise StrategyMismatchError(
            f"join() with averaging={averaging.spec.strategy.spec()}: its super learners wait for each other "
            "in every round, so all must make the same number of steps. Give all the same number of batches "
            "and leave join() out, or use a strategy that never waits (random_pairs)."
        )


@torch.no_grad()
def _begin(averaging: Averaging) -> None:
    """Add corrections from exchanges after the last step; record in `mates` that this learner joins."""
    averaging.absorb()
    if averaging.world.inner_size > 1:
        # before horovod.join, so that all learners see it after the next all-reduce
        averaging.super_learner.mates.joins()


class _Made(NamedTuple):
    """How far a learner has come with one optimizer.

    Attributes:
        sets: number of sets of gradients.
        step: number of steps.
        places: by shard, its counts of publish() calls: see ShardMemory.place.
    """

    sets: int
    step: int
    places: list[Any]

    @classmethod
    def by(cls, averaging: Averaging) -> _Made:
        places = [memory.place() for memory in averaging.engine.memory.shards]
        return cls(averaging.super_learner.mates.sets, averaging.step, places)


@torch.no_grad()
def _end(averaging: Averaging, told: list[_Made]) -> None:
    """Copy the state of the learner with most steps to its super learner, after all have called join().

    Args:
        averaging: the Averaging of one optimizer on this learner.
        told: by inner rank, how far the learners have come with that optimizer.
    """
    sets = [its.sets for its in told]
    root = sets.index(max(sets))
    averaging.super_learner.mates.returns(sets[root])
    averaging.first_models.skip()  # all get the model of one learner; some may not have made a step
    if min(sets) == sets[root]:
        return
    averaging.step = told[root].step
    # the rule's state comes from the root, also if this learner has made no step
    averaging.restart = False
    _copy_model(averaging, root)
    averaging.rule.reload()
    for i, memory in enumerate(averaging.engine.memory.shards):
        memory.adopt_counts([its.places[i] for its in told])
    averaging.engine.publish(averaging.step)
    averaging.engines.inner_barrier()
    averaging.absorb()


def _copy_model(averaging: Averaging, root: int) -> None:
    """Overwrite the averaged tensors and the optimizer's state with those of inner rank `root`."""
    rules = itertools.chain(*averaging.rule.tensors().values())
    tensors = [*averaging.tensors.parameters.tensors, *rules]
    optimizer = averaging.optimizer()
    if optimizer is not None:
        made = _state_tensors(optimizer, root)
        averaging.rule.reload()  # replaces those that are averaged, too, so that all learners broadcast alike
        held = {id(value) for its in optimizer.state.values() for value in its.values()}
        tensors += [tensor for tensor in made if id(tensor) in held]
    _broadcast(list({id(tensor): tensor for tensor in tensors}.values()), root)


def _state_tensors(optimizer: torch.optim.Optimizer, root: int) -> list[torch.Tensor]:
    """Give the optimizer the root's options and state; return state tensors that still lack their values."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    mine = [_outline(optimizer.state.get(p, {})) for p in parameters]
    options, states = horovod.broadcast_object((options, mine), root)
    for group, its in zip(optimizer.param_groups, options, strict=True):
        group.update(its)
    tensors: list[torch.Tensor] = []
    for parameter, outline in zip(parameters, states, strict=True):
        if outline:
            state = optimizer.state[parameter]
            tensors += _fit(state, outline, parameter.device)
    return tensors


def _outline(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's optimizer state: (shape, dtype, is on CPU) for tensors, [value] for the rest."""
    return {
        key: (value.shape, value.dtype, value.device.type == "cpu")
        if isinstance(value, torch.Tensor)
        else [value]
        for key, value in state.items()
    }


def _fit(
    state: dict[str, Any], outline: Mapping[str, Any], device: torch.device
) -> Iterable[torch.Tensor]:
    """Give a parameter's optimizer state the keys and values of `outline`; yield its tensors, to be filled.

    A tensor of the same shape and dtype stays the same object.
    """
    for key in set(state) - set(outline):
        del state[key]
    for key, its in outline.items():
        if isinstance(its, list):
            state[key] = its[0]
            continue
        shape, dtype, on_host = its
        held = state.get(key)
        if not isinstance(held, torch.Tensor) or (held.shape, held.dtype) != (shape, dtype):
            state[key] = torch.zeros(shape, dtype=dtype, device="cpu" if on_host else device)
        yield state[key]


def _broadcast(tensors: list[torch.Tensor], root: int) -> None:
    """Overwrite tensors of any dtype and strides with the root's, inside the super learner."""
    copies = [bytes_of(tensor.detach()) for tensor in tensors]
    pieces = [piece for copy in copies for piece in copy.split(_PIECE_NBYTES) if piece.numel()]
    handles = [horovod.broadcast_async_(piece, root, f"join.{i}") for i, piece in enumerate(pieces)]
    for handle in handles:
        horovod.synchronize(handle)
    for tensor, copy in zip(tensors, copies, strict=True):
        if copy.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(copy.view(tensor.dtype).view(tensor.shape))
