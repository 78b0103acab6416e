"""One engine over TCP that does what lines on its input say: `python engine.py RANK SIZE OPTIONS`."""

import base64
import contextlib
import json
import os
import pickle
import socket
import sys
import threading
import time
from typing import Any

import numpy as np

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.errors import AdpsgdError
from hvd_adpsgd.strategies import Plan
from tests.gathers import Rank

LONGEST_S = 60.0


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def gather(value: Any) -> list[Any]:
    """The test gathers."""
    tell(gather=base64.b64encode(pickle.dumps(value)).decode())
    return [pickle.loads(base64.b64decode(text)) for text in json.loads(sys.stdin.readline())]


class Commands:
    """What the test may ask for; each returns what is told of it."""

    def __init__(self, rank: int, size: int, options: dict[str, Any]):
        elements = options.pop("elements", 100_000)
        config = Config(
            wire="tcp",
            same_host="mpi",
            report_s=options.pop("report_s", 0),
            leave_deadline_s=5.0,
            **options,
        )
        plan = Plan.nobody(weight=1 / 2)
        self.engine = Engine(inner=None, outer=Rank(rank, size), plan=plan, config=config)
        self.model = np.random.default_rng(rank).standard_normal(elements)
        self.engine.memory.extend([TensorSpec("model", self.model.shape, "float64")])
        self.engine.start(gather)
        assert self.engine.loop is not None
        self.loop, self.steps = self.engine.loop, 0
        self.chunks = self.engine.memory.own.layout.nchunks
        self.step()

    def step(self) -> float:
        """Take the corrections, offer the model; its sum."""
        self.engine.publish(self.steps)
        self.engine.memory.absorb(np.array([self.model.ctypes.data], dtype=np.uintp), self.steps)
        self.engine.offer(self.steps)
        self.steps += 1
        return float(self.model.sum())

    def ask(self, peer: int) -> None:
        self.loop.ask(peer)

    def count(self) -> int:
        """Exchanges that have ended."""
        return int(self.loop.finished())

    def finished(self, count: int) -> bool:
        return bool(self.loop.wait_finished(count, LONGEST_S))

    def states(self) -> list[int]:
        return [int(state) for state in self.loop.peers()]

    def wait_state(self, peer: int, state: int) -> float:
        """When the peer has that state, in seconds of CLOCK_MONOTONIC."""
        ends = time.monotonic() + LONGEST_S
        while self.loop.peers()[peer] != state:
            assert time.monotonic() < ends, f"{self.loop.peers()}"
            time.sleep(1e-3)
        return time.monotonic()

    def listener(self) -> tuple[str, int]:
        found = self.engine._connections
        assert found is not None and found._listener is not None
        host, port = found._listener.getsockname()[:2]
        return host, port

    def incarnations(self) -> list[int]:
        found = self.engine._connections
        assert found is not None
        return [address.incarnation for address in found._addresses if address is not None]

    def misplace(self, peer: int, host: str, port: int) -> None:
        """Look for a peer at another address from now on."""
        found = self.engine._connections
        assert found is not None and found._addresses[peer] is not None
        found._addresses[peer] = found._addresses[peer]._replace(host=host, port=port)

    def report_on(self) -> None:
        """Report to the others again and again, as a learner does."""

        def report() -> None:
            while True:
                self.loop.report(b"here")
                time.sleep(0.05)

        threading.Thread(target=report, daemon=True).start()

    def wait_error(self) -> str:
        """That the next step would raise."""
        ends = time.monotonic() + LONGEST_S
        while time.monotonic() < ends:
            try:
                self.engine.check()
            except AdpsgdError as error:
                return f"{type(error).__name__}: {error}"
            time.sleep(1e-3)
        return ""

    def merged(self) -> int:
        """Chunks."""
        return int(self.loop.counters()["chunks"])

    def cut(self) -> int:
        """End every connection of this process, as a firewall or a NAT may; how many there were."""
        count = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as end:
                end.getpeername()  # not the listener
                end.shutdown(socket.SHUT_RDWR)
                count += 1
        return count

    def cut_midway(self, peer: int, cuts: int) -> None:
        """Exchange with a peer, and cut all connections after each of so many parts of the exchange."""
        before, wanted = self.merged(), self.count() + 1
        self.ask(peer)
        for i in range(1, cuts + 1):
            due = before + i * self.chunks // (cuts + 1)
            ends = time.monotonic() + LONGEST_S
            while self.merged() < due:
                assert time.monotonic() < ends, f"{self.merged() - before} of {self.chunks} chunks"
            self.cut()
        assert self.finished(wanted), f"{self.merged() - before} of {self.chunks} chunks"

    def fork(self) -> int:
        """A child that lives on, as a worker of a data loader does."""
        child = os.fork()
        if child == 0:
            os.close(0)
            os.close(1)
            time.sleep(2 * LONGEST_S)
            os._exit(0)
        return child

    def stop(self) -> None:
        self.engine.stop()
        self.engine.release()


def main() -> None:
    rank, size, options = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    commands = Commands(rank, size, options)
    tell(started=os.getpid())
    for line in sys.stdin:
        name, *args = json.loads(line)
        tell(result=getattr(commands, name)(*args))


if __name__ == "__main__":
    main()
