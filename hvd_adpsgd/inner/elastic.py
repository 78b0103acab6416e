"""The names of horovod.torch.elastic that this library uses, from the backend of the super learners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_adpsgd.inner import backend

# ruff: noqa: F401
if TYPE_CHECKING:

    class TorchState:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    class ElasticSampler:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(name: str) -> Any: ...

elif backend() == "torch":
    from hvd_adpsgd.inner.over_torch import refused as sampler
    from hvd_adpsgd.inner.over_torch import refused as state
    from hvd_adpsgd.inner.over_torch.refused import ElasticSampler, TorchState, run_fn
else:
    from horovod.common.elastic import run_fn
    from horovod.torch.elastic import ElasticSampler, TorchState, sampler, state
