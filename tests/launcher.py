"""Runs programs as several learners, with a deadline, and collects what each of them says."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
MARK = "@learner "
ON_DEVICES = ROOT / "tests" / "on_devices.py"
ON_GPU = ROOT / "tests" / "on_gpu.py"
QUICK = ROOT / "tests" / "quick"  # what makes a start cheaper: sitecustomize.py, and server.py
_OURS = ("HVD_ADPSGD_", "HOROVOD_", "OMPI_", "PMIX_", "PRTE_", "MPI4PY_", "SLURM_")

LONGEST_S = (
    250.0  # of a launch: what hangs ends, before pytest's own time-out; no verdict is about it
)

# Variables that Python, MPI or a library reads before a forked learner has its environment.
_EARLY = ("GOMP_", "LD_", "MALLOC_", "MKL_", "MPI4PY_", "OMP_", "PYTHON", "TORCH")

# What every program starts with. One os.write per line: learners share the pipe.
PRELUDE = f"""
import json, os, sys, time
def say(**facts):
    with open(1, "wb", closefd=False) as out:  # os.write may write a part only
        out.write(("\\n{MARK}" + json.dumps(facts) + "\\n").encode())
"""


# $0: processes, $1: port; then a command. As Slurm's launcher: a process that fails ends no other.
SRUN = """
n=$0; port=$1; shift; i=0; pids=
while [ $i -lt $n ]; do
  SLURM_PROCID=$i SLURM_STEP_NUM_TASKS=$n SLURM_STEP_NODELIST=localhost MASTER_PORT=$port "$@" &
  pids="$pids $!"; i=$((i + 1))
done
status=0
for pid in $pids; do wait $pid || status=$?; done
exit $status
"""

_ports = itertools.count()


@dataclass(frozen=True)
class Result:
    """What came of a launch.

    Attributes:
        returncode: of the launcher.
        stdout, stderr: of all learners together.
        said: what the learners said, in order of arrival.
    """

    returncode: int
    stdout: str
    stderr: str
    said: list[dict[str, Any]]

    def by_rank(self) -> list[dict[str, Any]]:
        """All that each learner said (its lines must carry `rank`), merged, by rank."""
        assert self.said, f"no learner said anything: {self.report()}"
        merged: dict[int, dict[str, Any]] = {}
        for facts in self.said:
            merged.setdefault(facts["rank"], {}).update(facts)
        return [merged[rank] for rank in sorted(merged)]

    def by_case(self) -> dict[str, list[dict[str, Any]]]:
        """What the learners said in each `case`, by rank."""
        cases: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for facts in sorted(self.said, key=lambda facts: facts["rank"]):
            cases[facts["case"]].append(facts)
        return cases

    def checked(self) -> Result:
        """This, if the launcher ended well."""
        assert self.returncode == 0, self.report()
        return self

    def report(self) -> str:
        return f"returncode {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def run_learners(
    np: int,
    program: str | Path,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = LONGEST_S,
    launcher: str | None = "mpirun",
    fresh: bool = False,
    imports: Sequence[str] = (),
) -> Result:
    """Run a program on `np` learners and wait for all of them.

    Args:
        np: number of learners.
        program: a file, or the code itself; code can call say(rank=..., ...).
        args: of the program.
        env: variables besides those of this process, which is rid of Horovod's and MPI's.
        timeout: seconds; then the process group started here is killed, and the test fails.
        launcher: "mpirun", "horovodrun" (learners start as users' do, not by QUICK), "gloo" (horovodrun
            --gloo), "torchrun", "srun" (its variables), or None for one process without any. TEST_LAUNCHER in
            the environment takes the place of "mpirun".
        fresh: start each learner's Python, where a learner's parent or memory matters; without,
            those that horovodrun does not start are forked by QUICK's server.
        imports: modules that forked learners have imported when the program begins; they may need torch's
            compiler, which QUICK keeps out of other learners.

    With TEST_DEVICES=SEED in `env` or in the environment learners' tensors are on devices (tests/lagging.py),
    with TEST_GPU=NUMBER on that GPU.
    With TEST_SHARD=auto in the environment their models are cut in shards where that is possible,
    with TEST_INNER=torch torch.distributed averages gradients in super learners.
    """
    env = {**(env or {}), **({"TEST_IMPORTS": ",".join(imports)} if imports else {})}
    if launcher == "mpirun":
        launcher = os.environ.get("TEST_LAUNCHER", launcher)
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(program, str):
            file = Path(folder) / "program.py"
            file.write_text(PRELUDE + textwrap.dedent(program))
        else:
            file = program
        python = [sys.executable]
        if launcher != "horovodrun" and not fresh and not any(k.startswith(_EARLY) for k in env):
            name = server(*_at_imports(imports, env))
            python = [*python, "-I", "-S", str(QUICK / "client.py"), name]
        ways = {"TEST_DEVICES": ON_DEVICES, "TEST_GPU": ON_GPU}
        files = [way for name, way in ways.items() if name in {**os.environ, **env}] + [file]
        command = [*launch(np, launcher), *python, *map(str, files), *args]
        first = [] if launcher == "horovodrun" else [QUICK]
        return _run(command, environment(env, first), timeout)


def once(launched: Callable[..., Any]) -> Callable[..., Any]:
    """As functools.cache. A failure is kept, too: one launch that hangs is enough."""

    @functools.cache
    def attempted(*args: Any) -> Any:
        try:
            return launched(*args)
        except (AssertionError, pytest.fail.Exception) as error:
            return error

    @functools.wraps(launched)
    def outcome(*args: Any) -> Any:
        found = attempted(*args)
        if isinstance(found, BaseException):
            raise found
        return found

    return outcome


def horovod_inside() -> bool:
    """Whether Horovod averages gradients in the super learners of launches that name no other backend."""
    return os.environ.get("TEST_INNER", "horovod") == "horovod"


def needs_horovod_inside(reason: str) -> pytest.MarkDecorator:
    """A mark that skips a test under TEST_INNER=torch, where it says nothing."""
    return pytest.mark.skipif(not horovod_inside(), reason=f"Horovod's own: {reason}")


def _at_imports(imports: Sequence[str], env: Mapping[str, str]) -> list[tuple[str, str]]:
    """The variables of learners that `imports` may read."""
    return [(k, v) for k, v in env.items() if imports and not k.startswith(_OURS)]


@functools.cache
def server(*env: tuple[str, str]) -> str:
    """Start the process that forks learners, with `env`; it ends with this one, however that ends."""
    name = f"hvd_adpsgd-tests-{secrets.token_hex(16)}"
    process = subprocess.Popen(
        [sys.executable, QUICK / "server.py", name],
        env=environment(dict(env), [QUICK]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    assert process.stdin and process.stdout
    assert process.stdout.readline() == b"ready\n", "tests/quick/server.py does not start"
    process.stdout.close()
    atexit.register(process.communicate)
    return name


def launch(np: int, launcher: str | None) -> list[str]:
    if launcher is None:
        assert np == 1
        return []
    if launcher == "srun":
        return ["sh", "-c", SRUN, str(np), str(free_port())]
    if launcher == "gloo":
        return [_find("horovodrun"), "--gloo", "-np", str(np)]
    program = _find(launcher)
    if launcher == "torchrun":
        ports = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        return [program, *ports, f"--nproc-per-node={np}", "--no-python"]
    if launcher == "horovodrun":
        binding = "--bind-to none --map-by slot:OVERSUBSCRIBE"
        return [program, "-np", str(np), f"--binding-args={binding}", "--mpi-args=--with-ft ulfm"]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    flags = ["--with-ft", "ulfm", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    return [program, *as_root, *flags, "-np", str(np)]


def free_port() -> int:
    """One that no socket gets by chance: below the system's own range, and another one each time."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = low - 1 - (os.getpid() * 61 + next(_ports)) % 10_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _find(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed")
    return found


