"""Makes each learner's World (ranks, communicators) in init(), and tears it down in bounded time.

Importing this module starts nothing; `init` loads MPI.
"""

import atexit
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hvd_adpsgd import strategies
from hvd_adpsgd.collectives.of_communicator import allgather_object
from hvd_adpsgd.config import Config, environment_name
from hvd_adpsgd.engine.failures import mpi_failures
from hvd_adpsgd.engine.handshake import RELEASE
from hvd_adpsgd.errors import ConfigError, InnerOnlyError, LaunchError, TransportError, WorldError
from hvd_adpsgd.inner import VARIABLE, backend, horovod
from hvd_adpsgd.launch import communicators, rendezvous
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.deadline import Deadline
from hvd_adpsgd.launch.gloo import world_over_gloo
from hvd_adpsgd.launch.host_name import unresolved_host
from hvd_adpsgd.launch.over_torch import start_over_torch
from hvd_adpsgd.launch.processes import variables
from hvd_adpsgd.launch.rendezvous import Opener
from hvd_adpsgd.launch.world import Communicators, Placement, World, form_super_learners
from hvd_adpsgd.lifecycle import preemption, shutdown, state_dump
from hvd_adpsgd.lifecycle.shutdown import exit_state
from hvd_adpsgd.messaging.sockets import Communicator

log = logging.getLogger("hvd_adpsgd")

_LEARNER_PID = "ADPSGD_LEARNER_PID"  # variable with the learner's pid, read by child processes


def init(
    config: Config | None = None,
    *,
    comm: Any = None,
    process_sets: Any = None,
    store: Opener | None = None,
) -> World:
    """Make the World of this learner (ranks, communicators); all learners call this together.

    Args:
        config: the options; default from the environment. Equal on all learners.
        comm: the learners, instead of all processes of the job: an mpi4py communicator, or ranks
            of MPI.COMM_WORLD (then only these processes may call init).
        process_sets: as in Horovod's init; only with one super learner.
        store: connects to torch's TCPStore, for processes that MPI does not join.

    Returns:
        The world, which worlds.current returns from now on.

    Raises:
        LaunchError: if the processes were started in a way in which they cannot connect, or do not connect
            within start_timeout_s, or if this process is a child of a learner.
        ConfigError: on all learners, if an option is invalid on one of them or differs between two.
        TopologyError: on all learners, if super_learner_size does not divide a host's learners.
        InnerOnlyError: on all learners, for process_sets with several super learners.
        PeerFailedError: if the process of a learner ends during init().
    """
    _require_whole()
    _require_no_learner_above()
    options = config or communicators.options_of_network()
    everyone = _everyone(comm, store, options)
    try:
        with mpi_failures("init()"):
            world = _make_world(everyone, config, bool(process_sets))
    except TransportError:
        exit_state.lacks_others(everyone)
        raise
    except Exception:
        everyone.Free()
        raise
    return enter(world, process_sets)


def _everyone(comm: Any, store: Opener | None, options: Config) -> Any:
    """Return a private communicator of all learners, over MPI or over sockets."""
    deadline = Deadline(options.start_timeout_s)
    place = rendezvous.of_environment(os.environ)
    if place is not None and (place.speaks_http or store is not None):
        if comm is not None:
            raise communicators.refuse_comm(place)
        watch_exit()
        return communicators.over_sockets(place, store, options, deadline)
    communicators.require_mpi_launcher(os.environ)
    mpi = communicators.load_mpi(deadline)
    watch_exit()
    return communicators.of_learners(mpi, comm, deadline)


def enter(world: World, process_sets: Any = None) -> World:
    """Start Horovod in this super learner; from now on worlds.current returns `world`."""
    worlds.put(world)
    os.environ[_LEARNER_PID] = str(os.getpid())
    _start_horovod(world, process_sets)
    _log_from(world.config.log_level)
    exit_state.has_begun = True
    state_dump.add_source("world", _describe)
    state_dump.watch(world.rank)
    _watch_preemption(world)
    return world


def _watch_preemption(world: World) -> None:
    """Make SIGTERM start the departure of this super learner; in plain Horovod SIGTERM ends the process."""
    preemption.watch(None if world.is_plain else world.departure)
    world.collectives.before.append(preemption.block_if_leaving)


def _describe() -> dict[str, Any] | None:
    """Return what a state file says about the world; None after shutdown()."""
    if not worlds.is_initialized():
        return None
    world = worlds.current()
    shown = ("rank", "size", "super_rank", "super_size", "inner_rank", "inner_size", "hostname")
    return {
        **{name: getattr(world, name) for name in shown},
        "super_learners": world.groups,
        "states": [state.name.lower() for state in world.membership.states],
        "left_in_communicator": world.collectives.ranks,
        "on_failure": world.collectives.on_failure,
        "config": dataclasses.asdict(world.config),
    }


