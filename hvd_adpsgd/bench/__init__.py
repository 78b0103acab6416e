"""The ruler: what averaging costs here, as ratios of two things measured in one run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["MARK", "add_arguments", "run"]

MARK = "HVD_ADPSGD_BENCH "

_MEANINGS = {
    "ratio": "time of an exchange / time of MPI_Sendrecv (median of rounds)",
    "speed_kept": "steps/s with averaging on / off (median of blocks)",
    "straggler_speed_kept": "steps/s of the others while one sleeps / while nobody sleeps",
    "idle": "share of a core that an engine uses while nobody trains",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m hvd_adpsgd bench`."""
    kinds = parser.add_subparsers(dest="kind", required=True)
    exchange = kinds.add_parser("exchange", help="one exchange against raw MPI_Sendrecv")
    exchange.add_argument("--mib", type=float, default=164.6, help="size of the model")
    exchange.add_argument("--rounds", type=int, default=9)
    exchange.add_argument("--chunk-kib", type=int, default=256)
    exchange.add_argument(
        "--through-mpi", action="store_true", help="as between hosts: no memory shared"
    )
    step = kinds.add_parser("step", help="training steps, averaging on against off")
    step.add_argument("--learners", type=int, default=4)
    step.add_argument("--super-learner-size", type=int, default=1)
    step.add_argument("--blocks", type=int, default=5)
    step.add_argument("--steps", type=int, default=20, help="steps per block")
    step.add_argument(
        "--straggler", type=float, default=0.0, metavar="S", help="one sleeps S s/step"
    )
    step.add_argument("--averaging", default="random_pairs")
    for kind in (exchange, step):
        kind.add_argument("--json", action="store_true", help="print one JSON object, no table")


def run(args: argparse.Namespace) -> int:
    """Launch the learners, print what they measured. Returns the exit status."""
    beside = os.path.dirname(sys.executable)  # mpirun's folder, whether or not it is activated
    path = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    if args.kind == "exchange":
        learners = 2
        options = {"mib": args.mib, "rounds": args.rounds, "chunk-kib": args.chunk_kib}
    else:
        learners = args.learners
        environment["HVD_ADPSGD_SUPER_LEARNER_SIZE"] = str(args.super_learner_size)
        options = {"blocks": args.blocks, "steps": args.steps, "straggler": args.straggler}
        options["averaging"] = args.averaging
    command = [
        shutil.which("horovodrun", path=path) or "horovodrun",
        "-np",
        str(learners),
        sys.executable,
    ]
    command += ["-m", f"hvd_adpsgd.bench.{args.kind}"]
    command += [f"--{name}={value}" for name, value in options.items()]
    if getattr(args, "through_mpi", False):
        command.append("--through-mpi")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    found = [line.split(MARK, 1)[1] for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or not found:
        sys.stderr.write(done.stdout)
        print(f"bench {args.kind} failed (exit status {done.returncode})", file=sys.stderr)
        return done.returncode or 1
    result = {**json.loads(found[0]), "machine": _machine()}
    print(json.dumps(result) if args.json else _table(result))
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
    for name, value in result.items():
        values = value if isinstance(value, dict) else {"": value}
        for part, number in values.items():
            text = f"{number:.4g}" if isinstance(number, float) else str(number)
            label = f"{name}.{part}" if part else name
            lines.append(f"{label:36s} {text:>12s}  {_MEANINGS.get(name, '')}".rstrip())
    return "\n".join(lines)
