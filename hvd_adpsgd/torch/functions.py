"""Counterpart of horovod.torch.functions: operations on parameters, optimizers and objects."""

# ruff: noqa: F401
from hvd_adpsgd.torch.collectives import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
