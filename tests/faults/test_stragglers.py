"""Slow, stopped and failed super learners: the others do not notice, or go on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import Result, run_learners, wait_for

pytestmark = [pytest.mark.mpi, pytest.mark.alone]

PROGRAM = Path(__file__).parent / "programs" / "train.py"
N = 4
PAUSE_S = 3.0
BOUND = 0.8  # of the steps in the PAUSE_S before
ATTEMPTS = 3  # the machine may be busy with other things in just one of the two windows


def steps(facts: dict[str, Any], began: float, ended: float) -> int:
    """Steps of one learner in a span of time.monotonic, which all processes of a host share."""
    return sum(began <= t < ended for t in facts["times"])


def met(facts: dict[str, Any], when: float, peers: list[int]) -> int:
    """Exchanges that one learner had finished with these by then."""
    before = [row for t, row in zip(facts["times"], facts["met"], strict=True) if t <= when]
    return sum(before[-1][p] for p in peers)


def told(folder: Path) -> list[dict[str, Any]]:
    """What the learners of train.py left, by rank."""
    files = sorted(folder.glob("?.json"))
    return [json.loads(file.read_text()) for file in files]


@contextlib.contextmanager
def training(folder: Path, *args: object, n: int = N) -> Iterator[Future[Result]]:
    """train.py of n learners under way; the future is its result."""
    arguments = [str(a) for a in ("--folder", folder, *args)]
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run_learners, n, PROGRAM, args=arguments, timeout=60)


def pid_of(learner: int, folder: Path) -> int:
    """Its pid, as soon as it trains."""
    file = folder / f"{learner}.pid"
    wait_for(file.exists, "the victim's pid")
    return int(file.read_text())


def require_not_slower(
    others: list[dict[str, Any]], began: float, ended: float
) -> tuple[bool, list[tuple[int, int]]]:
    """Whether each did BOUND times as many steps in the span as in one of that length before."""
    length = ended - began
    counts = [(steps(f, began - length, began), steps(f, began, ended)) for f in others]
    return all(after >= BOUND * before > 0 for before, after in counts), counts


# ---- promise 2: never blocks --------------------------------------------------------------------


def test_a_slow_super_learner_slows_only_itself(tmp_path: Path) -> None:
    sleeper = 1
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        args = ("--seconds", 7.5, "--sleeper", sleeper, "--after", 3.5, "--seed", attempt)
        with training(folder, *args) as run:
            run.result().checked()
        facts = told(folder)
        began = facts[sleeper]["slept"]
        assert steps(facts[sleeper], began, began + PAUSE_S) == 0, "nobody slept"
        others = [f for f in facts if f["rank"] != sleeper]
        good, counts = require_not_slower(others, began, began + PAUSE_S)
        if good:
            break
    assert good, f"steps before and during the {PAUSE_S:g} s, seed {attempt}: {counts}"
    for f in facts:
        assert f["worst"]["float32"] <= 1e-6, f["worst"]
        assert f["worst"]["float64"] <= 1e-12, f["worst"]


# ---- promise 3, and deadlines -------------------------------------------------------------------


def test_a_stopped_super_learner_is_passed_over_and_comes_back(tmp_path: Path) -> None:
    """SIGSTOP in the middle of exchanges, SIGCONT 3 s later.

    Its exchange is parked after deadline_s = 1 s; meanwhile the others exchange with each other;
    afterwards the parked exchange is finished, new ones begin, and the mean is exact.
    """
    victim = 2
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        args = ("--seconds", 9, "--exchanges-per-step", 8, "--seed", attempt)
        with training(folder, *args, "--elements", 400_000) as run:
            pid = pid_of(victim, folder)
            time.sleep(3.5)  # undisturbed training, to compare with
            began = time.monotonic()
            os.kill(pid, signal.SIGSTOP)
            try:
                time.sleep(PAUSE_S)  # the injected stop
            finally:
                os.kill(pid, signal.SIGCONT)
            ended = time.monotonic()
            result = run.result().checked()
        facts = told(folder)
        assert steps(facts[victim], began + 0.1, ended) <= 1, "nobody was stopped"
        others = [f for f in facts if f["rank"] != victim]
        good, counts = require_not_slower(others, began, ended)
        in_exchange = sum(f["parked"] for f in others) > 0
        if good and in_exchange:
            break
    where = f"seed {attempt}, {result.report()}"
    assert good, f"steps before and while stopped: {counts}; {where}"
    assert in_exchange, f"no exchange was parked: the stop met none; {where}"
    for f in others:
        rest = [p for p in range(N) if p != victim and p != f["rank"]]
        parked_by = began + 1.2  # deadline_s is 1
        assert met(f, ended, rest) > met(f, parked_by, rest) + 5, f"no exchanges meanwhile; {where}"
        assert f["peers"][victim] >= met(f, ended, [victim]) + 3, f"none afterwards; {where}"
        assert f["worst"]["float32"] <= 1e-6, f["worst"]
        assert f["worst"]["float64"] <= 1e-12, f["worst"]
    assert "is silent" in result.stderr, result.stderr


def test_horovod_in_one_super_learner_does_not_wait_for_another() -> None:
    """Learner 3 is stopped until learners 0 and 1 have made 50 operations; learner 2 waits for it."""
    program = """
        import signal, torch
        import hvd_adpsgd.torch as hvd
        hvd.init()
        rank = hvd.rank()
        def inner():
            began = time.monotonic()
            hvd.allreduce(torch.ones(1000), process_set=hvd.super_learner)
            return time.monotonic() - began
        for _ in range(3):
            inner()
        victim = hvd.allgather_object(os.getpid())[3]
        hvd.barrier()
        if rank == 0:
            os.kill(victim, signal.SIGSTOP)
        state = ""
        ends = time.monotonic() + 10
        while rank != 3 and state != "T" and time.monotonic() < ends:
            with open(f"/proc/{victim}/stat") as file:
                state = file.read().rsplit(")", 1)[1].split()[0]
        began = time.monotonic()
        if rank < 2:
            for _ in range(50):
                inner()
            if rank == 0:
                time.sleep(max(0, began + 2 - time.monotonic()))  # learner 3 stays stopped
                os.kill(victim, signal.SIGCONT)
        else:
            inner()
        say(rank=rank, state=state, took=time.monotonic() - began)
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
    said = run_learners(4, program, env=env, timeout=60).checked().by_rank()
    assert [facts["state"] for facts in said[:3]] == ["T"] * 3
    assert said[2]["took"] > 0.5, "learner 3 was not stopped"


