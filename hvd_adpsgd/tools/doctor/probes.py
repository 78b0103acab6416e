"""Measurements of the doctor, from files and from programs with a time limit; findings.py judges them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

MARK = "@doctor "
Extra = Mapping[str, str | None] | None
PACKAGE = Path(__file__).resolve().parents[2]
SHARED_FOLDER = "/dev/shm"
# Variables that a launcher sets for its processes; removed, because programs started here belong to no job.
_OF_A_JOB = ("OMPI_COMM_WORLD_", "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SERVER_", "PMI_", "PRTE_JOB")


class Answer(NamedTuple):
    """The result of running a program.

    Attributes:
        status: exit status, negative if a signal ended the program; None after a timeout or a failed start.
        out, err: what the program wrote to stdout and stderr.
        seconds: how long the program ran.
        error: why `status` is None; empty if it is not.
    """

    status: int | None
    out: str
    err: str
    seconds: float
    error: str = ""


def environment(extra: Extra = None) -> dict[str, str]:
    """Return os.environ without variables of a launcher, and with `extra`, whose None removes a variable."""
    wanted = {**os.environ, **(extra or {})}
    return {k: v for k, v in wanted.items() if v is not None and not k.startswith(_OF_A_JOB)}


def bounded(command: Sequence[str], seconds: float, extra: Extra = None) -> Answer:
    """Run a program for at most `seconds`; on timeout, end its process group.

    The program's output goes to files, because a grandchild that survives would keep a pipe open.

    Args:
        command: program (looked up on PATH) and its arguments.
        seconds: time limit.
        extra: environment variables besides those of this process; None removes one.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command,
                env=environment(extra),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as problem:
            return Answer(None, "", "", 0.0, f"{command[0]}: {problem.strerror}")
        late = ""
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = f"not done after {seconds:g} s"
            _end(process)
        except BaseException:
            _end(process)
            raise
        status = None if late else process.returncode
        return Answer(status, _text(out), _text(err), time.monotonic() - began, late)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process group: SIGTERM, so that a launcher can end its learners, and SIGKILL 5 s later."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        ends = time.monotonic() + 5
        while _group_lives(process):
            if time.monotonic() > ends:
                break
            time.sleep(0.02)
        else:
            return


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # reap the process: killpg would count a zombie as alive
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _text(file: Any) -> str:
    file.seek(0)
    data: bytes = file.read()
    return data.decode(errors="replace")


