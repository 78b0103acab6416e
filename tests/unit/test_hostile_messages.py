"""Control messages of a member that is broken: what no engine sends is ignored, and disturbs nobody.

Engine 0 exchanges with engine 1, over sockets, while member 2 sends it messages with bits flipped, bytes
dropped, added or exchanged. Some of these are still valid. Those that announce a departure or another model
are left out, because no receiver can tell them from true ones.
"""

import math
import random
import resource
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hvd_adpsgd.engine.agreement import Agreement
from hvd_adpsgd.engine.wire_tcp import TcpWire
from hvd_adpsgd.formats import FORMATS, OWN, Format
from tests.hostile import mutated
from tests.members import MEMBERS, WEIGHT, Member

CONTROL, AGREEMENT = 1, 2  # channels
COUNT = -3  # ... of a head that confirms messages
ASK, YES, NO, BYE, BYE_SEEN, CUT, CUT_SEEN, REPORT = range(1, 9)
MESSAGE = struct.Struct("=8iQdq")  # Message of core.pxd
HEAD = struct.Struct("=2i")
REPORT_OF = struct.Struct("=qii200s")  # Report of reports.pxd
REPORTS = 16  # in one message
BATCH = 500
BROKEN = 2
GROWTH_KIB = 2048
DEADLINE_S = 60.0


def message(
    member: Member, kind: int, number: int, chunks: int, window: int, aimed: int = 0,
    wire_format: int = OWN.code, mark: int | None = None, weight: float = WEIGHT,
) -> bytes:  # fmt: skip
    """A control message about the layout of `member`, or one of another fingerprint `mark`."""
    mark = member.fingerprint if mark is None else mark
    return MESSAGE.pack(kind, number, chunks, 0, 0, window, aimed, wire_format, mark, weight, 0)


class Ear:
    """What the broken member does read: the messages of an engine, which it confirms."""

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        self.end, self.data, self.count = end, b"", 0

    def read(self) -> None:
        try:
            while more := self.end.recv(1 << 20):
                self.data += more
        except BlockingIOError:
            pass
        before = self.count
        while len(self.data) >= HEAD.size:
            length = HEAD.size + max(0, HEAD.unpack_from(self.data)[0])
            if len(self.data) < length:
                break
            self.data = self.data[length:]
            self.count += 1
        if self.count > before:
            self.end.send(HEAD.pack(self.count, COUNT))


class Job:
    """Both engines, and what the broken member reads and writes."""

    def __init__(self, period: int = 1, **options: Any) -> None:
        self.members = [Member(rank, period=period, **options) for rank in (0, 1)]
        self.ears: list[Ear] = []
        self.is_gone = False
        mine, theirs = socket.socketpair()
        self.members[0].connect(TcpWire.ACCEPTED, BROKEN, theirs)
        self.broken = mine
        for member in self.members:
            member.loop.start()

    def open_connections(self) -> None:
        for member in self.members:
            for peer in member.dialed():
                if peer == BROKEN and self.is_gone:
                    member.tell(TcpWire.REFUSED, peer)
                    continue
                mine, theirs = socket.socketpair()
                if peer == BROKEN:
                    self.ears.append(Ear(theirs))
                else:
                    self.members[peer].connect(TcpWire.ACCEPTED, member.rank, theirs)
                member.connect(TcpWire.DIALED, peer, mine)

    def turn(self) -> None:
        """Both trainers make a step; the broken member reads what it was sent."""
        self.open_connections()
        for member in self.members:
            member.step()
        for ear in self.ears:
            ear.read()

    def until(self, condition: object) -> None:
        ends = time.monotonic() + DEADLINE_S
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < ends, [member.loop.view() for member in self.members]
            self.turn()

    def send(self, channel: int, data: bytes) -> None:
        self.broken.sendall(HEAD.pack(len(data), channel) + data)

    def settle(self, number: int) -> None:
        """Until engine 0 has read all that it was sent: a report with this number comes behind."""
        head = message(self.members[0], REPORT, 0, 1, 0)
        self.send(CONTROL, head + REPORT_OF.pack(number, BROKEN, 1, b"x"))
        self.until(lambda: self.members[0].loop.reports().get(BROKEN, (0,))[0] == number)

    def refuse(self) -> None:
        """The broken member's process ends, and its host refuses the connections that are dialed then."""
        self.is_gone = True
        for end in (self.broken, *(ear.end for ear in self.ears)):
            end.close()
        self.ears.clear()

    def end(self) -> None:
        for member in self.members:
            member.close()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.end()


