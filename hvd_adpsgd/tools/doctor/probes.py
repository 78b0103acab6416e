"""Measurements: files, and programs that run for a bounded time. No judgement here."""

from __future__ import annotations

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

from hvd_adpsgd.tools.doctor.findings import Interface, Memory

MARK = "@doctor "
PACKAGE = Path(__file__).resolve().parents[2]
SHARED_FOLDER = "/dev/shm"
ARPHRD_LOOPBACK = "772"
# Variables that a launcher sets for its processes; programs started here belong to no job.
_OF_A_JOB = ("OMPI_COMM_WORLD_", "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SERVER_", "PMI_", "PRTE_JOB")


# ---- programs ------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a program said.

    Attributes:
        status: exit status, negative if a signal ended it; None if it was late or did not start.
        out, err: what it wrote.
        seconds: how long it ran.
        error: why there is no status, empty if there is one.
    """

    status: int | None
    out: str
    err: str
    seconds: float
    error: str = ""


def environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """The environment without the traces of a job, and with `extra`; None takes a name away."""
    wanted = {**os.environ, **(extra or {})}
    return {k: v for k, v in wanted.items() if v is not None and not k.startswith(_OF_A_JOB)}


def bounded(
    command: Sequence[str], seconds: float, extra: Mapping[str, str | None] | None = None
) -> Answer:
    """Run a program, at most so long; then it and its process group are ended.

    What it writes goes through files: a surviving grandchild holds no pipe open.

    Args:
        command: program and arguments; found on PATH.
        seconds: longest time.
        extra: variables besides those of this process; None takes one away.
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
    """End a process group; a launcher in it first gets a chance to end its learners."""
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
    process.poll()  # a zombie would count
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
    """What programs said on lines with our mark, wherever in the line a launcher put it."""
    said = []
    for line in text.splitlines():
        if MARK in line:
            with contextlib.suppress(ValueError):
                said.append(json.loads(line.split(MARK, 1)[1]))
    return said


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def ask(
    program: str, seconds: float, extra: Mapping[str, str | None] | None = None
) -> dict[str, Any]:
    """Run code in a process of this Python; it answers by say(name=value, ...).

    Returns:
        What it said; or {"error": why it said nothing}, for instance the last line of a traceback.
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


# ---- what is asked -------------------------------------------------------------------------------

UNSTARTED = {"MPI4PY_RC_INITIALIZE": "0"}  # mpi4py loads MPI and does not start it

# Files of the MPI libraries that this process has loaded.
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

# As init() starts MPI: mpi4py does it at import, unless told not to.
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

SPEC = """
from hvd_adpsgd import config, errors, strategies
try:
    strategies.parse(config.Config.from_environment().averaging)
    say(problem=None)
except errors.ConfigError as problem:
    say(problem=str(problem))
"""


def compiled_modules() -> list[str]:
    """Names of the compiled modules: each has a face for Python, a .pyi."""
    return sorted(_dotted(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.pyi"))


def _dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts)


def ask_extension(seconds: float) -> dict[str, Any]:
    """Whether the compiled "modules" load; or "error"."""
    names = compiled_modules()
    imports = "".join(f"import hvd_adpsgd.{name}\n" for name in names)
    return ask(f"{imports}say(modules={names!r})", seconds)


def older_modules(package: Path = PACKAGE) -> list[str]:
    """Compiled modules that are older than their sources, in a checkout."""
    ext = package.parent / "ext"
    older = []
    for source in sorted((ext / package.name).rglob("*.pyx")):
        module = source.relative_to(ext / package.name)
        sources = [source, source.with_suffix(".pxd"), *(ext / "c").glob("*.[ch]")]
        newest = max(path.stat().st_mtime for path in sources if path.exists())
        built = [path.stat().st_mtime for path in package.glob(f"{module.with_suffix('')}.*.so")]
        if built and max(built) < newest:
            older.append(_dotted(module))
    return older


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def mpirun_version(seconds: float) -> tuple[str | None, str]:
    """Path of the first mpirun on PATH, and what it says of its version."""
    path = shutil.which("mpirun")
    if path is None:
        return None, ""
    answer = bounded([path, "--version"], seconds)
    return path, answer.out + answer.err


def mpi_daemon() -> str | None:
    """Path of the program that mpirun starts on every other host; None if it has none beside it."""
    mpirun = shutil.which("mpirun")
    beside = Path(mpirun).with_name("prted") if mpirun else None
    return str(beside) if beside and beside.exists() else None


def ompi_info(mpirun: str | None, seconds: float) -> str | None:
    """What the ompi_info beside mpirun says, or that on PATH; None if there is none."""
    beside = Path(mpirun).with_name("ompi_info") if mpirun else None
    path = str(beside) if beside and beside.exists() else shutil.which("ompi_info")
    return bounded([path, "--parsable"], seconds).out if path else None


# ---- files ---------------------------------------------------------------------------------------


def shared_memory(folder: str = SHARED_FOLDER) -> Memory:
    """What is free in shared memory, if a file can be made there."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            room = os.statvfs(folder)
    except OSError as problem:
        return Memory(None, f"no file can be made there: {problem.strerror}")
    return Memory(room.f_bavail * room.f_frsize)


def usable_cores() -> float:
    """Cores that this process may use: by its affinity, and by the quotas of its control groups."""
    quotas = [q for q in map(_quota, _control_groups()) if q is not None]
    return min([float(len(os.sched_getaffinity(0))), *quotas])


def _control_groups() -> list[Path]:
    """Folders of this process's control group and of those above it."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = [line.split(":", 2)[2] for line in lines if line.startswith("0::")]
    folders = [root, root / "cpu"]
    for path in own:
        inner = root / path.strip("/")
        folders += [inner, *(above for above in inner.parents if above.is_relative_to(root))]
    return folders


def _quota(folder: Path) -> float | None:
    """Cores that a control group allows, in either version's files; None: no limit."""
    two, one = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        if two.exists():
            quota, period = two.read_text().split()
            return None if quota == "max" else int(quota) / int(period)
        if one.exists():
            used = int(one.read_text())
            return used / int((folder / "cpu.cfs_period_us").read_text()) if used > 0 else None
    return None


def interfaces(folder: str = "/sys/class/net") -> list[Interface]:
    """Network interfaces but the loopback."""
    found = []
    for path in sorted(Path(folder).glob("*")):
        if not path.is_dir() or _read(path / "type") == ARPHRD_LOOPBACK:
            continue
        speed = _read(path / "speed")  # EINVAL or -1 where the driver does not report it
        known = speed.isdigit() and int(speed) > 0
        # "unknown" is what drivers without a carrier's state say of a working interface
        up = _read(path / "operstate") in ("up", "unknown")
        found.append(Interface(path.name, up, int(speed) if known else None))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
