"""Soak test: trains for an hour while learners fail and are replaced, and measures memory growth.

    python -m lab.studies.soak   an hour
    python -m lab.studies.soak --minutes 5

Four super learners of one learner train, with `hvd.admit` every 50 steps. At random moments a random learner
is killed, stopped and continued, made to crash, to raise, or to exit with status 1. Failed learners are
replaced, and a replacement may fail too. Each learner records once per second its resident memory, threads
and file descriptors. After the job has ended, memory left in /dev/shm is counted.

A learner is flat if its resident memory in the last quarter of its life exceeds that in the second quarter by
at most 1 % (or 1 MiB), plus half a MiB for each learner that joined in between, because communicators with a
failed process are freed only at the end of the job. Learners that ran for less than 2 minutes do not count.
The exit status is 0 if all learners are flat, less than 8 MiB are left in /dev/shm, and four learners ended
normally.
Written to --out: faults.jsonl, one learner.PID.jsonl each, result.json, soak.png (with matplotlib).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.acoustic_model.speech.launch import paths
from examples.acoustic_model.speech.problem import new_parser

N = 4  # super learners
STEPS_BETWEEN = 50  # training steps between two calls of hvd.admit
FAULTS = ("kill", "stop", "segfault", "raise", "exit")
STOP_S = (0.2, 3.0)  # range of the time between SIGSTOP and SIGCONT
PAUSE_S = (5.0, 15.0)  # range of the time between two faults
LONG_ENOUGH_S = 120.0  # learners that ran for less are not judged
GROWTH, GROWTH_BYTES = 0.01, 2**20  # allowed growth of resident memory: the larger of both
NEWCOMER_BYTES = 2**19  # allowed growth per joining learner, for its communicators
# Allowed remains in /dev/shm: Open MPI leaves small files of killed processes, but 32 MiB are an engine's.
LEFT_BYTES = 8 * 2**20
LEAVE_S = 90.0  # time for the job to end after the file "over" is written


# ---- a learner ------------------------------------------------------------------------------------


def learner(folder: Path) -> None:
    """Train until the file `folder`/over exists, and record this process's resources every second."""
    import torch

    import hvd_adpsgd.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    spec = _wishes(folder)
    model = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.ReLU(), torch.nn.Linear(500, 9))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
        exchanges_per_step=2,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    told = hvd.admit(model, optimizer, state=(0, False))
    threading.Thread(target=_watch, args=(folder, hvd), daemon=True).start()
    while not told[1]:
        for _ in range(STEPS_BETWEEN):
            optimizer.zero_grad()
            model(torch.randn(16, 500)).square().mean().backward()
            optimizer.step()
            time.sleep(0.02)  # stands for a GPU's work
            if spec():
                return
        over = hvd.allreduce(torch.tensor([float((folder / "over").exists())]), op=hvd.Max)
        told = hvd.admit(model, optimizer, state=(told[0] + STEPS_BETWEEN, bool(over.item())))
    assert torch.isfinite(model[0].weight).all()
    _note(folder / "ended.jsonl", pid=os.getpid(), rank=hvd.rank(), steps=told[0])


def _wishes(folder: Path) -> Any:
    """Return a function that raises or exits if the driver has asked this learner to, else returns False."""

    def look() -> bool:
        file = folder / f"spec.{os.getpid()}"
        if not file.exists():
            return False
        if file.read_text() == "raise":
            raise RuntimeError("this fault was requested by the driver")
        sys.exit(1)

    return look


def _watch(folder: Path, hvd: Any) -> None:
    file = folder / f"learner.{os.getpid()}.jsonl"
    while True:
        held = {
            "rss": _status_kib("VmRSS") * 1024,
            "threads": _status_kib("Threads"),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "exchanges": hvd.metrics()["exchanges"] if hvd.is_initialized() else None,
            "rank": hvd.rank() if hvd.is_initialized() else None,
        }
        _note(file, t=time.time(), **held)
        time.sleep(1.0)


