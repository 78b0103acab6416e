"""A Horovod for one super learner over torch.distributed: the interface of horovod.torch, no build.

    requests      which operations may begin, in which order (no threads, no sockets)
    link          messages between learners
    negotiation   two threads: one agrees with the others, one runs operations
    transfers     operations in torch's process groups
    operations, functions, ...     the interface

Learners announce operations by name and in any order, as in Horovod: autograd does not compute gradients in
the same order everywhere, torch.distributed needs the same order everywhere.
"""

# ruff: noqa: F401, F403
from hvd_adpsgd.inner.over_torch import compression, sync_batch_norm
from hvd_adpsgd.inner.over_torch.compression import Compression
from hvd_adpsgd.inner.over_torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvd_adpsgd.inner.over_torch.names import *
from hvd_adpsgd.inner.over_torch.operations import *
from hvd_adpsgd.inner.over_torch.refused import (
    add_process_set,
    remove_process_set,
    start_timeline,
    stop_timeline,
)
from hvd_adpsgd.inner.over_torch.sync_batch_norm import SyncBatchNorm
from hvd_adpsgd.inner.over_torch.world import World, is_initialized, rank, shutdown, size, start

mpi_lib_v2 = None  # Horovod's compiled part
