"""horovod.torch.elastic, which only Horovod has: its names raise."""

from typing import Any

from hvd_adpsgd.inner.over_torch.refused import refuse as _refuse


class TorchState:
    """Raises: see module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse(f"elastic.{type(self).__name__}")


class ElasticSampler(TorchState):
    """Raises: see module."""


def run_fn(*args: Any) -> Any:
    """Return a function that raises: see module."""
    return lambda *args, **kwargs: _refuse("elastic.run")
