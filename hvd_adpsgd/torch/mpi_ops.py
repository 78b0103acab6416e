"""Under Horovod's name: ranks, and operations on tensors."""

from hvd_adpsgd.torch.collectives import *  # noqa: F403
from hvd_adpsgd.torch.inner import *  # noqa: F403
from hvd_adpsgd.torch.ranks import *  # noqa: F403
