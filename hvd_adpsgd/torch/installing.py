"""Puts this library in the place of `horovod.torch`, for libraries that import that module themselves."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import ModuleType

from hvd_adpsgd.errors import WorldError

_SUBMODULES = (
    *("compression", "elastic", "elastic.sampler", "elastic.state", "functions", "mpi_ops"),
    *("optimizer", "sync_batch_norm"),
)


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
        sys.modules[f"horovod.torch.{name}"] = attrgetter(name)(face)
    sys.meta_path.insert(0, _NoOthers())


class _NoOthers(MetaPathFinder):
    """Finds no further submodule: Python would load one of this library's a second time, by its path."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name.startswith("horovod.torch."):
            raise ModuleNotFoundError(
                f"No module named {name!r}: hvd_adpsgd.torch.install() has replaced horovod.torch. Import "
                f"one of its submodules {', '.join(_SUBMODULES)}.",
                name=name,
            )


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
