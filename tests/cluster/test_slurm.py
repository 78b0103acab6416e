"""The script of docs/slurm.md under a Slurm of virtual hosts: lost hosts, preemption, what ends a job."""

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hvd_adpsgd_lab.machines import Cluster

from tests.cluster.slurm import ENDED, GPUS, Slurm, release, unavailable
from tests.launcher import QUICK, environment

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

PAGE = Path(__file__).parents[2] / "docs" / "slurm.md"
PROGRAM = Path(__file__).parent / "programs" / "on_slurm.py"
DYNAMIC = Path(__file__).parents[1] / "mpi" / "programs" / "dynamic.py"
RELEASE = " 22.05."  # of Debian 12; with others the tests that `make test` leaves out may fail
FURTHER = 60  # steps: a learner that makes so many more trains on
FEW = 5  # the same, where time counts
IMPATIENT = {"HVD_ADPSGD_FAILURE_TIMEOUT_S": "4"}
PATIENT = {"HVD_ADPSGD_FAILURE_TIMEOUT_S": "600"}


def page_block(begins: str) -> str:
    """The block of the page that begins so."""
    [block] = re.findall(rf"```bash\n({re.escape(begins)}.*?)```", PAGE.read_text(), re.DOTALL)
    return str(block)


def page_script(*, sleep_s: int = 5) -> str:
    """The page's batch script, with the paths of this checkout, and a time from final.pt to scancel."""
    script = page_block("#!/bin/bash\n").replace(
        "/shared/project/.venv", str(Path(sys.executable).parents[1])
    )
    return script.replace("sleep 60", f"sleep {sleep_s}")


@dataclass
class Training:
    """A job that runs a batch script with `on_slurm.py` as train.py.

    Attributes:
        slurm: where it runs.
        folder: its working directory.
        number: of the job, or array and task such as 4711_0.
        learners: how many.
        env: variables of the job.
    """

    slurm: Slurm
    folder: Path
    number: int | str
    learners: int
    env: dict[str, str]

    def facts(self, rank: int) -> list[dict[str, Any]]:
        """What a learner has said."""
        file = self.folder / f"{rank}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def last(self, rank: int, name: str) -> Any:
        """What a learner has said last about this; None before."""
        return next((facts[name] for facts in reversed(self.facts(rank)) if name in facts), None)

    def said(self) -> str:
        """All output of the job."""
        here = [*self.folder.glob("slurm-*.out")]
        above = [*self.folder.parent.glob(f"slurm-{self.number}.out")]  # of an array
        return "".join(file.read_text() for file in here or above)

    def wait_for_steps(self, ranks: Sequence[int] | None = None, further: int = FURTHER) -> None:
        """Wait until each of these learners, by default all, has made further steps."""
        ranks = range(self.learners) if ranks is None else ranks
        goals = {rank: (self.last(rank, "step") or 0) + further for rank in ranks}
        for rank, enough in goals.items():
            self.slurm.wait_for(
                lambda rank=rank, enough=enough: (self.last(rank, "step") or 0) >= enough,
                f"steps of learner {rank}",
                self.said,
            )

    def wait_for_failed(self, rank: int, failed: Sequence[int]) -> None:
        """Wait until a learner counts those as failed."""
        self.slurm.wait_for(
            lambda: self.last(rank, "failed") == list(failed), f"failed: {failed}", self.said
        )

    def end(self) -> dict[str, str]:
        """Let the training end: what scontrol prints of the job when it has."""
        (self.folder / "enough").touch()
        return self.slurm.wait_state(self.number, *ENDED)

    def wait_for_restart(self) -> None:
        """Wait until the job is requeued; start it soon, and wait until it runs again.

        Not at once: slurmd refuses a job that starts in the second in which it was requeued.
        """
        self.slurm.wait_for(lambda: self.job()["JobState"] == "PENDING", "requeued", self.said)
        self.slurm.scontrol("update", f"JobId={self.number}", "StartTime=now+5")
        self.slurm.wait_for(lambda: self.last(0, "restart") == 1, "the second start", self.said)

    def job(self) -> dict[str, str]:
        """What scontrol prints of the job."""
        return self.slurm.job(self.number)


def prepared(folder: Path, script: str) -> dict[str, str]:
    """Write job.sh and train.py: the variables that a job needs."""
    shutil.copy(PROGRAM, folder / "train.py")
    (folder / "job.sh").write_text(script)
    known = environment({}, [QUICK])
    return {name: known[name] for name in known if name.startswith(("HVD_", "PYTHON"))}


