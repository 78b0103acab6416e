"""When a learner waits in torch for a local peer that cannot come, and when it may not say so."""

import signal
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_adpsgd.errors import AdpsgdError, CollectiveMismatchError, LearnerFailedError
from hvd_adpsgd.training import peer_watch
from hvd_adpsgd.training.peer_watch import COLUMNS, PeerBoard, _PeerWatch
from tests.launcher import wait_for

CROSSED = CollectiveMismatchError("learner 5 is in barrier")


class Job:
    """Learner 4 of a super learner (4, 5), and what its thread finds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.begun = {"default": 30}
        self.failed: set[int] = set()
        self.crosses = False
        self.left: list[AdpsgdError] = []
        self.rows = np.zeros(2, list(COLUMNS))
        self.ended = self.rows["ended"]
        self.rows["begun"][1] = 30
        collectives: Any = SimpleNamespace(
            steps=[], before=[], require_step=self.require_step, leave=self.left.append
        )
        config = SimpleNamespace(failure_timeout_s=12.0, wire="tcp")
        self.world: Any = SimpleNamespace(
            config=config,
            inner=None,
            inner_rank=0,
            rank=4,
            super_rank=1,
            groups=((0, 1), (4, 5)),
            collectives=collectives,
            membership=SimpleNamespace(fail=lambda ranks: None, is_alone=False),
            teardown=SimpleNamespace(at_shutdown=lambda act: None),
        )
        for name, value in {
            "begun_inside": lambda world: dict(self.begun),
            "exited": lambda comm, ranks: self.failed,
            "interrupt_group": lambda world: self.interrupted.append(world),
        }.items():
            monkeypatch.setattr(peer_watch, name, value)
        monkeypatch.setattr(peer_watch, "shared_table", lambda *_: self.rows)
        monkeypatch.setattr("hvd_adpsgd.training.super_learner.abort_group", lambda world: None)
        self.watch = _PeerWatch(self.world)
        self.mates = SimpleNamespace(
            submitted_by=lambda peer: 9, sets=10, ahead=lambda: [1], late=lambda: [1]
        )
        self.its = SimpleNamespace(
            steps=SimpleNamespace(step=10), mates=self.mates, broken=None, waits=False
        )
        self.watch._all = [self.its]  # type: ignore[assignment]
        self.interrupted: list[Any] = []
        self.watch._super_learner = lambda: self.its  # type: ignore[assignment,return-value]
        self.watch._thread = threading.get_ident()
        monkeypatch.setattr(self.watch, "_is_in_torch", lambda: True)

    @property
    def peer(self) -> PeerBoard:
        """The board as the other learner writes it."""
        board = PeerBoard(self.world)
        board.mine = self.rows[1]
        return board

    def require_step(self, of: Any, step: int, ranks: list[int]) -> None:
        assert (step, ranks) == (29, [5])
        if self.crosses:
            raise CROSSED

    def look(self) -> None:
        self.watch._check(self.world)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_a_peer_that_ended_with_fewer_operations(job: Job) -> None:
    job.ended[1] = 1 + 29
    job.look()  # the first look: this learner may have begun its operation just now
    with pytest.raises(LearnerFailedError) as caught:
        job.look()
    for words in ("step 10, learner 4: learner 5", "after 9 steps", "hvd.join()"):
        assert words in str(caught.value)


@pytest.mark.parametrize("count", [0, 1 + 30, 1 + 31, 1 + peer_watch._FOREVER])
def test_a_peer_that_trains_or_has_begun_all_operations_is_no_error(job: Job, count: int) -> None:
    """It has ended its training after as many steps; this learner evaluates on its own."""
    job.ended[1] = count
    job.failed = {1} if count else set()  # it has ended in order
    for _ in range(3):
        job.look()


def test_a_learner_that_begins_operations_does_not_wait(job: Job) -> None:
    job.ended[1], job.crosses = 1 + 3, True
    for begun in range(4, 9):
        job.begun["default"] = begun
        job.look()


@pytest.mark.parametrize(
    ("where", "waits"),
    [
        ("/lib/torch/distributed/distributed_c10d.py", True),
        ("/lib/torch/autograd/graph.py", True),
        ("/lib/torch/nn/parallel/distributed.py", True),
        ("/lib/torch/distributed/checkpoint/filesystem.py", False),
        ("/home/me/train.py", False),
    ],
)
def test_a_learner_waits_where_torch_does(job: Job, where: str, waits: bool) -> None:
    """Others evaluate or save, with other numbers of operations, as those between two peers count."""
    lock = threading.Lock()
    with lock:
        code = compile("with lock: pass", where, "exec")
        trainer = threading.Thread(target=exec, args=(code, {"lock": lock}), daemon=True)
        trainer.start()
        job.watch._thread = trainer.ident
        found: Any = lambda: _PeerWatch._is_in_torch(job.watch)  # noqa: E731
        file = lambda: sys._current_frames()[trainer.ident].f_code.co_filename  # noqa: E731
        wait_for(lambda: file() == where, "the thread waits")
        assert found() == waits
    trainer.join()


def test_unequal_numbers_alone_are_no_wait(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.watch, "_is_in_torch", lambda: False)
    job.ended[1], job.crosses = 1 + 29, True
    for _ in range(3):
        job.look()


def test_a_peer_whose_process_has_ended(job: Job) -> None:
    job.failed = {1}
    job.look()
    with pytest.raises(LearnerFailedError, match=r"step 10, .*learner 5 of it has failed"):
        job.look()


def test_a_peer_that_waits_in_an_operation(job: Job) -> None:
    job.crosses = True
    job.look()
    with pytest.raises(CollectiveMismatchError, match="step 10: learner 5 is in barrier"):
        job.look()


def test_groups_that_are_made_or_destroyed_later_are_not_compared(job: Job) -> None:
    """Learners make and destroy them at different times."""
    job.begun["metrics"] = 100
    job.ended[1] = 1 + 30
    for _ in range(3):
        job.look()
    del job.begun["default"]
    job.crosses, job.ended[1] = True, 1
    for _ in range(3):
        job.look()
    assert job.watch._begun() == peer_watch._FOREVER


INSIDE = "allreduce at train.py:7"


def waits_in_torch(job: Job) -> None:
    job.rows["begun"][1] = 29


def waits_for_gradients(job: Job) -> None:
    job.begun, job.its.waits = {}, True
    job.watch._names = job.begun.keys()


@pytest.mark.parametrize("waits", [waits_in_torch, waits_for_gradients])
def test_a_peer_in_an_operation_that_this_learner_has_not_begun(job: Job, waits: Any) -> None:
    waits(job)
    job.peer.write(INSIDE)
    job.look()
    job.look()  # the peer may have left it just now
    with pytest.raises(CollectiveMismatchError, match=f"learner 5 is in {INSIDE}, and learner 4 "):
        job.look()


def has_begun_it(job: Job) -> None:
    job.mates.ahead = list


def has_all_of_the_peer(job: Job) -> None:
    job.rows["begun"][1] = 30


def makes_steps(job: Job) -> None:
    job.mates.sets += 1


def goes_on(job: Job) -> None:
    job.peer.write(f"{job.peer.text(1)}0")


@pytest.mark.parametrize("act", [has_begun_it, has_all_of_the_peer, makes_steps, goes_on])
def test_a_peer_in_an_operation_is_waited_for(job: Job, act: Any) -> None:
    waits_in_torch(job)
    job.peer.write(INSIDE)
    for _ in range(4):
        act(job)
        job.look()


def test_what_one_learner_has_found_all_raise(job: Job) -> None:
    """Also before their watches look: in their next call of this library, or when Horovod's wait ends."""
    job.watch._end_waits(CollectiveMismatchError("learner 5 is elsewhere"))
    assert job.interrupted == [job.world] and str(job.left.pop()) == "learner 5 is elsewhere"
    other = _PeerWatch(job.world)
    other._super_learner, other._all = job.watch._super_learner, job.watch._all
    job.its.broken = None
    for act in (other.hear, other._before_operation, lambda: other._check(job.world)):
        with pytest.raises(CollectiveMismatchError, match="learner 5 is elsewhere"):
            raise act() or AssertionError("nothing heard")
    assert str(job.its.broken) == "learner 5 is elsewhere" and len(job.left) == 2


