"""Benchmark of one exchange of a model by messages, over MPI and over TCP, against plain sockets.

Run by `python -m hvd_adpsgd bench wires`, in two processes, on one host or on two. MPI, TCP and plain sockets
take turns in each round, under the same load of the machine and of the link.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hvd_adpsgd.engine.interfaces import addresses, choose_address, network_name
from hvd_adpsgd.strategies import Plan
from hvd_adpsgd_lab.bench import report, settings, spread_of, timed
from hvd_adpsgd_lab.bench.driven import Driven

# Rounds that are not counted: they open connections and touch memory for the first time.
WARM_UP = 2
WIRES = ("mpi", "tcp")


class Sockets:
    """Two connections between two processes, one in each direction, with a thread that sends."""

    def __init__(self, comm: Any, nics: str | None):
        networks = comm.allgather((network_name(), addresses()))
        own = choose_address(nics, network_name(), networks)
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((own, 0))
            listener.listen()
            places = comm.allgather(listener.getsockname()[:2])
            self._out = socket.create_connection(places[1 - comm.rank])
            self._in, _ = listener.accept()
        self.cpu_s = 0.0

    def exchange(self, model: np.ndarray, received: np.ndarray) -> None:
        """Send `model` and receive the other process's model into `received`, at the same time."""
        sender = threading.Thread(target=self._timed, args=(lambda: self._out.sendall(model.data),))
        sender.start()
        self._timed(lambda: self._receive(received.data.cast("B")))
        sender.join()

    def _timed(self, act: Callable[[], object]) -> None:
        began = time.thread_time()
        act()
        self.cpu_s += time.thread_time() - began

    def _receive(self, space: memoryview) -> None:
        while space:
            count = self._in.recv_into(space[: 1 << 18])
            if not count:
                raise SystemExit("the other process has ended")
            space = space[count:]


def main() -> None:
    args = settings()

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    count = int(args.mib * 2**18)
    model = np.random.default_rng(comm.rank).standard_normal(count, dtype=np.float32)
    received = np.empty_like(model)
    sockets = Sockets(comm, args.nics or None)
    engines = {name: _engine(comm, model, name, args) for name in WIRES}
    seconds: dict[str, list[float]] = {name: [] for name in ("socket", *WIRES)}
    cpu: dict[str, list[float]] = {name: [] for name in seconds}
    for number in range(args.rounds + WARM_UP):
        before = sockets.cpu_s
        seconds["socket"].append(timed(comm, lambda: sockets.exchange(model, received)))
        cpu["socket"].append(sockets.cpu_s - before)
        for name, driven in engines.items():
            before = driven.engine.metrics()["engine_cpu_s"]
            seconds[name].append(driven.round(number, partial(_exchange, comm, driven, number)))
            cpu[name].append(driven.engine.metrics()["engine_cpu_s"] - before)
    for driven in engines.values():
        driven.engine.stop()
    report(comm.rank, _summary(args.mib, seconds, cpu))


def _engine(comm: Any, model: np.ndarray, wire: str, args: Any) -> Driven:
    options = {"same_host": "mpi", "wire": wire, "nics": args.nics or None, "report_s": 0.0}
    options["chunk_kib"] = args.chunk_kib
    return Driven(comm, model.copy(), Plan.nobody(weight=1 / 2), **options)


def _exchange(comm: Any, driven: Driven, number: int) -> float:
    def act() -> None:
        loop = driven.engine.loop
        assert loop is not None
        if comm.rank == 0:
            loop.ask(1)
        if not loop.wait_finished(number + 1, 600.0):
            raise SystemExit("an exchange took more than 600 s")

    return timed(comm, act)


def _summary(
    mib: float, seconds: dict[str, list[float]], cpu: dict[str, list[float]]
) -> dict[str, Any]:
    """Return speed, CPU seconds per GB sent or received (an exchange moves two models), and ratios."""
    moved = 2 * mib * 2**20 / 1e9
    result: dict[str, Any] = {"model_mib": mib, "rounds": len(seconds["socket"]) - WARM_UP}
    for name, times in seconds.items():
        result[name] = {
            "mb_per_s_each_way": 1e3 * moved / 2 / statistics.median(times[WARM_UP:]),
            "cpu_s_per_gb": statistics.median(cpu[name][WARM_UP:]) / moved,
        }
    for name in WIRES:
        speeds = zip(seconds["socket"][WARM_UP:], seconds[name][WARM_UP:], strict=True)
        result[name] |= spread_of("speed_to_socket", [plain / ours for plain, ours in speeds])
    return result


if __name__ == "__main__":
    main()
