"""What only Horovod has: these names raise, and say how to have Horovod inside."""

from typing import Any, NoReturn

from hvd_adpsgd.errors import MissingRequirementError


def refuse(name: str) -> NoReturn:
    """Raise MissingRequirementError for something that this backend does not have."""
    raise MissingRequirementError(
        f"{name} works with Horovod inside super learners, and this job averages gradients by "
        "torch.distributed. Set HVD_ADPSGD_INNER=horovod; python -m hvd_adpsgd build-horovod compiles it."
    )


def add_process_set(process_set: Any) -> Any:
    """Raise: super learners are the only sets."""
    refuse("add_process_set()")


def remove_process_set(process_set: Any) -> bool:
    """Raise: super learners are the only sets."""
    refuse("remove_process_set()")


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raise: HVD_ADPSGD_TIMELINE writes the timeline of this library."""
    refuse("start_timeline()")


def stop_timeline() -> None:
    """Raise: see start_timeline."""
    refuse("stop_timeline()")
