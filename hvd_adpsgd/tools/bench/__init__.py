"""The ruler: what averaging costs here, as ratios of two things measured in one run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["MARK", "add_arguments", "run", "timed"]

MARK = "HVD_ADPSGD_BENCH "

_MEANINGS = {
    "ratio": "time of an exchange / time of MPI_Sendrecv (median of rounds)",
    "speed_kept": "steps/s with averaging on / off (median of blocks)",
    "straggler_speed_kept": "steps/s of the others while one sleeps / while nobody sleeps",
    "idle": "share of a core that an engine uses while nobody trains",
    "decay.from_law": "largest difference to the law as it is written, models of size 1",
    "*.theory": "rate of the expectation, or a ratio of two",
    "*.measured": "the same through the engine",
    "*.typical": "rate of a typical run",
    "*.allreduce_ms": "MPI_Allreduce with nothing around it",
    "*.mpi_ms": "a mean of all through the engine, summed by MPI",
    "*.butterfly_ms": "the same, summed by the butterfly",
    "*.butterfly_to_mpi": "ratio of the two, median of rounds",
    "*.mean_ms": "a mean of all beside nothing",
    "*.off_ms": "step of the plain optimizer",
    "*.delay_to_max": "delay_by_one / max(off, mean)",
    "*.delay_to_sum": "delay_by_one / (off + mean)",
    "*.delay_hidden": "share of the shorter that is hidden behind the longer",
    "*.periodic_to_sum": "averaging after every step / (off + mean)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m hvd_adpsgd bench`."""
    kinds = parser.add_subparsers(dest="kind", required=True)
    exchange = kinds.add_parser("exchange", help="one exchange against raw MPI_Sendrecv")
    exchange.add_argument("--mib", type=float, default=164.6, help="size of the model")
    exchange.add_argument("--rounds", type=int, default=9)
    exchange.add_argument("--chunk-kib", type=int, default=256)
    exchange.add_argument(
        "--through-mpi", action="store_true", help="use messages, as between hosts"
    )
    step = kinds.add_parser("step", help="training steps, averaging on against off")
    step.add_argument("--learners", type=int, default=4)
    step.add_argument("--super-learner-size", type=int, default=1)
    step.add_argument("--blocks", type=int, default=5)
    step.add_argument("--steps", type=int, default=20, help="steps per block")
    step.add_argument(
        "--straggler", type=float, default=0.0, metavar="S", help="one sleeps S s per step"
    )
    step.add_argument("--averaging", default="random_pairs")
    gossip = kinds.add_parser("gossip", help="a ring, with and without A2CiD2, against theory")
    gossip.add_argument("--learners", type=int, default=8)
    gossip.add_argument("--windows", type=int, default=200, help="windows to measure decay in")
    gossip.add_argument("--simulated", type=int, default=100, help="long runs without engines")
    gossip.add_argument("--steps", type=int, default=1500, help="steps with updates; 0: none")
    gossip.add_argument("--columns", type=int, default=100)
    gossip.add_argument("--seeds", type=int, nargs="+", default=[0])
    overlap = kinds.add_parser("overlap", help="does the mean of all overlap the computation?")
    overlap.add_argument("--learners", type=int, default=2)
    overlap.add_argument("--mib", type=float, default=32.0, help="size of the model")
    overlap.add_argument("--blocks", type=int, default=5)
    overlap.add_argument("--steps", type=int, default=8, help="steps per block")
    overlap.add_argument(
        "--compute", type=float, nargs="+", default=[0.5, 1.0, 2.0, 3.0], help="steps, in means"
    )
    overlap.add_argument("--busy", action="store_true", help="compute instead of sleeping")
    overlap.add_argument("--picture", metavar="FILE", help="draw traced steps instead (matplotlib)")
    allreduce = kinds.add_parser("allreduce", help="the mean of all, by MPI and by the butterfly")
    allreduce.add_argument(
        "--learners", type=int, default=4, help="largest number of learners: 2, 4, ... up to this"
    )
    allreduce.add_argument("--mib", type=float, default=32.0, help="size of the model")
    allreduce.add_argument("--rounds", type=int, default=9)
    for kind in (exchange, step, gossip, overlap, allreduce):
        kind.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Launch the learners, print what they measured. Returns the exit status."""
    if getattr(args, "picture", None):
        return _draw_overlap(args)
    result = _measure(args.kind, _learners(args), _options(args), _variables(args))
    if result is None:
        return 1
    print(json.dumps(result) if args.json else _table(result))
    return 0


def _learners(args: argparse.Namespace) -> int:
    return int(getattr(args, "learners", 2))


def _variables(args: argparse.Namespace) -> dict[str, str]:
    """Every learner is a super learner, unless said otherwise."""
    return {"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(getattr(args, "super_learner_size", 1))}


def _options(args: argparse.Namespace) -> list[str]:
    """The command line of the kind's module: what was given here, but for what is ours."""
    ours = {"command", "kind", "json", "learners", "super_learner_size", "picture"}
    options = []
    for name, value in vars(args).items():
        flag = "--" + name.replace("_", "-")
        if name in ours or value is False:
            continue
        if value is True:
            options.append(flag)
        elif isinstance(value, list):
            options += [flag, *map(str, value)]
        else:
            options.append(f"{flag}={value}")
    return options


