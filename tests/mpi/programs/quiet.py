"""An engine by hand, for tests of one property each: --idle, --grow, --elsewhere.

idle: turns of the thread per second while nobody offers, whether it sleeps on its doorbell or in its wire.
grow: tensors are added while exchanges run; gives the error of the mean.
elsewhere: learner 1 cuts its model into larger chunks than learner 0; gives what is raised.
Several runs, one after the other: --then between them.
"""

import argparse
import ctypes
import platform
import time
from collections.abc import Callable

import numpy as np
from engines import DEADLINE_S, Driven, runs, say
from mpi4py import MPI

from hvd_adpsgd.errors import AdpsgdError

SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
FUTEX_WAKE = 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--grow", action="store_true")
    parser.add_argument("--elsewhere", action="store_true")
    parser.add_argument("--wire", default="mpi")
    parser.add_argument("--no-share", action="store_true", help="every chunk through MPI")
    for number, words in runs():
        args = parser.parse_args(words)
        run = Run(args)
        ways = {"idle": run.idle, "grow": run.grow, "elsewhere": run.elsewhere}
        facts = next(way for name, way in ways.items() if getattr(args, name))()
        run.engine.stop()
        say(run.comm, case=number, **facts)


def seen(condition: Callable[[], bool]) -> bool:
    """Whether it holds at some moment of the next DEADLINE_S."""
    ends = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > ends:
            return False
    return True


def woken(doorbell: int) -> bool:
    """Whether a thread sleeps on the doorbell at this address: it is woken."""
    address = ctypes.c_void_p(doorbell)
    return ctypes.CDLL(None).syscall(SYS_FUTEX, address, FUTEX_WAKE, 1, None, None, 0) == 1


class Run(Driven):
    """One engine and its model."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.comm = args, MPI.COMM_WORLD
        self.rng = np.random.default_rng(self.comm.rank)
        super().__init__(
            self.comm,
            "random_pairs",
            self.rng.standard_normal(1_000_000),
            exchanges_per_step=8.0,
            chunk_kib=256 * 2 ** (args.elsewhere and self.comm.rank == 1),
            same_host="mpi" if args.no_share else "memory",
            wire=args.wire,
        )

    def idle(self) -> dict:
        for _ in range(10):
            self.turn()
        calm, last, ends = 0, -1, time.monotonic() + DEADLINE_S
        while calm < 50 and time.monotonic() < ends:  # until all credit is spent
            time.sleep(0.01)
            exchanges = self.comm.allreduce(self.engine.metrics()["exchanges"])
            calm, last = (calm + 1, last) if exchanges == last else (0, exchanges)
        self.comm.Barrier()
        began, before = time.monotonic(), self.turns()
        time.sleep(2.0)  # the span that is measured
        rate = (self.turns() - before) / (time.monotonic() - began)
        if self.args.wire == "tcp":
            sleeps = seen(lambda: self.engine._connections.wire.sleeps)
        else:
            sleeps = seen(lambda: woken(self.engine._neighbours.doorbell))
        return {
            "turns_per_s": rate,
            "exchanges": self.engine.metrics()["exchanges"],
            "sleeps": sleeps,
        }

    def turns(self) -> int:
        return int(self.engine.loop.counters()["turns"])

    def grow(self) -> dict:
        added = 0
        while added < 12 or self.engine.metrics()["exchanges"] < 20:
            self.turn()
            if self.step % 5 == 0 and added < 12:
                self.add(self.rng.standard_normal(9973 * added))
                added += 1
            time.sleep(1e-3)  # a gradient
        start = self.start()
        self.comm.Barrier()
        assert self.engine.pause(DEADLINE_S), "the engine did not come to rest"
        self.comm.Barrier()
        self.turn()
        worst = 0.0
        for x, expected in zip(self.models, start, strict=True):
            mean = self.comm.allreduce(x)
            norm = float(np.linalg.norm(expected)) or 1.0
            worst = max(worst, float(np.linalg.norm(mean - expected)) / norm)
        return {"worst": worst, "chunks": self.engine.metrics()["chunks"]}

    def start(self) -> list[np.ndarray]:
        """Sum over learners of what each tensor was to begin with."""
        total = [np.zeros_like(x) for x in self.models]
        for rank in range(self.comm.size):
            rng = np.random.default_rng(rank)
            for x in total:
                x += rng.standard_normal(x.size)
        return total

    def elsewhere(self) -> dict:
        """Until an exchange was tried: one raises then, or both."""
        found: dict = {"error": None}
        ends = time.monotonic() + DEADLINE_S
        while not self.comm.allreduce(
            found["error"] is not None or time.monotonic() > ends, op=MPI.LOR
        ):
            try:
                self.turn()
            except AdpsgdError as error:
                found = {"error": type(error).__name__, "text": str(error)}
            time.sleep(1e-3)  # a gradient
        return found


if __name__ == "__main__":
    main()
