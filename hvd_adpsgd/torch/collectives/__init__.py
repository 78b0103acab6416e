"""Operations over all learners, with Horovod's signatures and conventions.

With one super learner, or `process_set=hvd.super_learner`, Horovod runs these operations. Over several super
learners they use point-to-point messages: all learners first compare their calls, so that a mismatch is an
error on all learners instead of a hang, and failed learners are left out.
"""

# ruff: noqa: F401
from hvd_adpsgd.torch.basics import global_process_set
from hvd_adpsgd.torch.collectives.barriers import barrier, join
from hvd_adpsgd.torch.collectives.broadcasts import (
    broadcast,
    broadcast_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvd_adpsgd.torch.collectives.gathers import allgather, allgather_object, grouped_allgather
from hvd_adpsgd.torch.collectives.reductions import (
    allreduce,
    allreduce_,
    grouped_allreduce,
    grouped_allreduce_,
)

__all__ = [
    "allgather", "allgather_object", "allreduce", "allreduce_", "barrier", "broadcast", "broadcast_",
    "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "grouped_allgather",
    "grouped_allreduce", "grouped_allreduce_", "join",
]  # fmt: skip
