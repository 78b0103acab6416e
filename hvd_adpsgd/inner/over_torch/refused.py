"""What only Horovod has: these names raise, and say how to have Horovod inside."""

from collections.abc import Callable
from typing import Any, NoReturn

from hvd_adpsgd.errors import MissingRequirementError


def refuse(name: str) -> NoReturn:
    """Raise MissingRequirementError for something that this backend does not have."""
    raise MissingRequirementError(
        f"{name} works with Horovod inside super learners, and this job averages gradients by "
        "torch.distributed. Set HVD_ADPSGD_INNER=horovod; python -m hvd_adpsgd build-horovod compiles it."
    )


def _refusing(name: str) -> Callable[..., Any]:
    def refusing(*args: Any, **kwargs: Any) -> Any:
        refuse(f"{name}()")

    refusing.__name__ = name
    return refusing


add_process_set, remove_process_set = _refusing("add_process_set"), _refusing("remove_process_set")
start_timeline, stop_timeline = _refusing("start_timeline"), _refusing("stop_timeline")


class TorchState:
    """Raises: see module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse(f"elastic.{type(self).__name__}")


class ElasticSampler(TorchState):
    """Raises: see module."""


def run_fn(*args: Any) -> Any:
    """Return a function that raises: see module."""
    return _refusing("elastic.run")
