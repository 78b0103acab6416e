"""How a process ends, as far as it can be said without MPI: who is last, and whether a script fails."""

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.engine.agreement import Agreement
from hvd_adpsgd.lifecycle import shutdown
from hvd_adpsgd.lifecycle.membership import Membership
from hvd_adpsgd.lifecycle.shutdown import ShutdownBarrier, Teardown, _is_last
from hvd_adpsgd.messaging.messages import COMPLETE, Messages
from tests.silent_network import AGREEMENT, LEAVES, SilentNetwork


@pytest.mark.parametrize(
    ("rank", "ranks", "ended", "failing", "expected"),
    [
        (0, [0, 1, 2], {1, 2}, set(), True),
        (0, [0, 1, 2], {1}, {1}, None),  # the first waits for the others
        (2, [0, 1, 2], {1}, {1}, False),  # 0 does it
        (2, [0, 1, 2], {0, 1}, {0}, True),
        (1, [0, 1, 2], {0}, {0}, None),  # the first that lives
        (1, [0, 1, 2], set(), {0}, None),  # 0 fails, and ends by a signal
        (0, [0], set(), set(), True),
        # learners 1 and 2 failed, 2 has been replaced: nobody waits for 1
        (0, [0, 2, 3], {2, 3}, {2}, True),
        (2, [0, 2, 3], {0}, {0}, None),
        (3, [0, 2, 3], {0}, {0}, False),
        (3, [0, 2, 3], {0}, {0, 1}, False),  # 2 lives: it is not the learner at place 1
    ],
)
def test_who_is_last(rank, ranks, ended, failing, expected):
    assert _is_last(rank, ranks, ended, failing) is expected


@given(st.data())
def test_one_of_the_living_waits_if_none_of_them_fails(data):
    ranks = data.draw(st.lists(st.integers(0, 20), min_size=2, unique=True).map(sorted))
    ended = data.draw(st.sets(st.sampled_from(ranks), max_size=len(ranks) - 1))
    living = [rank for rank in ranks if rank not in ended]
    says = [_is_last(rank, ranks, ended, ended) for rank in living]
    assert says == ([True] if len(living) == 1 else [None] + [False] * (len(living) - 1))


SCRIPT = """
import os, sys, threading
import mpi4py
mpi4py.rc.initialize = False
from hvd_adpsgd.lifecycle import shutdown
from hvd_adpsgd.lifecycle.exit_status import FAILED_STATUS

def shut_down():
    print(shutdown.script_fails())

shutdown.at_exit(shut_down, lambda: 1.0)
assert not shutdown.script_fails()
{end}
"""


@pytest.mark.parametrize(
    ("end", "fails"),
    [
        ("", False),
        ("sys.exit(0)", False),
        ("sys.exit(3)", True),
        ("sys.exit('a message')", True),
        ("raise ValueError", True),
        ("try:\n    sys.exit(3)\nfinally:\n    print()", True),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    sys.exit(0)", False),
        ("def main():\n    with open(os.devnull):\n        sys.exit(3)\nmain()", True),
        (
            "thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()",
            False,
        ),
        ("exit(1)", True),
        ("raise SystemExit(3)", False),  # a weakness: see docs/failures.md
    ],
)
def test_whether_the_script_fails(end, fails):
    said = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end)], capture_output=True, text=True, timeout=120
    )
    assert said.stdout.split()[-1:] == [str(fails)], said.stderr


AS_CHILD = """
import multiprocessing, sys
from types import SimpleNamespace
from hvd_adpsgd.lifecycle import shutdown
from hvd_adpsgd.lifecycle.exit_status import FAILED_STATUS

def learner():
    shutdown.exit_state.hub = SimpleNamespace(close=lambda: None)
    shutdown.exit_state.barrier = {barrier}
    shutdown.exit_state.failed = (9,)
    shutdown.at_exit(lambda: print(shutdown.script_fails()), lambda: 1.0)
    {end}

child = multiprocessing.get_context("fork").Process(target=learner)
child.start()
child.join()
print(child.exitcode)
"""
ALONE = "SimpleNamespace(rank=0, ranks=(0,), ended=lambda: set())"


@pytest.mark.parametrize(
    ("end", "barrier", "expected"),
    [
        ("pass", None, ["False", "0"]),
        ("pass", ALONE, ["False", "75"]),
        ("sys.exit(3)", ALONE, ["True", "3"]),
        ("1 / 0", ALONE, ["True", "1"]),
    ],
)
def test_a_learner_that_multiprocessing_has_forked_leaves_in_order(end, barrier, expected):
    script = AS_CHILD.format(end=end, barrier=barrier)
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert said.stdout.split() == expected, said.stderr


