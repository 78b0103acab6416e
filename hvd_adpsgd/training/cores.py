"""Cores for the engines alone, which all other threads leave alone; threads for the pass over a model."""

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
    """What counts of a learner.

    Attributes:
        host: see Placement.
        cores: that its launcher allows it.
        threads: with which torch computes.
        has_engine: whether an engine's thread runs in it.
    """

    host: int
    cores: tuple[int, ...]
    threads: int
    has_engine: bool


class Cores(NamedTuple):
    """What a learner gets.

    Attributes:
        engine: for its engine's thread alone; empty: wherever the system puts it.
        others: for its other threads.
    """

    engine: tuple[int, ...]
    others: tuple[int, ...]


def plan(asked: str, learners: Sequence[Learner]) -> list[Cores]:
    """The cores of each learner.

    Args:
        asked: the option: cores as 2,5-7, which the engines of a host get in turn; or auto: where as many
            cores are allowed as torch has threads and one more for each engine, the last ones.
        learners: of the job.

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
                f"{NAME}={asked}: a learner may use cores {_text(learner.cores)} only, and would have none. "
                "Give other cores, or auto."
            )
        mine: tuple[int, ...] = ()
        if learner.has_engine and kept:
            mine = (kept[engines[pool] % len(kept)],)
            engines[pool] += 1
        found.append(Cores(mine, others))
    return found


def _spare(pool: tuple[object, ...], learners: Sequence[Learner]) -> tuple[int, ...]:
    """The cores that learners with the same ones do not need: one for each of their engines, or none."""
    same = [one for one in learners if (one.host, one.cores) == pool]
    cores, engines = same[0].cores, sum(one.has_engine for one in same)
    enough = engines and len(cores) >= sum(one.threads for one in same) + engines
    return cores[-engines:] if enough else ()


def _listed(text: str) -> tuple[int, ...]:
    """Cores as taskset writes them."""
    if not re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", text, re.ASCII):
        raise ConfigError(
            f"{NAME}={text[:80]}: allowed are auto, and cores as 3 or 2,5-7, up to 9999. Correct it."
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
    """The cores of this process's engine threads; empty: those of the process."""
    return _engine


def reserve(world: World) -> None:
    """Keep this process's threads away from the engines' cores; all learners call this together.

    Threads that are started later, and data loaders, inherit it from those that start them.

    Raises:
        ConfigError: on all learners, for a bad value or a core that is not there.
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
    """Bind all threads there are; what is wrong, if anything is."""
    try:
        if cores.engine:
            os.sched_setaffinity(0, cores.engine)  # of this thread: may the process use them?
            os.sched_setaffinity(0, before)
        _bind_threads(cores.others)
    except OSError as error:
        return f"core {_text(cores.engine)}: {error}"
    return None


def _release(before: tuple[int, ...]) -> None:
    """Let the threads use what they could use before."""
    global _engine
    _engine = ()
    _bind_threads(before)


def _bind_threads(cores: Sequence[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def pass_threads(learners: int) -> int:
    """How many threads may make this learner's pass over its model.

    As many as torch has, but no more than its share of the cores: without OMP_NUM_THREADS torch has one for
    each core, in every learner.

    Args:
        learners: on this host.
    """
    share = (os.cpu_count() or 1) // learners
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)), share))
