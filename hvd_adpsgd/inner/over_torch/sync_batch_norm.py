"""SyncBatchNorm over the learners of a super learner."""

from __future__ import annotations

from typing import Any

import torch

from hvd_adpsgd.inner.over_torch import world

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """torch's SyncBatchNorm, over torch's process group of the super learner; for GPUs, as Horovod's is.

    All learners of the super learner make their layers in the same order, after init().
    """

    def __init__(self, num_features: int, *args: Any, **kwargs: Any):
        super().__init__(num_features, *args, **kwargs)
        self.process_group = world.current().group()
