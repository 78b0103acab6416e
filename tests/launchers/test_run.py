"""Jobs of `python -m hvd_adpsgd run`: failures, replacements, signals, and that no learner outlives it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from hvd_adpsgd.launch.processes import ATTEMPTS, GIVEN, PIPE, REPLACES_FAILED
from tests.launcher import LONGEST_S, environment, is_running, wait_for

SINGLE = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}
PAIRS = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2", "HVD_ADPSGD_INNER": "torch"}


class Started:
    """A launcher that runs, and what it has written."""

    def __init__(
        self,
        folder: Path,
        program: str,
        *options: str,
        under: Sequence[str] = (),
        setup: str = "",
        **env: str,
    ):
        (folder / "train.py").write_text(program)
        self._out = folder / "out"
        words = [] if "--" in options else ["train.py"]
        command = [*under, sys.executable, "-m", "hvd_adpsgd", "run", *options, *words]
        if setup:
            setup += f"\nfrom hvd_adpsgd.tools import run\nrun.main({[*options, *words]})"
            command = [*under, sys.executable, "-c", setup]
        with open(self._out, "w") as out:
            self.process = subprocess.Popen(
                command,
                env=environment(env),
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self._out.read_text()

    def found(self, pattern: str) -> list[tuple[str, ...]]:
        return re.findall(pattern, self.text)

    def status(self) -> int:
        return self.process.wait(LONGEST_S)


@contextlib.contextmanager
def started(
    folder: Path,
    program: str,
    *options: str,
    under: Sequence[str] = (),
    setup: str = "",
    env: Mapping[str, str] | None = None,
) -> Iterator[Started]:
    """`under`: words before the command; `setup`: Python code that the launcher runs first."""
    run = Started(folder, program, *options, under=under, setup=setup, **(env or {}))
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        print(run.text)


TRAINS = """
import os, signal, sys, torch
import hvd_adpsgd.torch as hvd
hvd.init()
anew = "HVD_ADPSGD_JOIN_AS" in os.environ
torch.manual_seed(0)
model = torch.nn.Linear(50, 20)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
def train(steps=5):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 50)).sum().backward()
        optimizer.step()
def end(how):
    if how == "raise":
        raise RuntimeError("of the script")
    os.kill(os.getpid(), getattr(signal, how))
"""

FAILS = (
    TRAINS
    + """
train()
if hvd.rank() == 1:
    end("HOW")
while not hvd.failed_ranks():  # the launcher has not ended this learner
    train()
print("survived:", hvd.rank(), hvd.failed_ranks())
"""
)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "env", "gone"),
    [
        ("SIGKILL", SINGLE, [1]),
        pytest.param("raise", SINGLE, [1], marks=pytest.mark.extended),
        pytest.param("SIGSEGV", SINGLE, [1], marks=pytest.mark.extended),
    ],
)
def test_a_failed_learner_ends_no_other_super_learner(
    tmp_path: Path, how: str, env: Mapping[str, str], gone: list[int]
) -> None:
    with started(tmp_path, FAILS.replace("HOW", how), "-np", "4", env=env) as run:
        assert run.status() == 75
    left = sorted(set(range(4)) - set(gone))
    found = sorted(run.found(r"\[(\d)\] survived: (\d) (\(.*\))"))
    assert found == [(str(i), str(i), str(tuple(gone))) for i in left]
    assert f"learners {gone} have failed, others have trained to the end: status 75" in run.text


REPLACED = (
    TRAINS
    + """
epoch = hvd.admit(model, optimizer, state=0)
# 1: a replacement trains; all see it in the same call, as each contributes
while not hvd.allreduce(torch.tensor([float(anew)]), op=hvd.Sum, name=f"anew {epoch}").item():
    train()
    if hvd.rank() == LAST and epoch == 1:
        end("SIGKILL")
    epoch = hvd.admit(model, optimizer, state=epoch + 1)
