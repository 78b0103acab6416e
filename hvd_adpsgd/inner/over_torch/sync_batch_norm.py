"""SyncBatchNorm over the learners of a super learner."""

from typing import Any

import torch

from hvd_adpsgd.inner.over_torch import world


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """torch's SyncBatchNorm, over torch's process group of the super learner; for GPUs, as Horovod's is.

    Raises:
        ValueError: in a forward pass that would synchronize, for an input that is not on a GPU.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize over the batches of the super learner."""
        if self.training and world.size() > 1:
            _ = self.process_group  # before torch asks whether torch.distributed is initialized
        return super().forward(input)

    @property
    def process_group(self) -> Any:
        """The group, which the learners of the super learner make together in their first forward pass."""
        return world.current().group()

    @process_group.setter
    def process_group(self, group: Any) -> None:
        """Leave out the group that torch's constructor sets."""