def marked(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects after each MARK in `text`, anywhere in a line: launchers add prefixes."""
    said = []
    for line in text.splitlines():
        if MARK in line:
            with contextlib.suppress(ValueError):
                said.append(json.loads(line.split(MARK, 1)[1]))
    return said


def last_line(text: str) -> str:
    """Return the last line of `text` that is not blank; "" without one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def ask(program: str, seconds: float, extra: Extra = None) -> dict[str, Any]:
    """Run code in another process of this Python, where it reports facts by say(name=value, ...).

    Returns:
        The facts of the last say(); without any, {"error": why}, for instance the last line of a traceback.
    """
    prelude = "import json\ndef say(**facts): print('\\n" + MARK + "' + json.dumps(facts))\n"
    answer = bounded([sys.executable, "-c", prelude + program], seconds, extra)
    said = marked(answer.out)
    if said:
        return said[-1]
    return {"error": answer.error or _failure(answer)}


def _failure(answer: Answer) -> str:
    words = last_line(answer.err) or last_line(answer.out)
    if answer.status is not None and answer.status < 0:
        ended = f"ended by {signal.Signals(-answer.status).name}"
        return f"{ended} ({words})" if words else ended
    return words or f"exit status {answer.status}"


UNSTARTED = {"MPI4PY_RC_INITIALIZE": "0"}  # mpi4py loads MPI but does not call MPI_Init

# Finds the files of the MPI libraries that the process has loaded.
_FILES = """
lines = [line.split() for line in open("/proc/self/maps")]
paths = {words[5] for words in lines if len(words) == 6}
files = sorted(p for p in paths if p.rpartition("/")[2].startswith(("libmpi.", "libmpich.")))
"""

LIBRARY = f"""
from mpi4py import MPI
{_FILES}
say(version=MPI.Get_library_version(), file=files[0] if files else "no shared library")
"""

# Starts MPI as hvd.init() does: mpi4py calls MPI_Init_thread at import, unless MPI4PY_RC_INITIALIZE is 0.
THREADS = """
from mpi4py import MPI
if not MPI.Is_initialized():
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
names = ["SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"]
levels = {getattr(MPI, "THREAD_" + name): "MPI_THREAD_" + name for name in names}
say(level=levels[MPI.Query_thread()])
"""

FLAGS = """
from horovod.runner import mpi_run
flags = mpi_run._get_mpi_implementation_flags(False)[0]
say(flags=flags)
"""

HOROVOD = f"""
import contextlib, glob, torch
import horovod.torch as horovod
with contextlib.suppress(ImportError):
    from mpi4py import MPI
{_FILES}
say(torch=torch.__version__, mpi=bool(horovod.mpi_built()), files=files,
    gpus=len(glob.glob("/dev/nvidia[0-9]*")), cuda=torch.version.cuda, nccl=bool(horovod.nccl_built()))
"""

TORCH = """
import cloudpickle, glob, torch
import torch.distributed as dist
has = dist.is_available()
say(torch=torch.__version__, gloo=has and dist.is_gloo_available(), nccl=has and dist.is_nccl_available(),
    gpus=len(glob.glob("/dev/nvidia[0-9]*")), cuda=torch.version.cuda)
"""

SPEC = """
from hvd_adpsgd import config, errors, strategies
try:
    strategies.parse(config.Config.from_environment().averaging)
    say(problem=None)
except errors.ConfigError as problem:
    say(problem=str(problem))
"""


_OF_MPI = ("engine.wire_mpi", "launch.mpi_start")


def compiled_modules() -> list[str]:
    """Return the names of the modules that Python imports of the compiled ones: they have a .pyi file."""
    stubs = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.pyi"))
    return sorted(".".join(stub.parts) for stub in stubs)


def ask_extension(seconds: float, has_mpi: bool = True) -> dict[str, Any]:
    """Import the compiled modules in another process; return their names as "modules", or "error".

    Args:
        seconds: time limit.
        has_mpi: whether to import also the modules that need mpi4py and an MPI library.
    """
    names = [name for name in compiled_modules() if has_mpi or name not in _OF_MPI]
    imports = "".join(f"import hvd_adpsgd.{name}\n" for name in names)
    return ask(f"{imports}say(modules={names!r})", seconds)


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def mpirun_version(seconds: float) -> tuple[str | None, str]:
    """Return the path of the first mpirun on PATH (None without one), and the output of its --version."""
    path = shutil.which("mpirun")
    if path is None:
        return None, ""
    answer = bounded([path, "--version"], seconds)
    return path, answer.out + answer.err


def mpi_daemon() -> str | None:
    """Return the path of prted, which mpirun starts on every other host; None if it is not beside mpirun."""
    mpirun = shutil.which("mpirun")
    beside = Path(mpirun).with_name("prted") if mpirun else None
    return str(beside) if beside and beside.exists() else None


def ompi_info(mpirun: str | None, seconds: float) -> str | None:
    """Return the output of the ompi_info beside mpirun, else of the one on PATH; None without either."""
    beside = Path(mpirun).with_name("ompi_info") if mpirun else None
    path = str(beside) if beside and beside.exists() else shutil.which("ompi_info")
    return bounded([path, "--parsable"], seconds).out if path else None


def usable_cores(quota: str = "/sys/fs/cgroup/cpu.max") -> float:
    """Return the number of cores that this process may use, by its affinity and its container's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(
        OSError, ValueError
    ):  # no control groups of version 2, or "max": no quota
        allowed, period = map(int, Path(quota).read_text().split())
        cores = min(cores, allowed / period)
    return cores


def shared_memory(folder: str = SHARED_FOLDER) -> int | str:
    """Return the free bytes of shared memory, or why no file can be created there."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            room = os.statvfs(folder)
    except OSError as problem:
        return f"no file can be made there: {problem.strerror}"
    return room.f_bavail * room.f_frsize
