"""Under Horovod's name: ranks, and operations on tensors."""

from hvd_adpsgd.torch.basics import *  # noqa: F403
from hvd_adpsgd.torch.collectives import *  # noqa: F403
from hvd_adpsgd.torch.horovod_ops import *  # noqa: F403