@contextmanager
def training(
    folder: Path,
    *,
    nodes: int = 3,
    tasks: int = 1,
    spare: int = 0,
    script: str | None = None,
    grace_s: int = 0,
    patient: bool = False,
    env: Mapping[str, str] = {},
) -> Iterator[Training]:
    """Yields when all learners train. Their hosts are node1, node2, ...

    Args:
        folder: the working directory.
        nodes, tasks: of the job, and tasks per node.
        spare: further nodes.
        script: default the page's.
        grace_s: of a preempted job.
        patient: whether nothing fails or ends because the machine stalls.
        env: variables of the job.
    """
    own = prepared(folder, page_script() if script is None else script)
    own.update(PATIENT if patient else IMPATIENT, **env)
    with (
        Cluster(nodes + spare + 1, ssh=False) as cluster,
        Slurm(cluster, grace_s=grace_s, patient=patient) as slurm,
    ):
        sizes = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
        number = slurm.sbatch([*sizes, "job.sh"], cwd=folder, env=own)
        run = Training(slurm, folder, number, nodes * tasks, own)
        try:
            run.wait_for_steps(further=FEW if patient else FURTHER)
            yield run
        finally:
            print(run.said())


@pytest.mark.skipif(RELEASE not in release(), reason=f"slurm.conf is written for {RELEASE}")
def test_one_super_learner_per_node_with_all_its_gpus(tmp_path: Path) -> None:
    """A learner that is killed takes its super learner along; the job is completed all the same."""
    script = page_script(sleep_s=600)
    with training(tmp_path, nodes=2, tasks=2, script=script, patient=True) as run:
        for rank in range(4):
            facts = run.facts(rank)[0]
            assert facts["host"] == f"node{1 + rank // 2}"
            assert facts["local"] == [rank % 2, 2]
            assert facts["super"] == [rank // 2, 2]
            assert facts["gpus"] == ",".join(map(str, range(GPUS)))
        kill = f"kill -KILL {run.facts(3)[0]['pid']}"
        assert run.slurm.cluster.run(["sh", "-c", kill], host="node2").returncode == 0
        run.wait_for_failed(0, [2, 3])
        run.wait_for_failed(1, [2, 3])
        run.wait_for_steps([0, 1], FEW)
        assert run.end()["JobState"] == "COMPLETED"
    assert (tmp_path / "final.pt").exists()
    assert (tmp_path / "record").is_dir()


@pytest.mark.extended
def test_a_slow_node_slows_down_itself_only(tmp_path: Path) -> None:
    """Its process runs for 50 ms, and is stopped for 100 ms, again and again."""
    epochs, pauses = 3, [0.02, 0.02]
    program = f"{DYNAMIC} {tmp_path} {epochs} '{pauses}' '[]' && touch final.pt"
    slows = "while :; do pkill -STOP -f [d]ynamic.py; sleep .1; pkill -CONT -f [d]ynamic.py; sleep .05; done"
    own = prepared(tmp_path, page_script().replace("train.py", program)) | PATIENT
    own["PYTHONPATH"] = str(DYNAMIC.parents[3])
    with Cluster(3, ssh=False) as cluster, Slurm(cluster, patient=True) as slurm:
        number = slurm.sbatch(["--nodes=2", "--ntasks-per-node=1", "job.sh"], cwd=tmp_path, env=own)
        slurm.wait_for(lambda: (tmp_path / "1.0").exists(), "the first epoch")
        with cluster.started(["sh", "-c", slows], host="node2"):
            slurm.wait_state(number, *ENDED)
        output = "".join(file.read_text() for file in tmp_path.glob("slurm-*.out"))
        steps = [
            [json.loads(line)[1] for line in (tmp_path / f"{rank}.steps").open()]
            for rank in range(2)
        ]
        counted = Counter(index for made in steps for indices in made for index in indices)
        assert counted == dict.fromkeys(range(403), epochs), output
        assert len(steps[1]) < 0.7 * len(steps[0]), output


@pytest.mark.extended
@pytest.mark.parametrize("silently", [True, False], ids=["power", "reset"])
def test_a_lost_node_leaves_the_job_running(tmp_path: Path, silently: bool) -> None:
    with training(tmp_path) as run:
        run.slurm.cluster.kill("node3", silently=silently)
        run.wait_for_failed(0, [2])
        run.slurm.wait_for(lambda: run.slurm.states()[2].startswith("down"), "node3 is down")
        run.wait_for_steps([0, 1])
        assert run.end()["JobState"] == "COMPLETED"
    assert run.last(1, "ended")


@pytest.mark.extended
@pytest.mark.parametrize("without", ["#SBATCH --no-kill\n", "srun --no-kill --kill"])
def test_with_one_no_kill_only_the_job_is_requeued(tmp_path: Path, without: str) -> None:
    script = page_script().replace(
        without, without.replace("#SBATCH --no-kill\n", "").replace(" --no-kill", "")
    )
    with training(tmp_path, script=script) as run:
        run.slurm.cluster.kill("node3", silently=True)
        run.slurm.wait_for(lambda: run.job()["JobState"] == "PENDING", "requeued", run.said)
        assert run.job()["Restarts"] == "1"


@pytest.mark.extended
def test_training_goes_on_without_the_first_node(tmp_path: Path) -> None:
    """With it the batch script and srun are lost. The step on the second node ends the job."""
    with training(tmp_path) as run:
        run.slurm.cluster.kill("node1", silently=True)
        run.wait_for_failed(1, [0])
        run.wait_for_steps([1, 2])
        assert run.end()["JobState"] == "CANCELLED"
        run.slurm.wait_for(lambda: run.slurm.states()[1:] == ["idle"] * 2, "the nodes are idle")
    assert (tmp_path / "final.pt").exists()


@pytest.mark.extended
def test_a_node_that_is_back_before_slurm_misses_it_does_not_keep_the_job(tmp_path: Path) -> None:
    """srun waits for its tasks without bound. The step on the second node ends the job."""
    with training(tmp_path) as run:
        run.slurm.restart("node3")
        run.wait_for_failed(0, [2])
        run.wait_for_steps([0, 1])
        assert run.end()["JobState"] == "CANCELLED"
    assert (tmp_path / "final.pt").exists()


@pytest.mark.extended
def test_a_node_that_is_set_down_leaves_the_job_running(tmp_path: Path) -> None:
    """Its learner is killed; before, on a node that drains, it trains on."""
    with training(tmp_path) as run:
        run.slurm.scontrol("update", "NodeName=node3", "State=DRAIN", "Reason=test")
        run.wait_for_steps()
        assert run.slurm.states()[2] == "draining"
        run.slurm.scontrol("update", "NodeName=node3", "State=DOWN", "Reason=test")
        run.wait_for_failed(0, [2])
        run.wait_for_steps([0, 1])
        assert run.end()["JobState"] == "COMPLETED"
    assert "Node failure on node3" in run.said()
    assert "SIGTERM" not in run.said()
    assert (tmp_path / "final.pt").exists()


@pytest.mark.extended
def test_a_first_node_that_is_set_down_ends_the_job(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        run.slurm.scontrol("update", "NodeName=node1", "State=DOWN", "Reason=test")
        ended = run.slurm.wait_state(run.number, *ENDED)
        assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0")
        run.slurm.wait_for(lambda: run.slurm.states()[1:] == ["idle"] * 2, "the nodes are idle")
        run.slurm.sbatch(["--nodes=2", "--ntasks-per-node=1", "job.sh"], cwd=tmp_path, env=run.env)
        run.slurm.wait_for(lambda: run.last(0, "first"), "submitted again, it resumes", run.said)


@pytest.mark.extended
def test_one_node_leaves_in_order(tmp_path: Path) -> None:
    """By the line of the page, without ssh."""
    with training(tmp_path, nodes=2, tasks=2) as run:
        line = page_block("srun --jobid").replace("4711", str(run.number)).replace("node7", "node2")
        (tmp_path / "leave.sh").write_text(line)
        run.slurm.run("bash", str(tmp_path / "leave.sh"))
        run.slurm.wait_for(lambda: "super learner 1 (node2" in run.said(), "it leaves", run.said)
        run.wait_for_steps([0, 1])
        assert run.end()["JobState"] == "COMPLETED"
    assert run.last(0, "failed") == []


@pytest.mark.extended
def test_a_second_job_joins(tmp_path: Path) -> None:
    secret = {"HVD_ADPSGD_JOIN_SECRET_FILE": str(tmp_path / "job.secret")}
    with training(tmp_path, nodes=2, spare=1, env=secret) as run:
        [address] = re.findall(r"HVD_ADPSGD_JOIN=(\S+)", run.said())
        options = ["--nodes=1", "--ntasks-per-node=1", "job.sh"]
        second = run.slurm.sbatch(
            options, cwd=tmp_path, env={**run.env, "HVD_ADPSGD_JOIN": address}
        )
        run.slurm.wait_for(lambda: run.last(0, "size") == 3, "it joins", run.said)
        run.wait_for_steps([0, 2])
        assert run.end()["JobState"] == "COMPLETED"
        run.slurm.wait_state(second, "COMPLETED")


@pytest.mark.extended
def test_a_preempted_job_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        (tmp_path / "urgent.sh").write_text("#!/bin/bash\ntrue\n")
        urgent = ["--partition=urgent", "--exclusive", "--nodes=3", "urgent.sh"]
        other = run.slurm.sbatch(urgent, cwd=tmp_path, env={})
        run.slurm.wait_state(other, "COMPLETED")
        run.wait_for_restart()
        run.wait_for_steps()
        assert run.last(0, "first") > 0
        assert run.end()["JobState"] == "COMPLETED"


@pytest.mark.extended
def test_a_job_requeues_itself_before_its_time_limit(tmp_path: Path) -> None:
    """Slurm's notice, sent here by hand; the output of the first start is kept."""
    option, trap, _ = page_block("#SBATCH --signal").splitlines()
    head, tail = page_script().split("#SBATCH --requeue\n")
    tail = tail.replace("python train.py\n", "python train.py & wait $!\n")
    script = f"{head}#SBATCH --requeue\n{option}\n" + tail.replace("source", f"{trap}\nsource", 1)
    with training(tmp_path, nodes=2, script=script) as run:
        run.slurm.scancel("--batch", "--signal=USR1", str(run.number))
        run.wait_for_restart()
        run.wait_for_steps()
        assert run.last(0, "first") > 0
        assert run.end()["JobState"] == "COMPLETED"
    assert "DUE TO JOB REQUEUE" in run.said()


@pytest.mark.extended
def test_scancel_ends_all_learners_in_order(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        run.slurm.scancel(str(run.number))
        run.slurm.wait_for(
            lambda: run.slurm.states() == ["idle"] * 3, "the nodes are idle", run.said
        )
        assert run.job()["JobState"] == "CANCELLED"
    assert run.said().count("SIGTERM: super learner") == 3
    assert not (tmp_path / "final.pt").exists()


@pytest.mark.extended
def test_scancel_with_a_signal_lets_all_leave_and_the_script_requeues_the_job(
    tmp_path: Path,
) -> None:
    with training(tmp_path) as run:
        run.slurm.scancel("--signal=TERM", str(run.number))
        run.wait_for_restart()
        assert run.said().count("SIGTERM: super learner") == 3
        run.wait_for_steps()
        assert run.last(0, "first") > 0
        assert run.end()["JobState"] == "COMPLETED"


@pytest.mark.extended
def test_tasks_of_an_array_are_trainings_of_their_own(tmp_path: Path) -> None:
    """Two on the same nodes: one is requeued, later cancelled by its step; the other trains on.

    SLURM_JOB_ID of the last task is the array's number.
    """
    source, rest = page_script().split("export OMP", 1)
    own = prepared(tmp_path, f"{source}{page_block('mkdir -p')}export OMP{rest}")
    options = ["--array=0-1", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "job.sh"]
    with Cluster(3, ssh=False) as cluster, Slurm(cluster) as slurm:
        array = slurm.sbatch(options, cwd=tmp_path, env=own | IMPATIENT)
        other, last = runs = [
            Training(slurm, tmp_path / str(task), f"{array}_{task}", 2, own) for task in range(2)
        ]
        for run in runs:
            run.wait_for_steps()
            assert [run.facts(rank)[0]["host"] for rank in range(2)] == ["node1", "node2"]
            assert run.last(0, "size") == 2
        assert last.job()["JobId"] == str(array)
        assert {run.facts(0)[0]["gpus"] for run in runs} == {"0,1", "2,3"}
        (last.folder / "raise").touch()
        last.slurm.wait_for(lambda: last.job()["Restarts"] == "1", "requeued", last.said)
        (last.folder / "raise").unlink()
        last.wait_for_restart()
        for run in runs:
            run.wait_for_steps()
        assert last.last(0, "first") > 0
        (last.folder / "final.pt").touch()  # as if srun waited without bound
        slurm.wait_state(last.number, "CANCELLED")
        other.wait_for_steps()
        ended = other.end()
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0")
    assert other.last(0, "failed") == []
    assert (other.folder / "record").is_dir()
