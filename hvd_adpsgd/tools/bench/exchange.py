"""One exchange of a model between two super learners, against raw MPI_Sendrecv of the same bytes.

Run by `python -m hvd_adpsgd bench exchange`, in two processes. Each round times one Sendrecv of the
whole model and one exchange through the engine (snapshot, transfer, merge), in turn, so that both
see the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np

from hvd_adpsgd.engine.engine import Engine, EngineOptions
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.strategies import RandomPairs
from hvd_adpsgd.tools.bench import MARK, timed

WARM_UP = 2  # rounds; each touches one of the two slots of corrections for the first time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=164.6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--through-mpi", action="store_true")
    parser.add_argument("--chunk-kib", type=int, default=256)
    args = parser.parse_args()

    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    count = int(args.mib * 2**20 / 4)
    model = np.random.default_rng(comm.rank).standard_normal(count, dtype=np.float32)
    engine = _engine(comm, count, args.chunk_kib, not args.through_mpi)
    addresses = np.array([model.ctypes.data], dtype=np.uintp)
    raw, exchange, cpu = [], [], []
    received = np.empty_like(model)
    for round_number in range(args.rounds + WARM_UP):
        raw.append(timed(comm, lambda: comm.Sendrecv(model, 1 - comm.rank, recvbuf=received)))
        engine.absorb(addresses, -1, round_number)
        engine.offer(round_number)
        before = engine.cpu_s()
        exchange.append(timed(comm, lambda: _exchange(engine, comm.rank, round_number)))  # noqa: B023
        cpu.append(engine.cpu_s() - before)
        engine.publish(round_number)
        engine.absorb(addresses, engine.published(), round_number)
    engine.stop()
    if comm.rank == 0:
        result = _summary(raw[WARM_UP:], exchange[WARM_UP:], cpu[WARM_UP:], args.mib)
        os.write(1, (MARK + json.dumps(result) + "\n").encode())


def _engine(comm: Any, count: int, chunk_kib: int, share_host: bool) -> Engine:
    plan = RandomPairs().plan(comm.Get_rank(), comm.Get_size())
    options = EngineOptions(
        chunk_nbytes=chunk_kib * 1024, deadline_s=60.0, autonomous=False, share_host=share_host
    )
    engine = Engine(inner=None, outer=comm, plan=plan, options=options)
    engine.extend([TensorSpec("model", (count,), "float32")])
    engine.start()
    return engine


def _exchange(engine: Engine, rank: int, done: int) -> None:
    if rank == 0:
        engine.ask(1)
    if not engine.wait_finished(done + 1, 60.0):
        raise SystemExit("an exchange took more than 60 s")


def _summary(
    raw: list[float], exchange: list[float], cpu: list[float], mib: float
) -> dict[str, Any]:
    ratios = np.array(exchange) / np.array(raw)
    return {
        "model_mib": mib,
        "rounds": len(raw),
        "sendrecv_ms": 1e3 * float(np.median(raw)),
        "exchange_ms": 1e3 * float(np.median(exchange)),
        "engine_cpu_ms": 1e3 * float(np.median(cpu)),
        "gib_per_s_each_way": mib / 1024 / float(np.median(exchange)),
        "ratio": float(np.median(ratios)),
        "ratio_min": float(ratios.min()),
        "ratio_max": float(ratios.max()),
    }


if __name__ == "__main__":
    main()