def templates(member: Member, draw: random.Random) -> bytes:
    """A message that an engine might send."""
    kind = draw.choice([ASK, YES, NO, BYE, BYE_SEEN, CUT, CUT_SEEN, REPORT])
    count = draw.randint(1, REPORTS) if kind == REPORT else draw.randint(0, member.chunks)
    number = draw.randint(0, 1) if kind == BYE else draw.randrange(2**30)
    window, wire_format = draw.randint(0, count), draw.choice(FORMATS).code
    head = message(member, kind, number, count, window, draw.randint(0, 1), wire_format)
    if kind == REPORT:
        return head + b"".join(draw.randbytes(REPORT_OF.size) for _ in range(count))
    return head


def is_believed(data: bytes, member: Member) -> bool:
    """Whether an engine may take the message for one of an engine, and must act on what it says of others."""
    if len(data) < MESSAGE.size:
        return False
    kind, *_, fingerprint, weight, _ = MESSAGE.unpack(data[: MESSAGE.size])
    another = (fingerprint, weight) != (member.fingerprint, WEIGHT)
    return kind == BYE or (kind in (ASK, YES, NO) and another)


def disturbing(member: Member, draw: random.Random) -> bytes:
    while is_believed(message := mutated(templates(member, draw), draw), member):
        pass
    return message


def memory_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("count", [50_000, pytest.param(1_000_000, marks=pytest.mark.extended)])
def test_no_mutated_control_message_disturbs_an_engine(job: Job, count: int) -> None:
    """It keeps exchanging, loses nothing, and its memory does not grow."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    draw, (engine, other) = random.Random(seed), job.members
    job.until(lambda: engine.loop.finished() > 2)
    before, batches = 0, count // BATCH
    for batch in range(batches):
        for _ in range(BATCH):
            job.send(CONTROL, disturbing(engine, draw))
        job.settle(batch + 1)
        before = before if batch > batches // 10 else memory_kib()
    exchanges = engine.loop.met(1)
    job.until(lambda: engine.loop.met(1) > exchanges + 20)
    assert not engine.loop.view()["ended"] and engine.loop.fault()[0] == 0
    malformed, peer = engine.loop.malformed()
    assert 0.3 * count < malformed <= count and peer == BROKEN
    assert memory_kib() - before < GROWTH_KIB
    job.refuse()  # an exchange that it has begun would not end
    for member in job.members:
        member.loop.pause(True)
    job.until(lambda: all(member.loop.wait_quiet(0.0) for member in job.members))
    total = engine.model.state() + other.model.state()
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)


def test_no_message_of_the_agreement_that_is_none_disturbs_a_mean(job: Job) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    draw, engine = random.Random(seed), job.members[0]
    judge = Agreement(MEMBERS, 0)
    speaker = Agreement(MEMBERS, BROKEN)
    speaker.vote(1)
    votes = [data for _, data in speaker.take_outgoing()]
    sent = 0
    while sent < 5000:
        message = mutated(draw.choice(votes), draw)
        try:
            judge.copy().receive(BROKEN, message)
        except ValueError:
            job.send(AGREEMENT, message)
            sent += 1
        if sent % BATCH == 0:
            job.turn()
    job.until(lambda: engine.loop.malformed()[0] == sent)
    assert engine.loop.fault()[0] == 0


def test_a_yes_with_a_longer_window_than_a_round_is_ignored() -> None:
    """With rare chunks a round is shorter than the model; a longer window would have a chunk twice."""
    job = Job(period=3)
    try:
        engine = job.members[0]
        rare = engine.chunks // 2
        turn = engine.chunks - rare + -(-rare // 3)
        assert turn < engine.chunks
        for malformed, window in enumerate((turn, turn + 1)):
            job.send(CONTROL, message(engine, YES, 2**29, engine.chunks, window))
            job.settle(malformed + 1)
            assert engine.loop.malformed()[0] == malformed
        # no window of a round: the layouts differ, which an engine that has asked reports
        other = message(engine, YES, 2**29, engine.chunks, window, mark=engine.fingerprint + 1)
        job.send(CONTROL, other)
        job.settle(3)
        assert engine.loop.malformed()[0] == 1
        job.until(lambda: engine.loop.met(1) > 2)
        assert engine.loop.fault()[0] == 0
    finally:
        job.end()


@pytest.mark.parametrize("longer", [1, 100_000])
def test_a_message_that_is_longer_than_any_is_ignored(job: Job, longer: int) -> None:
    engine = job.members[0]
    longest = MESSAGE.size + REPORTS * REPORT_OF.size
    job.send(CONTROL, bytes(longest + longer))
    job.send(AGREEMENT, bytes(longest + longer))
    job.until(lambda: engine.loop.malformed()[0] == 2)
    assert engine.loop.malformed()[1] == BROKEN and engine.loop.fault()[0] == 0
    job.until(lambda: engine.loop.met(1) > 2)


def is_closed(end: socket.socket) -> bool:
    """By the other side; what it has sent is dropped."""
    end.setblocking(False)
    try:
        while end.recv(1 << 20):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_bytes_that_are_no_frames_end_the_connection_alone() -> None:
    """The sender is dialed, and fails when its host refuses; the other two keep exchanging."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for head in (
        HEAD.pack(-1, CONTROL),
        HEAD.pack(8, -3),
        HEAD.pack(-(2**31), 0),
        HEAD.pack(5, -1),
    ):
        job = Job()
        engine = job.members[0]
        job.until(lambda engine=engine: engine.loop.finished() > 0)
        job.broken.sendall(head + draw.randbytes(64))
        job.until(lambda job=job: is_closed(job.broken))
        assert engine.loop.peers()[BROKEN] == 0
        job.refuse()
        job.until(lambda engine=engine: engine.loop.peers()[BROKEN] == 3)
        exchanges = engine.loop.met(1)
        job.until(lambda engine=engine, e=exchanges: engine.loop.met(1) > e + 2)
        assert engine.loop.fault()[0] == 0
        job.end()


