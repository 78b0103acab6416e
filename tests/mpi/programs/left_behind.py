"""Who leaves while its peer is stopped in mid exchange: the peer comes back, and waits for nothing.

Three engines. Super learners 0 and 1 are in a long exchange (1 has the lease of a chunk, so it cannot end)
when 1 is stopped; 0 passes over it and leaves. Then 1 goes on: it comes to rest, and leaves in good order, as
2 sees.
With `--twice` 1 comes back, a few chunks move, and it is stopped again before 0 leaves.
"""

import argparse
import os
import signal
import time

import numpy as np
from engines import ASKS_NOBODY, Driven, say, until
from mpi4py import MPI

from hvd_adpsgd.engine.engine import Engine

CHUNK_NBYTES, CHUNKS = 64 * 1024, 1000
LEASED = (400, 500)
ALIVE, SUSPECT, LEFT = 0, 1, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--leave-s", type=float, required=True)
    parser.add_argument("--no-share", action="store_true", help="every chunk through MPI")
    parser.add_argument("--twice", action="store_true")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    model = np.random.default_rng(comm.rank).standard_normal(CHUNKS * CHUNK_NBYTES // 8)
    options = {
        "deadline_s": 0.5,
        "leave_deadline_s": args.leave_s,
        "chunk_kib": CHUNK_NBYTES // 1024,
    }
    same_host = "mpi" if args.no_share else "memory"
    driven = Driven(comm, ASKS_NOBODY, model, same_host=same_host, **options)
    engine = driven.engine
    driven.offer()
    if comm.rank == 1:
        engine.memory.own.store.lease(LEASED[0])
    pids = comm.allgather(os.getpid())
    said = (first, second, third)[comm.rank](comm, engine, pids, args.twice)
    comm.Barrier()
    engine.stop()
    say(comm, **said)


def first(comm: MPI.Comm, engine: Engine, pids: list[int], twice: bool) -> dict:
    engine.loop.ask(1)
    until(lambda: any(one["peer"] == 1 for one in engine.loop.under_way()))
    comm.Barrier()
    os.kill(pids[1], signal.SIGSTOP)
    try:
        until(lambda: engine.loop.peers()[1] == SUSPECT)
        if twice:
            os.kill(pids[1], signal.SIGCONT)
            comm.send(None, 1)
            until(lambda: engine.loop.peers()[1] == ALIVE)
            os.kill(pids[1], signal.SIGSTOP)
        began = time.monotonic()
        engine.stop()
        leave_s = time.monotonic() - began
        begun = engine.loop.under_way()
    finally:
        os.kill(pids[1], signal.SIGCONT)
        comm.send(None, 1)
    return {"left_behind": len(begun), "leave_s": leave_s}


def second(comm: MPI.Comm, engine: Engine, pids: list[int], twice: bool) -> dict:
    until(lambda: bool(engine.loop.under_way()))
    comm.Barrier()
    comm.recv(source=0)
    chunks = engine.memory.own.store
    if twice:  # merge some chunks
        chunks.lease(LEASED[1])
        chunks.end_lease(LEASED[0])
        comm.recv(source=0)
    chunks.end_lease(LEASED[1] if twice else LEASED[0])
    until(lambda: engine.loop.peers()[0] == LEFT)
    rests = engine.pause(60.0)
    began = time.monotonic()
    engine.stop()
    return {"rests": rests, "leave_s": time.monotonic() - began}


def third(comm: MPI.Comm, engine: Engine, pids: list[int], twice: bool) -> dict:
    comm.Barrier()
    ends = time.monotonic() + 60
    while engine.loop.peers()[:2] != [LEFT, LEFT] and time.monotonic() < ends:
        time.sleep(1e-3)
    return {"peers": engine.loop.peers()[:2]}


if __name__ == "__main__":
    main()
