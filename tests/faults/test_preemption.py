"""SIGTERM to a learner: its super learner leaves soon, and the others train on without a failure."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_adpsgd.lifecycle.exit_status import FAILED_STATUS
from tests.faults.programs import preempted
from tests.launcher import Result, run_learners, wait_for

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "preempted.py"
# Promised are 5 s, on a machine that does nothing else. Whoever waits for a deadline waits 30 s or more.
ENDS_S = 20.0
SEED = 11
ROUNDING = 2e-4  # of some hundred sums of float32 numbers of size 1 to 10; a step adds 0.01
NOTICE = "SIGTERM: super learner"


def facts(folder: Path, kind: str) -> dict[int, dict[str, Any]]:
    """What the learners left, by rank."""
    return {int(f.stem): json.loads(f.read_text()) for f in folder.glob(f"*.{kind}")}


def preempt(pids: dict[int, int], ranks: Sequence[int]) -> float:
    """SIGTERM to these learners; when."""
    at = time.monotonic()
    for rank in ranks:
        os.kill(pids[rank], signal.SIGTERM)
    return at


def run(
    folder: Path,
    n: int,
    k: int,
    act: Callable[[dict[int, int]], float],
    *args: str,
) -> tuple[Result, float]:
    """The program on n learners, k per super learner; `act` is called with their pids once all train.

    Returns:
        What came of it, and what `act` returned.
    """
    every = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(k), "HVD_ADPSGD_LOG_LEVEL": "info"}
    arguments = ["--folder", str(folder), "--seed", str(SEED), *args]
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_learners, n, PROGRAM, args=arguments, env=every)
        wait_for(lambda: job.done() or len(facts(folder, "pid")) == n, "all learners train", 200)
        at = act({rank: told["pid"] for rank, told in facts(folder, "pid").items()})
        (folder / "preempted").touch()
        return job.result(), at


def require_left(folder: Path, result: Result, ranks: Sequence[int], at: float) -> None:
    """These learners ended by SIGTERM, in time, with one line per super learner and without an error."""
    ends = facts(folder, "status")
    assert {rank: ends[rank]["status"] for rank in ranks} == dict.fromkeys(
        ranks, -signal.SIGTERM
    ), result.report()
    assert max(ends[rank]["at"] for rank in ranks) - at < ENDS_S, result.report()
    assert not set(ranks) & set(facts(folder, "json")), "they trained to the end"
    for word in ("Traceback", "has failed", "are gone"):
        assert word not in result.stderr, result.report()


def require_trained_on(folder: Path, result: Result, ranks: Sequence[int]) -> None:
    """These learners trained to the end, and none of them takes the others for failed."""
    ends = facts(folder, "json")
    assert sorted(ends) == list(ranks), result.report()
    for rank in ranks:
        assert (ends[rank]["total"], ends[rank]["failed"]) == (len(ranks), []), result.report()
        assert facts(folder, "status")[rank]["status"] == 0, result.report()
    assert result.returncode == 0, result.report()


def require_sum(folder: Path, n: int, left: Sequence[int]) -> None:
    """All models together, of those that left and of those that stayed, moved by their own steps only."""
    steps = {rank: told["steps"] for rank, told in facts(folder, "json").items()}
    steps.update({rank: told["steps"] for rank, told in facts(folder, "left").items()})
    moved = np.zeros(preempted.CHUNKS * 2**16)
    for rank in range(n):
        model, drift = preempted.drawn(SEED, rank)
        now = np.load(folder / (f"{rank}.left.npy" if rank in left else f"{rank}.npy"))
        expected = model.detach().double() + steps[rank] * drift.double()
        moved += now.ravel() - expected.numpy().ravel()
        assert np.abs(now.ravel() - expected.numpy().ravel()).max() > 0.1, "it was not averaged"
    assert np.abs(moved).max() < ROUNDING, f"seed {SEED}, steps {steps}"


def test_one_learner_takes_its_super_learner_along(tmp_path: Path) -> None:
    result, at = run(tmp_path, 4, 2, lambda pids: preempt(pids, [3]))
    require_left(tmp_path, result, [2, 3], at)
    require_trained_on(tmp_path, result, [0, 1])
    assert result.stderr.count(NOTICE) == 1, result.report()
    assert "super learner 1 (" in result.stderr
    assert "has left" in result.stderr


def test_the_first_learner_leaves_and_the_mean_is_kept(tmp_path: Path) -> None:
    result, at = run(tmp_path, 3, 1, lambda pids: preempt(pids, [0]))
    require_left(tmp_path, result, [0], at)
    require_trained_on(tmp_path, result, [1, 2])
    require_sum(tmp_path, 3, [0])


@pytest.mark.extended
def test_the_last_one_says_that_no_other_trains(tmp_path: Path) -> None:
    def one_by_one(pids: dict[int, int]) -> float:
        preempt(pids, [1])
        wait_for(lambda: 1 in facts(tmp_path, "status"), "the first one has left")
        return preempt(pids, [0])

    result, at = run(tmp_path, 2, 1, one_by_one)
    lines = [line for line in result.stderr.splitlines() if NOTICE in line]
    assert ["the others train on" in line for line in lines] == [True, False], result.report()
    assert "leaves; no other trains" in lines[1], result.report()
    assert facts(tmp_path, "status")[0]["at"] - at < ENDS_S


@pytest.mark.extended
@pytest.mark.parametrize("asked", [2, 3])
def test_a_learner_that_sleeps_leaves_in_time(tmp_path: Path, asked: int) -> None:
    """Learner 2 sleeps, so learner 3 waits for it in Horovod's all-reduce."""
    result, at = run(tmp_path, 4, 2, lambda pids: preempt(pids, [asked]), "--sleeps", "2")
    require_left(tmp_path, result, [2, 3], at)
    require_trained_on(tmp_path, result, [0, 1])


@pytest.mark.extended
@pytest.mark.parametrize("k", [1, 2])
def test_all_learners_leave_at_once(tmp_path: Path, k: int) -> None:
    result, at = run(tmp_path, 4, k, lambda pids: preempt(pids, range(4)))
    require_left(tmp_path, result, [1, 2, 3], at)
    assert result.stderr.count(NOTICE) == 4 // k, result.report()
    first = facts(tmp_path, "status")[0]
    assert first["status"] == result.returncode == FAILED_STATUS, result.report()
    assert first["at"] - at < ENDS_S


@pytest.mark.extended
def test_a_further_signal_changes_nothing(tmp_path: Path) -> None:
    """Sent again and again until both learners have ended."""

    def again(pids: dict[int, int]) -> float:
        at = preempt(pids, [2, 3])
        while len(facts(tmp_path, "status")) < 2 and time.monotonic() < at + 2 * ENDS_S:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its status is to come
                preempt(pids, sorted({2, 3} - set(facts(tmp_path, "status"))))
            time.sleep(0.05)
        return at

    result, at = run(tmp_path, 4, 2, again, "--steps", "300")
    require_left(tmp_path, result, [2, 3], at)
    require_trained_on(tmp_path, result, [0, 1])
    assert result.stderr.count(NOTICE) == 1, result.report()
