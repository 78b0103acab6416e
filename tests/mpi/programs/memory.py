"""How much memory engines take: super learners of --k learners each, a model of --mib MiB.

Each learner says, in MiB, by how much its memory grew from before the engine was made to after
some steps with exchanges: all that it maps (rss), what only it maps (private), and its part of what several
map (pss).
"""

import argparse
import time

import numpy as np
from engines import DEADLINE_S, Driven, say
from mpi4py import MPI

from hvd_adpsgd.strategies import parse


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--k", type=int, required=True)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--exchanges", type=int, default=12)
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    mine, n = comm.rank // args.k, comm.size // args.k
    inner = comm.Split(mine, comm.rank)
    leads = inner.rank == 0
    outer = comm.Split(0 if leads else MPI.UNDEFINED, comm.rank)
    model = np.full(args.mib * 2**18, 1.0 + mine, dtype=np.float32)
    comm.Barrier()
    before = memory()
    plan = parse("random_pairs").plan(mine, n)
    driven = Driven(outer if leads else None, plan, model, inner=inner, exchanges_per_step=8.0)
    engine = driven.engine
    exchanges, ends = 0, time.monotonic() + DEADLINE_S
    while exchanges < args.exchanges and time.monotonic() < ends:
        engine.publish(driven.step)
        comm.Barrier()
        engine.memory.all_met()
        driven.offer()
        exchanges = comm.allreduce(engine.metrics().get("exchanges", 0))
        driven.step += 1
    after = memory()
    comm.Barrier()
    grown = {key: (after[key] - before[key]) / 1024 for key in before}
    engine.stop()
    say(comm, leads=leads, exchanges=exchanges, **grown)


def memory() -> dict[str, int]:
    """KiB of this process, from the kernel."""
    with open("/proc/self/smaps_rollup") as file:
        lines = [line.split() for line in file.readlines()[1:]]
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    return {
        "rss": kib["Rss"],
        "private": kib["Private_Clean"] + kib["Private_Dirty"],
        "pss": kib["Pss"],
    }


if __name__ == "__main__":
    main()
