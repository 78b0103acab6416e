"""Replaces Horovod for one learner without a launcher: the functions of horovod.torch that train.py calls."""

from __future__ import annotations

Sum = "sum"


def init() -> None:
    """Do nothing: one learner needs no initialisation."""


def rank() -> int:
    """Return 0, the rank of the only learner."""
    return 0


def size() -> int:
    """Return 1, the number of learners."""
    return 1


def DistributedOptimizer(optimizer, named_parameters=None):  # noqa: N802 - Horovod's
    """Return the optimizer unchanged."""
    return optimizer


def broadcast_parameters(params, root_rank):
    """Do nothing: there is no other learner to send to."""


def broadcast_optimizer_state(optimizer, root_rank):
    """Do nothing: there is no other learner to send to."""


def broadcast_object(obj, root_rank, name=None):
    """Return the object itself."""
    return obj


def allreduce(tensor, name=None, op=None):
    """Return the tensor itself, which is the sum over one learner."""
    return tensor
