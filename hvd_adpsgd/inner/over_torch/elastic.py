"""horovod.torch.elastic, which only Horovod has: its names raise."""

from collections.abc import Callable
from typing import Any

from hvd_adpsgd.inner.over_torch.refused import refuse


class TorchState:
    """Raises: see module."""

    def __init__(self, *args: Any, **kwargs: Any):
        refuse("elastic.TorchState")


class ElasticSampler:
    """Raises: see module."""

    def __init__(self, *args: Any, **kwargs: Any):
        refuse("elastic.ElasticSampler")


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Return a function that raises: see module."""

    def run(*args: Any, **kwargs: Any) -> Any:
        refuse("elastic.run")

    return run
