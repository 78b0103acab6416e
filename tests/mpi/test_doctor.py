"""The doctor at work: on this machine, and where something is wrong with it."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hvd_adpsgd import __version__
from hvd_adpsgd.tools.doctor import findings, hosts, launch
from hvd_adpsgd.tools.doctor.findings import FAIL, OK, WARN

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 280  # of a whole run, on a busy machine
OURS = ("HVD_ADPSGD_", "HOROVOD_", "OMPI_", "PMIX_", "PRTE_", "MPI4PY_")


class Report(NamedTuple):
    """What `doctor --json` said: exit status, whether fit, findings by what they are about."""

    status: int
    fit: bool
    found: dict[str, dict[str, str]]

    def levels(self, level: str) -> set[str]:
        return {what for what, row in self.found.items() if row["level"] == level}

    def require(self, what: str, level: str, *words: str) -> None:
        row = self.found[what]
        assert row["level"] == level, row
        assert all(word in row["found"] + " " + row["cure"] for word in words), row
        assert bool(row["cure"]) == (level != OK)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """As of a user who has activated this Python's environment."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    mine["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    mine["PYTHONPATH"] = str(ROOT)
    mine["OMPI_MCA_btl"] = "^ofi"  # which sleeps a second in each MPI_Init
    return {**mine, **(extra or {})}


def run(command: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    answer = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=LONGEST_S
    )
    assert "Traceback" not in answer.stderr, answer.stderr
    return answer


def doctor(
    *args: str, env: Mapping[str, str] | None = None, python: str = sys.executable
) -> Report:
    answer = run([python, "-m", "hvd_adpsgd", "doctor", "--json", *args], environment(env))
    told: dict[str, Any] = json.loads(answer.stdout)
    found = {row["what"]: row for row in told["findings"]}
    assert len(found) == len(told["findings"]), "two findings about one thing"
    report = Report(answer.returncode, told["fit"], found)
    assert report.fit == (report.status == 0) == (not report.levels(FAIL)), report
    return report


def executable(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o755)
    return file


def with_path(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder}:{environment()['PATH']}"}


@pytest.mark.slow
def test_this_machine_is_fit_and_a_learner_survives():
    """The whole run, in words: what `make venv` made is fit, with a launch."""
    command = [sys.executable, "-m", "hvd_adpsgd", "doctor", "-H", "localhost:1"]
    answer = run([*command, "--patience", "110"], environment())
    lines = answer.stdout.splitlines()
    assert answer.returncode == 0, answer.stdout
    assert not [line for line in lines if line.startswith("FAIL")]
    assert lines[-1].startswith("fit")
    assert any(line.startswith("ok    launch: ") and "was killed" in line for line in lines), lines
    for what in ("MPI threads: MPI_THREAD_MULTIPLE", "ULFM switched on: by a plain horovodrun"):
        assert f"ok    {what}" in answer.stdout


def test_quick_launches_nothing():
    report = doctor("--quick")
    assert report.status == 0, report
    assert "launch" not in report.found
    assert report.levels(OK) >= {"python", "MPI", "MPI threads", "horovod.torch", "extension"}


def test_a_malformed_option():
    report = doctor("--quick", env={"HVD_ADPSGD_AVERAGING": "random_pears"})
    assert report.levels(FAIL) == {"HVD_ADPSGD_*"}
    report.require("HVD_ADPSGD_*", FAIL, "random_pears")


def test_neither_horovod_nor_mpi_is_needed_with_torch_inside(tmp_path):
    """README's set-up: packages that cannot be loaded, and no mpirun or horovodrun on PATH."""
    for name in ("horovod", "mpi4py"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('on purpose')\n")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    env = {
        "HVD_ADPSGD_INNER": "torch",
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "PATH": str(python.parent),
    }
    report = doctor(env=env)
    assert report.fit, report
    for what in ("horovod", "mpi4py", "torch.distributed"):
        assert report.found[what]["level"] == OK, report
    report.require("launch", OK, "one was killed, 1 went on")