@pytest.mark.parametrize("weight", [math.nan, math.inf, -0.5, 2.0])
def test_a_weight_that_no_strategy_has_is_ignored(job: Job, weight: float) -> None:
    engine = job.members[0]
    job.send(CONTROL, message(engine, ASK, 1, 1, 1, weight=weight))
    job.until(lambda: engine.loop.malformed()[0] == 1)
    assert engine.loop.fault()[0] == 0


@pytest.mark.parametrize("own", [None, OWN, FORMATS[-1]])
@pytest.mark.parametrize("asked", [-2, 0, 2, 3, 6, 10**6])  # 6: of offers only
def test_a_format_that_an_engine_cannot_have_is_ignored(own: Format | None, asked: int) -> None:
    """Its buffers are made for those that it can have: one, or those that it may choose."""
    job = Job(chooses_format=True) if own is None else Job(wire_format=own.code)
    engine = job.members[0]
    job.send(CONTROL, message(engine, ASK, 1, 1, 1, wire_format=asked))
    job.until(lambda: engine.loop.malformed()[0] == 1)
    assert engine.loop.fault()[0] == 0
    job.end()


def test_messages_of_sums_that_were_given_up_do_not_stay(job: Job) -> None:
    """Member 2 fails when engine 0 has sent chunks of the mean, and engine 1 has not begun it."""
    first, second = job.members
    second.loop.ask(BROKEN)
    job.until(lambda: job.ears)  # engine 1 has a connection to it, whose end it notices
    second.loop.ask(-1)
    for member in job.members:
        member.loop.pause(True)
    job.until(lambda: first.loop.wait_quiet(0.0))
    mean = first.loop.begin_mean(False)
    job.until(lambda: second.wire.strays > 0)
    job.refuse()
    job.until(lambda: all(member.loop.peers()[BROKEN] == 3 for member in job.members))
    assert second.loop.begin_mean(False) == mean
    job.until(lambda: all(member.loop.wait_mean(mean, 0.0) for member in job.members))
    job.until(lambda: first.wire.strays == second.wire.strays == 0)
    for member in job.members:
        assert member.loop.fault()[0] == 0
        member.model.apply()
        np.testing.assert_allclose(member.model.state(), 0.5, rtol=1e-5)


@pytest.mark.parametrize("left", ["an exchange", "a mean"])
def test_an_engine_that_ends_in_the_middle_frees_all_when_its_connections_are_closed(
    job: Job, left: str
) -> None:
    """Member 2 asks for an exchange, and sends no chunk; it takes no part in the mean."""
    engine = job.members[0]
    if left == "an exchange":
        job.turn()
        job.send(CONTROL, message(engine, ASK, 1, engine.chunks, engine.chunks))
        job.until(
            lambda: (
                engine.loop.view()["peers"][BROKEN]["exchange"] in ("running", "closing", "broken")
            )
        )
    else:
        engine.loop.begin_mean(False)
        job.until(lambda: engine.loop.view()["mean"]["begun"] > 0)
    assert not engine.loop.released(), "it runs"
    engine.loop.stop(within=0.1)
    engine.wire.close()
    assert engine.loop.released()