print("ends:", hvd.rank(), hvd.size(), hvd.local_rank(), hvd.failed_ranks(), anew)
"""
)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("np", "env", "last"), [(2, SINGLE, 1), pytest.param(4, PAIRS, 3, marks=pytest.mark.extended)]
)
def test_a_failed_super_learner_is_started_anew(
    tmp_path: Path, np: int, env: Mapping[str, str], last: int
) -> None:
    program = REPLACED.replace("LAST", str(last))
    with started(tmp_path, program, "-np", str(np), "--replace", env=env) as run:
        assert run.status() == 0
    ended = np // int(env["HVD_ADPSGD_SUPER_LEARNER_SIZE"]) - 1
    assert f"super learner {ended} is started anew" in run.text
    found = sorted(run.found(r"\[(\d)\] ends: (.*)"))
    each = [f"{i} {np} {i} () {i * 2 >= np}" for i in range(np)]
    assert found == [(str(i), text) for i, text in enumerate(each)]


# What a learner is to the launcher. Learner 1 fails before learner 0 is known, its mate ends; then HOW.
FAILS_ANEW = """
import os, signal, sys, time
from pathlib import Path
from hvd_adpsgd.launch.processes import notify_launcher
def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.01)
anew = "HVD_ADPSGD_JOIN_AS" in os.environ
rank = 1 if anew else int(os.environ["RANK"])
super_rank = min(rank, 1)
rank == 0 and wait_for("failed")
if not anew or "after it has joined" in "HOW":
    notify_launcher(super_rank=super_rank, listener="127.0.0.1:1", is_member=True)
if anew:
    Path("anew").touch()
    "HOW" == "hangs" and signal.pause()
    sys.exit(3)
if rank > 0:
    sys.exit(2 if rank == 1 else 75)
wait_for("anew" if "HOW" == "hangs" else "end")
"""


@pytest.mark.parametrize(
    "how", ["hangs", "fails", "fails after it has joined", "fails long after it has joined"]
)
def test_replacements_that_fail_or_hang_end(tmp_path: Path, how: str) -> None:
    program, setup = FAILS_ANEW.replace("HOW", how), "from hvd_adpsgd.tools.run import job\n"
    setup += "job.processes.LIVES_S = 0.0" if "long" in how else "job._START_S = 0.1"
    with started(tmp_path, program, "-np", "3", "--replace", setup=setup) as run:
        wait_for(lambda: run.found("learner 1 on .* has ended"), "it has failed", LONGEST_S)
        (tmp_path / "failed").touch()
        if "long" in how:
            many = ATTEMPTS + 1
            wait_for(lambda: len(run.found("is started anew")) == many, "again", LONGEST_S)
        elif how != "hangs":
            wait_for(lambda: run.found("is not replaced again"), "it is given up", LONGEST_S)
            assert len(run.found("is started anew")) == ATTEMPTS
        (tmp_path / "end").touch()
        assert run.status() == 75


def test_a_job_under_nohup_outlives_the_terminal(tmp_path: Path) -> None:
    """It is sent a hangup before SIGTERM: it would end with the status of the first."""
    program = LEARNER.replace("signal.SIGUSR1, ", "signal.SIGHUP, signal.SIGUSR1, ")
    with started(tmp_path, program, "-np", "1", under=["nohup"]) as run:
        wait_for(lambda: run.found("pids"), "it has begun", LONGEST_S)
        for number in (signal.SIGHUP, signal.SIGTERM):
            run.process.send_signal(number)
        assert run.status() == 128 + signal.SIGTERM
    assert run.found(r"got (\d+)") == [str(int(signal.SIGTERM))]


@pytest.mark.mpi
def test_a_job_that_cannot_start_ends(tmp_path: Path) -> None:
    """Without waiting for HVD_ADPSGD_START_TIMEOUT_S: a learner ends before its hvd.init()."""
    program = """
import os, sys
if os.environ["RANK"] == "1":
    sys.exit(3)
import hvd_adpsgd.torch as hvd
hvd.init()
"""
    env = {**SINGLE, "HVD_ADPSGD_START_TIMEOUT_S": str(10 * LONGEST_S)}
    with started(tmp_path, program, "-np", "3", env=env) as run:
        assert run.status() == 3
    assert "learner 1 on localhost has ended: status 3." in run.text
    assert "before hvd.init() returned" in run.text


# What a learner is to the launcher; it writes that its handlers are there.
LEARNER = """
IGNORES, REPORTS = False, False
import os, signal, subprocess, sys, time
def tell(number, _):
    os.write(1, f"got {number}\\n".encode())  # in one: another signal may come in between
    if number != signal.SIGUSR1:
        sys.exit(5)
for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, tell)
if IGNORES and os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
if REPORTS:
    from hvd_adpsgd.launch.processes import notify_launcher
    notify_launcher(super_rank=int(os.environ["RANK"]), listener="", is_member=True)
