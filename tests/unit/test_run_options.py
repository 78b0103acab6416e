"""The launcher `python -m hvd_adpsgd run`: which learners start where, and the status of a job."""

import contextlib
import json
import os
import subprocess

import pytest

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.launch import processes
from hvd_adpsgd.lifecycle.exit_status import is_failure, status_of_job
from hvd_adpsgd.tools import run
from hvd_adpsgd.tools.doctor.hosts import Host, read_hosts


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ([0, 0], 0),
        ([143, 0], 0),  # preempted
        ([0, 75], 75),
        ([137, 0, 0], 75),
        ([1, 75, 0], 75),
        ([143, 75], 75),
        ([143, 143], 75),
        ([3, 137], 3),
        ([143, 137, 3], 137),
    ],
)
def test_status_of_a_job(ends: list[int], status: int) -> None:
    assert status_of_job(ends) == status


def test_only_learners_that_have_failed_themselves_are_replaced() -> None:
    """Not one that has left after SIGTERM."""
    assert [is_failure(status) for status in (0, 75, 143, 1, 137)] == [False] * 3 + [True] * 2


@pytest.mark.parametrize(
    ("hosts", "np", "found"),
    [
        ("a:2,b:3", None, "aabbb"),
        ("a:2,b:3", 3, "aab"),
        ("a:2,b:3", 1, "a"),
        ("a:1,b:1,a:1", None, "aba"),
    ],
)
def test_learners_fill_the_first_hosts_first(hosts: str, np: int | None, found: str) -> None:
    learners = run.learners(read_hosts(hosts), np)
    assert "".join(learner.host for learner in learners) == found
    assert [learner.rank for learner in learners] == list(range(len(found)))


@pytest.mark.parametrize("np", [0, 6, -1])
def test_more_learners_than_slots_are_refused(np: int) -> None:
    with pytest.raises(ConfigError, match=f"-np {np}, allowed is 1 to 5"):
        run.learners([Host("a", 2), Host("b", 3)], np)


def test_other_hosts_connect_to_the_first_one_by_its_name() -> None:
    here = os.uname().nodename

    def address(hosts: str) -> str:
        return run.address(run.learners(read_hosts(hosts), None))

    assert address("localhost:2") == address(f"localhost:1,{here}:1") == "127.0.0.1"
    assert address(f"{here}:1,b.invalid:1") == here
    assert address(f"localhost:1,{here}:1,b.invalid:1") == here
    assert address("b.invalid:1") == "b.invalid"
    for own in ("localhost", "127.0.0.1"):
        with pytest.raises(ConfigError, match=here):
            address(f"{own}:1,b.invalid:1")


def test_names_of_one_host_are_one_host() -> None:
    """Else two learners would have the same local rank there."""
    here = os.uname().nodename
    learners = run.learners(read_hosts(f"localhost:1,b.invalid:1,{here}:1"), None)
    assert [each.host for each in learners] == [here, "b.invalid", here]
    assert [each.is_here for each in learners] == [True, False, True]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["-np", "2"], "no script to start"),
        (["train.py"], "how many learners"),
        (["-H", "node1", "train.py"], "no NAME:SLOTS"),
        (["--hostfile", "/nowhere", "train.py"], "/nowhere cannot be read"),
        (["--hostfile", "/nowhere", "-H", "a:1", "train.py"], "not allowed with"),
        (["-np", "3", "-H", "a:1,b:1", "train.py"], "-np 3, allowed is 1 to 2"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert run.main(arguments) == 2
    assert word in capsys.readouterr().err


def test_a_process_gets_the_ranks_of_its_own_launcher_only() -> None:
    environ = {"PATH": "/bin", "OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "1", "RANK": "2"}
    given = processes.place(5, 8, 1, 4, "node1", 29000)
    inside = processes.environment(environ, {**given, "HVD_ADPSGD_JOIN": "of the outer job"})
    assert inside["HVD_ADPSGD_JOIN"] == "of the outer job"
    assert processes.environment(inside, given) == {
        "PATH": "/bin",
        processes.GIVEN: ",".join(given),
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29000",
    }


def test_a_learner_reports_to_its_launcher_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the path of the pipe, as a wrapper may start the learner without the launcher's descriptors."""
    reads, writes = os.pipe()
    monkeypatch.setenv(processes.PIPE, f"/proc/{os.getpid()}/fd/{writes}")
    processes.notify_launcher(super_rank=3)
    assert json.loads(os.read(reads, 100)) == {"pid": os.getpid(), "super_rank": 3}
    os.close(writes)
    os.close(reads)
    processes.notify_launcher(super_rank=3)  # the launcher has ended
    monkeypatch.delenv(processes.PIPE)
    processes.notify_launcher(super_rank=3)


@pytest.mark.parametrize(
    "name", ["SLURM_JOB_ID", "RANKED", "PATH", "HVD_ADPSGD_JOIN", "ROLE_OF_MINE", "PMI"]
)
def test_variables_that_give_no_rank_are_passed_on(name: str) -> None:
    assert processes.without_launchers({name: "1"}) == {name: "1"}


def test_a_free_port_is_below_the_ephemeral_ones() -> None:
    low = int(subprocess.check_output(["cut", "-f1", "/proc/sys/net/ipv4/ip_local_port_range"]))
    assert 1024 <= processes.free_port() < low