def _log_from(level: str) -> None:
    """Log the library's messages of `level` and above, to stderr if the script has not set up logging."""
    log.setLevel(level.upper())
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hvd_adpsgd: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        log.addHandler(handler)


def _require_whole() -> None:
    if exit_state.stuck:
        raise WorldError(
            f"init(): a thread of this process is left behind in {exit_state.stuck}. init() cannot be called "
            "again in it. Start the job again."
        )


def _require_no_learner_above() -> None:
    """Raise LaunchError in a child process of a learner: its parent has started MPI and Horovod already."""
    above = os.environ.get(_LEARNER_PID)
    if above is not None and int(above) in _multiprocessing_parents():
        raise LaunchError(
            f"init(): this is a child process of the learner with pid {above}. multiprocessing imports the "
            "script again in each worker that it spawns. Put all that only learners do, init() included, "
            'under `if __name__ == "__main__":`.'
        )


def _multiprocessing_parents() -> set[int]:
    """Return pids of the processes that may have started this one with multiprocessing; empty if none did."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        return {parent.pid}
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return set()
    # a spawned child that imports the script: its parent is the learner, or the learner's fork server
    server = re.search(r"^PPid:\s*(\d+)", Path(f"/proc/{os.getppid()}/status").read_text(), re.M)
    return {os.getppid(), int(server[1]) if server else 0}


def _make_world(everyone: Any, config: Config | None, asks_sets: bool) -> World:
    """Gather placements and options of all learners, and form super learners; all raise the same error."""
    _require_one_build(everyone)
    _require_one_backend(everyone, config)
    host = communicators.of_host(everyone)
    answers = allgather_object(everyone, _answer(everyone, host, config, asks_sets))
    _require_fit(answers)
    checked = _with_absolute_paths(communicators.with_wire(_agreed_config(answers), everyone))
    _log_from(checked.log_level)
    _look_for_heartbeats(everyone, [answer["misses_heartbeats"] for answer in answers])
    placements = tuple(answer["placement"] for answer in answers)
    joined = strategies.parse(checked.averaging).averages == "nothing"
    groups = form_super_learners(placements, None if joined else checked.super_learner_size, joined)
    asking = [rank for rank, answer in enumerate(answers) if answer["sets"]]
    if asking and len(groups) > 1:
        raise InnerOnlyError(
            f"init(process_sets=...) on learner {asking[0]}: process sets work with one super "
            f"learner, this job has {len(groups)}. Leave process_sets out, or start the job as one "
            "super learner (HVD_ADPSGD_AVERAGING=synchronous)."
        )
    return _cut(everyone, host, checked, placements, groups)


def _require_one_build(everyone: Any) -> None:
    """Raise LaunchError if two learners run different versions, whose later messages may differ."""
    builds = allgather_object(everyone, RELEASE)
    for rank, build in enumerate(builds):
        if build != builds[0]:
            raise LaunchError(
                f"init(): learner {rank} runs hvd_adpsgd {build}, learner 0 runs {builds[0]}. Two versions "
                "cannot train together: install the same one for all learners."
            )


def _require_one_backend(everyone: Any, config: Config | None) -> None:
    """Raise ConfigError on all learners unless all have the backend that the options ask for."""
    asked = None if config is None else config.inner
    loaded = allgather_object(everyone, (backend(), asked))
    for rank, (its, its_asked) in enumerate(loaded):
        if its_asked not in (None, its):
            raise ConfigError(
                f"init(): Config.inner={its_asked} on learner {rank}, and hvd_adpsgd.torch was imported with "
                f"{its}, whose classes and functions are bound then. Set {VARIABLE}={its_asked} in the "
                f'environment of all learners, or os.environ["{VARIABLE}"] before the import.'
            )
        if its != loaded[0][0]:
            raise ConfigError(
                f"init(): {VARIABLE} differs between learners: {loaded[0][0]} on learner 0, {its} on learner "
                f"{rank} (horovod, if it is not set and Horovod is installed). Set the same value on all "
                "learners (horovodrun passes the environment on; mpirun needs -x)."
            )


def _require_fit(answers: Sequence[dict[str, Any]]) -> None:
    """Raise LaunchError on all learners if the host name of one of them has no IPv4 address."""
    for rank, answer in enumerate(answers):
        if answer["unresolved"]:
            raise LaunchError(
                f"init(): on learner {rank} the name of its own host, {answer['unresolved']}, has no IPv4 "
                "address, and Gloo, over which Horovod runs without MPI, looks it up. Add it to /etc/hosts "
                "there, or launch with `horovodrun --mpi`."
            )


def _look_for_heartbeats(everyone: Any, missed: Sequence[bool]) -> None:
    """Raise LaunchError if only some learners send MPI's heartbeats: the others would count as failed."""
    if any(missed) and not all(missed):
        raise LaunchError(
            f"init(): learner {missed.index(True)} started MPI before init(), without heartbeats, and "
            "others in init(), with heartbeats: those would report it as failed. Import mpi4py.MPI after "
            "hvd.init(), on all learners."
        )
    if any(missed) and everyone.Get_rank() == 0:
        log.warning(
            "MPI was started before hvd.init(), without heartbeats: a host that loses power or is cut off "
            "will not be detected. Import mpi4py.MPI after hvd.init()."
        )