print("pids", os.getpid(), os.getppid(), child.pid)
while True:
    signal.pause()
"""


SHELL = ["--", "sh", "-c", f"{sys.executable} train.py; exit $?"]


@pytest.mark.parametrize(
    ("command", "last"),
    [([], signal.SIGTERM), (SHELL, signal.SIGHUP)],
    ids=["script", "below a shell"],
)
def test_signals_reach_all_learners(
    tmp_path: Path, command: list[str], last: signal.Signals
) -> None:
    """Also those that a shell starts, once they have reported; else SIGUSR1, unhandled, would kill them."""
    program = LEARNER.replace("REPORTS = False, False", "REPORTS = False, True")
    with started(tmp_path, program, "-np", "3", *command) as run:
        wait_for(lambda: len(run.found("pids")) == 3, "all have begun", LONGEST_S)

        def all_have_it() -> bool:
            run.process.send_signal(signal.SIGUSR1)  # the launcher may not have read a report yet
            return len(set(run.found(rf"\[(\d)\] got {int(signal.SIGUSR1)}"))) == 3

        wait_for(all_have_it, "SIGUSR1", LONGEST_S)
        run.process.send_signal(last)
        assert run.status() == 128 + last
    for number in (signal.SIGUSR1, signal.SIGTERM):
        ranks = run.found(rf"\[(\d)\] got {int(number)}\n")
        assert set(ranks) == {"0", "1", "2"}
    require_gone(run)


def test_an_interrupt_ends_what_does_not_heed_it(tmp_path: Path) -> None:
    """The second one kills."""
    program = LEARNER.replace("signal.SIGINT, ", "")
    ignores = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    with started(tmp_path, ignores + program, "-np", "2") as run:
        wait_for(lambda: len(run.found("pids")) == 2, "all have begun", LONGEST_S)
        run.process.send_signal(signal.SIGINT)
        wait_for(lambda: run.found("SIGINT: all learners are sent it"), "the first", LONGEST_S)
        run.process.send_signal(signal.SIGINT)
        assert run.status() == 128 + signal.SIGINT
    assert "SIGINT: all learners are killed" in run.text
    require_gone(run)


def test_what_does_not_heed_a_signal_is_killed_later(tmp_path: Path) -> None:
    program = LEARNER.replace("REPORTS = False, False", "REPORTS = True, False")
    setup = "from hvd_adpsgd.tools.run import job\njob.STOP_S = 0.1"
    with started(tmp_path, program, "-np", "2", setup=setup) as run:
        wait_for(lambda: len(run.found("pids")) == 2, "all have begun", LONGEST_S)
        run.process.terminate()
        assert run.status() == 128 + signal.SIGTERM
    require_gone(run)


@pytest.mark.parametrize("output", ["a full disk", "a reader that stopped"])
def test_output_that_cannot_be_written_holds_nothing_up(tmp_path: Path, output: str) -> None:
    (tmp_path / "train.py").write_text("while True:\n    print('x' * 1000)\n")
    command = [sys.executable, "-m", "hvd_adpsgd", "run", "-np", "2", "train.py"]
    reads, writes = os.pipe()
    target = os.open("/dev/full", os.O_WRONLY) if output == "a full disk" else writes
    process = subprocess.Popen(
        command, env=environment({}), cwd=tmp_path, stdout=target, start_new_session=True
    )
    try:
        if target == writes:
            wait_for(lambda: os.read(reads, 1) == b"[", "the first line", LONGEST_S)
            process.terminate()
            assert process.wait(LONGEST_S) == 128 + signal.SIGTERM
        else:
            assert process.wait(LONGEST_S) == 128 + signal.SIGPIPE
    finally:
        process.kill()
        process.wait()
        for fd in {reads, writes, target}:
            os.close(fd)


@pytest.mark.parametrize("command", [[], SHELL], ids=["script", "below a shell"])
@pytest.mark.parametrize("victim", ["launcher", "process of learner 0"])
def test_no_learner_outlives_the_launcher(tmp_path: Path, victim: str, command: list[str]) -> None:
    """Killed so that it can do nothing. Of a learner that ignores SIGTERM, and what the learners started."""
    program = LEARNER.replace("REPORTS = False, False", "REPORTS = True, False")
    with started(tmp_path, program, "-np", "2", *command) as run:
        wait_for(lambda: len(run.found("pids")) == 2, "all have begun", LONGEST_S)
        if victim == "launcher":
            run.process.kill()
            run.process.wait()
        else:
            first = next(pids for rank, *pids in pids_of(run) if rank == 0)
            process = parent(first[1]) if command else first[1]
            os.kill(process, signal.SIGKILL)
            wait_for(lambda: not any(map(is_running, first)), f"{first} end with it", LONGEST_S)
            run.process.terminate()
        require_gone(run)


def test_no_learner_outlives_the_shell_above_it(tmp_path: Path) -> None:
    program = LEARNER.replace("REPORTS = False, False", "REPORTS = False, True")
    with started(tmp_path, program, "-np", "1", *SHELL) as run:
        wait_for(lambda: run.found("pids"), "it has begun", LONGEST_S)
        ((_, learner, shell, child),) = pids_of(run)
        os.kill(shell, signal.SIGKILL)
        assert run.status() == 128 + signal.SIGKILL
        wait_for(lambda: not is_running(learner), f"{learner} has ended", LONGEST_S)
        assert is_running(child)  # as after the end of a learner; hvd.admit may have started it
        os.kill(child, signal.SIGKILL)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


NESTED = """
import os, subprocess, sys
print("given:", [name for name in os.environ if "JOIN" in name or "LAUNCHER" in name])
print("threads:", os.environ["OMP_NUM_THREADS"])
if not sys.argv[1:]:
    run = [sys.executable, "-m", "hvd_adpsgd", "run", "-np", "1", "train.py", "inner"]
    sys.exit(subprocess.run(run).returncode)
