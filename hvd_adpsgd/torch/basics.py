"""init, shutdown, ranks and sizes of this learner, and the process sets of operations."""

from typing import Any

from hvd_adpsgd.config import Config
from hvd_adpsgd.errors import AlreadyInitializedError, InnerOnlyError
from hvd_adpsgd.inner import backend, horovod
from hvd_adpsgd.inner.over_torch.refused import refuse
from hvd_adpsgd.joining import callbacks, candidates, joining
from hvd_adpsgd.launch import bootstrap, torch_group
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.torch.rendezvous import TcpStore
from hvd_adpsgd.training import watching

__all__ = [
    "cross_rank", "cross_size", "global_process_set", "init", "is_initialized", "is_leader", "local_rank",
    "local_size", "rank", "shutdown", "size", "super_learner", "super_learner_group", "super_rank",
    "super_size",
]  # fmt: skip

_given: tuple[Any, ...] = ()  # the arguments of the last call of init()


def init(comm: Any = None, process_sets: Any = None, *, config: Config | None = None) -> None:
    """Initialize the library; all learners call this together. A further call does nothing.

    A process that hvd.admit has started gets the ranks of the failed learner that it replaces.

    Args:
        comm: the learners, instead of all processes of the job: an mpi4py communicator or ranks.
        process_sets: as in Horovod; only with one super learner.
        config: the options; default from the environment (HVD_ADPSGD_*).

    Raises:
        AlreadyInitializedError: in a further call with other arguments.
        LaunchError, ConfigError, TopologyError, InnerOnlyError: see hvd_adpsgd.launch.bootstrap.init.
    """
    global _given
    given = (comm, process_sets, config)
    if worlds.is_initialized():
        if not _repeats(given):
            raise AlreadyInitializedError(
                f"init() on learner {rank()}: hvd_adpsgd is initialized already, with other arguments. "
                "Call hvd.shutdown() first, or drop the second call."
            )
        return
    with bootstrap.undone_on_failure():
        if joining.is_joining(config):
            joining.enter(TcpStore, config)
        else:
            bootstrap.init(config, comm=comm, process_sets=process_sets, store=TcpStore)
            candidates.open_listener(worlds.current())
        worlds.current().teardown.at_shutdown(callbacks.forget)
        candidates.notify_launcher(worlds.current())
        watching.start(worlds.current())
    _given = given


def _repeats(given: tuple[Any, ...]) -> bool:
    """Whether the arguments of a further init() are left out, or equal those of the first init()."""
    config = worlds.current().config
    return given[:2] in (_given[:2], (None, None)) and given[2] in (None, _given[2], config)


def shutdown() -> None:
    """Stop the averaging engines, then Horovod, in bounded time; idempotent. init() may be called again."""
    bootstrap.shut_down()


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() was not called since then."""
    return worlds.is_initialized()


def rank() -> int:
    """Return the rank of this learner among all learners of the job."""
    return worlds.current().rank


def size() -> int:
    """Return the number of learners in the job."""
    return worlds.current().size


def local_rank() -> int:
    """Return the rank of this learner among the learners of its host; use this rank to choose a GPU."""
    return worlds.current().local_rank


def local_size() -> int:
    """Return the number of learners on this host."""
    return worlds.current().local_size


def cross_rank() -> int:
    """Return the rank of this host among the hosts that have a learner with this local_rank()."""
    return worlds.current().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a learner with this local_rank()."""
    return worlds.current().cross_size


def super_rank() -> int:
    """Return the rank of this learner's super learner among all super learners."""
    return worlds.current().super_rank


def super_size() -> int:
    """Return the number of super learners in the job."""
    return worlds.current().super_size


def super_learner_group() -> Any:
    """Return torch.distributed's process group of this super learner; its learners call this together.

    For a model in the super learner, before hvd.DistributedOptimizer:

        ddp = DistributedDataParallel(model, process_group=hvd.super_learner_group())

    Unless the script has initialized torch.distributed itself, the group is torch's default group until
    hvd.shutdown(); so never call torch.distributed.init_process_group after this.
    """
    return torch_group.super_learner_group(worlds.current())


def is_leader() -> bool:
    """Whether this learner runs the averaging engine of its super learner."""
    return worlds.current().is_leader


class _AllLearners(horovod.ProcessSet):
    """The process set of all learners of the job; each super learner runs a Horovod of its own."""

    process_set_id = 0

    def __init__(self) -> None:
        """Skip Horovod's constructor, which checks ranks: `ranks` is a property of this class."""

    @property
    def ranks(self) -> list[int] | None:
        return list(range(size())) if is_initialized() else None

    @property
    def mpi_comm(self) -> Any:
        return worlds.current().collectives.comm if is_initialized() else None

    def _invalidate(self) -> None:
        """Do nothing: Horovod calls this to invalidate process sets, and this process set stays valid."""

    def size(self) -> int:
        return size()

    def rank(self) -> int:
        return rank()

    def included(self) -> bool | None:
        return True if is_initialized() else None

    def __str__(self) -> str:
        return f"ProcessSet(all learners, ranks={self.ranks})"


global_process_set = _AllLearners()
super_learner = horovod.global_process_set  # each super learner runs a Horovod of its own


def inner_process_set(process_set: Any, doing: str) -> Any | None:
    """Return Horovod's process set for an operation; None if the operation is over several super learners.

    Raises InnerOnlyError if there are several, for a set that is neither all learners nor `super_learner`.
    """
    world = worlds.current()
    everyone = process_set is None or process_set is global_process_set
    if process_set is super_learner or (everyone and world.super_size == 1):
        world.collectives.asks()
        return super_learner
    if everyone:
        return None
    if world.is_plain:
        return require_sets(process_set, doing)
    raise InnerOnlyError(
        f"{doing}(process_set={process_set}) on learner {world.rank}: with {world.super_size} super "
        "learners there are two sets, all learners and hvd.super_learner. Pass one of these, or "
        f"start the job as one super learner. {one_super_learner(world)}"
    )


def require_sets(process_set: Any, doing: str) -> Any:
    """Return a process set of the script's own, in plain Horovod.

    Raises:
        MissingRequirementError: with torch.distributed inside, which has no process sets.
    """
    if backend() == "torch" and process_set is not super_learner:
        refuse(f"{doing}(process_set={process_set})")
    return process_set


def one_super_learner(world: World) -> str:
    """Return the part of a message that says how to start this job as one super learner."""
    return (
        "HVD_ADPSGD_AVERAGING=synchronous makes all "
        f"{world.size} learners one super learner, with plain Horovod between them."
    )
