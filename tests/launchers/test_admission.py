"""Super learners that were not there at the start join a job, from outside of its launcher."""

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hvd_adpsgd.engine.interfaces import addresses
from hvd_adpsgd.lifecycle.exit_status import FAILED_STATUS
from tests.launcher import QUICK, environment, launch
from tests.launchers.grown import require_grown

PROGRAM = Path(__file__).parent / "programs" / "growing.py"
TIMEOUT_S = 240.0
ENDS_S = 60.0
# whoever waits for its deadline is found out
RECONNECT_WITHOUT_END = ("--reconnect-s", TIMEOUT_S / 2)
SECRET = "HVD_ADPSGD_JOIN_SECRET_FILE"
# For the replacement of a super learner that has joined, whose host is its own.
SPARE = {"HVD_ADPSGD_SPARE_SLOTS": "1"}


class Launches:
    """What a test has started, and what it has written."""

    def __init__(self, folder: Path):
        self.folder, self.started = folder, []
        self.secret = folder / "secret"

    def start(
        self,
        np: int,
        launcher: str | None,
        told: Mapping[str, str],
        *args: object,
        program: Path = PROGRAM,
    ) -> None:
        """Start learners; `args` are those of the program."""
        ours = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", SECRET: str(self.secret)}
        env = environment({**ours, **told}, [QUICK])
        command = [*launch(np, launcher), sys.executable, str(program), *map(str, args)]
        with open(self._file("out"), "w") as out, open(self._file("err"), "w") as err:
            self.started.append(
                subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True)
            )

    def _file(self, kind: str, number: int | None = None) -> Path:
        return self.folder / f"{kind}{len(self.started) if number is None else number}"

    def doors_of(self, number: int) -> str:
        """What a launch says of its listeners."""
        return self.await_line(r"HVD_ADPSGD_JOIN=(\S+)", number)

    def await_line(self, pattern: str, number: int = 0) -> str:
        """What the pattern's group finds in the errors of a launch."""
        ends = time.monotonic() + TIMEOUT_S
        while time.monotonic() < ends and self.started[number].poll() is None:
            found = re.search(pattern, self.errors(number))
            if found:
                return found.group(1)
            time.sleep(0.02)
        raise AssertionError(self.report())

    def start_job(
        self,
        size: int,
        launcher: str,
        *args: object,
        of: int = 2,
        told: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Start one `of` learners that ends with `size` super learners; the variables of those that join."""
        self.start(of, launcher, told or {}, "--size", size, *args)
        return {"HVD_ADPSGD_JOIN": self.doors_of(0)}

    def errors(self, number: int) -> str:
        return self._file("err", number).read_text()

    def report(self) -> str:
        started = enumerate(self.started)
        return "\n".join(f"-- launch {i}: {p.poll()}\n{self.errors(i)}" for i, p in started)

    def facts(self, passed_over: int | None = None) -> list[dict[str, Any]]:
        """What the learners say at their end, by rank; without those of a launch that fails."""
        ends, found = time.monotonic() + TIMEOUT_S, []
        for i, process in enumerate(self.started):
            if i == passed_over:
                continue
            assert process.wait(max(0.0, ends - time.monotonic())) == 0, self.report()
            found += self.said(i)
        return sorted(found, key=lambda facts: facts["rank"])

    def said(self, number: int) -> list[dict[str, Any]]:
        """Of one launch, so far."""
        text = self._file("out", number).read_text()
        return [json.loads(line) for line in re.findall(r"@learner (.*)", text)]

    def end(self) -> None:
        for process in self.started:
            with_group = process.poll() is None
            if with_group:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    made = Launches(tmp_path)
    yield made
    made.end()


@pytest.mark.extended  # test_another_model_is_not_let_in lets one in, too
@pytest.mark.parametrize(("launcher", "np"), [("srun", 1), ("srun", 2), ("gloo", 1), ("mpirun", 1)])
def test_a_super_learner_that_was_not_there_joins(
    launches: Launches, launcher: str, np: int
) -> None:
    told = launches.start_job(3, launcher)
    assert stat.S_IMODE(launches.secret.stat().st_mode) == 0o600
    # the number of learners in a super learner may be another one than in the job
    launches.start(np, "srun" if np > 1 else None, told, "--size", 3)
    require_grown(launches.facts(), [3], 2 + np)
    assert "super learner 2 has joined" in launches.report()


@pytest.mark.parametrize(
    ("launcher", "np"),
    [
        ("srun", 1),
        pytest.param("mpirun", 2, marks=pytest.mark.extended),
        pytest.param("gloo", 1, marks=pytest.mark.extended),
    ],
)
def test_a_job_of_one_super_learner_becomes_one_of_two(
    launches: Launches, launcher: str, np: int
) -> None:
    """Of one learner, or of several, whose gradients Horovod averages."""
    size = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(np)}
    told = launches.start_job(2, launcher, of=np, told=size)
    launches.start(1, None, told, "--size", 2)
    facts = launches.facts()
    require_grown(facts, [2], np + 1, leaders=(0, np))
    first, *mates, joined = [each["listener"] for each in facts]
    assert first == told["HVD_ADPSGD_JOIN"] and not any(mates)
    assert f"others can join here too: HVD_ADPSGD_JOIN={joined}\n" in launches.errors(1)


@pytest.mark.extended
def test_moments_that_are_shared(launches: Launches) -> None:
    """A joining super learner has the mean of the first moments, too."""
    told = launches.start_job(3, "srun", "--adamw")
    launches.start(1, None, told, "--size", 3, "--adamw")
    facts = launches.facts()
    require_grown(facts, [3], 3)
    assert any(before[2] != 0 for _, before, _ in facts[0]["told"])


@pytest.mark.extended
def test_models_in_shards(launches: Launches) -> None:
    """A joining super learner needs a learner for each shard, and may have more."""
    cut = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2", "HVD_ADPSGD_SHARD": "auto"}
    args = ("--size", 3, "--inputs", 100_000)
    told = launches.start_job(3, "srun", *args[2:], of=4, told=cut)
    launches.start(1, None, told, *args)
    refused = (
        r"(has not joined: it averages a model that is not cut, the others a model in 2 shards)"
    )
    launches.await_line(refused)
    launches.start(3, "srun", told, *args)
    require_grown(launches.facts(passed_over=1), [3], 7, leaders=range(6))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("averaging", "error"),
    [("synchronous", "InnerOnlyError"), ("delay_by_one", "StrategyMismatchError")],
)
def test_what_one_super_learner_cannot_let_in(
    launches: Launches, averaging: str, error: str
) -> None:
    told = {"HVD_ADPSGD_AVERAGING": averaging}
    launches.start(1, "srun", told, "--size", 2, "--averaging", averaging)
    assert launches.started[0].wait(TIMEOUT_S) != 0
    assert error in launches.errors(0) and "others cannot join" in launches.errors(0)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("averaging", "size"),
    [
        ("a2cid2", 4),  # its constants change with the number
        ("delay_by_one", 2),
        ("fixed_ring", 3),
        ("gasloc:period=2", 2),
        ("gossip_pga:period=2", 2),
        ("noloco:period=2", 2),
        ("periodic_averaging:period=2", 2),
    ],
)
def test_with_every_kind_of_strategy(launches: Launches, averaging: str, size: int) -> None:
    told = launches.start_job(size + 1, "srun", "--averaging", averaging, of=size)
    launches.start(1, None, told, "--size", size + 1, "--averaging", averaging)
    require_grown(launches.facts(), [size + 1], size + 1)
    for warning in ("a state is loaded", "starts anew"):
        assert warning not in launches.errors(1), launches.errors(1)


@pytest.mark.extended
def test_two_come_one_after_the_other(launches: Launches) -> None:
    told = launches.start_job(4, "srun")
    for _ in range(2):
        launches.start(1, None, told, "--size", 4)
    facts = launches.facts()
    require_grown(facts, [3, 4], 4)
    for each in (f for f in facts if not f["new"]):
        began, ended = each["epolls"]
        assert ended == began, "connections that admissions have replaced are closed"


@pytest.mark.extended
def test_one_that_has_joined_lets_others_in(launches: Launches) -> None:
    """Those that were there at the start may be gone: the next one asks to join at its listener only."""
    launches.start_job(4, "srun")
    told = {"HVD_ADPSGD_JOIN": launches.doors_of(0)}
    launches.start(1, None, told, "--size", 4)
    told = {"HVD_ADPSGD_JOIN": launches.doors_of(1)}
    launches.start(1, None, told, "--size", 4)
    require_grown(launches.facts(), [3, 4], 4)


@pytest.mark.extended
@pytest.mark.parametrize(
    "moment", ["start", "connected", "requested", "invited", "wrapped", "ready", "reconnect", "met"]
)
def test_a_newcomer_that_dies_leaves_no_trace(launches: Launches, moment: str) -> None:
    """The job goes on with what it had, and lets the next one in, which gets the number."""
    told = launches.start_job(3, "srun", *RECONNECT_WITHOUT_END)
    launches.start(1, None, told, "--size", 3, "--dies", moment)
    assert launches.started[1].wait(TIMEOUT_S) == -signal.SIGKILL, launches.report()
    launches.start(1, None, told, "--size", 3)
    facts = launches.facts(passed_over=1)
    require_grown(facts, [3], 3)
    assert max(f["slowest_s"] for f in facts if not f["new"]) < TIMEOUT_S / 4, facts


@pytest.mark.extended
@pytest.mark.parametrize("moment", ["engines", "agreed"])
def test_a_newcomer_that_dies_when_all_have_agreed_is_a_member_that_fails(
    launches: Launches, moment: str
) -> None:
    """The others train on, start another one in its place, and the job's status tells of it."""
    told = launches.start_job(3, "srun", *RECONNECT_WITHOUT_END, told=SPARE)
    launches.start(1, None, told, "--size", 3, "--dies", moment)
    assert launches.started[0].wait(TIMEOUT_S) == FAILED_STATUS, launches.report()
    facts = launches.said(0)
    assert sorted(f["rank"] for f in facts) == [0, 1], launches.report()
    assert all(f["size"] == 3 and f["averagings"] > 0 for f in facts), facts
    assert max(f["slowest_s"] for f in facts) < TIMEOUT_S / 4, facts
    assert "super learner 2 is gone; starting another one in its place" in launches.report()


@pytest.mark.extended
def test_one_that_always_dies_directly_after_it_has_joined_is_started_three_times(
    launches: Launches,
) -> None:
    """In all: the job does not spend its time on it."""
    args = ("--dies-if-new", "received", "--seconds", 60)
    told = launches.start_job(2, "srun", "--after", 10**6, *args, of=1, told=SPARE)
    launches.start(1, None, told, "--size", 2, *args)
    launches.started[0].wait(TIMEOUT_S)
    said = launches.errors(0)
    assert said.count("failed directly after it had joined") == 3, said
    assert said.count("starting another one in its place") == 2, said
    assert "failed directly after it had joined; no more after 3 attempts" in said


def test_another_model_is_not_let_in(launches: Launches) -> None:
    told = launches.start_job(3, "srun")
    launches.start(1, None, told, "--size", 3, "--inputs", 999)
    assert launches.started[1].wait(TIMEOUT_S) != 0
    assert "was not let in" in launches.errors(1) and "[1, 999]" in launches.errors(1)
    launches.start(1, None, told, "--size", 3)  # the job goes on, and lets the next one in
    require_grown(launches.facts(passed_over=1), [3], 3)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "difference"), [("--adds", "allreduce.added"), ("--frozen", "param_group 0")]
)
def test_a_newcomer_has_the_parameter_groups_of_the_job(
    launches: Launches, kind: str, difference: str
) -> None:
    """One that lacks parameters is not let in; one that has added them before it joins is."""
    told = launches.start_job(2, "srun", kind, of=1)
    launches.start(1, None, told, "--size", 2)
    assert launches.started[1].wait(TIMEOUT_S) != 0
    assert "was not let in" in launches.errors(1) and difference in launches.errors(1)
    launches.start(1, None, told, "--size", 2, kind)
    require_grown(launches.facts(passed_over=1), [2], 2)


