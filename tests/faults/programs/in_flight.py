"""Super learners of one process, without Horovod: one is killed in the middle of an exchange.

Nobody trains (the learning rate is 0), so the sum of all models may move only by chunks in flight. The
memory of the victim's engine is a file, or mapped by survivors, so that what it had merged can be read
after its end. Each survivor leaves its model twice: when the loss is noticed, and some exchanges later.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import mpi4py

mpi4py.rc.finalize = False

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

from hvd_adpsgd.config import Config  # noqa: E402
from hvd_adpsgd.engine import shard_memory, shared_memory  # noqa: E402
from hvd_adpsgd.engine.engine import Engine  # noqa: E402
from hvd_adpsgd.engine.layout import TensorSpec  # noqa: E402
from hvd_adpsgd.engine.peers import PeerState  # noqa: E402
from hvd_adpsgd.strategies import parse  # noqa: E402

LANES, LEASED = 8, 48
DEADLINE_S = 60.0
ATTEMPT_S = 5.0
MORE = 20  # exchanges after the loss
SELDOM = 1e-6  # exchanges per step: none in a run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--victim", type=int, required=True)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--asking", action="store_true", help="the victim asked; else was asked")
    parser.add_argument("--no-share", action="store_true")
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    learner = Learner(MPI.COMM_WORLD, args)
    if learner.rank == args.victim:
        learner.die()
    learner.survive()
    os._exit(0)


class Learner:
    """A super learner of one process."""

    def __init__(self, comm: MPI.Comm, args: argparse.Namespace):
        self.args, self.rank = args, comm.rank
        self.survivors = comm.Split(0 if comm.rank == args.victim else 1)
        if comm.rank == args.victim:
            keep_memory(args.folder)
        outer = comm.Dup()
        outer.Set_errhandler(MPI.ERRORS_RETURN)
        self.model = draw(args.seed, comm.rank, args.elements)
        asks = comm.rank != args.victim or args.asking
        self.engine = Engine(
            inner=None,
            outer=outer,
            plan=parse("random_pairs").plan(comm.rank, comm.size),
            config=Config(
                exchanges_per_step=4 if asks else SELDOM,
                same_host="mpi" if args.no_share else "memory",
            ),
        )
        self.engine.memory.extend([TensorSpec("x", self.model.shape, "float32")])
        self.addresses = np.array([self.model.ctypes.data], dtype=np.uintp)
        self.engine.start()
        comm.Barrier()

    def die(self) -> None:
        """Offer once, and end in the middle of an exchange: no correction is taken in meanwhile.

        None ends before that: this learner has the leases of chunks in the middle of its model, one of
        each lane. A victim that is to end while it answers never asks: the peer that it asked could answer no
        other peer, and one that waits for that peer would never ask the victim.
        """
        self.engine.memory.absorb(self.addresses, 0)
        store, chunks = self.engine.memory.own.store, range(LEASED, LEASED + LANES)
        over = time.monotonic() + DEADLINE_S
        while time.monotonic() < over:
            for chunk in chunks:
                store.lease(chunk)
            self._end_in_an_exchange()
            # those that others have asked for, which wait for the leases, too, keep it from its own: end them
            for chunk in chunks:
                store.end_lease(chunk)
            self.engine.pause(ATTEMPT_S)
            self.engine.resume()

    def _end_in_an_exchange(self) -> None:
        loop = self.engine.loop
        assert loop is not None
        over = time.monotonic() + ATTEMPT_S
        while time.monotonic() < over:
            self.engine.offer(0)  # credit to ask once more
            ends = time.monotonic() + 0.05
            while time.monotonic() < ends:
                for x in loop.under_way():
                    here = x["asked"] == self.args.asking and not x["broken"]
                    if here and LANES < x["done"] < x["chunks"] - 2 * LANES:
                        (self.args.folder / "fault").write_text(json.dumps(x))
                        os.kill(os.getpid(), signal.SIGKILL)

    def survive(self) -> None:
        self.step = 0
        self.turns(lambda: PeerState.FAILED not in dict(self.engine.report()).values())
        exchanges = self.leave("after")
        neighbours = self.engine._neighbours
        if neighbours is not None and neighbours.models[self.args.victim]:
            shown = neighbours._models[self.args.victim]
            shown.tofile(self.args.folder / f"{self.rank}.shown")
        self.turns(lambda: self.engine.metrics()["exchanges"] < exchanges + MORE)
        self.leave("end")
        held = sum(x["broken"] for x in self.engine.loop.under_way())
        facts = {"rank": self.rank, "broken": self.engine.loop.counters()["broken"], "held": held}
        self.engine.stop()
        (self.args.folder / f"{self.rank}.json").write_text(json.dumps(facts))

    def turns(self, more) -> None:
        ends = time.monotonic() + DEADLINE_S
        while more():
            assert time.monotonic() < ends, "not in time"
            self.turn()
            time.sleep(2e-3)

    def turn(self) -> None:
        self.engine.publish(self.step)
        self.engine.memory.absorb(self.addresses, self.step)
        self.engine.offer(self.step)
        self.step += 1

    def leave(self, name: str) -> int:
        """The model with all that is owed to it, when nobody exchanges. How many exchanges there were."""
        assert self.engine.pause(DEADLINE_S)
        self.survivors.Barrier()
        assert self.engine.pause(DEADLINE_S)
        self.survivors.Barrier()
        self.turn()
        self.turn()
        np.save(self.args.folder / f"{self.rank}.{name}.npy", self.model)
        # before any survivor begins another one
        exchanges = int(self.engine.metrics()["exchanges"])
        self.survivors.Barrier()
        self.engine.resume()
        return exchanges


def draw(seed: int, rank: int, elements: int) -> np.ndarray:
    return np.random.default_rng([seed, rank]).standard_normal(elements).astype(np.float32)


def keep_memory(folder: Path) -> None:
    """Of the engine made next: files memory.0 (shared_memory) and memory.1 (mirror)."""
    made = []

    def kept(nbytes: int) -> np.ndarray:
        made.append(nbytes)
        return np.memmap(folder / f"memory.{len(made) - 1}", np.uint8, "w+", shape=(nbytes,))

    shard_memory.private_memory = kept
    shared_memory.private_memory = kept


if __name__ == "__main__":
    main()