def _status_kib(name: str) -> int:
    """Return the first number of line `name` in /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise LookupError(name)


def _note(file: Path, **facts: Any) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(facts) + "\n")


# ---- the driver -------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """Return the options of the script."""
    parser = new_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/soak"))
    parser.add_argument("--learner", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def living(folder: Path) -> list[int]:
    """Return the process ids of learners that have written a record and are alive."""
    pids = [int(file.name.split(".")[1]) for file in folder.glob("learner.*.jsonl")]
    return [pid for pid in pids if _alive(pid)]


def shared_bytes() -> int:
    """Return the bytes used in /dev/shm, by files with a name or without."""
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def is_whole(folder: Path, doomed: set[int]) -> bool:
    """Return whether all learners with a fatal fault have ended, and N learners train."""
    pids = living(folder)
    return len(pids) == N and not doomed & set(pids)


def _alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rsplit(")", 1)[1].split()[0] != "Z"


def disturb(folder: Path, rng: random.Random, ends: float) -> Iterator[dict[str, Any]]:
    """Commit faults until time `ends`, but only while at least three learners train; yield each fault."""
    while time.time() < ends:
        time.sleep(min(rng.uniform(*PAUSE_S), max(0.0, ends - time.time())))
        pids = living(folder)
        if len(pids) < 3 or time.time() >= ends:
            continue
        fault, pid = rng.choice(FAULTS), rng.choice(pids)
        yield {"t": time.time(), "fault": fault, "pid": pid}
        _commit(folder, fault, pid, rng.uniform(*STOP_S))


def _commit(folder: Path, fault: str, pid: int, seconds: float) -> None:
    if fault in ("raise", "exit"):
        (folder / f"spec.{pid}").write_text(fault)
        return
    if fault == "stop":
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)  # the learner is stopped meanwhile
        os.kill(pid, signal.SIGCONT)
        return
    os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSEGV)


def launch(folder: Path) -> subprocess.Popen[bytes]:
    """Start the job, with its output in the files stdout and stderr of `folder`."""
    variables = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "OMP_NUM_THREADS": "1"}
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    how = ["--with-ft", "ulfm", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    program = [sys.executable, "-m", "lab.studies.soak", "--learner", str(folder)]
    command = ["mpirun", *root, *how, "-np", str(N), *program]
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        return subprocess.Popen(
            command, env=os.environ | paths() | variables, stdout=out, stderr=err
        )


def wait_until(condition: Any, seconds: float) -> bool:
    """Poll condition() for at most `seconds`; return whether it became true."""
    ends = time.time() + seconds
    while not condition():
        if time.time() > ends:
            return False
        time.sleep(0.1)
    return True


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file, without a last line that is only partly written."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1] if line]


def growth(series: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Return the medians of a value over the second and over the last quarter of a learner's rows."""
    values = [row[name] for row in series]
    quarter = len(values) // 4
    return statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])


