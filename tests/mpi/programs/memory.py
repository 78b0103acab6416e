"""How much memory engines take: super learners of --k learners each, a model of --mib MiB.

Each learner says, in MiB, by how much its memory grew from before the engine was made to after
some steps with exchanges: all that it maps (rss), what only it maps (private), and its part of what several
map (pss).
"""

import argparse
import json
import time

import numpy as np
from mpi4py import MPI

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.strategies import parse

DEADLINE_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--k", type=int, required=True)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--exchanges", type=int, default=12)
    parser.add_argument("--extra-mib", type=int, default=0, help="to see the bound broken")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    mine, n = comm.rank // args.k, comm.size // args.k
    inner = comm.Split(mine, comm.rank)
    leads = inner.rank == 0
    outer = comm.Split(0 if leads else MPI.UNDEFINED, comm.rank)
    if leads:
        outer.Set_errhandler(MPI.ERRORS_RETURN)
    model = np.full(args.mib * 2**18, 1.0 + mine, dtype=np.float32)
    comm.Barrier()
    before = memory()
    engine = Engine(
        inner=inner,
        outer=outer if leads else None,
        plan=parse("random_pairs").plan(mine, n),
        config=Config(exchanges_per_step=8.0),
    )
    engine.memory.extend([TensorSpec("model", model.shape, "float32")])
    engine.start()
    extra = np.ones(args.extra_mib * 2**17)
    addresses = np.array([model.ctypes.data], dtype=np.uintp)
    exchanges, step, ends = 0, 0, time.monotonic() + DEADLINE_S
    while exchanges < args.exchanges and time.monotonic() < ends:
        engine.publish(step)
        comm.Barrier()
        engine.memory.all_met()
        engine.memory.absorb(addresses, step)
        engine.offer(step)
        exchanges = comm.allreduce(engine.metrics().get("exchanges", 0))
        step += 1
    after = memory()
    comm.Barrier()
    grown = {key: (after[key] - before[key]) / 1024 for key in before}
    said = {"rank": comm.rank, "leads": leads, "exchanges": exchanges, **grown}
    engine.stop()
    with open(1, "wb", closefd=False) as out:  # os.write may write a part only
        out.write(("\n@learner " + json.dumps({**said, "extra": extra.size}) + "\n").encode())


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