def _measure(
    kind: str, learners: int, options: list[str], variables: dict[str, str]
) -> dict[str, Any] | None:
    """What the learners of a kind say; None if they failed, with what they wrote on stderr."""
    beside = os.path.dirname(sys.executable)  # mpirun's folder, whether or not it is activated
    path = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    launcher = shutil.which("horovodrun", path=path) or "horovodrun"
    command = [
        launcher,
        "-np",
        str(learners),
        sys.executable,
        "-m",
        f"hvd_adpsgd.tools.bench.{kind}",
    ]
    done = subprocess.run(
        [*command, *options], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    found = [line.split(MARK, 1)[1] for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or not found:
        sys.stderr.write(done.stdout)
        print(f"bench {kind} failed (exit status {done.returncode})", file=sys.stderr)
        return None
    return {**json.loads(found[0]), "machine": _machine()}


def _draw_overlap(args: argparse.Namespace) -> int:
    """Trace a few steps of each scheme, and draw them."""
    from hvd_adpsgd.tools.bench import picture

    options = [f"--mib={args.mib}", f"--steps={args.steps}"] + ["--busy"] * args.busy
    with tempfile.TemporaryDirectory() as folder:
        traces, compute_ms = {}, 0.0
        for scheme in reversed(picture.SCHEMES):  # first what shows how long a mean takes alone
            traces[scheme] = os.path.join(folder, f"{scheme}.json")
            variables = {**_variables(args), "HVD_ADPSGD_TIMELINE": traces[scheme]}
            asked = [*options, f"--only={scheme}", f"--compute-ms={compute_ms}"]
            result = _measure("overlap", 2, asked, variables)
            if result is None:
                return 1
            compute_ms = compute_ms or 1.5 * result["mean_ms"]
        picture.draw(traces, args.picture)
    return 0


def _machine() -> str:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{os.cpu_count()} cores, {model}"


def _table(result: dict[str, Any]) -> str:
    lines = []
    for label, value, meaning in _rows(result):
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        lines.append(f"{label:36s} {text:>12s}  {meaning}".rstrip())
    return "\n".join(lines)


def _rows(result: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any, str]]:
    """(name, value, meaning), names of what is nested joined by dots."""
    for name, value in result.items():
        label = f"{above}.{name}" if above else name
        if isinstance(value, dict):
            yield from _rows(value, label)
        else:
            meaning = _MEANINGS.get(label) or (above and _MEANINGS.get(f"*.{name}")) or ""
            yield label, value, meaning


def timed(comm: Any, act: Callable[[], object]) -> float:
    """Seconds from a common start until all of `comm` are done."""
    comm.Barrier()
    began = time.perf_counter()
    act()
    comm.Barrier()
    return time.perf_counter() - began
