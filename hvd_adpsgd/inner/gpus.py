"""CUDA tensors inside a super learner: whether NCCL or Gloo moves them; how NCCL's operations are aborted."""

import json
import logging
import os
import threading
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("hvd_adpsgd")

_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def cuda_backend(rank: int, size: int, store: dist.Store, used: int | None = None) -> str:
    """Return "nccl"; "gloo", through the host, if learners share a GPU; "" if no learner has a GPU.

    NCCL refuses two learners on one GPU. The learners of the super learner call this together.

    Args:
        rank: this learner's rank in the super learner.
        size: number of learners of the super learner.
        store: a store of the super learner, for nothing else.
        used: number of the GPU that this learner trains on, if that is known.

    Raises:
        RuntimeError: on all learners, if some train on the same GPU although there is one for each; if torch
            is set to train on after it has ended an operation.
    """
    host = os.environ.get("NCCL_HOSTID", "")  # GPUs of two such hosts are two for NCCL
    mine = [f"{host}/{_uuid(number)}" for number in range(torch.cuda.device_count())]
    store.set(str(rank), json.dumps([mine, None if used is None else mine[used]]))
    told = [json.loads(store.get(str(other))) for other in range(size)]
    found = {gpu for gpus, _ in told for gpu in gpus}
    if len(found) >= size:
        _require_different([gpu for _, gpu in told])
        _require_no_silent_abort()
        return "nccl"
    if found and rank == 0:
        log.info(
            "%d learners of a super learner share %d GPU(s): gradients pass through the host, by Gloo. "
            "NCCL needs a GPU for each learner",
            size,
            len(found),
        )
    return "gloo" if found else ""


def _require_different(used: list[str | None]) -> None:
    """Raise RuntimeError if two learners use the same GPU; `used`: by inner rank."""
    for rank, gpu in enumerate(used):
        if gpu is not None and (first := used.index(gpu)) != rank:
            raise RuntimeError(
                f"learners {first} and {rank} of the super learner train on the same GPU "
                f"({gpu.lstrip('/')}), and there is one for each of the {len(used)} learners. Call "
                "torch.cuda.set_device(hvd.local_rank()) after hvd.init(), before the model is made."
            )


def nccl_of(group: Any) -> Any:
    """Return a process group's backend for CUDA tensors, if it is NCCL; else None."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        return None
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # the group has no backend for CUDA tensors
        return None
    return backend if isinstance(backend, nccl) else None


def abort_nccl(nccl: Any) -> None:
    """End the operations of a NCCL backend, unfinished; return at once.

    Its kernels wait for a learner that has ended, and with them what is queued behind them, until torch ends
    the process.
    """
    # in a thread: it waits for communicators that are being made
    threading.Thread(target=nccl.abort, name="hvd_adpsgd.inner.abort", daemon=True).start()


def _uuid(gpu: int) -> str:
    return str(torch.cuda.get_device_properties(gpu).uuid)


def _require_no_silent_abort() -> None:
    if os.environ.get(_ERRORS) == "2":
        raise RuntimeError(
            f"{_ERRORS}=2: torch would end an operation that takes too long, and train on with part of a "
            "sum. Unset it."
        )