LAST = f"""
import os, sys
from types import SimpleNamespace
from hvd_adpsgd.lifecycle import shutdown
from hvd_adpsgd.lifecycle.exit_status import FAILED_STATUS
shutdown.exit_state.hub = SimpleNamespace(close=lambda: None)
shutdown.exit_state.barrier = {ALONE}
shutdown.exit_state.failed = (9,)
shutdown.at_exit(lambda: None, lambda: 1.0)
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("pass", 75),
        ("sys.stdout = None", 75),
        ("sys.stdout.close()", 75),
        pytest.param("sys.stdout = sys.stderr = None", 75, marks=pytest.mark.extended),
        ("sys.stdout = object()", 120),  # Python's own, where it cannot flush
        ("if os.fork() == 0: sys.exit(0)\nsys.exit(os.wait()[1])", 75),  # the child ends with 0
    ],
)
def test_a_failure_of_others_is_the_status_whatever_the_output_is(end, status):
    said = subprocess.run([sys.executable, "-c", LAST + end], capture_output=True, text=True)
    assert said.returncode == status, said.stderr


@pytest.mark.parametrize(("failed", "status"), [((9,), 0), ((0, 1), 0), ((0, 3), 75)])
def test_a_learner_of_a_failed_super_learner_tells_it_itself(failed, status):
    """Here learner 3, while all others run. They may not know of the failure, and leave it to this one."""
    others = "SimpleNamespace(rank=3, ranks=(0, 1, 2, 3), ended=lambda: set())"
    script = LAST.replace(ALONE, others) + f"shutdown.exit_state.failed = {failed}"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert said.returncode == status, said.stderr


def test_a_process_without_mpi_does_not_start_it_at_its_end():
    """In a job of torchrun, whether it leaves or init() has failed."""
    script = """
import atexit, sys
from types import SimpleNamespace
atexit.register(lambda: print("mpi4py.MPI" in sys.modules))  # runs last
from hvd_adpsgd.lifecycle import shutdown
from hvd_adpsgd.lifecycle.exit_status import FAILED_STATUS
barrier = SimpleNamespace(rank=0, ranks=(0, 1), ended=lambda: {1})
print(shutdown.Teardown(barrier, None, (0, 1), None).ends_last(5.0), "mpi4py.MPI" in sys.modules)
shutdown.at_exit(lambda: None, lambda: 1.0)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert said.stdout.split() == ["True", "False", "False"], said.stderr


def commit_without_the_first() -> bytes:
    """What the first of three learners is sent by the other two, which have taken it for failed."""
    core, other = peers = [Agreement(3, i, direct=True) for i in (1, 2)]
    for peer in peers:
        peer.failed(0)
        peer.vote(COMPLETE)
    while not (commit := core.last_commit()):
        for place, message in core.take_outgoing():
            if place == 2:
                other.receive(1, message)
        for place, message in other.take_outgoing():
            if place == 1:
                core.receive(2, message)
    return commit


