"""The few names of Horovod that train.py uses, for one learner without a launcher."""

from __future__ import annotations

Sum = "sum"


def init() -> None:
    """Nothing to set up."""


def rank() -> int:
    """The only learner's rank."""
    return 0


def size() -> int:
    """One learner."""
    return 1


def DistributedOptimizer(optimizer, named_parameters=None):  # noqa: N802 - Horovod's
    """The optimizer as it is."""
    return optimizer


def broadcast_parameters(params, root_rank):
    """Nobody to send to."""


def broadcast_optimizer_state(optimizer, root_rank):
    """Nobody to send to."""


def broadcast_object(obj, root_rank, name=None):
    """The object itself."""
    return obj


def allreduce(tensor, name=None, op=None):
    """The sum over one learner."""
    return tensor