def test_a_horovod_that_does_not_load(tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('on purpose')\n")
    report = doctor("--quick", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert report.levels(FAIL) == {"horovod.torch", "ULFM switched on"}
    report.require("horovod.torch", FAIL, "on purpose", "build-horovod")


@pytest.mark.extended
def test_a_python_where_nothing_is_installed(tmp_path):
    """No torch, numpy, mpi4py, Horovod, mpirun: findings, and no traceback."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    path = os.pathsep.join(
        folder
        for folder in os.environ["PATH"].split(os.pathsep)
        if not Path(folder, "mpirun").exists() and not Path(folder, "horovodrun").exists()
    )
    python = str(tmp_path / "v" / "bin" / "python")
    # PATH is set whole: the test's own puts this Python's environment first
    answer = run(
        [python, "-m", "hvd_adpsgd", "doctor"], {**environment(), "PATH": f"{tmp_path}:{path}"}
    )
    assert answer.returncode == 1
    failed = {line[6:].partition(":")[0] for line in answer.stdout.splitlines() if "FAIL  " in line}
    nothing = {"torch", "numpy", "torch.distributed", "extension", "launch"}
    assert failed == nothing, answer.stdout
    assert "NOT fit" in answer.stdout.splitlines()[-1]


def can_unshare() -> bool:
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.mark.parametrize(
    ("size", "level", "words"),
    [
        ("1m", FAIL, ["1 MiB free", "--shm-size"]),
        pytest.param("200m", OK, ["a float32 model of 64 MiB"], marks=pytest.mark.extended),
    ],
)
def test_little_shared_memory(size, level, words):
    if not can_unshare():
        pytest.skip("unshare -m needs root")
    command = shlex.join([sys.executable, "-m", "hvd_adpsgd", "doctor", "--quick", "--json"])
    script = f"mount -t tmpfs -o size={size} none /dev/shm && exec {command}"
    answer = run(["unshare", "-m", "sh", "-c", script], environment())
    rows = {row["what"]: row for row in json.loads(answer.stdout)["findings"]}
    report = Report(answer.returncode, level == OK, rows)
    report.require("/dev/shm", level, *words)
    assert (report.status == 0) == (level == OK)


# One that Open MPI 5 starts with, but without ULFM.
NO_ULFM = "mpi_run._OMPI5_FLAGS = list(mpi_run._OMPI_FLAGS)"


def another_horovod(folder: Path, change: str) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(f"from horovod.runner import mpi_run\n{change}\n")
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.mark.extended
@pytest.mark.slow
def test_without_ulfm_no_survival_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe can fail: the same launch without the options ends when a learner is killed."""
    for name, value in environment(another_horovod(tmp_path, NO_ULFM)).items():
        monkeypatch.setenv(name, value)
    survival = launch.try_survival(200, switch_on=False)
    assert survival.together, survival
    assert survival.killed, survival
    assert survival.alive is None, survival
    assert findings.judge_launch(survival, ulfm=True).level == FAIL
    assert findings.judge_launch(survival, ulfm=False).level == WARN


@pytest.mark.extended
def test_a_host_that_cannot_be_reached(tmp_path):
    """Of 203.0.113.0/24, which is for documentation: refused, unreachable or silent."""
    file = tmp_path / "hosts"
    file.write_text("localhost slots=1\n203.0.113.1 slots=2\n")
    began = time.monotonic()
    report = doctor("--quick", "--hostfile", str(file))
    assert time.monotonic() - began < 200
    assert report.levels(FAIL) == {"host 203.0.113.1"}
    report.require("host 203.0.113.1", FAIL, "no ssh", "ssh 203.0.113.1 true")
    report.require("host localhost", OK, "this host")


@pytest.mark.extended
def test_hosts_that_say_nothing_are_waited_for_all_at_once(tmp_path, monkeypatch):
    executable(tmp_path / "ssh", "#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setenv("PATH", with_path(tmp_path)["PATH"])
    began = time.monotonic()
    named = hosts.read_hosts(",".join(f"203.0.113.{n}:1" for n in range(1, 9)))
    visits = hosts.visit_all(named, hosts.Ssh(), "true", 8)
    assert time.monotonic() - began < 8 * 8 - 8
    assert [visit.host for visit in visits] == [host.name for host in named]
    assert {visit.error for visit in visits} == {"not done after 8 s"}


@pytest.fixture
def another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a host that ssh reaches: an sshd of our own, here."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("sshd is not installed")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    client, server = tmp_path / "ssh_config", tmp_path / "sshd_config"
    client.write_text(
        f"Host another\nHostName 127.0.0.1\nPort {port}\nIdentityFile {key}\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {tmp_path}/known\n"
    )
    server.write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {key}\nAuthorizedKeysFile {key}.pub\n"
        "PidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\n"
    )
    ssh = shutil.which("ssh")
    executable(tmp_path / "ssh", f'#!/bin/sh\nexec {ssh} -F {shlex.quote(str(client))} "$@"\n')
    monkeypatch.setenv("PATH", with_path(tmp_path)["PATH"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    log = tmp_path / "sshd.log"
    os.makedirs("/run/sshd", exist_ok=True)
    process = subprocess.Popen([sshd, "-D", "-f", server, "-E", log])
    try:
        ends = time.monotonic() + 30
        while "listening" not in (log.read_text() if log.exists() else ""):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < ends, "sshd does not listen"
            time.sleep(0.05)
        yield "another"
    finally:
        process.terminate()
        process.wait(30)


REMOTE = hosts.remote_command(sys.executable, "/", str(ROOT), sys.executable)


def visit(name: str, remote: str) -> findings.Visit:
    return hosts.visit(hosts.Host(name, 1), hosts.Ssh(), remote, 100)


def test_another_host_is_visited(another_host: str) -> None:
    seen = visit(another_host, REMOTE)
    assert not seen.local
    assert seen.status == 0, seen
    assert seen.said is not None
    here = findings.Here(sys.executable, __version__, seen.said["packages"])
    assert findings.judge_host(seen, here).level == OK
    other = findings.Here(sys.executable, __version__, {"numpy": "0"})
    assert findings.judge_host(seen, other).level == WARN
    newer = findings.Here(sys.executable, "99", {})
    assert findings.judge_host(seen, newer).level == FAIL


@pytest.mark.parametrize(
    ("python", "status", "words"),
    [("/no/such/python", 127, "/no/such/python"), ("", 1, "No module named 'hvd_adpsgd'")],
)
def test_another_host_that_lacks_something(
    another_host: str, tmp_path: Path, python: str, status: int, words: str
) -> None:
    """The interpreter, or the package: in an environment with nothing installed."""
    if not python:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
        python = str(tmp_path / "v" / "bin" / "python")
    seen = visit(another_host, hosts.remote_command(python, "/", None, None))
    assert seen.status == status, seen
    finding = findings.judge_host(seen, findings.Here(python, __version__, {}))
    assert finding.level == FAIL
    assert words in finding.found


def test_the_command_visits_hosts(another_host: str) -> None:
    """The whole way; the doctor finds the key, the port and the name in ssh's configuration."""
    folder = str(Path(shutil.which("ssh") or "").parent)
    env = {**with_path(Path(folder)), "PYTHONPATH": str(ROOT)}
    report = doctor("--quick", "-H", f"localhost:1,{another_host}:1", env=env)
    report.require(f"host {another_host}", OK, "ssh works", __version__)
    assert report.status == 0
