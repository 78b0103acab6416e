"""CPU cores reserved for engines' threads (HVD_ADPSGD_ENGINE_CPUS); threads that add corrections."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.launch.world import World

__all__ = ["Learner", "engine_cores", "pass_threads", "plan", "reserve"]

log = logging.getLogger("hvd_adpsgd")

NAME = "HVD_ADPSGD_ENGINE_CPUS"


class Learner(NamedTuple):
    """The properties of a learner that decide which cores it gets.

    Attributes:
        host: number of its host; see Placement.
        cores: the cores that its launcher allows its process.
        threads: number of threads with which torch computes in it.
        has_engine: whether an engine's thread runs in it.
    """

    host: int
    cores: tuple[int, ...]
    threads: int
    has_engine: bool


class Cores(NamedTuple):
    """The cores of one learner's threads.

    Attributes:
        engine: cores for its engine's thread alone; empty: the system chooses.
        others: cores for its other threads.
    """

    engine: tuple[int, ...]
    others: tuple[int, ...]


def plan(asked: str, learners: Sequence[Learner]) -> list[Cores]:
    """Return the cores of each learner, in the order of `learners`.

    Args:
        asked: value of the option: cores such as 2,5-7, which the engines of a host get in turn; or auto: the
            last allowed cores, one per engine, where torch's threads leave as many cores free.
        learners: all learners of the job.

    Raises:
        ConfigError: if `asked` is neither, or leaves a learner without a core.
    """
    given = None if asked == "auto" else _listed(asked)
    engines: Counter[tuple[object, ...]] = Counter()
    found = []
    for learner in learners:
        pool = (learner.host, learner.cores) if given is None else (learner.host,)
        kept = _spare(pool, learners) if given is None else given
        others = tuple(core for core in learner.cores if core not in kept)
        if not others:
            raise ConfigError(
                f"{NAME}={asked}: a learner may use cores {_text(learner.cores)} only, and the "
                "engines would take all of these. Give other cores, or auto."
            )
        mine: tuple[int, ...] = ()
        if learner.has_engine and kept:
            mine = (kept[engines[pool] % len(kept)],)
            engines[pool] += 1
        found.append(Cores(mine, others))
    return found


def _spare(pool: tuple[object, ...], learners: Sequence[Learner]) -> tuple[int, ...]:
    """Return the cores for the engines of learners with the same allowed cores: one per engine, or none.

    None if torch's threads of these learners do not leave enough cores free.

    Args:
        pool: (host, allowed cores) of these learners.
        learners: all learners of the job.
    """
    same = [one for one in learners if (one.host, one.cores) == pool]
    cores, engines = same[0].cores, sum(one.has_engine for one in same)
    enough = engines and len(cores) >= sum(one.threads for one in same) + engines
    return cores[-engines:] if enough else ()


def _listed(text: str) -> tuple[int, ...]:
    """Parse a list of cores in the form of taskset, such as 3 or 2,5-7; each core once."""
    if not re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", text, re.ASCII):
        shown = text if len(text) <= 80 else f"{text[:80]}..."
        raise ConfigError(
            f"{NAME}={shown}: allowed are auto, and cores as 3 or 2,5-7, up to 9999. Correct it."
        )
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores = range(int(first), int(last or first) + 1)
        if not cores:
            raise ConfigError(f"{NAME}={text}: {part} names no core. Write the lower number first.")
        found += cores
    return tuple(dict.fromkeys(found))


def _text(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores)) or "none"


# ---- in this process ----------------------------------------------------------------------------


_engine: tuple[int, ...] = ()


def engine_cores() -> tuple[int, ...]:
    """Return the cores reserved for this process's engine threads; empty if none are reserved."""
    return _engine


def reserve(world: World) -> None:
    """Bind this process's threads to cores that no engine uses; all learners call this together.

    Threads and data loaders started later inherit the binding from the thread that starts them.

    Raises:
        ConfigError: on all learners, for a bad value of the option or a core that cannot be used.
    """
    global _engine
    asked = world.config.engine_cpus
    if asked is None or world.is_plain:
        return
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    mine = Learner(
        world.placements[world.rank].host,
        allowed,
        torch.get_num_threads(),
        world.inner_rank < world.shards,
    )
    cores = plan(asked, world.collectives.gather("init", mine))
    place = world.collectives.ranks.index(world.rank)
    problems = world.collectives.gather("init", _bind(cores[place], allowed))
    problem = next(filter(None, problems), None)
    if problem is not None:
        _release(allowed)
        raise ConfigError(f"{NAME}={asked}: {problem}. Give cores that the learners may use.")
    _engine = cores[place].engine
    world.teardown.at_shutdown(lambda: _release(allowed))
    log.info(
        "%s: engine on core %s, other threads on %s.",
        NAME,
        _text(_engine) if _engine else "of its process" if mine.has_engine else "none",
        _text(cores[place].others),
    )


def _bind(cores: Cores, before: tuple[int, ...]) -> str | None:
    """Bind all threads of this process to `cores.others`; return why that failed, None if it did not."""
    try:
        if cores.engine:
            # a trial, which raises if the process may not use these cores
            os.sched_setaffinity(0, cores.engine)
            os.sched_setaffinity(0, before)
        _bind_threads(cores.others)
    except OSError as error:
        return f"core {_text(cores.engine)}: {error}"
    return None


def _release(before: tuple[int, ...]) -> None:
    """Let this process's threads use the cores `before`, which were allowed before `reserve`."""
    global _engine
    _engine = ()
    _bind_threads(before)


def _bind_threads(cores: Sequence[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def pass_threads(learners: int) -> int:
    """Return the number of threads with which this learner adds corrections to its model.

    As many as torch has, but no more than this learner's share of the host's cores: without OMP_NUM_THREADS
    torch has one thread per core in every learner.

    Args:
        learners: number of learners on this host.
    """
    share = (os.cpu_count() or 1) // learners
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)), share))
