"""Learners of a super learner over torch.distributed that agree on operations, in one process."""

import errno
import functools
import os
import queue
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_adpsgd.config import Config
from hvd_adpsgd.errors import LaunchError, LearnerFailedError
from hvd_adpsgd.inner.over_torch import negotiation
from hvd_adpsgd.inner.over_torch.link import connect
from hvd_adpsgd.inner.over_torch.names import HorovodInternalError
from hvd_adpsgd.inner.over_torch.negotiation import Negotiation
from hvd_adpsgd.inner.over_torch.pending import Pending
from hvd_adpsgd.inner.over_torch.requests import Order, Request
from hvd_adpsgd.launch import over_torch
from hvd_adpsgd.lifecycle.threads import in_thread

LONGEST_S = 60.0  # of what takes milliseconds
NAMES = (3, 4, 5)  # ranks in the job, of which messages tell


@pytest.fixture
def learners() -> Iterator[list[Negotiation]]:
    """Three learners, whose operations run at once and do nothing; strangers keep none of them out."""
    address: queue.Queue[Any] = queue.Queue()

    def gather(value: Any) -> list[Any]:
        if value is not None:
            address.put(value)
            address.put(value)
            return []
        found = address.get(timeout=LONGEST_S)
        with socket.create_connection(found[:2]) as stranger:
            stranger.sendall(bytes(20))
        return [found]

    def connected(rank: int) -> dict[int, socket.socket]:
        return connect(rank, 3, "127.0.0.1", gather, LONGEST_S)

    connecting = [in_thread("connect", functools.partial(connected, rank)) for rank in range(3)]
    links = [each.result(LONGEST_S) for each in connecting]

    def run(works: Any) -> str:
        for _, pending in works:
            pending.succeed(None)
        return ""

    transfers: Any = SimpleNamespace(run=run, abort=lambda: None)
    made = [Negotiation(rank, NAMES, links[rank], transfers, lambda: None) for rank in range(3)]
    yield made
    stopping = [in_thread("stop", each.stop) for each in made]
    for each in stopping:
        each.result(LONGEST_S)


def announced(negotiation: Negotiation, name: str, own: Any = None) -> Pending:
    pending = Pending(Request(name, "allreduce", [], own), (), True)
    negotiation.begin(pending)
    return pending


def test_long_announcements_pass_each_other(learners: list[Negotiation]) -> None:
    """A blocking send waits until the other end receives, which waits in its own send."""
    long = "x" * 2**22
    pendings = [announced(one, f"{i}", long) for i in range(3) for one in learners]
    for pending in pendings:
        in_thread("wait", pending.wait).result(LONGEST_S)


@pytest.mark.parametrize("stops", [1, 2])
def test_who_has_shut_down_is_named_on_all_that_wait(
    learners: list[Negotiation], stops: int
) -> None:
    waiting = [rank for rank in range(3) if rank != stops]
    pendings = [announced(learners[rank], "a") for rank in waiting]
    stopping = in_thread("stop", learners[stops].stop)
    for rank, pending in zip(waiting, pendings, strict=True):
        with pytest.raises(LearnerFailedError) as caught:
            in_thread("wait", pending.wait).result(LONGEST_S)
        assert isinstance(caught.value, HorovodInternalError)
        for words in (
            f"learner {NAMES[stops]} of this super learner has shut down: ",
            f"learner {NAMES[rank]} waits",
            "join()",
        ):
            assert words in str(caught.value)
        with pytest.raises(LearnerFailedError, match=f"^learner {NAMES[stops]} "):
            announced(learners[rank], "b")
    stopping.result(LONGEST_S)


def test_a_stall_is_of_one_operation_not_of_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next step's operation of the same name begins to wait anew."""
    now, longest_s = [0.0], negotiation._STALL_S
    monkeypatch.setattr(negotiation, "time", SimpleNamespace(monotonic=lambda: now[0]))
    first: Any = Negotiation.__new__(Negotiation)
    first._order, first._names, first._told, first._look = Order(NAMES[:2]), NAMES, {}, 0.0
    first._undone, first._over = 0, None
    first._send = first._start = lambda *_: None

    def look(seconds: float) -> int:
        now[0] += seconds
        first._tell_stalled()
        return len(caplog.records)

    first._order.ask(0, Request("a", "allreduce", [], None))
    look(1.0)
    first._order.ask(1, Request("a", "allreduce", [], None))
    first._decide()
    first._order.ask(0, Request("a", "allreduce", [], None))
    assert look(longest_s + 1.0) == 0, "it has just begun to wait"
    assert look(longest_s + 1.0) == look(longest_s + 1.0) == 1
    assert "learners [4]" in caplog.text


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.EMFILE, "learner 4 cannot connect .*Too many open files.*ulimit -n"),
        (errno.ECONNREFUSED, "do not connect to learner 3 .*HVD_ADPSGD_NICS"),
    ],
)
def test_a_limit_of_open_files_is_no_network_between_the_learners(
    number: int, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(over_torch, "address_inside", lambda world: "127.0.0.1")
    monkeypatch.setattr(over_torch.over_torch, "World", fails)
    world: Any = SimpleNamespace(
        rank=4, inner_rank=1, super_rank=0, groups=(NAMES,), inner=None, config=Config()
    )
    with pytest.raises(LaunchError, match=cure):
        over_torch.start_over_torch(world)