@pytest.mark.parametrize("is_excluded", [False, True])
def test_a_learner_that_its_peers_count_as_failed_does_not_say_that_it_leaves(
    is_excluded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would count it as one that has left in order, where some have not decided yet."""
    monkeypatch.setattr(shutdown.exit_state, "at_end", [])
    network = SilentNetwork()
    messages = Messages(network)
    if is_excluded:
        network.arrives(1, AGREEMENT, commit_without_the_first())
        messages.poll()
    assert messages.agreement.excluded is is_excluded
    shutdown.leave_operations(messages)
    for act in shutdown.exit_state.at_end:
        act()
    says = [place for place, channel, _ in network.sent if channel == LEAVES]
    assert says == ([] if is_excluded else [1, 2])


@pytest.mark.parametrize("fails", [False, True])
def test_a_learner_that_leaves_tells_whether_it_fails(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown.exit_state, "at_end", [])
    network = SilentNetwork()
    shutdown.leave_operations(Messages(network), fails)
    for act in shutdown.exit_state.at_end:
        act()
    told = [
        np.frombuffer(data, np.int32)[0] for _, channel, data in network.sent if channel == LEAVES
    ]
    how = 1 if fails else 2  # _FAILS, _FINISHES
    assert told == [how, how]


class SharedNetwork(SilentNetwork):
    """The network of one of several learners of this process; it moves what they send to each other."""

    def __init__(self, place: int, inboxes: list[queue.SimpleQueue[tuple[int, int, Any]]]):
        super().__init__(len(inboxes))
        self._place, self._inboxes = place, inboxes

    def Get_rank(self) -> int:
        return self._place

    def send(self, place: int, tag: int, data: Any) -> None:
        self._inboxes[place].put((self._place, tag, np.frombuffer(bytes(data), dtype=np.uint8)))

    def poll(self) -> Iterator[tuple[int, int, Any]]:
        while not self._inboxes[self._place].empty():
            yield self._inboxes[self._place].get()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.mark.parametrize("groups", [[(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)], [(0, 1, 2, 3)]])
@pytest.mark.parametrize("left", [set(), {3}])
def test_all_learners_know_of_a_death_that_one_of_them_has_seen(
    groups: list[tuple[int, ...]],
    left: set[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Learner 3 has exited, as the network of learner 1 alone reports; or it has said that it leaves."""
    inboxes: list[queue.SimpleQueue[tuple[int, int, Any]]] = [queue.SimpleQueue() for _ in range(4)]
    outcomes = threading.local()

    class Outcome:
        def __setattr__(self, name: str, value: object) -> None:
            setattr(outcomes, name, value)

        def __getattr__(self, name: str) -> object:
            return getattr(outcomes, name)

    monkeypatch.setattr(shutdown, "exit_state", Outcome())
    seen = {1: {3}, 3: {0, 1, 2}}  # what the networks report

    def shut_down(rank: int) -> tuple[bool, bool, bool]:
        network = SharedNetwork(rank, inboxes)
        network.failed = seen.get(rank, set())
        own = next(i for i, group in enumerate(groups) if rank in group)
        membership = Membership(groups, [f"node {i}" for i in range(len(groups))], own)
        mates = groups[own]
        done = np.zeros(len(mates), dtype=np.uint8)
        teardown = Teardown(ShutdownBarrier(network, (0, 1, 2, 3)), membership, mates, done)
        clean = teardown.meet(True, time.monotonic() + 60, lambda: left)
        assert (shutdown.exit_state.barrier is None) is clean
        return clean, 3 in membership.failed_ranks(), bool(shutdown.exit_state.failed)

    with caplog.at_level("WARNING", "hvd_adpsgd"), ThreadPoolExecutor(3) as learners:
        ends = list(learners.map(shut_down, range(3)))
    assert ends == [(False, not left, not left)] * 3
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        [] if left else ["learners [3] have failed: they did not leave the job in order."]
    )
    if not left:  # it was only stopped: it finds the others gone, and their decision
        caplog.clear()
        with caplog.at_level("WARNING", "hvd_adpsgd"):
            assert shut_down(3) == (False, True, True)
        told = "learner 3 was declared failed by the others while all were leaving, because"
        (record,) = caplog.records
        assert record.getMessage().startswith(told)


def test_a_leave_that_arrives_after_the_decision_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Learner 0 has seen that 2 has left and ended; learner 1 is told of the end before 2 is heard."""
    inboxes: list[queue.SimpleQueue[tuple[int, int, Any]]] = [queue.SimpleQueue() for _ in range(3)]
    monkeypatch.setattr(shutdown, "exit_state", threading.local())
    monkeypatch.setattr(shutdown, "_FLUSH_S", 60.0)  # longer than any machine stalls
    asked = {0: 0, 1: 0}

    def shut_down(rank: int) -> tuple[int, ...]:
        network = SharedNetwork(rank, inboxes)
        network.failed = {2} if rank == 0 else set()
        membership = Membership([(0,), (1,), (2,)], ["a", "b", "c"], rank)

        def left() -> set[int]:
            asked[rank] += 1
            return {2} if rank == 0 or asked[rank] > 3 else set()

        done = np.zeros(1, dtype=np.uint8)
        teardown = Teardown(ShutdownBarrier(network, (0, 1, 2)), membership, (rank,), done)
        teardown.meet(True, time.monotonic() + 60, left)
        return membership.failed_ranks()

    with caplog.at_level("INFO", "hvd_adpsgd"), ThreadPoolExecutor(2) as learners:
        assert list(learners.map(shut_down, range(2))) == [(), ()]
    assert asked[1] == 4
    assert "failed while" not in caplog.text
