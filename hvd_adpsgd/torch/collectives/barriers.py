"""Collectives `barrier` and `join` over all learners."""

import time
from typing import Any

from hvd_adpsgd.collectives.call import Call
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.torch.basics import global_process_set, inner_process_set
from hvd_adpsgd.torch.collectives.calls import run_call
from hvd_adpsgd.torch.uneven_steps import contributing_zeros
from hvd_adpsgd.training.inside import told


def barrier(process_set: Any = global_process_set) -> None:
    """Wait until all learners have entered the barrier.

    Args:
        process_set: all learners, or hvd.super_learner.
    """
    inner = inner_process_set(process_set, "barrier")
    if inner is not None:
        told(horovod.barrier)(inner)
        return
    run_call(worlds.current(), Call("barrier"), lambda attempt: None)


def join(device: int = -1) -> int:
    """Wait until no learner has data left; meanwhile contribute zero gradients to this super learner's steps.

    With several super learners, all learners of a super learner continue with the model and the optimizer
    state of the learner among them that made most steps.

    Args:
        device: id of the GPU for the zero gradients; -1 is the CPU.

    Returns:
        Rank of the learner that called join() last, by the clocks of the hosts.

    Raises:
        StrategyMismatchError: at once, for a strategy whose super learners wait for each other.
        CollectiveMismatchError: on all learners, if a learner calls another operation over all learners.
    """
    world = worlds.current()
    if world.is_plain:
        return int(horovod.join(device))
    call = Call("join", private=(time.time(), world.rank))
    with contributing_zeros(device):
        calls = run_call(world, call, lambda attempt: attempt.calls)
    return int(max(other.private for other in calls)[1])
