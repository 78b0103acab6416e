"""Slow, stopped and failed super learners: the others do not notice, or go on.

Nothing here measures how fast anything is. A learner sleeps, or is stopped, until the others have made so
many steps and exchanges: if they waited for it, they would never come to them.
"""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import Result, run_learners, wait_for

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "train.py"
N = 4
STEPS, EXCHANGES = 100, 5  # that the others make meanwhile, and finish with each other


class Job:
    """train.py under way."""

    def __init__(self, folder: Path, run: Future[Result]):
        self.folder, self.run = folder, run

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        return wait_for(lambda: self.run.done() or condition(), what, 200)

    def left(self, rank: int, kind: str) -> Any:
        """What the learner left last of this kind; None before that."""
        file = self.folder / f"{rank}.{kind}"
        return json.loads(file.read_text()) if file.exists() else None

    def trains(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The progress of these, once all have made some steps."""
        self.wait(lambda: all(self.left(rank, "progress") for rank in ranks), "all train")
        return {rank: self.left(rank, "progress") for rank in ranks}

    def pid_of(self, rank: int) -> int:
        return int(self.wait(lambda: self.left(rank, "pid"), "its pid"))

    def others_go_on(self, ranks: Sequence[int]) -> None:
        """Wait until each of these has made STEPS more steps, and finished EXCHANGES more with each other."""
        then = self.trains(ranks)

        def far(rank: int) -> bool:
            before, now = then[rank], self.left(rank, "progress")
            rest = [peer for peer in ranks if peer != rank]
            met = sum(now["met"][peer] - before["met"][peer] for peer in rest)
            return now["step"] >= before["step"] + STEPS and met >= EXCHANGES

        self.wait(lambda: all(far(rank) for rank in ranks), f"{ranks} go on")

    def end(self) -> tuple[Result, list[dict[str, Any]]]:
        """Its result, and what the learners that are left found."""
        (self.folder / "enough").touch()
        result = self.run.result()
        found = [self.left(rank, "json") for rank in range(10)]
        return result, [facts for facts in found if facts]


@contextlib.contextmanager
def training(folder: Path, *args: object, n: int = N) -> Iterator[Job]:
    """train.py of n learners under way."""
    arguments = [str(a) for a in ("--folder", folder, *args)]
    with ThreadPoolExecutor(1) as pool:
        job = Job(folder, pool.submit(run_learners, n, PROGRAM, args=arguments))
        try:
            yield job
        finally:
            (folder / "enough").touch()


def require_the_mean(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert facts["worst"]["float32"] <= 1e-6, facts["worst"]
        assert facts["worst"]["float64"] <= 1e-12, facts["worst"]


def test_a_slow_super_learner_slows_only_itself(tmp_path: Path) -> None:
    """It sleeps in one of its steps until the others have made a hundred."""
    sleeper, others = 1, [0, 2, 3]
    with training(tmp_path) as job:
        job.trains(range(N))
        (tmp_path / f"{sleeper}.sleep").touch()
        job.wait(lambda: job.left(sleeper, "sleeps"), "it sleeps")
        before = job.left(sleeper, "progress")["step"]
        job.others_go_on(others)
        assert job.left(sleeper, "progress")["step"] == before, "nobody slept"
        (tmp_path / f"{sleeper}.sleep").unlink()
        result, found = job.end()
    result.checked()
    assert len(found) == N, result.report()
    require_the_mean(found)


def test_a_stopped_super_learner_is_passed_over_and_comes_back(tmp_path: Path) -> None:
    """SIGSTOP in the middle of an exchange, SIGCONT when the others have gone on without it.

    Its exchange is parked after deadline_s = 1 s; meanwhile the others exchange with each other;
    afterwards the parked exchange is finished, new ones begin, and the mean is exact.
    """
    victim, others = 2, [0, 1, 3]
    args = ("--stops", victim, "--exchanges-per-step", 8, "--elements", 400_000)
    with training(tmp_path, *args) as job:
        pid = job.pid_of(victim)
        job.wait((tmp_path / "stopped").exists, "it stops in an exchange")
        try:
            parked = lambda: sum(f["parked"] for f in job.trains(others).values())  # noqa: E731
            job.wait(parked, "its exchange is parked")
            job.others_go_on(others)
            then = job.trains(others)
        finally:
            os.kill(pid, signal.SIGCONT)

        def back(rank: int) -> bool:
            met = job.left(rank, "progress")["met"]
            return met[victim] >= then[rank]["met"][victim] + 3

        job.wait(lambda: all(map(back, others)), "they exchange with it again")
        result, found = job.end()
    result.checked()
    assert len(found) == N, result.report()
    require_the_mean(found)
    assert "is silent" in result.stderr, result.stderr


def test_horovod_in_one_super_learner_does_not_wait_for_another(tmp_path: Path) -> None:
    """Learner 3 is stopped until learners 0 and 1 have made 50 operations; learner 2 waits for it."""
    program = """
        import signal, torch
        from pathlib import Path
        import hvd_adpsgd.torch as hvd
        hvd.init()
        rank, goes_on = hvd.rank(), Path(sys.argv[1], "goes on")
        def inner():
            hvd.allreduce(torch.ones(1000), process_set=hvd.super_learner)
        def stopped():
            with open(f"/proc/{victim}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] == "T"
        for _ in range(3):
            inner()
        victim = hvd.allgather_object(os.getpid())[3]
        hvd.barrier()
        if rank == 0:
            os.kill(victim, signal.SIGSTOP)
        ends = time.monotonic() + 60
        while rank != 3 and not stopped() and time.monotonic() < ends:
            time.sleep(1e-3)
        facts = {}
        if rank < 2:
            for _ in range(50):
                inner()
        if rank == 0:
            facts["meanwhile"] = stopped()
            goes_on.touch()
            os.kill(victim, signal.SIGCONT)
        if rank > 1:
            inner()
            facts["after"] = goes_on.exists()
        say(rank=rank, **facts)
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
    result = run_learners(4, program, args=[str(tmp_path)], env=env)
    said = result.checked().by_rank()
    assert said[0]["meanwhile"], "learners 0 and 1 have waited for learner 3"
    assert said[2]["after"], "learner 3 was not stopped"


@pytest.mark.extended
def test_a_killed_super_learner_is_left_behind(tmp_path: Path) -> None:
    """SIGKILL: the others exchange on, say so once each, and end by themselves with status 0."""
    victim, others = 1, [0, 2, 3]
    with training(tmp_path, "--exchanges-per-step", 8, "--no-check") as job:
        job.trains(range(N))
        os.kill(job.pid_of(victim), signal.SIGKILL)
        for _ in range(2):  # also long afterwards
            job.others_go_on(others)
        result, found = job.end()
    assert [f["rank"] for f in found] == others, result.report()
    lines = [line for line in result.stderr.splitlines() if "has failed" in line]
    assert len(lines) == N - 1, result.report()
    assert all("learner 1" in line for line in lines)


@pytest.mark.extended
def test_two_go_on_when_all_others_are_killed_one_by_one(tmp_path: Path) -> None:
    """A loss may be noticed by any look at any message; none makes a survivor deaf, or run on."""
    n, survivors = 8, [2, 5]
    victims = [3, 0, 6, 1, 7, 4]
    args = ("--exchanges-per-step", 8, "--elements", 20_000, "--no-check")
    with training(tmp_path, *args, n=n) as job:
        job.trains(range(n))
        for victim in victims:
            then = job.trains(survivors)
            os.kill(job.pid_of(victim), signal.SIGKILL)
            job.wait(
                lambda then=then: all(
                    job.left(rank, "progress")["step"] > then[rank]["step"] + 10
                    for rank in survivors
                ),
                "some steps between two losses",
            )
        job.others_go_on(survivors)
        result, found = job.end()
    assert [f["rank"] for f in found] == survivors, result.report()
    for victim in victims:
        assert f"(learner {victim}) has failed" in result.stderr, result.report()
