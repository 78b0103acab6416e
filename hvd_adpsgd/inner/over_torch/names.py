"""Constants, classes and queries of horovod.torch that need no communication."""

from collections.abc import Iterable
from typing import Any

import torch

from hvd_adpsgd.errors import LearnerFailedError

Average, Sum, Adasum, Min, Max, Product = range(6)  # Horovod's numbers

BUCKET_NBYTES = 25 * 2**20  # of gradients that are reduced together, as DistributedDataParallel's

try:  # so that code which imports Horovod's own class catches the errors of this backend, too
    from horovod.common.exceptions import HorovodInternalError
except ImportError:

    class HorovodInternalError(RuntimeError):  # type: ignore[no-redef]
        """An operation inside the super learner failed: a learner ended, or the learners' calls differ."""


class LearnerEndedError(LearnerFailedError, HorovodInternalError):
    """An operation waits for a learner of the super learner that has ended or called shutdown()."""


class ProcessSet:
    """A set of learners; with this backend `global_process_set`, the whole super learner, is the only one."""

    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]):
        self.ranks: Any = sorted(ranks)
        self.mpi_comm = None

    def _invalidate(self) -> None:
        self.process_set_id = None

    def size(self) -> int | None:
        """Return the number of learners; None before init()."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this learner's rank; None before init()."""
        from hvd_adpsgd.inner.over_torch import world

        return None if self.process_set_id is None else world.rank()

    def included(self) -> bool | None:
        """Whether this learner belongs to the set; None before init()."""
        return None if self.process_set_id is None else True

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])


def handle_average_backwards_compatibility(op: Any, average: bool | None) -> Any:
    """Return the reduction that the arguments `op` and the older `average` ask for.

    Raises:
        ValueError: if both are given.
    """
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if op is not None:
        return op
    return Average if average is None or average else Sum


def num_rank_is_power_2(size: int) -> bool:
    """Whether `size` is a power of 2."""
    return size != 0 and size & (size - 1) == 0


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether torch sees a GPU."""
    return torch.cuda.is_available()


def check_extension(*args: Any, **kwargs: Any) -> None:
    """Return at once: this backend has no extension that could be missing."""


def mpi_enabled() -> bool:
    """Whether gradients travel over MPI: no."""
    return False


mpi_built = mpi_threads_supported = ddl_built = ccl_built = mpi_enabled


def gloo_enabled() -> bool:
    """Whether gradients of CPU tensors travel over Gloo: yes."""
    return True


gloo_built = gloo_enabled


def nccl_built(verbose: bool = False) -> int:
    """Return 1 if torch has NCCL, else 0."""
    return int(torch.distributed.is_nccl_available())


def cuda_built() -> bool:
    """Whether torch has CUDA."""
    return torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    """Whether torch has ROCm."""
    return torch.version.hip is not None