def _answer(everyone: Any, host: Any, config: Config | None, asks_sets: bool) -> dict[str, Any]:
    """Return what this learner sends to all learners: its placement, and its options or their error."""
    head = host.bcast(everyone.Get_rank())
    placement = Placement(head, socket.gethostname(), host.Get_rank(), host.Get_size())
    options, problem = None, None
    try:
        options = config if config is not None else Config.from_environment()
        strategies.parse(options.averaging)
    except ConfigError as error:
        problem = str(error)
    return {
        "placement": placement,
        "config": options,
        "problem": problem,
        "sets": asks_sets,
        "misses_heartbeats": communicators.misses_heartbeats(),
        "unresolved": unresolved_host() if isinstance(everyone, Communicator) else "",
    }


def _agreed_config(answers: Sequence[dict[str, Any]]) -> Config:
    for rank, answer in enumerate(answers):
        if answer["problem"] is not None:
            raise ConfigError(f"{answer['problem']} (on learner {rank})")
    first: Config = answers[0]["config"]
    for rank, answer in enumerate(answers):
        name = first.unequal(answer["config"])
        if name is not None:
            raise ConfigError(
                f"{name} differs between learners: {environment_name(name)} or Config.{name} "
                f"is {getattr(first, name)!r} on learner 0 and {getattr(answer['config'], name)!r} on "
                f"learner {rank}. Set the same value on all learners (horovodrun passes the environment on; "
                "mpirun needs -x)."
            )
    return first


def _with_absolute_paths(config: Config) -> Config:
    """Return the options with absolute paths: the script may change its working directory after init()."""
    paths = {name: getattr(config, name) for name in ("record", "timeline")}
    return config.replace(**{name: os.path.abspath(path) for name, path in paths.items() if path})


def _cut(
    everyone: Any,
    host: Any,
    config: Config,
    placements: tuple[Placement, ...],
    groups: tuple[tuple[int, ...], ...],
) -> World:
    rank = everyone.Get_rank()
    inner, outer = communicators.split(everyone, groups)
    plain, departures = communicators.duplicate(everyone), communicators.duplicate(everyone)
    comms = Communicators(everyone, plain, departures, host, inner, outer)
    world = World.make(config, placements, groups, rank, comms)
    if rank == 0:
        _warn_of_torchrun(world)
    return world


def _warn_of_torchrun(world: World) -> None:
    """Log what torchrun does when a learner fails, if that ends more than its super learner."""
    hosts = [world.placements[group[0]].host for group in world.groups]
    if "TORCHELASTIC_RUN_ID" in os.environ and len(set(hosts)) < len(hosts):
        log.warning(
            "torchrun ends all learners of a host, other super learners too, when one of them fails. Start "
            "with `python -m hvd_adpsgd run -np N train.py`: it lets them train on."
        )


def _start_horovod(world: World, process_sets: Any) -> None:
    """Start Horovod, or torch.distributed in its place, in this super learner."""
    if backend() == "torch":
        start_over_torch(world, process_sets)
        return
    with variables(_own_timeline(world)):
        if isinstance(world.inner, Communicator):
            with world_over_gloo(world):
                horovod.init(process_sets=process_sets)
        else:
            horovod.init(comm=world.inner, process_sets=process_sets)
    # Horovod's exit handler waits without bound for this super learner's learners; this library's does not.
    atexit.unregister(horovod._basics.shutdown)


def _own_timeline(world: World) -> dict[str, str]:
    """Return the variable that gives this super learner's Horovod a file of its own: trace.0.json, ..."""
    asked = os.environ.get("HOROVOD_TIMELINE", "")
    if world.super_size == 1 or asked in (
        "",
        "DYNAMIC",
    ):  # DYNAMIC names no file; see start_timeline
        return {}
    path = Path(asked)
    name = f"{path.stem}.{world.super_rank}{path.suffix}"
    return {"HOROVOD_TIMELINE": str(path.with_name(name))}