@pytest.mark.parametrize("begun", [29, 30])
def test_a_peer_that_failed_in_an_operation_of_torch_is_told_before_the_next_one(
    job: Job, begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's error ends the wait before a look; a peer that made all of them leaves the operation whole."""
    monkeypatch.setattr(job.watch, "_is_in_torch", lambda: False)
    job.failed, job.rows["begun"][1] = {1}, begun
    for act in (job.watch._before_operation, job.look):
        if begun == 30:
            act()
            continue
        with pytest.raises(LearnerFailedError, match=r"step 10, .*learner 5 of it has failed"):
            act()


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("horovod.torch.mpi_ops", "told at "),
        ("hvd_adpsgd.inner.over_torch.operations", "told at "),
        ("hvd_adpsgd.training.averaging", ""),
        ("train", ""),
    ],
)
def test_where_the_thread_that_trains_is_in_an_operation(job: Job, module: str, found: str) -> None:
    lock = threading.Lock()
    names: dict[str, Any] = {"lock": lock, "__name__": module}
    exec("def told():\n with lock: pass\ndef alltoall(): told()", names)
    with lock:
        trainer = threading.Thread(target=lambda: names["alltoall"](), daemon=True)
        trainer.start()
        job.watch._thread = trainer.ident
        here = lambda: sys._current_frames()[trainer.ident].f_code.co_name  # noqa: E731
        wait_for(lambda: here() == "told", "the thread waits")
        found = found.replace("told", "alltoall") + (__file__ if found else "")
        assert job.watch._operation().startswith(found) and bool(job.watch._operation()) == bool(
            found
        )
    trainer.join()


@pytest.mark.parametrize(
    ("wire", "last", "moves", "place", "killed"),
    [
        *(("tcp", 0, False, 0, True), ("tcp", 7, True, 0, False), ("tcp", -1, False, 0, False)),
        *(("mpi", 7, False, 0, False), ("tcp", 0, False, 1, False)),
    ],
)
def test_a_peer_that_stands_still_is_killed(
    job: Job,
    wire: str,
    last: int,
    moves: bool,
    place: int,
    killed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that trains, or has ended, or is under MPI (heartbeats), or in another container is not."""
    kills: list[Any] = []
    monkeypatch.setattr(peer_watch.os, "kill", lambda *its: kills.append(its))
    job.world.config.wire, job.rows["looks"][1], job.rows["pid"][1] = wire, last, 4711
    job.rows["pids"] = [7, 7 + place]
    for look in range(40):
        job.rows["looks"][1] += moves
        job.look()
        assert not kills or look >= 12
    assert kills == [(4711, signal.SIGKILL)] * killed
