"""Hierarchical asynchronous decentralized SGD for Horovod and PyTorch.

Importing this package has no side effect: neither MPI, Horovod nor torch is loaded. The training
interface is `hvd_adpsgd.torch`.
"""

from hvd_adpsgd.errors import *  # noqa: F403

__version__ = "0.1.0.dev0"
# Version of all that learners send each other (messages, chunks, agreements); raise it with every change.
PROTOCOL = 9