def merge_super_learners(world: World) -> World:
    """Make one super learner of all learners; all learners call this together.

    Returns:
        The World with super_size 1, which worlds.current returns from now on.

    Raises:
        WorldError: if a learner has failed, or Horovod cannot be stopped within leave_deadline_s.
    """
    if world.super_size == 1:
        return world
    gone = sorted(world.collectives.gone())
    if gone:
        raise WorldError(
            f"merge_super_learners(): learners {gone} of {world.size} have failed, and one super learner "
            "needs all of its learners. Restart the job, or average with a strategy that continues without "
            "them (random_pairs)."
        )
    if not _stop_horovod(world.config.leave_deadline_s):
        raise WorldError(
            "merge_super_learners(): Horovod did not stop within "
            f"leave_deadline_s={world.config.leave_deadline_s:g} s, so a learner of super learner "
            f"{world.super_rank} has stopped or died. Start the job again."
        )
    everyone = tuple(range(world.size))
    merged = _cut(world.collectives.comm, world.host, world.config, world.placements, (everyone,))
    merged.teardown.inherit(world.teardown)
    _start_horovod(merged, None)
    plain = world.collectives.close(world.config.leave_deadline_s)
    shutdown.free(world.inner, world.outer, plain)
    worlds.put(merged)
    _watch_preemption(merged)
    return merged


@contextlib.contextmanager
def undone_on_failure() -> Iterator[None]:
    """Context manager that shuts down the world if its body raises, so that init() may be called again."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # shut_down has logged it; the first error is raised
            shut_down()
        raise


def watch_exit() -> None:
    """From now on end this process in bounded time at exit, with any failure visible in the exit status."""
    shutdown.set_running(True)
    shutdown.at_exit(shut_down, _leave_deadline_s)


def shut_down() -> None:
    """Run the registered callbacks, stop Horovod, run the shutdown barrier, free the communicators.

    Waits for other learners at most leave_deadline_s; idempotent. init() may be called afterwards.

    Raises:
        Exception: the first exception that a registered callback has raised, after all other work is done.
    """
    if not worlds.is_initialized():
        return
    world, seconds = worlds.current(), _leave_deadline_s()
    world.departure.enter_shutdown()
    finished = _finish_operations(world, seconds)
    worlds.put(None)
    os.environ.pop(_LEARNER_PID, None)
    failures = list(world.teardown.run_stops())
    world.departure.note_announced()
    ends = time.monotonic() + seconds
    stopped = _stop_horovod(seconds) and finished
    # engines stop before the barrier, communicators are freed after it: else operations of peers would fail
    if world.teardown.meet(stopped, ends, world.collectives.left):
        plain = world.collectives.close(seconds) if finished else None
        comms = (world.outer, world.inner, world.host, plain, world.collectives.comm)
        world.teardown.free_all(comms, seconds)
        shutdown.set_running(False)
    elif finished:
        shutdown.leave_operations(world.collectives.messages, world.teardown.fails)
    preemption.unwatch()
    if failures:
        raise failures[0]


def _leave_deadline_s() -> float:
    config = worlds.current().config if worlds.is_initialized() else Config()
    return config.leave_deadline_s


def _finish_operations(world: World, seconds: float) -> bool:
    """Wait for pending operations over all learners; return whether they are complete within `seconds`."""
    finished = world.collectives.finish(seconds)
    if not finished:
        exit_state.stuck = "an operation that learners have not called, which waits for them"
        log.warning(
            "an operation over all learners was not complete %g s after shutdown() began: not all learners "
            "have called it. It is left behind.",
            seconds,
        )
        # its thread must not be inside torch when the interpreter exits
        world.collectives.leave(WorldError("hvd.shutdown() came first. Call both on all learners."))
    return finished


def _stop_horovod(seconds: float) -> bool:
    """Stop Horovod's world; return False if Horovod still waits for a learner after `seconds`.

    A thread left behind in Horovod is a weakness that we accept: there is no way to interrupt it.
    """
    stopped = shutdown.finishes_within(horovod.shutdown, seconds)
    if not stopped:
        exit_state.stuck = "Horovod, which waits for a learner that has stopped or died"
        log.warning(
            "Horovod did not stop within %g s: a learner of this super learner has stopped or died. "
            "Horovod's background thread is left running until this process ends.",
            seconds,
        )
    return stopped
