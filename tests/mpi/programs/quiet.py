"""How often an engine's thread looks while nobody offers, and whether it sleeps: over MPI, and over TCP."""

import ctypes
import platform
import time
from collections.abc import Callable

import numpy as np
from engines import DEADLINE_S, Driven, say
from hvd_adpsgd_lab.simulation import engine_calls
from mpi4py import MPI

SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
FUTEX_WAKE = 1


def main() -> None:
    comm = MPI.COMM_WORLD
    for wire in ("mpi", "tcp"):
        model = np.random.default_rng(comm.rank).standard_normal(1_000_000)
        driven = Driven(comm, "random_pairs", model, exchanges_per_step=8.0, wire=wire)
        facts = idle(comm, driven, wire)
        driven.engine.stop()
        say(comm, case=wire, **facts)


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


def idle(comm: MPI.Comm, driven: Driven, wire: str) -> dict:
    engine = driven.engine
    for _ in range(10):
        driven.turn()
    calm, last, ends = 0, -1, time.monotonic() + DEADLINE_S
    while calm < 50 and time.monotonic() < ends:  # until all credit is spent
        time.sleep(0.01)
        exchanges = comm.allreduce(engine.metrics()["exchanges"])
        calm, last = (calm + 1, last) if exchanges == last else (0, exchanges)
    comm.Barrier()
    began, before = time.monotonic(), engine.loop.counters()["turns"]
    time.sleep(2.0)  # the span that is measured
    rate = (engine.loop.counters()["turns"] - before) / (time.monotonic() - began)
    if wire == "tcp":
        sleeps = seen(lambda: engine_calls.sleeps(engine._connections.wire))
    else:
        sleeps = seen(lambda: woken(engine._neighbours.doorbell))
    return {"turns_per_s": rate, "exchanges": engine.metrics()["exchanges"], "sleeps": sleeps}


if __name__ == "__main__":
    main()
