"""What averages gradients in a super learner: Horovod, or torch.distributed behind Horovod's interface.

`hvd_adpsgd.inner.horovod` has the names of `horovod.torch`, from the one or the other.
"""

import importlib.util
import os

from hvd_adpsgd.errors import ConfigError

__all__ = ["BACKENDS", "VARIABLE", "backend", "is_fallback"]

VARIABLE = "HVD_ADPSGD_INNER"
BACKENDS = ("horovod", "torch")


def _asked() -> str:
    asked = os.environ.get(VARIABLE, "").strip().lower()
    if asked in ("", "none", *BACKENDS):
        return asked.removeprefix("none")
    raise ConfigError(
        f"{VARIABLE}={asked}: allowed are {' | '.join(BACKENDS)}. Leave it out: Horovod is used where it is "
        "installed."
    )


_chosen = _asked() or ("horovod" if importlib.util.find_spec("horovod") else "torch")
_fallback = not _asked() and _chosen == "torch"


def backend() -> str:
    """Return HVD_ADPSGD_INNER as it was at the first import, else "horovod" where it is installed."""
    return _chosen


def is_fallback() -> bool:
    """Whether torch.distributed is used because Horovod is not installed, and nothing else was asked for."""
    return _fallback
