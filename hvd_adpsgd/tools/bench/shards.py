"""Benchmark of an exchange of a whole model by two leaders, against an exchange in shards by all learners.

Run by `python -m hvd_adpsgd bench shards`, with two super learners. Each round times both exchanges in turn,
by messages, as between hosts. Each result is the largest of all learners.
"""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.strategies import Plan
from hvd_adpsgd.tools.bench import report, settings, spread_of, timed

WARM_UP = 2  # rounds that are not counted


class Cut:
    """The engine of a model that is cut into shards.

    Args:
        comm: communicator of all learners.
        model: the array to average; corrections are added to it.
        shards: number of shards; with 1 the leader exchanges the whole model.
        per_super_learner: number of learners of a super learner.
    """

    def __init__(self, comm: Any, model: np.ndarray, shards: int, per_super_learner: int):
        from mpi4py import MPI

        self.super_rank, place = divmod(comm.rank, per_super_learner)
        self._inner = comm.Split(self.super_rank, comm.rank)
        outer = comm.Split(place if place < shards else MPI.UNDEFINED, comm.rank)
        if outer != MPI.COMM_NULL:
            outer.Set_errhandler(MPI.ERRORS_RETURN)
        before = private_mib()
        self.engine = Engine(
            inner=self._inner,
            outer=None if outer == MPI.COMM_NULL else outer,
            plan=Plan.nobody(weight=1 / 2),
            config=Config(deadline_s=60.0, same_host="mpi"),
            shards=shards,
        )
        self.engine.memory.extend([TensorSpec("model", model.shape, str(model.dtype))])
        self.engine.start()
        self._addresses = np.array([model.ctypes.data], dtype=np.uintp)
        self._rounds = 0
        self.private_mib = private_mib() - before

    def exchange(self) -> None:
        """Exchange the model between both super learners; each learner waits for its own shard."""
        loop = self.engine.loop
        if loop is None:
            return
        if self.super_rank == 0:
            loop.ask(1)
        if not loop.wait_finished(self._rounds + 1, 60.0):
            raise SystemExit("an exchange took more than 60 s")

    def round(self, comm: Any) -> tuple[float, float, float]:
        """Run a round; return the seconds of the exchange, of this learner's copies, of its engine's CPU."""
        copies = self._absorb()
        self.engine.offer(self._rounds)
        cpu = self.engine.metrics()["engine_cpu_s"]
        exchange = timed(comm, self.exchange)
        cpu = self.engine.metrics()["engine_cpu_s"] - cpu
        self.engine.publish(self._rounds)
        self._inner.Barrier()
        self.engine.memory.all_met()
        copies += self._absorb()
        self._rounds += 1
        return exchange, copies, cpu

    def _absorb(self) -> float:
        began = time.perf_counter()
        self.engine.memory.absorb(self._addresses, self._rounds)
        return time.perf_counter() - began


def private_mib() -> float:
    """Return the MiB of this process's memory that no other process shares."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(kib) for kib in re.findall(r"Private_\w+:\s+(\d+) kB", text)) / 1024


def main() -> None:
    args = settings()

    from mpi4py import MPI

    comm, per_super_learner = MPI.COMM_WORLD, args.learners // 2
    model = np.random.default_rng(comm.rank // per_super_learner).standard_normal(
        int(args.mib * 2**18), dtype=np.float32
    )
    cuts = {
        "whole": Cut(comm, model, 1, per_super_learner),
        "shards": Cut(comm, model, per_super_learner, per_super_learner),
    }
    most = partial(comm.allreduce, op=MPI.MAX)
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in cuts}
    for number in range(args.rounds + WARM_UP):
        for name, cut in cuts.items():
            seconds = cut.round(comm)
            if number >= WARM_UP:
                found[name].append(tuple(most(value) for value in seconds))
    result: dict[str, Any] = {
        "model_mib": args.mib,
        "learners_per_super_learner": per_super_learner,
    }
    for name, cut in cuts.items():
        medians = 1e3 * np.median(found[name], axis=0)
        keys = ("exchange_ms", "copies_ms", "engine_cpu_ms")
        result[name] = dict(zip(keys, map(float, medians), strict=True))
        result[name]["private_mib"] = most(cut.private_mib)
    for i, key in enumerate(("exchange", "copies", "engine_cpu")):
        pairs = zip(found["shards"], found["whole"], strict=True)
        result |= spread_of(f"{key}_to_whole", [a[i] / b[i] for a, b in pairs])
    for cut in cuts.values():
        cut.engine.stop()
    report(comm.rank, result)


if __name__ == "__main__":
    main()
