"""Hierarchical asynchronous decentralized SGD for Horovod and PyTorch.

Importing this package has no side effect: neither MPI, Horovod nor torch is loaded. The training
interface is `hvd_adpsgd.torch`.
"""

from hvd_adpsgd.errors import (
    AdpsgdError,
    AlreadyInitializedError,
    ConfigError,
    DeviceMovedError,
    InnerOnlyError,
    LaunchError,
    ModelMismatchError,
    NonFiniteModelError,
    NotInitializedError,
    PeerFailedError,
    StrategyMismatchError,
    TopologyError,
    TransportError,
    UnsupportedOptimizerError,
    WorldError,
)

__version__ = "0.1.0"

__all__ = [
    "AdpsgdError",
    "AlreadyInitializedError",
    "ConfigError",
    "DeviceMovedError",
    "InnerOnlyError",
    "LaunchError",
    "ModelMismatchError",
    "NonFiniteModelError",
    "NotInitializedError",
    "PeerFailedError",
    "StrategyMismatchError",
    "TopologyError",
    "TransportError",
    "UnsupportedOptimizerError",
    "WorldError",
    "__version__",
]
