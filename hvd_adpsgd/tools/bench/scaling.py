"""Benchmark of the averaging thread's CPU time per exchange, by the number of super learners.

Run by `python -m hvd_adpsgd bench scaling`, in --learners processes. In turn the first 2, 4, 8, ... processes
average their models by random_pairs, one engine each and one exchange per step, while the other processes
wait. A step is a pause in place of a gradient; its length is proportional to the number of engines, so that
the machine's cores are equally busy with any number of engines.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from hvd_adpsgd.collectives.of_communicator import wait
from hvd_adpsgd.strategies import parse
from hvd_adpsgd.tools.bench import report, settings, spread_of
from hvd_adpsgd.tools.bench.driven import Driven

WARM_UP = 1  # blocks that are not counted: they touch memory and connect peers


def main() -> None:
    args = settings()

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    sizes = [2**k for k in range(1, comm.size.bit_length())]
    teams = [Team(comm, size, args.mib) for size in sizes]
    found: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for _ in range(args.rounds + WARM_UP):
        for team in teams:
            found[team.size].append(team.block(args.steps, args.pause_ms / 1e3))
    for team in teams:
        team.stop()
    report(comm.rank, _summary({size: rows[WARM_UP:] for size, rows in found.items()}))


class Team:
    """The first `size` processes of a communicator, each of which averages a model by its own engine."""

    def __init__(self, comm: Any, size: int, mib: float):
        self.size = size
        self._comm = comm
        members = comm.Split(0 if comm.rank < size else 1, comm.rank)
        self._driven: Driven | None = None
        if comm.rank < size:
            rng = np.random.default_rng(comm.rank)
            model = rng.standard_normal(int(mib * 2**18), dtype=np.float32)
            self._driven = Driven(members, model, parse("random_pairs").plan(comm.rank, size))
        self._step = 0

    def block(self, steps: int, pause_s: float) -> dict[str, float]:
        """Run `steps` steps; return CPU per exchange (of one side) and exchanges per step, of all engines."""
        # wait() sleeps between polls; MPI_Barrier would spin and keep the cores busy.
        wait(self._comm.Ibarrier())
        before = self._counts()
        for _ in range(steps if self._driven else 0):
            assert self._driven is not None
            # The pause stands for a gradient.
            self._driven.round(self._step, lambda: time.sleep(self.size * pause_s))
            self._step += 1
        wait(self._comm.Ibarrier())
        told = self._comm.allgather([b - a for a, b in zip(before, self._counts(), strict=True)])
        cpu_s, exchanges = (sum(column) for column in zip(*told, strict=True))
        return {
            "cpu_ms_per_exchange": 1e3 * cpu_s / exchanges,
            "exchanges_per_step": exchanges / (self.size * steps),
        }

    def _counts(self) -> tuple[float, int]:
        """Return the CPU seconds and the number of exchanges of this process's engine so far."""
        if self._driven is None:
            return 0.0, 0
        metrics = self._driven.engine.metrics()
        return metrics["engine_cpu_s"], metrics["exchanges"]

    def stop(self) -> None:
        if self._driven is not None:
            self._driven.engine.stop()


def _summary(found: dict[int, list[dict[str, float]]]) -> dict[str, Any]:
    """Return medians over blocks, and ratios to the block with two engines of the same round."""
    result: dict[str, Any] = {}
    for size, rows in found.items():
        ratios = [
            row["cpu_ms_per_exchange"] / two["cpu_ms_per_exchange"]
            for row, two in zip(rows, found[2], strict=True)
        ]
        medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        result[str(size)] = medians | spread_of("cpu_to_two", ratios)
    return result


if __name__ == "__main__":
    main()
