"""Promise 1: engines exchange as fast as they can while every trainer updates its own model.

Each super learner is one process without Horovod. Local updates and pauses are drawn from a seed;
the order of exchanges is whatever the machine makes of it. Every `--check` steps all stop, take in
what is pending, and compare the mean of the models with the sum of all local updates. After `--steps` they
end as soon as there were `--least` exchanges.

Learner 0 says: worst relative error per dtype, and exchanges.
"""

import argparse
import itertools
import time

import numpy as np
from engines import Driven, say
from hvd_adpsgd_lab.simulation import engine_calls
from mpi4py import MPI

from hvd_adpsgd.engine.engine import Engine

LONGEST_S = 60.0  # for more exchanges
SHAPES = {"a": (1,), "b": (3, 7), "c": (100_003,), "d": (0,), "e": (50, 1000)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--check", type=int, default=50)
    parser.add_argument("--least", type=int, default=0, help="exchanges: step on until then")
    parser.add_argument("--strategy", default="random_pairs")
    parser.add_argument("--wire", default=None)
    parser.add_argument("--no-share", action="store_true", help="every chunk through MPI")
    args = parser.parse_args()

    comm = MPI.COMM_WORLD
    rng = np.random.default_rng([args.seed, comm.rank])
    model = {
        (name, dtype): rng.standard_normal(shape).astype(dtype)
        for dtype in ("float32", "float64", "float16")
        for name, shape in SHAPES.items()
    }
    driven = Driven(
        comm,
        args.strategy,
        *model.values(),
        exchanges_per_step=64.0,
        chunk_kib=64,
        wire_dtype=args.wire,
        deadline_s=30.0,
        same_host="mpi" if args.no_share else "memory",
    )
    engine = driven.engine
    expected = {key: x.astype(np.float64) for key, x in model.items()}
    worst = {"float32": 0.0, "float64": 0.0, "float16": 0.0}
    comm.Barrier()
    ends, exchanges = time.monotonic() + LONGEST_S, 0
    for step in itertools.count():
        update(model, expected, rng)
        pause = rng.exponential(1e-3) * (rng.random() < 0.5)
        time.sleep(pause)  # jitter of the interleaving, not a synchronisation
        driven.turn()
        if (step + 1) % args.check == 0:
            assert engine.pause(30.0), "the engine did not come to rest in 30 s"
            comm.Barrier()
            engine.publish(step)
            driven.absorb()
            compare(comm, owed(engine), expected, worst)
            exchanges = comm.allreduce(engine.metrics()["exchanges_active"])
            enough = exchanges >= args.least or comm.bcast(time.monotonic() > ends)
            if step + 1 >= args.steps and enough:
                break
            engine.resume()
    engine.stop()
    if comm.rank == 0:
        say(comm, worst=worst, exchanges=exchanges)


def update(model: dict, expected: dict, rng: np.random.Generator) -> None:
    """A local step on every tensor; `expected` collects what it really changed."""
    for key, x in model.items():
        before = x.astype(np.float64)
        x += (0.1 * rng.standard_normal(x.shape)).astype(x.dtype)
        expected[key] += x.astype(np.float64) - before


def owed(engine: Engine) -> dict[str, np.ndarray]:
    """The model by dtype, with what rounding to 16 bits holds back."""
    found = {dtype: [] for dtype in ("float32", "float64", "float16")}
    for i, chunk in enumerate(engine.memory.own.layout.parts[0].chunks):
        share = np.zeros(chunk.count, "float64" if chunk.dtype == "float64" else "float32")
        assert engine_calls.share(engine.memory.own.store, i, share.view(np.uint8))
        found[chunk.dtype].append(share.astype(np.float64))
    return {dtype: np.concatenate(shares) for dtype, shares in found.items()}


def compare(comm: MPI.Comm, owed: dict, expected: dict, worst: dict) -> None:
    """Distance of the mean model from the sum of all local updates, relative, over all tensors."""
    for dtype in worst:
        ideal = np.concatenate([x.ravel() for key, x in expected.items() if key[1] == dtype])
        mine, ideal = comm.allreduce(owed[dtype]), comm.allreduce(ideal)
        error = np.linalg.norm(mine - ideal) / np.linalg.norm(ideal)
        worst[dtype] = max(worst[dtype], float(error))


if __name__ == "__main__":
    main()