def environment(extra: Mapping[str, str], first: Sequence[Path] = ()) -> dict[str, str]:
    """For learners: this Python's programs and this tree first, nobody's settings, and `extra`.

    `first`: folders for Python to look into before this tree.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env["PYTHONPATH"] = os.pathsep.join([*map(str, first), str(ROOT), env.get("PYTHONPATH", "")])
    env["OMP_NUM_THREADS"] = "1"
    env["PRTE_MCA_prte_tmpdir_base"] = tempfile.mkdtemp(dir=_folder().name)
    env["OMPI_MCA_btl"] = "^ofi"  # which sleeps a second in each MPI_Init
    env["OMPI_MCA_mpi_yield_when_idle"] = "1"  # also where np <= cores: other tests share them
    env["LD_PRELOAD"] = " ".join(filter(None, [env.get("LD_PRELOAD"), idle()]))
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # or each learner compiles this tree: 0.1 CPU s
    if "TEST_SHARD" in env:
        env["HVD_ADPSGD_SHARD"] = env["TEST_SHARD"]
    if "TEST_INNER" in env:
        env["HVD_ADPSGD_INNER"] = env["TEST_INNER"]
    return {**env, **extra}


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for the folders of MPI's launchers, one for each, until this process ends.

    A launcher names its folder by its process number. A killed one leaves it, and in the same place the next
    launcher with that number would not start ("The PMIx server's listener thread failed to start").
    """
    return tempfile.TemporaryDirectory(prefix="hvd_adpsgd.", ignore_cleanup_errors=True)


@functools.cache
def idle() -> str | None:
    """The library that makes MPI's waiting loops sleep, compiled; None without a compiler."""
    source, library = QUICK / "idle.c", ROOT / "out" / "idle.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        library.parent.mkdir(exist_ok=True)
        new = library.with_name(f"idle.{os.getpid()}.so")
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(new), str(source)]
        if shutil.which("cc") is None or subprocess.run(command, check=False).returncode != 0:
            return None
        new.replace(library)  # several workers may compile it
    return str(library)


def _run(command: list[str], env: dict[str, str], timeout: float) -> Result:
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=ROOT,
            start_new_session=True,
        ) as process,
    ):
        late = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
        result = _result(process.returncode, out, err)
    if late:
        pytest.fail(f"not done after {timeout:g} s: {command}\n{result.report()}")
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process group that was started here, and nothing else.

    mpirun first gets a chance to take its learners along, which are in groups of their own.
    """
    for sign, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            break
        os.killpg(process.pid, sign)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue


def _result(returncode: int, out: Any, err: Any) -> Result:
    out.seek(0)
    err.seek(0)
    stdout, stderr = out.read(), err.read()
    # horovodrun puts the rank before each line
    said = [json.loads(line.split(MARK, 1)[1]) for line in stdout.splitlines() if MARK in line]
    return Result(returncode, stdout, stderr, said)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """Poll until true; what was true."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    return pytest.fail(f"not in {seconds} s: {what}")


def is_running(pid: int) -> bool:
    """Whether a process has not ended; one that only its parent has still to ask for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
