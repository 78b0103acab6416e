"""Benchmark of one exchange of a model between two super learners, against MPI_Sendrecv of the same bytes.

Run by `python -m hvd_adpsgd bench exchange`, in two processes. Each round times one Sendrecv of the
whole model and one exchange through the engine (snapshot, transfer, merge), in turn, under the same load
of the machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.shared_memory import private_memory
from hvd_adpsgd.strategies import Plan
from hvd_adpsgd_lab.bench import report, settings, spread_of, timed

WARM_UP = 2  # rounds that are not counted: each first touches one of two buffers of corrections
LONGEST_S = 60.0


def main() -> None:
    args = settings()

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    count = int(args.mib * 2**18)
    # in huge pages, as the engine's memory
    model, received = (private_memory(4 * count).view(np.float32) for _ in range(2))
    np.random.default_rng(comm.rank).standard_normal(out=model, dtype=np.float32)
    engine = _engine(comm, model, "mpi" if args.through_mpi else "memory", args.chunk_kib)
    addresses = np.array([model.ctypes.data], dtype=np.uintp)
    raw, exchange, cpu = [], [], []
    for number in range(args.rounds + WARM_UP):
        raw.append(timed(comm, lambda: comm.Sendrecv(model, 1 - comm.rank, recvbuf=received)))
        before = engine.metrics()["engine_cpu_s"]
        engine.memory.absorb(addresses, number)
        engine.offer(number)
        exchange.append(timed(comm, lambda done=number: _exchange(engine, comm.rank, done)))  # type: ignore[misc]
        engine.publish(number)
        engine.memory.absorb(addresses, number)
        cpu.append(engine.metrics()["engine_cpu_s"] - before)
    engine.stop()
    report(comm.rank, _summary(raw[WARM_UP:], exchange[WARM_UP:], cpu[WARM_UP:], args.mib))


def _engine(comm: Any, model: np.ndarray, same_host: str, chunk_kib: int) -> Engine:
    """Return an engine that has started, and asks nobody by itself."""
    from mpi4py import MPI

    outer = comm.Dup()
    outer.Set_errhandler(MPI.ERRORS_RETURN)
    config = Config(deadline_s=LONGEST_S, same_host=same_host, chunk_kib=chunk_kib)
    engine = Engine(inner=None, outer=outer, plan=Plan.nobody(weight=1 / 2), config=config)
    engine.memory.extend([TensorSpec("model", model.shape, "float32")])
    engine.start()
    return engine


def _exchange(engine: Engine, rank: int, done: int) -> None:
    loop = engine.loop
    assert loop is not None
    if rank == 0:
        loop.ask(1)
    if not loop.wait_finished(done + 1, LONGEST_S):
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
