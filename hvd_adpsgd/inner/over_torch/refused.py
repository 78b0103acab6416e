"""What only Horovod has: these names raise, and say how to have Horovod inside."""

from functools import partial
from typing import Any, NoReturn

from hvd_adpsgd.errors import MissingRequirementError


def refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise MissingRequirementError for something that this backend does not have."""
    raise MissingRequirementError(
        f"{name} works with Horovod inside super learners, and this job averages gradients by "
        "torch.distributed. Set HVD_ADPSGD_INNER=horovod; python -m hvd_adpsgd build-horovod compiles it."
    )


add_process_set, remove_process_set = (
    partial(refuse, "add_process_set()"),
    partial(refuse, "remove_process_set()"),
)
start_timeline, stop_timeline = (
    partial(refuse, "start_timeline()"),
    partial(refuse, "stop_timeline()"),
)
