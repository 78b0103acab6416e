"""Counterpart of horovod.torch.mpi_ops: ranks, and operations on tensors."""

from hvd_adpsgd.inner.horovod import (  # noqa: F401
    gpu_available,
    handle_average_backwards_compatibility,
    num_rank_is_power_2,
)
from hvd_adpsgd.launch import world as _worlds
from hvd_adpsgd.torch.asynchronous import *  # noqa: F403
from hvd_adpsgd.torch.basics import *  # noqa: F403
from hvd_adpsgd.torch.collectives import *  # noqa: F403
from hvd_adpsgd.torch.horovod_ops import *  # noqa: F403


def is_homogeneous() -> bool:
    """Whether every host has the same number of learners."""
    return len({placement.local_size for placement in _worlds.current().placements}) == 1
