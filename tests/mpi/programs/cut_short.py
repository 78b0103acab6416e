"""Who leaves in the middle of a long exchange: it ends early, with the same chunks on both sides.

Two engines. The slots are held, so that no chunk can be merged and the exchange cannot end before somebody
leaves; whoever learns that it is cut short lets go. Each says how many chunks it merged, of how many, and how
far the sum of both models has moved. `--who`: first (the second one trains on), or both (at once).
"""

import argparse
import threading

import numpy as np
from engines import address, say, started, until
from mpi4py import MPI

from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.peers import PeerState

CHUNK_NBYTES, CHUNKS = 64 * 1024, 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--who", choices=("first", "both"), required=True)
    parser.add_argument("--leave-s", type=float, required=True)
    parser.add_argument("--no-share", action="store_true", help="every chunk through MPI")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    model = np.random.default_rng(comm.rank).standard_normal(CHUNKS * CHUNK_NBYTES // 8)
    before = total(comm, model)
    engine = started(
        comm, model, chunk_kib=CHUNK_NBYTES // 1024, deadline_s=60.0, leave_deadline_s=args.leave_s,
        same_host="mpi" if args.no_share else "memory",
    )  # fmt: skip
    engine.memory.store.publish()
    engine.memory.store.publish(hold=True)  # both, so that slots have their turn as in a step
    comm.Barrier()
    if comm.rank == 0:
        engine.loop.ask(1)
    until(lambda: bool(engine.loop.under_way()))
    comm.Barrier()
    freed = threading.Thread(target=let_go, args=(engine,))
    freed.start()
    if comm.rank == 0 or args.who == "both":
        engine.loop.stop(False)  # Engine.stop() would let go at once
    freed.join()
    until(lambda: engine.loop.finished() == 1)
    comm.Barrier()
    lost = [peer for peer, state in engine.report() if state is PeerState.FAILED]
    engine.stop()
    for _ in range(2):
        engine.memory.publish()
        engine.memory.absorb(address(model), 0)
    merged = engine.loop.counters()["chunks"]
    moved = np.abs(total(comm, model) - before).max() / np.abs(before).max()
    say(comm, merged=merged, moved=float(moved), lost=lost)


def let_go(engine: Engine) -> None:
    """Once the exchange is cut short, or over."""
    until(lambda: all(one["chunks"] < CHUNKS for one in engine.loop.under_way()))
    engine.memory.store.reopen()


def total(comm: MPI.Comm, model: np.ndarray) -> np.ndarray:
    result = np.empty_like(model)
    comm.Allreduce(model, result)
    return result


if __name__ == "__main__":
    main()
