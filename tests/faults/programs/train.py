"""One super learner per process, without Horovod: trains a toy model until the test has seen enough.

A step is a little matrix product and a local update, about 10 ms. Files in --folder:

RANK.pid        when all begin, for the test to stop or kill the learner
RANK.progress   now and then: its steps, exchanges that were parked, and finished with each other one
RANK.sleep      of the test: the learner sleeps in its next step while this is there
RANK.sleeps     it sleeps, or has slept
stopped         of learner --stops, which has stopped itself in the middle of an exchange
enough          of the test: all end their training, and compare the mean of the models with the sum of
                all local updates
RANK.json       what a learner found
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import mpi4py

mpi4py.rc.finalize = False  # MPI_Finalize may wait without bound for who was killed

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

from hvd_adpsgd.config import Config  # noqa: E402
from hvd_adpsgd.engine.engine import Engine  # noqa: E402
from hvd_adpsgd.engine.layout import TensorSpec  # noqa: E402
from hvd_adpsgd.lifecycle.membership import Membership  # noqa: E402
from hvd_adpsgd.strategies import parse  # noqa: E402

DEADLINE_S = 60.0
LONGEST_S = 150.0
EVERY, LANES = 5, 8  # steps; lanes of an exchange


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stops", type=int, help="this learner stops itself")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--strategy", default="random_pairs")
    parser.add_argument("--exchanges-per-step", type=float, default=1.0)
    parser.add_argument("--elements", type=int, default=200_000, help="of each dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-check", action="store_true", help="somebody dies: no mean at the end")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="LOG %(message)s")
    learner = Learner(MPI.COMM_WORLD, args)
    learner.train()
    if not args.no_check:
        learner.compare()
    learner.engine.stop()
    learner.say()
    sys.stderr.flush()
    os._exit(0)


class Learner:
    """A super learner of one process."""

    def __init__(self, comm: MPI.Comm, args: argparse.Namespace):
        self.comm, self.args = comm, args
        outer = comm.Dup()
        outer.Set_errhandler(MPI.ERRORS_RETURN)
        self.rng = np.random.default_rng([args.seed, comm.rank])
        names = [f"learner {i}" for i in range(comm.size)]
        self.membership = Membership([[i] for i in range(comm.size)], names, comm.rank)
        self.engine = Engine(
            inner=None,
            outer=outer,
            plan=parse(args.strategy).plan(comm.rank, comm.size),
            config=Config(exchanges_per_step=args.exchanges_per_step),
            names=names,
        )
        self.model = {d: self.draw(d) for d in ("float32", "float64")}
        self.expected = {d: x.astype(np.float64) for d, x in self.model.items()}
        self.engine.memory.extend([TensorSpec(d, x.shape, d) for d, x in self.model.items()])
        self.engine.start()
        self.addresses = np.array([x.ctypes.data for x in self.model.values()], dtype=np.uintp)
        self.facts: dict = {"rank": comm.rank, "step": 0}

    def draw(self, dtype: str) -> np.ndarray:
        return self.rng.standard_normal(self.args.elements).astype(dtype)

    def train(self) -> None:
        left = np.ones((150, 150))
        self.comm.Barrier()
        self.leave("pid", os.getpid())
        if self.comm.rank == self.args.stops:
            threading.Thread(target=self.stop_in_an_exchange, daemon=True).start()
        ends = time.monotonic() + LONGEST_S
        while not (self.args.folder / "enough").exists():
            assert time.monotonic() < ends, "the test has not seen enough"
            left = left @ left
            left /= np.abs(left).max()
            time.sleep(8e-3)  # the rest of a step's work, for which this machine has too few cores
            if (self.args.folder / f"{self.comm.rank}.sleep").exists():
                self.sleep()
            self.update()
            self.turn()
            if self.facts["step"] % EVERY == 0:
                self.leave("progress", self.progress())

    def sleep(self) -> None:
        self.leave("progress", self.progress())
        self.leave("sleeps", True)
        while (self.args.folder / f"{self.comm.rank}.sleep").exists():
            time.sleep(1e-3)

    def stop_in_an_exchange(self) -> None:
        """After some steps; the test lets this process go on.

        The exchange cannot end before that: this thread has the leases of chunks in the middle of the model,
        one of each lane.
        """
        while self.facts["step"] < 20:
            time.sleep(1e-3)
        loop, store = self.engine.loop, self.engine.memory.own.store
        for chunk in range(LANES, 2 * LANES):
            store.lease(chunk)
        while not any(x["done"] for x in loop.under_way()):
            time.sleep(1e-3)
        (self.args.folder / "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
        for chunk in range(LANES, 2 * LANES):
            store.end_lease(chunk)

    def progress(self) -> dict:
        metrics = self.engine.metrics()
        return {"step": self.facts["step"], "met": metrics["peers"], "parked": metrics["parked"]}

    def leave(self, kind: str, facts: object) -> None:
        """A file, which appears whole or not at all."""
        new = self.args.folder / f"{self.comm.rank}.new"
        new.write_text(json.dumps(facts))
        new.rename(self.args.folder / f"{self.comm.rank}.{kind}")

    def update(self) -> None:
        """A local step on a few elements; `expected` collects what it really changed."""
        for dtype, x in self.model.items():
            some = slice(self.facts["step"] % 50, None, 50)
            before = x[some].astype(np.float64)
            x[some] += (0.1 * self.rng.standard_normal(x[some].shape)).astype(dtype)
            self.expected[dtype][some] += x[some].astype(np.float64) - before

    def turn(self) -> None:
        step = self.facts["step"]
        self.engine.publish(step)
        self.engine.memory.absorb(self.addresses, step)
        self.engine.offer(step)
        self.membership.update(self.engine.report(), step)
        self.facts["step"] += 1

    def compare(self) -> None:
        """Relative distance of the mean model from the sum of all local updates."""
        self.comm.Barrier()  # who was stopped is back
        assert self.engine.pause(DEADLINE_S), "the engine did not come to rest"
        self.comm.Barrier()
        self.turn()
        worst = {}
        for dtype, x in self.model.items():
            mine = self.comm.allreduce(x.astype(np.float64))
            ideal = self.comm.allreduce(self.expected[dtype])
            worst[dtype] = float(np.linalg.norm(mine - ideal) / np.linalg.norm(ideal))
        self.facts["worst"] = worst
        self.comm.Barrier()

    def say(self) -> None:
        self.leave("json", self.facts | self.progress())


if __name__ == "__main__":
    main()
