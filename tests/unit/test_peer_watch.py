"""When a learner waits in torch for a local peer that cannot come, and when it may not say so."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_adpsgd.errors import CollectiveMismatchError, LearnerFailedError
from hvd_adpsgd.training import peer_watch
from hvd_adpsgd.training.peer_watch import _PeerWatch
from tests.launcher import wait_for

CROSSED = CollectiveMismatchError("learner 5 is in barrier")


class Job:
    """Learner 4 of a super learner (4, 5), and what its thread finds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.begun = {"default": 30}
        self.failed: set[int] = set()
        self.crosses = False
        self.ended = np.zeros((2, 1), np.int64)
        collectives: Any = SimpleNamespace(
            steps=[], require_step=self.require_step, leave=lambda why: None
        )
        self.world: Any = SimpleNamespace(
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
            "failed_comm_ranks": lambda comm: self.failed,
            "shared_counters": lambda *_: self.ended,
        }.items():
            monkeypatch.setattr(peer_watch, name, value)
        monkeypatch.setattr("hvd_adpsgd.training.super_learner.abort_group", lambda world: None)
        self.watch = _PeerWatch(self.world)
        mates = SimpleNamespace(submitted_by=lambda peer: 9)
        its = SimpleNamespace(step=lambda: 10, mates=mates)
        self.watch._super_learner = lambda: its  # type: ignore[assignment]
        monkeypatch.setattr(self.watch, "_is_in_torch", lambda: True)

    def require_step(self, of: Any, step: int, ranks: list[int]) -> None:
        assert (step, ranks) == (29, [5])
        if self.crosses:
            raise CROSSED

    def look(self) -> None:
        self.watch._look(self.world)


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
