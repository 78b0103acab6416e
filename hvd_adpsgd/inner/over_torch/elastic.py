"""horovod.torch.elastic, which only Horovod has: its names raise."""

from functools import partial
from typing import Any

from hvd_adpsgd.inner.over_torch.refused import refuse as _refuse


def _raises(self: Any, *args: Any, **kwargs: Any) -> None:
    _refuse(f"elastic.{type(self).__name__}")


class TorchState:
    """Raises: see module."""

    __init__ = _raises


class ElasticSampler:
    """Raises: see module."""

    __init__ = _raises


def run_fn(*args: Any) -> Any:
    """Return a function that raises: see module."""
    return partial(_refuse, "elastic.run")
