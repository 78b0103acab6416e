"""The public interface: `import hvd_adpsgd.torch as hvd` in place of `import horovod.torch as hvd`.

It has every public name of horovod.torch. Ranks, sizes and operations such as allreduce and
broadcast_parameters are over all learners of the job; the other operations of Horovod work inside a
super learner. Importing this module starts neither MPI nor Horovod; `init` does.
"""

from hvd_adpsgd.torch.requirements import require_torch_and_horovod

# Before the imports below, which would fail with errors that do not say what to install.
require_torch_and_horovod()

# ruff: noqa: E402
from hvd_adpsgd.errors import CollectiveMismatchError
from hvd_adpsgd.inner.horovod import compression, mpi_lib_v2, sync_batch_norm
from hvd_adpsgd.joining.admission import admit, listener
from hvd_adpsgd.joining.callbacks import on_membership_change
from hvd_adpsgd.optim import natural_gradient as natural
from hvd_adpsgd.optim.lr_schedulers import Newbob, WarmupAnneal
from hvd_adpsgd.optim.natural_gradient import NaturalGradientSGD
from hvd_adpsgd.strategies import (
    A2CiD2,
    DelayByOne,
    DelayedGradients,
    FixedRing,
    GASLoC,
    GossipPGA,
    NoLoCo,
    PeriodicAveraging,
    RandomPairs,
    RandomRing,
    Synchronous,
    SynchronousGossip,
)
from hvd_adpsgd.torch import elastic, functions, mpi_ops
from hvd_adpsgd.torch.asynchronous import (
    allgather_async,
    allreduce_async,
    allreduce_async_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    poll,
    synchronize,
)
from hvd_adpsgd.torch.basics import (
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_initialized,
    is_leader,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    super_learner,
    super_learner_group,
    super_rank,
    super_size,
)
from hvd_adpsgd.torch.collectives import (
    allgather,
    allgather_object,
    allreduce,
    allreduce_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    join,
)
from hvd_adpsgd.torch.dynamic_sampler import DynamicBatchSampler, DynamicSampler, progress
from hvd_adpsgd.torch.horovod_ops import (
    Adasum,
    Average,
    Compression,
    HorovodInternalError,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    SyncBatchNorm,
    add_process_set,
    alltoall,
    alltoall_async,
    ccl_built,
    check_extension,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    grouped_reducescatter,
    grouped_reducescatter_async,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    reducescatter,
    reducescatter_async,
    remove_process_set,
    rocm_built,
    sparse_allreduce_async,
    start_timeline,
    stop_timeline,
)
from hvd_adpsgd.torch.installing import install
from hvd_adpsgd.torch.membership import failed_ranks, is_coordinator, on_failure
from hvd_adpsgd.torch.optimizer import DistributedOptimizer
from hvd_adpsgd.training.model_average import average_model, averaged, consensus_distance
from hvd_adpsgd.training.pause import averaging_paused
from hvd_adpsgd.training.reports import metrics
from hvd_adpsgd.watching.scalars import log
from hvd_adpsgd.watching.writers import log_to

__all__ = [
    "A2CiD2", "Adasum", "Average", "CollectiveMismatchError", "Compression", "DelayByOne",
    "DelayedGradients", "DistributedOptimizer", "DynamicBatchSampler", "DynamicSampler", "FixedRing",
    "GASLoC", "GossipPGA", "HorovodInternalError", "Max", "Min", "NaturalGradientSGD", "Newbob", "NoLoCo",
    "PeriodicAveraging", "ProcessSet", "Product", "RandomPairs", "RandomRing", "Sum", "SyncBatchNorm",
    "Synchronous", "SynchronousGossip", "WarmupAnneal", "add_process_set", "admit", "allgather",
    "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "average_model", "averaged", "averaging_paused",
    "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "ccl_built", "check_extension", "compression",
    "consensus_distance", "cross_rank", "cross_size", "cuda_built", "ddl_built", "elastic",
    "failed_ranks", "functions", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init", "install",
    "is_coordinator", "is_initialized", "is_leader", "join", "listener", "local_rank", "local_size",
    "log", "log_to", "metrics", "mpi_built", "mpi_enabled", "mpi_lib_v2", "mpi_ops",
    "mpi_threads_supported", "natural", "nccl_built", "on_failure", "on_membership_change", "optimizer",
    "poll", "progress", "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built",
    "shutdown", "size", "sparse_allreduce_async", "start_timeline", "stop_timeline", "super_learner",
    "super_learner_group", "super_rank", "super_size", "sync_batch_norm", "synchronize",
]  # fmt: skip
