"""The lines of docs/slurm.md for submitit: run by its local executor, and the batch script that they make."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import ROOT, environment

submitit = pytest.importorskip("submitit", reason="no submitit: make test-schedulers installs it")

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.extended]

PAGE = ROOT / "docs" / "slurm.md"
TRAIN = ROOT / "tests" / "cluster" / "programs" / "on_slurm.py"
LONGEST_S = 120.0  # of a wait for what must come
FURTHER = 30  # steps: a learner that makes so many more trains on


def page_lines() -> str:
    (found,) = re.findall(r"(?ms)^```py\n(.*?)^```", PAGE.read_text())
    return str(found)


class Training:
    """The page's lines with on_slurm.py as train.py: 4 learners on this machine, 2 super learners."""

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.copy(TRAIN, folder / "train.py")
        local, times = re.subn(
            r'AutoExecutor\("log"', 'AutoExecutor("log", cluster="local"', page_lines()
        )
        local = local.replace("nodes=8", "nodes=1")
        assert times == 1
        (folder / "submit.py").write_text(local)
        env = environment({"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}, [])
        self.process = subprocess.Popen(
            [sys.executable, "submit.py"], cwd=folder, env=env, start_new_session=True
        )

    def said(self) -> str:
        files = sorted((self.folder / "log").glob("*.*"))
        return "".join(file.read_text() for file in files if file.suffix in (".err", ".out"))

    def last(self, rank: int, name: str) -> Any:
        """What a learner has said last about this; None before."""
        file = self.folder / f"{rank}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        told = [json.loads(line) for line in lines if line.endswith("\n")]
        return next((facts[name] for facts in reversed(told) if name in facts), None)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        ends = time.monotonic() + LONGEST_S
        while not condition():
            assert time.monotonic() < ends and self.process.poll() is None, self.said()
            time.sleep(0.1)

    def wait_for_steps(self, *ranks: int) -> None:
        """Wait until each of these learners has made further steps."""
        for rank in ranks:
            enough = (self.last(rank, "step") or 0) + FURTHER
            self.wait_for(lambda rank=rank, enough=enough: (self.last(rank, "step") or 0) >= enough)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    yield made
    if made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.wait()


def test_the_lines_train_and_a_learner_that_is_preempted_leaves(training: Training) -> None:
    training.wait_for_steps(0, 1, 2, 3)
    assert [training.last(rank, "super") for rank in range(4)] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    os.kill(training.last(3, "pid"), signal.SIGTERM)
    training.wait_for(lambda: "SIGTERM: super learner 1" in training.said())
    training.wait_for_steps(0, 1)
    (training.folder / "enough").touch()
    assert training.process.wait(LONGEST_S) == 0, training.said()
    assert (training.folder / "final.pt").exists()
    assert [training.last(rank, "failed") for rank in range(2)] == [[], []]
    assert [training.last(rank, "ended") is None for rank in range(4)] == [False, False, True, True]


def test_the_batch_script_has_the_options_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it can be seen without a Slurm: the text that sbatch would get."""
    made: list[str] = []
    executor = submitit.SlurmExecutor

    def text(self: Any, command: str, uid: str) -> Any:
        made.append(submitted(self, command, uid))
        raise InterruptedError

    submitted = executor._make_submission_file_text
    monkeypatch.setattr(executor, "_make_submission_file_text", text)
    monkeypatch.setattr(executor, "affinity", classmethod(lambda cls: 2))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InterruptedError):
        exec(compile(page_lines(), str(PAGE), "exec"), {"__name__": "submitted"})
    (script,) = made
    for option in ("--nodes=8", "--ntasks-per-node=4", "--gpus-per-node=4", "--no-kill"):
        assert f"#SBATCH {option}\n" in script, script
    (command,) = re.findall(r"^srun .*", script, re.MULTILINE)
    for option in ("--mpi=none", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"):
        assert option in command.split(), script
