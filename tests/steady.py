"""Is a command green every time? Runs it again and again: idle, beside other work, stopped, preempted.

    python -m tests.steady [--idle N] [--busy N] [--stopped N] [--preempted N] [--seed S] [COMMAND ...]

Without numbers each load once; without a command `make test`. A red verdict that only some runs have depends
on how much happens within a time: the table shows which one, and under which load.

idle       nothing beside it
busy       two processes compute beside it
stopped    every 10 s all processes of the run are stopped together for 0.5 to 2.5 s, at moments drawn from
           the seed, as by a hypervisor that gives the cores to another machine
preempted  each core by itself is taken away for 0 to 60 ms again and again, so that one thread stands still
           while another one goes on (tests.preempting; needs root)

What each run wrote is in --out. A run that lasts longer than --limit-s is ended, with all that it started.
"""

import argparse
import contextlib
import ctypes
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests import preempting

ROOT = Path(__file__).parents[1]
OUT = ROOT / "out" / "steady"
LOADS = ("idle", "busy", "stopped", "preempted")
SEEDED = ("stopped", "preempted")
BUSY = 2  # processes
PERIOD_S, STOP_S = 10.0, (0.5, 2.5)
LIMIT_S = 3600.0
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Run:
    load: str
    seconds: float
    status: int
    passed: int
    failed: list[str]

    def row(self, number: int) -> str:
        red = ", ".join(self.failed) or ("" if self.status == 0 else f"status {self.status}")
        return f"| {number} | {self.load} | {self.seconds:.0f} | {self.passed} | {red} |"


def adopt_orphans() -> None:
    """Learners and daemons whose parent has ended become children of this process, and stay in sight."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def processes(spared: Sequence[int] = ()) -> list[psutil.Process]:
    """Those that this process has started, parents before children, and what adopt_orphans() left it."""
    return [p for p in psutil.Process().children(recursive=True) if p.pid not in spared]


def stop(seconds: float) -> None:
    """Stop all processes of the run, parents first, and let them go on, children first.

    Who is stopped already was stopped by a test, which will let it go on: it is left alone.
    """
    stopped: list[psutil.Process] = []
    for process in processes():
        with contextlib.suppress(psutil.Error):
            if process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                process.suspend()
                stopped.append(process)
    time.sleep(seconds)
    for process in reversed(stopped):
        with contextlib.suppress(psutil.Error):
            process.resume()


def pause(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Until the command has ended, but no longer."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, seconds))


def watch(process: subprocess.Popen[bytes], stops: random.Random | None, limit_s: float) -> None:
    """Return when the command has ended, or the time is up; stop it now and then."""
    ends = time.monotonic() + limit_s
    while process.poll() is None and (left := ends - time.monotonic()) > 0:
        if stops is None:
            pause(process, left)
            continue
        before = stops.uniform(0, PERIOD_S)
        pause(process, min(before, left))
        if process.poll() is None:
            stop(stops.uniform(*STOP_S))
        pause(process, PERIOD_S - before)


def beside(load: str, seed: int) -> list[list[str]]:
    """The commands that run beside a run."""
    if load == "busy":
        return [[sys.executable, "-c", "while True: pass"]] * BUSY
    if load == "preempted":
        cores = sorted(os.sched_getaffinity(0))
        return [[sys.executable, "-m", "tests.preempting", f"{core}", f"{seed}"] for core in cores]
    return []


@contextlib.contextmanager
def running_beside(commands: Sequence[Sequence[str]]) -> Iterator[list[int]]:
    """Their processes, on cores that the run shares."""
    running = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    try:
        yield [process.pid for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


def end(command: subprocess.Popen[bytes], spared: Sequence[int]) -> None:
    """Whatever of the run is left."""
    for act in (psutil.Process.terminate, psutil.Process.kill):
        left = processes(spared)
        for process in left:
            with contextlib.suppress(psutil.Error):
                act(process)
        pause(command, 10)  # before psutil, which would take its status away
        psutil.wait_procs([p for p in left if p.pid != command.pid], timeout=10)


def run(command: Sequence[str], load: str, log: Path, seed: int, limit_s: float) -> Run:
    """Once, under a load; its output goes to the log."""
    stops = random.Random(seed) if load == "stopped" else None
    with log.open("wb") as out, running_beside(beside(load, seed)) as spared:
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            watch(process, stops, limit_s)
            seconds = time.monotonic() - began
        finally:
            end(process, spared)
    name = f"{load}, seed {seed}" if load in SEEDED else load
    return Run(name, seconds, process.wait(), *verdicts(log.read_text(errors="replace")))


def verdicts(said: str) -> tuple[int, list[str]]:
    """How many tests passed, and which did not, by pytest's summary."""
    passed = re.findall(r"\b(\d+) passed\b", said)
    return int(passed[-1]) if passed else 0, re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.M)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for load in LOADS:
        parser.add_argument(f"--{load}", type=int, metavar="N", help="so many runs")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first run at random; then counted up"
    )
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of a run")
    parser.add_argument("--out", type=Path, default=OUT, help="folder (default: out/steady)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="default: make test")
    args = parser.parse_args()
    command = args.command or ["make", "test"]
    counts = {load: getattr(args, load) for load in LOADS}
    if all(count is None for count in counts.values()):
        counts = dict.fromkeys(LOADS if preempting.is_permitted() else LOADS[:-1], 1)
    if counts["preempted"] and not preempting.is_permitted():
        parser.error("--preempted takes cores away with real-time priority, which needs root")
    loads = [load for load in LOADS for _ in range(counts[load] or 0)]

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with all it started
    adopt_orphans()
    args.out.mkdir(parents=True, exist_ok=True)
    print(
        " ".join(command), "\n\n| run | load | seconds | passed | failed |\n|---|---|---|---|---|"
    )
    red, seeds = False, itertools.count(args.seed)
    for number, load in enumerate(loads, 1):
        seed = next(seeds) if load in SEEDED else 0
        found = run(command, load, args.out / f"{number}.{load}.log", seed, args.limit_s)
        print(found.row(number), flush=True)
        red |= bool(found.status)
    return int(red)


if __name__ == "__main__":
    sys.exit(main())