def test_a_secret_that_others_can_read_is_refused(launches: Launches) -> None:
    launches.secret.write_text("00" * 32)
    launches.secret.chmod(0o644)
    launches.start(2, "srun", {}, "--size", 2)
    assert launches.started[0].wait(TIMEOUT_S) != 0
    assert launches.errors(0).count("chmod 600") >= 2, launches.report()


REPLACED = Path(__file__).parents[1] / "faults" / "programs" / "replaced.py"


def learners(folder: Path) -> set[int]:
    """Processes of the program that work in this folder."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().split(b"\0")
            if (
                str(REPLACED).encode() in line
                and str(folder).encode() in line
                and b"-np" not in line
            ):
                found.add(int(entry.name))
    return found


def replaced(
    launches: Launches, np: int, victims: str, told: Mapping[str, str]
) -> list[dict[str, Any]]:
    """What the learners say when all victims are replaced; waits for those that no launcher waits for."""
    args = ("--folder", launches.folder, "--victims", victims, "--after", 10)
    launches.start(np, "srun", told, *args, "--seconds", TIMEOUT_S, program=REPLACED)
    ends = time.monotonic() + TIMEOUT_S
    try:
        while len(launches.said(0)) < np:
            assert time.monotonic() < ends, launches.report()
            time.sleep(0.1)
    finally:
        for pid in learners(launches.folder):
            os.kill(pid, signal.SIGKILL)
    return launches.said(0)


@pytest.mark.extended
@pytest.mark.skipif(not addresses(), reason="no network interface but loopback is up")
def test_a_replacement_comes_by_a_door_on_a_network(launches: Launches) -> None:
    """Not by the loopback interface, on which nobody listens then."""
    told = {"HVD_ADPSGD_NICS": addresses()[0][0]}
    facts = replaced(launches, 3, "2", told)
    assert sorted(f["rank"] for f in facts if f["new"]) == [2], launches.report()
    assert "JOIN=127.0.0.1" not in launches.errors(0)


@pytest.mark.extended
@pytest.mark.parametrize("launcher_is_told", [True, False])
def test_a_replacement_does_not_outlive_its_job(launches: Launches, launcher_is_told: bool) -> None:
    """The launcher does not know it: it ends with the learners that the launcher has started."""
    args = ("--folder", launches.folder, "--victims", 2, "--after", 100_000, "--seconds", TIMEOUT_S)
    launches.start(3, "mpirun", {}, *args, program=REPLACED)
    launches.await_line(r"(super learner 2 has joined)")
    if launcher_is_told:
        launches.started[0].terminate()
    else:
        for pid in learners(launches.folder):
            if b"HVD_ADPSGD_JOIN_AS=" not in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)
    launches.started[0].wait(TIMEOUT_S)
    ends = time.monotonic() + ENDS_S
    while (left := learners(launches.folder)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not left, launches.report()
