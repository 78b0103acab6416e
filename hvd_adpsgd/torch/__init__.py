"""The public interface: `import hvd_adpsgd.torch as hvd` in place of `import horovod.torch as hvd`.

It has every public name of horovod.torch. Ranks, sizes and operations such as allreduce and
broadcast_parameters are over all learners of the job; the other operations of Horovod work inside a
super learner. Importing this module starts neither MPI nor Horovod; `init` does.
"""

from hvd_adpsgd.torch.requirements import require_torch_and_horovod

# Before the imports below, which would fail with errors that do not say what to install.
require_torch_and_horovod()

# ruff: noqa: E402, F403
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
from hvd_adpsgd.torch import (
    asynchronous,
    basics,
    collectives,
    elastic,
    functions,
    horovod_ops,
    mpi_ops,
    optimizer,
)
from hvd_adpsgd.torch.asynchronous import *
from hvd_adpsgd.torch.basics import *
from hvd_adpsgd.torch.collectives import *
from hvd_adpsgd.torch.dynamic_sampler import (
    DynamicBatchSampler,
    DynamicSampler,
    dynamic_shards,
    progress,
)
from hvd_adpsgd.torch.horovod_ops import *
from hvd_adpsgd.torch.installing import install
from hvd_adpsgd.torch.membership import failed_ranks, is_coordinator, on_failure
from hvd_adpsgd.torch.optimizer import DistributedOptimizer
from hvd_adpsgd.training.async_mean import average_model_async
from hvd_adpsgd.training.model_average import average_model, averaged, consensus_distance
from hvd_adpsgd.training.pause import averaging_paused
from hvd_adpsgd.training.reports import metrics
from hvd_adpsgd.watching.scalars import log
from hvd_adpsgd.watching.writers import log_to

__all__ = [
    "A2CiD2", "CollectiveMismatchError", "DelayByOne", "DelayedGradients", "DistributedOptimizer",
    "DynamicBatchSampler", "DynamicSampler", "FixedRing", "GASLoC", "GossipPGA", "NaturalGradientSGD",
    "Newbob", "NoLoCo", "PeriodicAveraging", "RandomPairs", "RandomRing", "Synchronous",
    "SynchronousGossip", "WarmupAnneal", "admit", "average_model", "average_model_async", "averaged",
    "averaging_paused", "compression", "consensus_distance", "dynamic_shards", "elastic", "failed_ranks",
    "functions", "install", "is_coordinator", "listener", "log", "log_to", "metrics", "mpi_lib_v2",
    "mpi_ops", "natural", "on_failure", "on_membership_change", "optimizer", "progress", "sync_batch_norm",
]  # fmt: skip
__all__ += asynchronous.__all__
__all__ += basics.__all__
__all__ += collectives.__all__
__all__ += horovod_ops.__all__
