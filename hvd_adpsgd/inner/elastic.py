"""The names of horovod.torch.elastic that this library uses, from the backend of the super learners."""

from __future__ import annotations

from hvd_adpsgd.inner import backend

# ruff: noqa: F401
if backend() == "torch":
    from hvd_adpsgd.inner.over_torch import elastic as sampler
    from hvd_adpsgd.inner.over_torch import elastic as state
    from hvd_adpsgd.inner.over_torch.elastic import ElasticSampler, TorchState, run_fn
else:
    from horovod.common.elastic import run_fn
    from horovod.torch.elastic import ElasticSampler, TorchState, sampler, state
