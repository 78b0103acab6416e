"""Engines over TCP, each in a process of its own, that die, stop, fork and are called by strangers."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_adpsgd.engine.handshake import HELLO_NBYTES, PROOF_NBYTES, REPLY_NBYTES, Hello, NotAMember
from hvd_adpsgd.engine.peers import PeerState

PROGRAM = Path(__file__).parent / "programs" / "engine.py"
LONGEST_S = 60.0


class Remote:
    """An engine in another process."""

    def __init__(
        self,
        rank: int,
        size: int,
        options: dict[str, Any],
        popen: Callable[..., Any] = subprocess.Popen,
    ):
        command = [sys.executable, str(PROGRAM), str(rank), str(size), json.dumps(options)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.rank = rank
        self.process = popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.pid = self.process.pid

    def say(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def hear(self, what: str) -> Any:
        assert self.process.stdout is not None
        facts = json.loads(self.process.stdout.readline() or '{"ended": true}')
        assert what in facts, f"engine {self.rank}: {facts}"
        return facts[what]

    def do(self, name: str, *args: Any) -> Any:
        self.say([name, *args])
        return self.hear("result")

    def stop(self) -> None:
        """Return when all of its threads stand still; one may run on for a moment after the signal."""
        os.kill(self.pid, signal.SIGSTOP)
        ends = time.monotonic() + LONGEST_S
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            while (task / "stat").read_text().rpartition(")")[2].split()[0] != "T":
                assert time.monotonic() < ends, f"{task} runs on"

    def kill(self) -> float:
        """When it was killed, in seconds of CLOCK_MONOTONIC."""
        now = time.monotonic()
        self.process.kill()
        self.process.wait()
        return now


@pytest.fixture
def engines() -> Iterator[Callable[..., list[Remote]]]:
    """Starts n engines, each in a process; kills those that are left."""
    made: list[Remote] = []

    def start(n: int, **options: Any) -> list[Remote]:
        remotes = [Remote(i, n, options) for i in range(n)]
        made.extend(remotes)
        return met(remotes)

    yield start
    for remote in made:
        remote.kill()
        for pipe in (remote.process.stdin, remote.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def met(remotes: list[Remote]) -> list[Remote]:
    """They know each other's addresses, and their engines run."""
    for _ in range(2):
        values = [remote.hear("gather") for remote in remotes]
        for remote in remotes:
            remote.say(values)
    for remote in remotes:
        remote.hear("started")
    return remotes


def exchange(a: Remote, b: Remote) -> None:
    """One exchange, and the sum of the two models is what it was."""
    before = a.do("step") + b.do("step")
    counts = {remote: remote.do("count") for remote in (a, b)}
    a.do("ask", b.rank)
    for remote, count in counts.items():  # the side that was asked may merge its last chunk later
        assert remote.do("finished", count + 1), "the exchange did not end"
    for _ in range(2):  # a correction is applied one step after its publication
        after = a.do("step") + b.do("step")
    assert abs(after - before) < 1e-6


def test_a_killed_process_is_failed_at_once(engines: Callable[..., list[Remote]]) -> None:
    """Long before failure_timeout_s, by the end of its connections."""
    a, b, c = engines(3, failure_timeout_s=600.0)
    exchange(a, b)
    exchange(b, c)
    killed = b.kill()
    times = [other.do("wait_state", 1, PeerState.FAILED) - killed for other in (a, c)]
    print(f"failed after {times} s")
    exchange(a, c)


def test_a_peer_without_a_connection_is_found_to_be_gone_when_it_is_asked(
    engines: Callable[..., list[Remote]],
) -> None:
    a, b = engines(2)
    b.kill()
    a.do("ask", 1)
    a.do("wait_state", 1, PeerState.FAILED)


def test_a_forked_child_does_not_hide_the_end_of_its_parent(
    engines: Callable[..., list[Remote]],
) -> None:
    """Workers of a data loader outlive a killed learner by seconds, with copies of its descriptors."""
    a, b = engines(2, failure_timeout_s=600.0)
    exchange(a, b)
    child = b.do("fork")
    try:
        b.kill()
        a.do("wait_state", 1, PeerState.FAILED)
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_stopped_process_is_not_failed(engines: Callable[..., list[Remote]]) -> None:
    """Its host acknowledges for it, also for longer than failure_timeout_s, and with full buffers."""
    a, b = engines(2, failure_timeout_s=1.0, deadline_s=0.5)
    exchange(a, b)
    b.stop()
    a.do("ask", 1)
    a.do("wait_state", 1, PeerState.SUSPECT)
    ends = time.monotonic() + 3.0
    while time.monotonic() < ends:
        assert a.do("states")[1] == PeerState.SUSPECT
        time.sleep(0.05)
    os.kill(b.pid, signal.SIGCONT)
    a.do("wait_state", 1, PeerState.ALIVE)
    exchange(a, b)


def test_connections_that_end_between_living_engines_are_dialed_again(
    engines: Callable[..., list[Remote]],
) -> None:
    """At rest and in the middle of exchanges, from either end: nobody fails, and nothing is lost."""
    a, b, c = engines(3, elements=500_000, chunk_kib=64, deadline_s=LONGEST_S)
    for side, other in ((a, b), (b, a)):
        exchange(a, b)
        assert side.do("cut") > 0
        exchange(a, b)
        before = a.do("step") + b.do("step")
        count = other.do("count")
        side.do("cut_midway", other.rank, 4)
        assert other.do("finished", count + 1)
        for _ in range(2):
            after = a.do("step") + b.do("step")
        assert abs(after - before) < 1e-6
    exchange(b, c)
    for remote in (a, b, c):
        assert remote.do("states") == [PeerState.ALIVE] * 3


