"""The names of `horovod.torch` that this library uses, from the backend of the super learners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_adpsgd.inner import backend

# ruff: noqa: F401, F403
if TYPE_CHECKING:

    class HorovodInternalError(RuntimeError): ...

    def __getattr__(name: str) -> Any: ...

elif backend() == "torch":
    from hvd_adpsgd.inner.over_torch import *
else:
    BUCKET_NBYTES = 0  # Horovod fuses small tensors itself
    from horovod.common.util import num_rank_is_power_2
    from horovod.torch import *
    from horovod.torch.mpi_ops import _basics, gpu_available, handle_average_backwards_compatibility
