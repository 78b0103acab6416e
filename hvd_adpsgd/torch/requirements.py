"""Checks, before torch and Horovod are imported, that both are installed; errors name the install command."""

import importlib.util
import sys
from importlib import metadata

from hvd_adpsgd.errors import MissingRequirementError
from hvd_adpsgd.inner import backend

_BUILD = "python -m hvd_adpsgd build-horovod"
_CURES = {
    "torch": f"python -m pip install 'hvd_adpsgd[torch]', then {_BUILD}",
    "horovod": f"{_BUILD} (it compiles Horovod for the installed torch and MPI)",
}


def require_torch_and_horovod() -> None:
    """Check that torch is installed and, if Horovod is asked for, that it loads with this torch and an MPI.

    Raises:
        MissingRequirementError: if torch or Horovod is missing, or if Horovod does not load.
    """
    for module, cure in _CURES.items():
        needed = module == "torch" or backend() == module
        if needed and importlib.util.find_spec(module) is None:
            raise MissingRequirementError(
                f"hvd_adpsgd.torch needs {module}, which is not installed for {sys.executable}. "
                f"Run {cure}."
            )
    if backend() != "horovod":
        return
    try:
        from horovod.torch import mpi_lib_v2  # noqa: F401
    except ImportError as error:
        raise MissingRequirementError(
            f"horovod.torch does not load with torch {metadata.version('torch')} and the MPI of "
            f"{sys.prefix}: {error}. Run {_BUILD} --rebuild; python -m hvd_adpsgd doctor says more."
        ) from error
