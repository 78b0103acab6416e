"""A mean of all through the engine, summed by MPI's all-reduce and by the butterfly.

Run by `python -m hvd_adpsgd bench allreduce`, one process per super learner, no torch. For n = 2, 4, 8, ...
learners of one job, in turn in each round so that all see the same machine: MPI_Allreduce of the same bytes
with nothing around it, the engine's mean with MPI's non-blocking all-reduce, and with the butterfly. A mean
reads the model, sums it and hands the difference to the trainer, so it is more than a sum.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np

from hvd_adpsgd.engine.engine import Engine, EngineOptions
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.strategies import PeriodicAveraging
from hvd_adpsgd.tools.bench import MARK, timed

WARM_UP = 2  # rounds
WAYS = ("mpi", "butterfly")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=32.0)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()

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
    if world.rank == 0:
        os.write(1, (MARK + json.dumps(result) + "\n").encode())


def measure(comm: Any, count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round."""
    model = np.random.default_rng(comm.rank).standard_normal(count, dtype=np.float32)
    total = np.empty_like(model)
    means = {way: Means(comm, model.copy(), way) for way in WAYS}
    times: dict[str, list[float]] = {"allreduce": [], **{way: [] for way in WAYS}}
    for number in range(rounds + WARM_UP):
        times["allreduce"].append(timed(comm, lambda: comm.Allreduce(model, total)))
        for way in WAYS:
            times[way].append(means[way].seconds(number))
    for one in means.values():
        one.engine.stop()
    return {name: seconds[WARM_UP:] for name, seconds in times.items()}


class Means:
    """An engine that averages a model of its own, one way of summing."""

    def __init__(self, comm: Any, model: np.ndarray, way: str):
        from mpi4py import MPI

        self._comm, self._model = comm, model
        self._addresses = np.array([model.ctypes.data], dtype=np.uintp)
        outer = comm.Dup()
        outer.Set_errhandler(MPI.ERRORS_RETURN)
        plan = PeriodicAveraging(period=1).plan(comm.rank, comm.size)
        options = EngineOptions(deadline_s=60.0, all_reduce=way)
        self.engine = Engine(inner=None, outer=outer, plan=plan, options=options)
        self.engine.extend([TensorSpec("model", model.shape, "float32")])
        self.engine.start()

    def seconds(self, number: int) -> float:
        """Of one mean, until all have it."""
        engine = self.engine
        engine.absorb(self._addresses, -1, number)
        engine.offer(number)

        def mean() -> None:
            engine.begin_round(number)
            engine.finish_round()

        seconds = timed(self._comm, mean)
        engine.publish(number)
        engine.absorb(self._addresses, engine.published(), number)
        return seconds


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    ratios = np.array(times["butterfly"]) / np.array(times["mpi"])
    found = {f"{name}_ms": 1e3 * float(np.median(seconds)) for name, seconds in times.items()}
    return found | {
        "butterfly_to_mpi": float(np.median(ratios)),
        "butterfly_to_mpi_min": float(ratios.min()),
        "butterfly_to_mpi_max": float(ratios.max()),
    }


if __name__ == "__main__":
    main()
