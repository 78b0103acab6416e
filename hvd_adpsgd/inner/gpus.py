"""Which of torch's backends moves CUDA tensors inside a super learner."""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["abort_nccl", "cuda_backend"]

log = logging.getLogger("hvd_adpsgd")


def cuda_backend(rank: int, size: int, store: dist.Store) -> str:
    """Return "nccl"; "gloo", through the host, if learners share a GPU; "" if no learner has a GPU.

    NCCL refuses two learners on one GPU. The learners of the super learner call this together.

    Args:
        rank: this learner's rank in the super learner.
        size: number of learners of the super learner.
        store: a store of the super learner, for nothing else.
    """
    host = os.environ.get("NCCL_HOSTID", "")  # GPUs of two such hosts are two for NCCL
    mine = [_uuid(number) for number in range(torch.cuda.device_count())]
    store.set(str(rank), json.dumps([f"{host}/{uuid}" for uuid in mine]))
    found = {gpu for other in range(size) for gpu in json.loads(store.get(str(other)))}
    if len(found) >= size:
        return "nccl"
    if found and rank == 0:
        log.info(
            "%d learners of a super learner share %d GPUs: gradients pass through the host, by Gloo. "
            "NCCL needs a GPU for each learner",
            size,
            len(found),
        )
    return "gloo" if found else ""


def abort_nccl(group: Any) -> None:
    """End the operations of a NCCL process group, unfinished; return at once. None, and Gloo's, are left.

    NCCL's kernels wait for a learner that has ended, and with them what is queued behind them, until torch
    ends the process.
    """
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is not None and isinstance(group, nccl):
        # in a thread: it waits for communicators that are being made
        threading.Thread(target=group.abort, name="hvd_adpsgd.inner.abort", daemon=True).start()


def _uuid(gpu: int) -> str:
    return str(torch.cuda.get_device_properties(gpu).uuid)
