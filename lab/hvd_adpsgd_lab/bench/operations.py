"""Benchmark of the library's all-reduce and broadcast over all learners, against MPI's collectives.

Run by `python -m hvd_adpsgd bench operations`, on one host or on several, with n = 2, 4, 8, ... learners of
one job. Each round measures in turn, under the same load of the machine: MPI's own collective on numpy
arrays; the library's operation over MPI's messages, with its comparison of the learners' calls and its
agreement on failures; and the library's operation over sockets, as in a job without MPI. On one host both
library operations send large arrays through shared memory.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_adpsgd.collectives.call import Call
from hvd_adpsgd.collectives.collectives import Collectives
from hvd_adpsgd.collectives.of_communicator import barrier
from hvd_adpsgd.config import Config
from hvd_adpsgd.lifecycle.membership import Membership
from hvd_adpsgd.messaging.attempt import Attempt
from hvd_adpsgd.messaging.sockets import Hub
from hvd_adpsgd_lab.bench import report, settings, spread_of

# Rounds that are not counted: they open connections and touch memory for the first time.
WARM_UP = 2
# Bytes of the small array, which travels in the message that announces the call; operations on it per round.
SMALL_NBYTES, SMALL_TIMES = 1024, 20


class Ours:
    """The library's operations over all learners on numpy arrays, over the messages of a communicator."""

    def __init__(self, comm: Any, plain: Any, size: int, rank: int) -> None:
        everyone = tuple(range(size))
        membership = Membership([(i,) for i in everyone], [str(i) for i in everyone], rank)
        self._all = Collectives(
            comm, plain, rank, everyone, size, membership, on_failure="continue", joining=False
        )

    def allreduce(self, model: np.ndarray) -> np.ndarray:
        """Sum `model` over learners as hvd.allreduce does: a small array is part of the announcement."""
        if model.nbytes > SMALL_NBYTES:
            return self._all.run("allreduce", lambda attempt: attempt.allreduce(model))
        call = Call("allreduce", private=model)
        return self._all.run(call, _sum_of_calls)

    def broadcast(self, model: np.ndarray) -> None:
        """Broadcast `model` from learner 0 in place, as hvd.broadcast_ does."""
        self._all.run("broadcast", lambda attempt: attempt.broadcast(model, 0))


def _sum_of_calls(attempt: Attempt) -> np.ndarray:
    total: np.ndarray = functools.reduce(np.add, [call.private for call in attempt.calls])
    return total


def main() -> None:
    args = settings()

    from mpi4py import MPI

    world = MPI.COMM_WORLD
    result: dict[str, Any] = {"mib": args.mib, "rounds": args.rounds}
    n = 2
    while n <= world.size:
        comm = world.Split(0 if world.rank < n else MPI.UNDEFINED, world.rank)
        if world.rank < n:
            result[f"n {n}"] = measure(comm, int(args.mib * 2**18), args.rounds, args.nics or None)
        barrier(world)  # waits by sleeping, which leaves the cores to the learners that measure
        n *= 2
    report(world.rank, result)


def measure(comm: Any, count: int, rounds: int, nics: str | None) -> dict[str, Any]:
    """Return the milliseconds of each operation, and their ratios to MPI's."""
    plain = comm.Dup()
    hub = Hub(comm.rank, comm.size, Config(nics=nics), comm.allgather)
    pair = [hub.communicator(range(comm.size)) for _ in range(2)]
    ways = {
        "over_mpi": Ours(comm, plain, comm.size, comm.rank),
        "sockets": Ours(pair[0], pair[1], comm.size, comm.rank),
    }
    small, large = (
        np.random.default_rng(comm.rank).standard_normal(size, dtype=np.float32)
        for size in (SMALL_NBYTES // 4, count)
    )
    found: dict[str, Any] = {}
    for name, array, times in (("small", small, SMALL_TIMES), ("large", large, 1)):
        total = np.empty_like(array)
        acts: dict[str, Callable[[], object]] = {
            "mpi": functools.partial(comm.Allreduce, array, total)
        }
        acts |= {way: functools.partial(ours.allreduce, array) for way, ours in ways.items()}
        found[f"allreduce_{name}"] = _compared(comm, acts, rounds, times)
    acts = {"mpi": functools.partial(comm.Bcast, large, 0)}
    acts |= {way: functools.partial(ours.broadcast, large) for way, ours in ways.items()}
    found["broadcast_large"] = _compared(comm, acts, rounds, 1)
    barrier(comm)
    hub.close()
    return found


def _compared(
    comm: Any, acts: dict[str, Callable[[], object]], rounds: int, times: int
) -> dict[str, float]:
    """Time each of the operations `acts` in turn, `times` per round; return medians, and ratios to "mpi"."""

    def several(act: Callable[[], object]) -> None:
        for _ in range(times):
            act()

    seconds: dict[str, list[float]] = {way: [] for way in acts}
    for _ in range(rounds + WARM_UP):
        for way, act in acts.items():
            seconds[way].append(_timed(comm, functools.partial(several, act)) / times)
    kept = {way: values[WARM_UP:] for way, values in seconds.items()}
    result = {f"{way}_ms": 1e3 * float(np.median(values)) for way, values in kept.items()}
    for way in acts:
        if way != "mpi":
            ratios = [a / b for a, b in zip(kept[way], kept["mpi"], strict=True)]
            result |= spread_of(f"{way}_to_mpi", ratios)
    return result


def _timed(comm: Any, act: Callable[[], object]) -> float:
    """Return the seconds of act() from a barrier until all are done; waiting learners sleep, not spin."""
    barrier(comm)
    began = time.perf_counter()
    act()
    barrier(comm)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
