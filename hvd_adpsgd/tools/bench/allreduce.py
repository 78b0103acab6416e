"""Benchmark of the engine's mean of all models, summed by MPI's all-reduce or pairwise (butterfly).

Run by `python -m hvd_adpsgd bench allreduce`, one process per super learner, without torch, with n = 2, 4, 8,
... learners of one job. Each round measures in turn, under the same load of the machine: MPI_Allreduce of the
same bytes without the engine, the engine's mean with MPI's non-blocking all-reduce, and the engine's mean
with the butterfly. A mean takes longer than a sum: it also reads the model and passes the difference to the
trainer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from hvd_adpsgd.strategies import PeriodicAveraging
from hvd_adpsgd.tools.bench import report, settings, spread_of, timed
from hvd_adpsgd.tools.bench.driven import Driven

WARM_UP = 2  # rounds that are not counted
WAYS = ("mpi", "butterfly")


def main() -> None:
    args = settings()

    from mpi4py import MPI

    world = MPI.COMM_WORLD
    result: dict[str, Any] = {"model_mib": args.mib, "rounds": args.rounds}
    n = 2
    while n <= world.size:
        comm = world.Split(0 if world.rank < n else MPI.UNDEFINED, world.rank)
        if world.rank < n:
            times = measure(comm, int(args.mib * 2**18), args.rounds)
            result[f"n {n}"] = summary(times)
        world.Barrier()
        n *= 2
    report(world.rank, result)


def measure(comm: Any, count: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round, by the way in which the mean is summed."""
    model = np.random.default_rng(comm.rank).standard_normal(count, dtype=np.float32)
    total = np.empty_like(model)
    plan = PeriodicAveraging(period=1).plan(comm.rank, comm.size)
    means = {way: Driven(comm, model.copy(), plan, all_reduce=way) for way in WAYS}
    times: dict[str, list[float]] = {"allreduce": [], **{way: [] for way in WAYS}}
    for number in range(rounds + WARM_UP):
        times["allreduce"].append(timed(comm, lambda: comm.Allreduce(model, total)))
        for way, driven in means.items():
            mean = partial(driven.average, number)
            times[way].append(driven.round(number, partial(timed, comm, mean)))
    for driven in means.values():
        driven.engine.stop()
    return {name: seconds[WARM_UP:] for name, seconds in times.items()}


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    found = {f"{name}_ms": 1e3 * float(np.median(seconds)) for name, seconds in times.items()}
    ratios = [a / b for a, b in zip(times["butterfly"], times["mpi"], strict=True)]
    return found | spread_of("butterfly_to_mpi", ratios)


if __name__ == "__main__":
    main()