"""


def test_a_job_that_a_learner_starts_is_a_job_of_its_own(tmp_path: Path) -> None:
    """It has not the secret of the outer job, nor its pipe to the launcher."""
    unset = ["env", "-u", "OMP_NUM_THREADS"]
    with started(tmp_path, NESTED, "-np", "1", "--replace", under=unset) as run:
        assert run.status() == 0
    assert run.found(r"threads: (\d+)")[0] == str(len(os.sched_getaffinity(0)))
    (outer,), (inner,) = (
        run.found(rf"(?m)^{at}given: (.*)") for at in (r"\[0\] ", r"\[0\] \[0\] ")
    )
    assert "JOIN_SECRET_FILE" in outer and REPLACES_FAILED in outer
    assert inner == str([GIVEN, PIPE])


def pids_of(run: Started) -> list[list[int]]:
    """By learner: its rank, its pid, that of its parent, that of its child."""
    return [list(map(int, found)) for found in run.found(r"\[(\d)\] pids (\d+) (\d+) (\d+)\n")]


def require_gone(run: Started) -> None:
    pids = [pid for _, *pids in pids_of(run) for pid in pids]
    assert len(pids) % 3 == 0 and pids
    wait_for(lambda: not any(map(is_running, pids)), f"{pids} have ended", LONGEST_S)


def test_variables_of_this_host_do_not_go_to_others(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"  # in place of the real one: as if its last argument ran on another host
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec env -i PATH="$PATH" sh -c "$last"\n')
    ssh.chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SSH_TTY": "here", "OF_THE_JOB": "all"}
    program = (
        'import os\nprint([os.environ.get(name) for name in ("SSH_TTY", "OF_THE_JOB", "RANK")])'
    )
    with started(tmp_path, program, "-H", "b.invalid:1", env=given) as run:
        assert run.status() == 0
    assert run.text == "[0] [None, 'all', '0']\n"


def test_lines_keep_their_learner_and_their_stream(tmp_path: Path) -> None:
    """Also one of a progress bar, one without an end, and one longer than any buffer, without Python's."""
    program = """
import os, sys, time
rank = int(os.environ["RANK"])
print("x" * 300_000 + f"|{rank}")
sys.stderr.write(f"10 % of {rank}\\r20 % of {rank}")
"""
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "-m", "hvd_adpsgd", "run", "-np", "2", "train.py"]
    done = subprocess.run(
        command,
        env=environment({"PYTHONUNBUFFERED": "1"}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stderr
    lines = ["x" * 300_000 + f"|{rank}" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == [f"[{i}] {line}" for i, line in enumerate(lines)]
    for rank in range(2):
        assert (
            f"[{rank}] 10 % of {rank}" in done.stderr and f"[{rank}] 20 % of {rank}" in done.stderr
        )
