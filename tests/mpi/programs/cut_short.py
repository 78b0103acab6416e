"""Who leaves in the middle of a long exchange: it ends early, with the same chunks on both sides.

Two engines. The second one has the lease of a chunk in the middle, so that the exchange cannot end before the
first one leaves; once that has cut the exchange short, the lease ends. Each says how many chunks it merged,
of how many, and how far the sum of both models has moved. `--who`: first (the second one trains on), or both
(at once).
"""

import argparse
import threading

import numpy as np
from engines import ASKS_NOBODY, Driven, say, until
from mpi4py import MPI

from hvd_adpsgd.engine.peers import PeerState

CHUNK_NBYTES, CHUNKS, LEASED = 64 * 1024, 100, 40


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--who", choices=("first", "both"), required=True)
    parser.add_argument("--leave-s", type=float, required=True)
    parser.add_argument("--no-share", action="store_true", help="every chunk through MPI")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    model = np.random.default_rng(comm.rank).standard_normal(CHUNKS * CHUNK_NBYTES // 8)
    before = total(comm, model)
    options = {
        "deadline_s": 60.0,
        "leave_deadline_s": args.leave_s,
        "chunk_kib": CHUNK_NBYTES // 1024,
    }
    same_host = "mpi" if args.no_share else "memory"
    driven = Driven(comm, ASKS_NOBODY, model, same_host=same_host, **options)
    engine = driven.engine
    driven.offer()
    if comm.rank == 1:
        engine.memory.own.store.lease(LEASED)
    comm.Barrier()
    if comm.rank == 0:
        engine.loop.ask(1)
    until(lambda: bool(engine.loop.under_way()))
    comm.Barrier()
    stopping = threading.Thread(target=engine.loop.stop, args=(False,))
    if comm.rank == 0 or args.who == "both":
        stopping.start()
    if comm.rank == 0:
        until(lambda: any(one["cut"] for one in engine.loop.under_way()))
    comm.Barrier()
    if comm.rank == 1:
        engine.memory.own.store.end_lease(LEASED)
    if stopping.ident:
        stopping.join()
    until(lambda: engine.loop.finished() == 1)
    comm.Barrier()
    lost = [peer for peer, state in engine.report() if state is PeerState.FAILED]
    engine.stop()
    for _ in range(2):
        engine.memory.publish()
        driven.absorb()
    merged = engine.loop.counters()["chunks"]
    moved = np.abs(total(comm, model) - before).max() / np.abs(before).max()
    say(comm, merged=merged, moved=float(moved), lost=lost)


def total(comm: MPI.Comm, model: np.ndarray) -> np.ndarray:
    result = np.empty_like(model)
    comm.Allreduce(model, result)
    return result


if __name__ == "__main__":
    main()
