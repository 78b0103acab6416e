"""Communicators over sockets: several learners in one process, each with a hub of its own."""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine import connections
from hvd_adpsgd.errors import PeerFailedError
from hvd_adpsgd.messaging.attempt import Attempt
from hvd_adpsgd.messaging.messages import AttemptAbandonedError, Messages
from hvd_adpsgd.messaging.mpi_transport import SEGMENT, failed_comm_ranks
from hvd_adpsgd.messaging.sockets import Communicator, Hub
from tests.gathers import Gathers, at_once
from tests.holdings import holdings

LONGEST_S = 60.0


@pytest.fixture
def hubs() -> Iterator[Callable[[int], list[Hub]]]:
    made: list[Hub] = []

    def make(n: int) -> list[Hub]:
        gathers, config = Gathers(n), Config(failure_timeout_s=30.0)
        made.extend(at_once(*(lambda i=i: Hub(i, n, config, gathers.of(i)) for i in range(n))))
        return made

    yield make
    for hub in made:
        hub.close()


def communicators(hubs: list[Hub], ranks: list[int]) -> list[Communicator | None]:
    return [hub.communicator(ranks) for hub in hubs]


@pytest.mark.parametrize("n", [2, 5, 18])
def test_values_are_gathered_by_rank(hubs: Callable[[int], list[Hub]], n: int) -> None:
    """18: with fewer messages than one from each to each."""
    everyone = communicators(hubs(n), list(range(n)))
    for values in ([b"x" * i for i in range(n)], [np.arange(3) + i for i in range(n)]):
        told = at_once(
            *(lambda c=c, v=v: c.allgather(v) for c, v in zip(everyone, values, strict=True))
        )
        for found in told:
            assert [np.array(v).tolist() for v in found] == [np.array(v).tolist() for v in values]
    told = at_once(*(lambda c=c, i=i: c.bcast(i, root=n - 1) for i, c in enumerate(everyone)))
    assert told == [n - 1] * n


def test_communicators_do_not_hear_each_other(hubs: Callable[[int], list[Hub]]) -> None:
    """One made later by a slower process too; what comes for a freed one is dropped."""
    made = hubs(3)
    everyone = communicators(made, [0, 1, 2])
    first = [made[0].communicator([0, 2]), made[1].communicator([0, 2])]
    assert first[1] is None
    assert first[0] is not None
    first[0].send(1, 7, b"early")  # learner 2 has not made it yet
    at_once(*(lambda c=c: c.allgather(None) for c in everyone if c))
    late = made[2].communicator([0, 2])
    assert late is not None and (late.Get_rank(), late.Get_size()) == (1, 2)
    assert [(place, tag, bytes(data)) for place, tag, data in until(late)] == [(0, 7, b"early")]
    late.Free()
    first[0].send(1, 8, b"too late")
    at_once(*(lambda c=c: c.allgather(None) for c in everyone if c))
    assert list(late.poll()) == []


def until(comm: Communicator) -> list[tuple[int, int, Any]]:
    ends = time.monotonic() + LONGEST_S
    found: list[tuple[int, int, Any]] = []
    while not found and time.monotonic() < ends:
        found = list(comm.poll())
    return found


def test_collectives_of_large_arrays(hubs: Callable[[int], list[Hub]]) -> None:
    n = 3
    everyone = communicators(hubs(n), list(range(n)))
    messages = [Messages(c) for c in everyone]
    mine = [np.arange(SEGMENT, dtype=np.float32) * (i + 1) for i in range(n)]  # four segments

    def act(rank: int) -> tuple[np.ndarray, np.ndarray]:
        attempt = Attempt(messages[rank], range(n), range(n), time.monotonic() + LONGEST_S)
        total = attempt.allreduce(mine[rank])
        given = mine[rank].copy()
        attempt.broadcast(given, 2)
        attempt.flush()
        return total, given

    for total, given in at_once(*(lambda i=i: act(i) for i in range(n))):
        np.testing.assert_allclose(total, sum(mine), rtol=1e-6)
        np.testing.assert_array_equal(given, mine[2])


