"""Trainer and engine threads under ThreadSanitizer: no report is allowed.

    python -m tests.tsan [JOB ...]              the jobs of jobs.py, then two processes over MPI (mpi)
    python -m tests.tsan --mutants [WORD ...]   take a lock or an atomic away: is each found?

The extension modules are built with -fsanitize=thread in a folder beside the normal ones, and loaded by
the normal Python after libtsan.so. Code that is not built so (Python, NumPy, MPI) is not looked at; its
locks are.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.launcher import environment

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ENGINE = Path("ext/hvd_adpsgd/engine")
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "gcc")[0]
FLAGS = ["-fsanitize=thread", "-g"]
MPI_JOB = "mpi"
# ThreadSanitizer bears neither memory at fixed addresses (PMIx) nor hooks of the allocator that take
# locks in threads which it does not know yet (UCX).
MPI_SETTINGS = {
    "OMPI_MCA_btl": "^ofi,uct",
    "OMPI_MCA_pml": "ob1",
    "PMIX_MCA_gds": "hash",
    "UCX_MEM_EVENTS": "n",
    "UCX_MEM_MMAP_HOOK_MODE": "none",
}
LONGEST_S = 400


class JobFailed(SystemExit):
    """A job has failed, and ThreadSanitizer has reported nothing."""


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, `old` (found once) becomes `new`. `job` shows it."""

    name: str
    file: str
    old: str
    new: str
    job: str


MUTANTS = (
    Mutant(
        "orders are read without the gate",
        "inspect.pxi",
        "    pthread_mutex_lock(&e.mailbox.gate)\n    given = e.mailbox.given\n"
        "    pthread_mutex_unlock(&e.mailbox.gate)\n",
        "    given = e.mailbox.given\n",
        "pairs",
    ),
    Mutant(
        "an inspection is handed over before it is made",
        "inspect.pxi",
        "    p.inspection = copy_state(e)\n    store(&p.inspection_made, number)\n",
        "    store(&p.inspection_made, number)\n    p.inspection = copy_state(e)\n",
        "pairs",
    ),
    Mutant(
        "a counter that is not atomic",
        "lanes.pxi",
        "add(&e.mailbox.counters.chunks, 1)",
        "e.mailbox.counters.chunks += 1",
        "pairs",
    ),
    Mutant(
        "the wish for a mean without the gate",
        "loop.pyx",
        "        store(&e.mean.replace, replace)\n        store(&e.mean.wanted, e.mean.wanted + 1)",
        "        e.mean.replace = replace\n        e.mean.wanted = e.mean.wanted + 1",
        "means",
    ),
)


def build(project: Path, folder: Path) -> Path:
    """The package with sanitized modules. Returns what PYTHONPATH needs."""
    lib = folder / "lib"
    flags = " ".join(FLAGS)
    env = {**os.environ, "CFLAGS": flags, "LDFLAGS": flags}
    command = [sys.executable, "setup.py", "--quiet", "build"]
    command += ["--build-base", str(folder), "--build-lib", str(lib)]
    checked(command, project, env)
    return lib


def checked(command: list[str], folder: Path, env: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"tsan: {shlex.join(command)}\n{done.stdout[-500:]}{done.stderr[-2000:]}")


def libtsan() -> str:
    """The library of the compiler.

    Raises:
        SystemExit: if the compiler has none.
    """
    command = [COMPILER, "-print-file-name=libtsan.so"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(
            f"tsan: {COMPILER} has no libtsan.so. Install it (Debian: libtsan2) or gcc."
        )
    return found


def run(lib: Path, job: str) -> tuple[int, str]:
    """Reports of a job, and its output.

    Raises:
        JobFailed: if it fails without any report.
    """
    program = [str(HERE / "jobs.py"), job]
    launch: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        options = f"suppressions={HERE / 'suppressions.txt'} history_size=5 exitcode=0"
        env = environment(
            {
                "MPI4PY_RC_INITIALIZE": "0",
                "TSAN_OPTIONS": f"{options} log_path={folder}/report",
                **MPI_SETTINGS,
            }
        )
        env["PYTHONPATH"] = f"{lib}{os.pathsep}{ROOT}"
        if job == MPI_JOB:
            del env["MPI4PY_RC_INITIALIZE"]
            program = [str(ROOT / "tests/mpi/programs/mean.py"), "--seed", "1", "--steps", "60"]
            as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            launch = [shutil.which("mpirun", path=env["PATH"]) or "mpirun", *as_root]
            launch += ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "-np", "2"]
        command = [*launch, "env", f"LD_PRELOAD={libtsan()}", sys.executable, *program]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LONGEST_S)
        told = "".join(file.read_text() for file in Path(folder).iterdir())
    reports = told.count("WARNING: ThreadSanitizer")
    if done.returncode and not reports:
        raise JobFailed(f"tsan: {job} failed ({done.returncode})\n{done.stdout}{done.stderr}")
    return reports, done.stdout + told


def names() -> list[str]:
    """Of the jobs, which import what is not built yet."""
    return [*re.findall(r'^    "([^"]+)": lambda', (HERE / "jobs.py").read_text(), re.M), MPI_JOB]


def run_jobs(chosen: list[str]) -> int:
    lib = build(ROOT, ROOT / "build" / "tsan")
    total = 0
    for job in chosen or names():
        reports, told = run(lib, job)
        print(f"{job}: {reports} reports\n{told if reports else told.rstrip()}", flush=True)
        total += reports
    print(f"{total} reports of ThreadSanitizer")
    return 1 if total else 0


def run_mutants(words: list[str]) -> int:
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "tests", "build")
        )
        build(copy, Path(folder) / "tsan")
        for mutant in MUTANTS:
            if words and not any(word in mutant.name for word in words):
                continue
            path = copy / ENGINE / mutant.file
            source = path.read_text()
            if source.count(mutant.old) != 1:
                raise SystemExit(f"tsan: {mutant.name!r}: its text is not in {mutant.file} once")
            path.write_text(source.replace(mutant.old, mutant.new))
            try:
                reports, _ = run(build(copy, Path(folder) / "tsan"), mutant.job)
            except JobFailed:
                reports = None
            path.write_text(source)
            what = "the job fails" if reports is None else f"{reports} reports"
            print(f"{mutant.name}: {what}", flush=True)
            missed += [mutant.name] if reports == 0 else []
    print(f"not found: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="of jobs, or words of mutants")
    parser.add_argument("--mutants", action="store_true")
    args = parser.parse_args()
    return run_mutants(args.names) if args.mutants else run_jobs(args.names)


if __name__ == "__main__":
    sys.exit(main())