def with_newcomers(series: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the number of learners that joined so far.

    It is the number of times that the count of exchanges fell, because it restarts at 0 when a learner joins.
    """
    met, last, found = 0, 0, []
    for row in series:
        count = row["exchanges"]
        met += count is not None and count < last
        last = last if count is None else count
        found.append({**row, "joining learners": met})
    return found


def judged(folder: Path) -> list[dict[str, Any]]:
    """Return the growth of memory, threads and descriptors of each learner that ran long enough."""
    lives = []
    for file in sorted(folder.glob("learner.*.jsonl")):
        series = with_newcomers(rows(file))
        if len(series) < 8 or series[-1]["t"] - series[0]["t"] < LONG_ENOUGH_S:
            continue
        life = {"pid": int(file.name.split(".")[1]), "seconds": series[-1]["t"] - series[0]["t"]}
        for name in ("rss", "threads", "descriptors", "joining learners"):
            life[name] = growth(series, name)
        early, late = life["rss"]
        few, many = life["joining learners"]
        allowed = max(GROWTH * early, GROWTH_BYTES) + NEWCOMER_BYTES * (many - few)
        life["flat"] = late <= early + allowed
        lives.append(life)
    return lives


def figure(folder: Path) -> None:
    """Draw the resident memory of every learner over time, with the faults, to soak.png."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9, 4), layout="constrained")
    axes = drawing.subplots()
    files = sorted(folder.glob("learner.*.jsonl"))
    zero = min(rows(file)[0]["t"] for file in files)
    for file in files:
        series = rows(file)
        axes.plot(
            [(row["t"] - zero) / 60 for row in series], [row["rss"] / 2**20 for row in series], lw=1
        )
    for fault in rows(folder / "faults.jsonl"):
        axes.axvline((fault["t"] - zero) / 60, color="0.85", lw=0.5, zorder=0)
    axes.set(xlabel="minutes", ylabel="resident memory, MiB", title="learners; faults in grey")
    axes.set_ylim(bottom=0)
    drawing.savefig(folder / "soak.png", dpi=120)


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run the job, commit faults, and return the results."""
    folder = options.out.resolve()
    for old in folder.glob("*"):
        old.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "faults.jsonl").touch()
    before = shared_bytes()
    job = launch(folder)
    committed: Counter[str] = Counter()
    try:
        if not wait_until(lambda: len(living(folder)) == N, 120):
            raise SystemExit(f"error: the job did not start; see {folder / 'stderr'}")
        ends = time.time() + 60 * options.minutes
        for fault in disturb(folder, random.Random(options.seed), ends):
            _note(folder / "faults.jsonl", **fault)
            committed[fault["fault"]] += 1
            left = (ends - time.time()) / 60
            print(f"{left:5.1f} min left  {fault['fault']} {fault['pid']}", flush=True)
            if job.poll() is not None:
                break
        doomed = {f["pid"] for f in rows(folder / "faults.jsonl") if f["fault"] != "stop"}
        whole = wait_until(lambda: is_whole(folder, doomed) or job.poll() is not None, 90)
        (folder / "over").touch()
        ended = wait_until(lambda: job.poll() is not None, LEAVE_S)
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(30)
    lives = judged(folder)
    well = rows(folder / "ended.jsonl") if (folder / "ended.jsonl").exists() else []
    return {
        "minutes": options.minutes,
        "seed": options.seed,
        "faults": dict(committed),
        "all_replaced": whole,
        "learners_started": len(list(folder.glob("learner.*.jsonl"))),
        "steps": max((row["steps"] for row in well), default=0),
        "ended_well": len(well),
        "command_returned": ended,
        "status": job.returncode,
        "lives": lives,
        "left_in_dev_shm": shared_bytes() - before,
    }


def main() -> int:
    """Run the soak test, print its results; return the exit status, 0 if all criteria are met."""
    options = arguments()
    if options.learner:
        learner(options.learner)
        return 0
    print(f"seed {options.seed}", flush=True)
    result = soak(options)
    folder = options.out.resolve()
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    figure(folder)
    print(json.dumps({k: v for k, v in result.items() if k != "lives"}, indent=1))
    for life in result["lives"]:
        early, late = (value / 2**20 for value in life["rss"])
        print(
            f"lived {life['seconds']:5.0f} s  memory {early:.1f} -> {late:.1f} MiB  joining learners "
            f"{life['joining learners']}  threads {life['threads']}  descriptors {life['descriptors']}"
            f"{'' if life['flat'] else '  GROWS'}"
        )
    good = (
        result["ended_well"] == N
        and result["command_returned"]
        and result["left_in_dev_shm"] < LEFT_BYTES
    )
    return 0 if good and all(life["flat"] for life in result["lives"]) else 1


if __name__ == "__main__":
    sys.exit(main())
