"""Horovod's operations that work inside a super learner only, with a check of their process set.

With several super learners these operations need `process_set=hvd.super_learner`. Horovod's queries and
constants are those of this module, too. SyncBatchNorm works over the learners of the super learner.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from hvd_adpsgd.errors import InnerOnlyError
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.inner.horovod import (
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
    ccl_built,
    check_extension,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.gloo import variables_set
from hvd_adpsgd.torch import basics
from hvd_adpsgd.training.inside import told

__all__ = [
    "Adasum", "Average", "Compression", "HorovodInternalError", "Max", "Min", "ProcessSet", "Product",
    "Sum", "SyncBatchNorm", "add_process_set", "alltoall", "alltoall_async", "ccl_built",
    "check_extension", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "grouped_reducescatter",
    "grouped_reducescatter_async", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
    "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built",
    "sparse_allreduce_async", "start_timeline", "stop_timeline",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])


def inner_only(operation: F) -> F:
    """Return Horovod's `operation` with a check that raises if it would span several super learners."""
    signature = inspect.signature(operation)
    takes_set = "process_set" in signature.parameters
    name = operation.__name__

    @functools.wraps(operation)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not takes_set:
            require_one_super_learner(name)
            return operation(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        asked = given.arguments.get("process_set")
        inner = basics.inner_process_set(asked, name)
        if inner is None:
            raise _refusal(name, " Pass process_set=hvd.super_learner to stay inside one, or start")
        given.arguments["process_set"] = inner
        return told(operation)(*given.args, **given.kwargs)

    if takes_set:
        checked.__signature__ = _with_our_default(signature)  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]


def require_one_super_learner(name: str, cure: str = " Start") -> None:
    """Raise InnerOnlyError unless the job has one super learner; `cure` is the beginning of the message's."""
    if worlds.current().super_size > 1:
        raise _refusal(name, cure)


def _refusal(name: str, cure: str) -> InnerOnlyError:
    world = worlds.current()
    return InnerOnlyError(
        f"{name}() on learner {world.rank}: Horovod works inside a super learner, and this job has "
        f"{world.super_size}.{cure} the job as one super learner: {basics.one_super_learner(world)}"
    )


def _with_our_default(signature: inspect.Signature) -> inspect.Signature:
    """Return `signature` with all learners as the default of its parameter `process_set`."""
    parameters = [
        p.replace(default=basics.global_process_set) if p.name == "process_set" else p
        for p in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters)


sparse_allreduce_async = inner_only(horovod.sparse_allreduce_async)
alltoall = inner_only(horovod.alltoall)
alltoall_async = inner_only(horovod.alltoall_async)
reducescatter = inner_only(horovod.reducescatter)
reducescatter_async = inner_only(horovod.reducescatter_async)
grouped_reducescatter = inner_only(horovod.grouped_reducescatter)
grouped_reducescatter_async = inner_only(horovod.grouped_reducescatter_async)
start_timeline = inner_only(horovod.start_timeline)
stop_timeline = inner_only(horovod.stop_timeline)


@functools.wraps(horovod.add_process_set)
def _add_process_set(process_set: Any) -> Any:
    with variables_set():
        return horovod.add_process_set(process_set)


add_process_set = inner_only(_add_process_set)
remove_process_set = inner_only(horovod.remove_process_set)
