"""Benchmark of one exchange of a model between two super learners, against MPI_Sendrecv of the same bytes.

Run by `python -m hvd_adpsgd bench exchange`, in two processes. Each round times one Sendrecv of the
whole model and one exchange through the engine (snapshot, transfer, merge), in turn, under the same load
of the machine.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from hvd_adpsgd.engine.shared_memory import private_memory
from hvd_adpsgd.strategies import Plan
from hvd_adpsgd_lab.bench import report, settings, spread_of, timed
from hvd_adpsgd_lab.bench.driven import Driven

WARM_UP = 2  # rounds that are not counted: each first touches one of two buffers of corrections


def main() -> None:
    args = settings()

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    count = int(args.mib * 2**18)
    # in huge pages, as the engine's memory
    model, received = (private_memory(4 * count).view(np.float32) for _ in range(2))
    np.random.default_rng(comm.rank).standard_normal(out=model, dtype=np.float32)
    same_host = "mpi" if args.through_mpi else "memory"
    driven = Driven(
        comm, model, Plan.nobody(weight=1 / 2), same_host=same_host, chunk_kib=args.chunk_kib
    )
    raw, exchange, cpu = [], [], []
    for number in range(args.rounds + WARM_UP):
        raw.append(timed(comm, lambda: comm.Sendrecv(model, 1 - comm.rank, recvbuf=received)))
        before = driven.engine.metrics()["engine_cpu_s"]
        act = partial(_exchange, driven, comm.rank, number)
        exchange.append(driven.round(number, partial(timed, comm, act)))
        cpu.append(driven.engine.metrics()["engine_cpu_s"] - before)
    driven.engine.stop()
    report(comm.rank, _summary(raw[WARM_UP:], exchange[WARM_UP:], cpu[WARM_UP:], args.mib))


def _exchange(driven: Driven, rank: int, done: int) -> None:
    loop = driven.engine.loop
    assert loop is not None
    if rank == 0:
        loop.ask(1)
    if not loop.wait_finished(done + 1, 60.0):
        raise SystemExit("an exchange took more than 60 s")


def _summary(
    raw: list[float], exchange: list[float], cpu: list[float], mib: float
) -> dict[str, Any]:
    median = float(np.median(exchange))
    return {
        "model_mib": mib,
        "rounds": len(raw),
        "sendrecv_ms": 1e3 * float(np.median(raw)),
        "exchange_ms": 1e3 * median,
        "engine_cpu_ms": 1e3 * float(np.median(cpu)),
        "gib_per_s_each_way": mib / 1024 / median,
        **spread_of("ratio", [a / b for a, b in zip(exchange, raw, strict=True)]),
    }


if __name__ == "__main__":
    main()