def test_one_that_was_taken_for_failed_learns_so_and_stops(
    engines: Callable[..., list[Remote]],
) -> None:
    """Else both would train on, each as the only one. Here its host seems to refuse a connection."""
    a, b = engines(2)
    exchange(a, b)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        a.do("misplace", 1, *unused.getsockname())  # nobody listens there
        a.do("cut")
        a.do("wait_state", 1, PeerState.FAILED)
        assert "0 has declared this super learner failed" in b.do("wait_error")
    assert b.do("states")[0] == PeerState.FAILED


@pytest.mark.extended
def test_a_peer_that_only_others_reach_is_not_failed(engines: Callable[..., list[Remote]]) -> None:
    """Its reports come by another one, as long as that one lives."""
    timeout_s = 8.0
    a, b, c = engines(3, report_s=0.2, failure_timeout_s=timeout_s, deadline_s=0.5)
    for one, other in ((a, b), (b, c), (a, c)):
        exchange(one, other)
    for remote in (a, b, c):
        remote.do("report_on")
    for one, other in ((a, b), (b, a)):
        one.do("misplace", other.rank, "224.0.0.1", 1)  # no connection leads there
    a.do("cut")
    ends = time.monotonic() + 2.5 * timeout_s
    while time.monotonic() < ends:
        assert PeerState.FAILED not in a.do("states") + b.do("states") + c.do("states")
        time.sleep(0.1)
    exchange(a, c)
    c.kill()
    for one, other in ((a, b), (b, a)):
        one.do("wait_state", other.rank, PeerState.FAILED)


def test_an_engine_that_leaves_says_so(engines: Callable[..., list[Remote]]) -> None:
    a, b, c = engines(3)
    exchange(a, b)
    b.do("stop")
    for other in (a, c):
        other.do("wait_state", 1, PeerState.LEFT)
    b.kill()
    exchange(a, c)
    assert a.do("states")[1] == c.do("states")[1] == PeerState.LEFT


def _is_closed(stranger: socket.socket) -> bool:
    """Whether the other end has closed the connection, and has said nothing before."""
    stranger.settimeout(LONGEST_S)
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


def _hello(a: Remote, caller: int = 1) -> Hello:
    incarnations = a.do("incarnations")
    return Hello.new(caller, 0, incarnations[caller], incarnations[0])


def test_strangers_are_refused(engines: Callable[..., list[Remote]]) -> None:
    """A scan of the port, noise, a peer of another job, a recorded handshake: closed, and no effect."""
    a, b = engines(2)
    exchange(a, b)
    address = tuple(a.do("listener"))
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    noise = random.Random(seed)
    for _ in range(50):
        with socket.create_connection(address):  # a scan
            pass
        with socket.create_connection(address) as stranger:
            stranger.sendall(noise.randbytes(HELLO_NBYTES))
            assert _is_closed(stranger)
    for known in (
        Hello.new(1, 0, 5, 6),
        Hello.new(7, 0, 5, 6),
        Hello.new(0, 0, *a.do("incarnations")),
    ):
        with socket.create_connection(address) as stranger:  # of another job, or of none
            stranger.sendall(known.pack())
            reply = stranger.recv(REPLY_NBYTES, socket.MSG_WAITALL)
            with pytest.raises(NotAMember, match="called side refuses"):
                known.answer(bytes(32), reply)
            assert _is_closed(stranger)
    # says all that is said in the open, without the secret
    with socket.create_connection(address) as stranger:
        hello = _hello(a)
        stranger.sendall(hello.pack())
        reply = stranger.recv(REPLY_NBYTES, socket.MSG_WAITALL)
        assert len(reply) == REPLY_NBYTES
        stranger.sendall(hello._proof(bytes(32), b"dials", reply[:32]))
        assert _is_closed(stranger)
    with socket.create_connection(address) as stranger:  # sends the engine's own proof back
        stranger.sendall(hello.pack())
        reply = stranger.recv(REPLY_NBYTES, socket.MSG_WAITALL)
        stranger.sendall(reply[-PROOF_NBYTES:])
        assert _is_closed(stranger)
    exchange(a, b)
    assert a.do("states") == b.do("states") == [PeerState.ALIVE] * 2


def test_a_thousand_idle_connections_take_nothing(engines: Callable[..., list[Remote]]) -> None:
    """The oldest unproven connections make room; descriptors and memory stay bounded; members are let in."""
    a, b = engines(2)
    address = tuple(a.do("listener"))
    process = psutil.Process(a.pid)
    descriptors, memory = process.num_fds(), process.memory_info().rss
    strangers = []
    try:
        for _ in range(1000):
            strangers.append(socket.create_connection(address))
        exchange(b, a)  # b dials meanwhile
        exchange(a, b)
        assert process.num_fds() <= descriptors + 64 + 4
        assert process.memory_info().rss < memory + (16 << 20)
    finally:
        for stranger in strangers:
            stranger.close()
    ends = time.monotonic() + LONGEST_S
    while process.num_fds() > descriptors + 4 and time.monotonic() < ends:
        time.sleep(0.01)
    assert process.num_fds() <= descriptors + 4