def test_one_that_ends_fails_what_waits_for_it(hubs: Callable[[int], list[Hub]]) -> None:
    made = hubs(3)
    everyone = communicators(made, [0, 1, 2])
    at_once(*(lambda c=c: c.allgather(None) for c in everyone if c))

    def wait(comm: Communicator) -> str:
        with pytest.raises(PeerFailedError) as raised:
            comm.allgather(None)
        return str(raised.value)

    acts = [lambda c=c: wait(c) for c in everyone[:2] if c]
    assert (
        at_once(*acts, made[2].close)[:2]
        == ["learners [2] failed while all waited for them. Start the job again."] * 2
    )
    for comm in everyone[:2]:  # one may have been told by the other one, and sees for itself later
        assert comm is not None
        ends = time.monotonic() + LONGEST_S
        while failed_comm_ranks(comm) != {2}:
            assert time.monotonic() < ends
            comm.pause(1e-3)


def test_one_that_never_said_anything_is_found_to_have_ended(
    hubs: Callable[[int], list[Hub]],
) -> None:
    """No connection ends then: one is opened to learn that nobody listens."""
    made = hubs(2)
    comm = made[0].communicator([0, 1])
    assert comm is not None
    made[1].close()
    ends = time.monotonic() + LONGEST_S
    while not comm.look_at_all():
        assert time.monotonic() < ends
        time.sleep(1e-3)
    assert comm.failed == {1}
    messages = Messages(comm)
    attempt = Attempt(messages, [0, 1], [0, 1], time.monotonic() + LONGEST_S)
    with pytest.raises(AttemptAbandonedError):
        attempt.gather(None)


def first_has_come(made: list[Hub]) -> list[Communicator]:
    """The communicators of two learners, with a connection from learner 0 to learner 1."""
    comms = [comm for comm in communicators(made, [0, 1]) if comm]
    comms[0].send(1, 0, b"first")
    until_sent(comms[0])
    assert [bytes(data) for _, _, data in until(comms[1])] == [b"first"]
    return comms


def lose(hub: Hub) -> None:
    """End the connection to this learner, with the bytes that have come and are not read."""
    port = hub._connections._addresses[hub.rank].port
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as end:
            if end.family != socket.AF_UNIX and end.getsockname()[1] == port and end.getpeername():
                end.settimeout(LONGEST_S)
                assert end.recv(1 << 16)
                end.shutdown(socket.SHUT_RDWR)
                return
    raise AssertionError("no connection")


def test_what_is_lost_between_operations_comes_again(
    hubs: Callable[[int], list[Hub]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for anything on learner 0: the thread of its connections sends it again."""
    monkeypatch.setattr(connections, "_TEND_S", 0.05)
    made = hubs(2)
    comms = first_has_come(made)
    with made[1]._lock:  # it reads nothing meanwhile
        comms[0].send(1, 1, b"second")
        lose(made[1])
    assert [bytes(data) for _, _, data in until(comms[1])] == [b"second"]
    assert made[0].ended == made[1].ended == set()


def test_what_is_lost_just_before_the_end_comes_again(
    hubs: Callable[[int], list[Hub]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_FLUSH_S", LONGEST_S)
    monkeypatch.setattr(Hub, "_tend", lambda hub: None)  # it comes once per second
    made = hubs(2)
    comms = first_has_come(made)
    with made[1]._lock:  # it reads nothing meanwhile
        comms[0].send(1, 1, b"last")
        lose(made[1])
    _, found = at_once(made[0].close, lambda: until(comms[1]))
    assert [bytes(data) for _, _, data in found] == [b"last"]


def until_sent(comm: Communicator) -> None:
    ends = time.monotonic() + LONGEST_S
    while comm.is_sending and time.monotonic() < ends:
        assert list(comm.poll()) == []
        comm.pause(1e-3)
    assert not comm.is_sending


@pytest.mark.parametrize("failing", range(connections.Connections.GATHERS))
def test_a_hub_that_fails_to_start_leaves_nothing(failing: int) -> None:
    calls = itertools.count()

    def gather(value: Any) -> list[Any]:
        if next(calls) == failing:
            raise PeerFailedError("a peer has ended")
        return [value]

    before = holdings()
    with pytest.raises(PeerFailedError):
        Hub(0, 1, Config(), gather)
    assert not holdings() - before


def test_a_hub_without_descriptors_says_so_and_leaves_nothing() -> None:
    """It needs pipes, a wire, a listener and a thread with an event loop: each may be the one too many."""
    program = Path(__file__).parent / "programs" / "without_descriptors.py"
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 6, "errors"