# ---- a super learner that is gone ----------------------------------------------------------------


@pytest.mark.extended
def test_a_killed_super_learner_is_left_behind(tmp_path: Path) -> None:
    """SIGKILL: the others exchange on, say so once each, and end by themselves with status 0."""
    victim = 1
    args = ("--seconds", 5, "--exchanges-per-step", 8, "--no-check")
    with training(tmp_path, *args) as run:
        pid = pid_of(victim, tmp_path)
        time.sleep(1.5)  # training before the loss
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        result = run.result()
    facts = told(tmp_path)
    assert [f["rank"] for f in facts] == [0, 2, 3], result.report()
    for f in facts:
        rest = [p for p in range(N) if p != victim and p != f["rank"]]
        assert sum(f["peers"][p] for p in rest) > met(f, killed + 2, rest) + 5, result.report()
        assert f["times"][-1] > killed + 2
    lines = [line for line in result.stderr.splitlines() if "has failed" in line]
    assert len(lines) == N - 1, result.report()
    assert all("learner 1" in line for line in lines)


@pytest.mark.extended
def test_two_go_on_when_all_others_are_killed_one_by_one(tmp_path: Path) -> None:
    """A loss may be noticed by any look at any message; none makes a survivor deaf, or run on."""
    n, seconds = 8, 7
    victims = [3, 0, 6, 1, 7, 4]
    args = ("--seconds", seconds, "--exchanges-per-step", 8, "--elements", 20_000, "--no-check")
    with training(tmp_path, *args, n=n) as run:
        pids = [pid_of(victim, tmp_path) for victim in victims]
        for pid in pids:
            time.sleep(0.5)  # training between two losses
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        result = run.result()
    facts = told(tmp_path)
    assert [f["rank"] for f in facts] == [2, 5], result.report()
    for f, peer in zip(facts, [5, 2], strict=True):
        assert f["peers"][peer] > met(f, killed + 1.5, [peer]) + 5, result.report()
        assert f["times"][-1] > killed + 2, "too little time for the survivors"
    for victim in victims:
        assert f"(learner {victim}) has failed" in result.stderr, result.report()
