"""A network that ends connections between living peers: messages arrive once; exchanges are exact."""

import os
import random
import socket
import time
from collections.abc import Callable

import numpy as np
import pytest

from hvd_adpsgd.engine.wire import SystemClock
from hvd_adpsgd.engine.wire_tcp import TcpWire
from tests.members import Member

LONGEST_S = 120.0
TWO = 2
ELEMENTS = 30 * 1024  # 30 chunks: an exchange uses its buffers again and again
NOBODY = -1


class Relay:
    """A connection that passes bytes on in parts of random size, and can end with bytes on their way."""

    def __init__(self, draw: random.Random):
        self.draw = draw
        self.ends: list[socket.socket] = []
        given: list[socket.socket] = []
        for _ in range(TWO):
            inner, outer = socket.socketpair()
            inner.setblocking(False)
            self.ends.append(inner)
            given.append(outer)
        self.dialed, self.accepted = given
        self.held = [b"", b""]
        self.is_open = True

    def pump(self) -> None:
        for here, there, i in ((*self.ends, 0), (*self.ends[::-1], 1)):
            try:
                more = here.recv(self.draw.choice((7, 4096, 1 << 18)))
                self.held[i] += more
                if not more and not self.held[i]:
                    return self.cut()
            except BlockingIOError:
                pass
            except OSError:
                return self.cut()
            part = self.held[i][: self.draw.choice((1, 100, 1 << 18))]
            try:
                self.held[i] = self.held[i][there.send(part) if part else 0 :]
            except BlockingIOError:
                pass
            except OSError:
                return self.cut()
        return None

    def cut(self) -> None:
        self.is_open = False
        for end in self.ends:
            end.close()


class Net:
    """Opens what the members dial, by relays; one thread.

    Args:
        members: by rank.
        draw: of which each choice is drawn.
        cuts: probability that a turn ends a connection.
        loses: dials that get no answer, at the beginning.
    """

    def __init__(self, members: list[Member], draw: random.Random, cuts: float, loses: int = 0):
        self.members, self.draw, self.cuts, self.loses = members, draw, cuts, loses
        self.relays: list[Relay] = []
        self.ended = 0

    def turn(self) -> None:
        for member in self.members:
            for peer in member.dialed():
                if self.loses > 0:
                    self.loses -= 1
                    continue
                relay = Relay(self.draw)
                self.relays.append(relay)
                self.members[peer].connect(TcpWire.ACCEPTED, member.rank, relay.accepted)
                member.connect(TcpWire.DIALED, peer, relay.dialed)
        for relay in self.relays:
            relay.pump()
        if self.relays and self.draw.random() < self.cuts:
            self.draw.choice(self.relays).cut()
            self.ended += 1
        self.relays = [relay for relay in self.relays if relay.is_open]


class Speaker:
    """A wire without an engine, and the pipes by which it gets connections."""

    def __init__(self, rank: int):
        self.rank = rank
        self.news, self._news = os.pipe2(os.O_NONBLOCK)
        self.dials, self._dials = os.pipe2(os.O_NONBLOCK)
        self.wire = TcpWire(SystemClock(), rank, TWO, self.news, self._dials, 1e6)
        self.sent = 0

    connect, dialed = Member.connect, Member.dialed

    def speak(self, draw: random.Random) -> None:
        data = np.frombuffer(draw.randbytes(draw.choice((0, 1, 300, 5000, 90_000))), np.uint8)
        self.wire.post(1 - self.rank, draw.randrange(3), b"%8d" % self.sent, data)
        self.sent += 1


def test_each_message_arrives_once_and_in_order() -> None:
    """Whatever is cut, when, and with which bytes on their way; also when a dial gets no answer."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    draw, count = random.Random(seed), 400
    speakers = [Speaker(rank) for rank in range(TWO)]
    net = Net(speakers, draw, 0.1, loses=1)  # type: ignore[arg-type]
    heard: list[list[int]] = [[], []]
    ends = time.monotonic() + LONGEST_S
    while min(map(len, heard)) < count:
        assert time.monotonic() < ends, [len(numbers) for numbers in heard]
        for speaker in speakers:
            if speaker.sent < count and draw.random() < 0.3:
                speaker.speak(draw)
            speaker.wire.progress()
            assert speaker.wire.next_failed(True) == NOBODY
            while (found := speaker.wire.take()) is not None:
                heard[speaker.rank].append(int(found[1][:8]))
        net.turn()
    assert heard == [list(range(count))] * TWO
    assert net.ended > 10
    for speaker in speakers:
        speaker.wire.close()


@pytest.mark.parametrize("exchanges", [10, pytest.param(300, marks=pytest.mark.extended)])
def test_exchanges_over_a_network_that_ends_connections_are_exact(exchanges: int) -> None:
    """What the engines send from their own buffers, and receive into them."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    members = [Member(rank, ELEMENTS) for rank in range(TWO)]
    net = Net(members, draw, 0.05)
    noise, total = np.random.default_rng(seed), np.ones(ELEMENTS)

    def act() -> None:
        """A step of both, with local updates: what belongs to another chunk would change the sum."""
        for member in members:
            update = noise.standard_normal(ELEMENTS).astype(np.float32)
            member.model.model += update
            total[:] += update
            member.step()
        net.turn()

    for member in members:
        member.loop.start()
    until(lambda: members[0].loop.finished() >= exchanges and net.ended > 10, act)
    net.cuts = 0.0
    for member in members:
        member.loop.pause(True)
    until(lambda: all(member.loop.wait_quiet(0.0) for member in members), act)
    found = sum(member.model.state() for member in members)
    np.testing.assert_allclose(found, total, rtol=0, atol=0.02)
    for rank, member in enumerate(members):
        assert member.loop.fault()[0] == 0
        assert member.loop.peers()[1 - rank] != 3
        member.loop.stop(within=0.1)
        member.wire.close()


def until(fact: Callable[[], bool], act: Callable[[], None]) -> None:
    ends = time.monotonic() + LONGEST_S
    while not fact():
        assert time.monotonic() < ends, "not in time"
        act()
