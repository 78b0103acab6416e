"""Engines of one process, over wires of sockets whose connections a test opens."""

import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from hvd_adpsgd.engine.engine_options import EngineOptions
from hvd_adpsgd.engine.loop import Loop
from hvd_adpsgd.engine.wire import SystemClock
from hvd_adpsgd.engine.wire_tcp import TcpWire
from tests.shown import CHUNK_NBYTES, Shown

NEWS_RECORD, RANK = struct.Struct("=3i"), struct.Struct("=i")
MEMBERS = 3  # of which two or three are made
ELEMENTS = 5000
WEIGHT = 0.5
DEADLINE_S = 120.0


class Member:
    """A wire, and the pipes by which it gets connections; the engine of rank 0 or 1 over it.

    Args:
        rank: 0 or 1.
        elements: of the model.
        period: every other chunk moves in one of so many exchanges.
        rate: exchanges per step for which it asks by itself.
        options: other fields of its EngineOptions.
    """

    def __init__(
        self,
        rank: int,
        elements: int = ELEMENTS,
        period: int = 1,
        rate: float = 1.0,
        **options: Any,
    ):
        self.rank = rank
        self.news, self._news = os.pipe2(os.O_NONBLOCK)
        self.dials, self._dials = os.pipe2(os.O_NONBLOCK)
        self.wire = TcpWire(SystemClock(), rank, MEMBERS, self.news, self._dials, 1e6)
        self.model = Shown(np.full(elements, float(rank)))
        part = self.model.memory.layout.parts[0]
        self.fingerprint, self.chunks = part.fingerprint, part.last_chunk
        schedule = np.array([1 - rank], np.int32)
        options = {"deadline_s": 0.2, "leave_deadline_s": 0.5, "report_s": 1.0, **options}
        how = EngineOptions(WEIGHT, rate, CHUNK_NBYTES, **options)
        self.loop = Loop(self.wire, SystemClock(), self.model.store, schedule, how)
        rare = range(1, self.chunks, 2) if period > 1 else ()
        self.loop.extend(self.chunks, self.fingerprint, rare, period)
        self.loop.average_all()

    def connect(self, kind: int, peer: int, end: socket.socket) -> None:
        end.setblocking(False)
        os.write(self._news, NEWS_RECORD.pack(kind, peer, end.detach()))

    def tell(self, kind: int, peer: int) -> None:
        """Of a peer to which there is no connection."""
        os.write(self._news, NEWS_RECORD.pack(kind, peer, -1))

    def dialed(self) -> Iterator[int]:
        """Peers to which this one wants a connection."""
        try:
            while data := os.read(self.dials, RANK.size):
                yield RANK.unpack(data)[0]
        except BlockingIOError:
            return

    def step(self) -> None:
        """The trainer's: apply corrections, offer the model."""
        self.model.apply()
        self.loop.offer(self.model.step, True)

    def close(self) -> None:
        self.loop.stop(within=0.1)
        self.wire.close()


def come_to_rest(members: list[Member]) -> list[dict]:
    """Exchanges end, and then the engines; their counters."""
    for member in members:
        member.loop.pause(True)
        assert member.loop.wait_quiet(DEADLINE_S)
    counters = [member.loop.counters() for member in members]
    for member in members:
        member.close()
    return counters


def connect_all(members: list[Member]) -> None:
    """Open what they have asked for."""
    for member in members:
        for peer in member.dialed():
            mine, theirs = socket.socketpair()
            members[peer].connect(TcpWire.ACCEPTED, member.rank, theirs)
            member.connect(TcpWire.DIALED, peer, mine)


def share_memory(members: list[Member], rings: bool) -> list[np.ndarray]:
    """As on one host; keep what is returned as long as they run.

    Args:
        members: of which two share memory.
        rings: whether they wake each other.
    """
    memory = [np.zeros(Loop.shared_nbytes(CHUNK_NBYTES), np.uint8) for _ in range(MEMBERS)]
    for member in members:
        own = memory[member.rank].ctypes.data
        near = {m.rank: m for m in members if m is not member}
        places = [memory[rank].ctypes.data if rank in near else 0 for rank in range(MEMBERS)]
        models = [near[rank].model.place if rank in near else (0, 0) for rank in range(MEMBERS)]
        member.loop.share(own, places, *zip(*models, strict=True))
        if rings:
            at = Loop.doorbell_at(CHUNK_NBYTES)
            member.loop.hear(own + at, [place and place + at for place in places])
    return memory
