"""Puts this library in the place of `horovod.torch`, for libraries that import that module themselves."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from hvd_adpsgd.errors import WorldError

__all__ = ["install"]

_SUBMODULES = ("elastic", "functions", "mpi_ops", "optimizer")  # those that this library has, too


def install() -> None:
    """From now on `import horovod.torch` gives `hvd_adpsgd.torch`, in this process; idempotent.

    For libraries with a Horovod backend of their own, such as Ignite and open_clip. Call it first in the
    script, on all learners:

        import hvd_adpsgd.torch as hvd
        hvd.install()
        import ignite.distributed as idist

    Raises:
        WorldError: if a module has imported `horovod.torch` before: it would average gradients of one super
            learner where it means all learners.
    """
    face = sys.modules["hvd_adpsgd.torch"]
    before = sys.modules.get("horovod.torch")
    if before is face:
        return
    if before is not None and (late := sorted(_users(before))):
        raise WorldError(
            f"install(): {', '.join(late)} imported horovod.torch before. Call hvd_adpsgd.torch.install() at "
            "the start of the script, before other imports."
        )
    package = sys.modules.get("horovod") or _package()
    sys.modules["horovod.torch"] = package.torch = face  # type: ignore[attr-defined]
    for name in _SUBMODULES:
        sys.modules[f"horovod.torch.{name}"] = getattr(face, name)


def _package() -> ModuleType:
    """Return a new module `horovod`, where that is not installed."""
    package = ModuleType("horovod")
    package.__spec__ = ModuleSpec("horovod", None, is_package=True)
    package.__path__ = []
    sys.modules["horovod"] = package
    return package


def _users(module: ModuleType) -> set[str]:
    """Return the names of modules of others that hold `module` or one of its functions or classes."""
    own = {id(module)}
    for value in vars(module).values():
        if callable(value) and str(getattr(value, "__module__", "")).startswith("horovod."):
            own.add(id(value))
    return {
        name
        for name, user in list(sys.modules.items())
        if isinstance(user, ModuleType)
        and name.partition(".")[0] not in ("horovod", "hvd_adpsgd", "__mp_main__")
        and any(id(value) in own for value in list(vars(user).values()))
    }
