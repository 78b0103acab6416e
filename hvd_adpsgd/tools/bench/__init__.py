"""Microbenchmarks: what averaging costs here, as ratios of two things measured in one run."""

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
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.watching.trace import merge

__all__ = [
    "MARK",
    "add_arguments",
    "machine",
    "programs_path",
    "report",
    "require_at_least",
    "run",
    "settings",
    "spread_of",
    "timed",
    "with_slots",
]

MARK = "HVD_ADPSGD_BENCH "

_HERE = ("absorb", "calibrate", "kernels", "peers")

# Of arguments that mean the same in all kinds.
_LEAST = {
    "mib": 0.01,
    "rounds": 1,
    "blocks": 1,
    "learners": 1,
    "super_learner_size": 1,
    "chunk_kib": 1,
    "threads": 0,
    "straggler": 0.0,
    "device_ms": 0.0,
    "pause_ms": 0.0,
    "steps": 1,
    "seconds": 0.1,
    "slow": 0.0,
    "columns": 1,
    "simulated": 0,
    "windows": 0,
}
_LEAST_OF = {"gossip": {"steps": 0}}

_MEANINGS = {
    "memcpy_gb_per_s": "read and written",
    "*.float32": "bytes per second / memcpy's (median of rounds)",
    "one_to_copy": "time of the pass by one thread / of a copy of the model (median of rounds)",
    "several_to_copy": "the same by several threads",
    "several_to_one": "ratio of the two, median of rounds",
    "ratio": "time of an exchange / time of MPI_Sendrecv (median of rounds)",
    "*.mb_per_s_each_way": "of the model, median of rounds",
    "*.cpu_s_per_gb": "of the averaging thread (socket: of both threads), per GB sent or received",
    "*.speed_to_socket": "of the same bytes in the same round, median",
    "speed_kept": "steps/s with averaging on / off (median of blocks)",
    "copy_ms": "of the model, all learners at once where there are several (median)",
    "step_in_copies": "time in step() beside optimizer and all-reduce / of a copy of the model (median)",
    "straggler_speed_kept": "steps/s of the others while one sleeps / while none sleeps",
    "watched_speed_kept": "steps/s while the run is watched / not (median of blocks)",
    "watching_cpu": "share of a core that watching uses, the largest of all learners",
    "*.samples_per_s": "of all learners",
    "*.cpu_ms_per_step": "of a learner, threads of the library included",
    "*.loss_after_samples": "held out, mean of all models, after --steps steps",
    "*.loss_after_time": "after --seconds seconds",
    "*.slow_samples_per_s": "of all learners, one of which sleeps",
    "*.slow_others_kept": "steps/s of the others while one sleeps / while none sleeps",
    "*.slow_loss_after_time": "after --seconds seconds, while one sleeps",
    "*.cpu_ms_per_exchange": "of one side's averaging thread (median of blocks)",
    "*.cpu_to_two": "the same, to that of two super learners in the same round",
    "*.copies_ms": "of the learner that has most, per step: parameters to the mirror, corrections",
    "*.private_mib": "of the learner that has most, for averaging",
    "*.engine_cpu_ms": "of the learner that has most, per exchange",
    "exchange_to_whole": "ratio of the two, median of rounds",
    "copies_to_whole": "ratio of the two, median of rounds",
    "engine_cpu_to_whole": "ratio of the two, median of rounds",
    "idle": "share of a core that an idle engine uses",
    "decay.from_law": "largest difference to the law, models of size 1",
    "*.theory": "rate of the expectation, or a ratio of two",
    "*.measured": "the same through the engine",
    "*.typical": "rate of a typical run",
    "*.allreduce_ms": "MPI_Allreduce with nothing around it",
    "*.mpi_ms": "the same by MPI",
    "*.over_mpi_ms": "the library's operation over MPI's messages",
    "*.sockets_ms": "the same over sockets, as without MPI",
    "*.over_mpi_to_mpi": "ratio to MPI's, median of rounds",
    "*.sockets_to_mpi": "ratio to MPI's, median of rounds",
    "*.butterfly_ms": "the same, summed by the butterfly",
    "*.butterfly_to_mpi": "ratio of the two, median of rounds",
    "*.mean_ms": "a mean of all beside nothing",
    "step_ms": "a step's work on the model beside the optimizer: publish, apply, mirror",
    "chunk_us": "of the engine for a chunk: snapshot and merge",
    "*.off_ms": "step of the plain optimizer",
    "*.delay_to_max": "delay_by_one / max(off, mean)",
    "*.delay_to_sum": "delay_by_one / (off + mean)",
    "*.delay_hidden": "share of the shorter that is hidden behind the longer",
    "*.periodic_to_sum": "averaging after every step / (off + mean)",
}

# Each kind is a module of this package: what it is, and its options with their defaults.
_KINDS: dict[str, tuple[str, dict[str, tuple[Any, str]]]] = {
    "kernels": (
        "the engine's loops over memory, against memcpy",
        {
            "mib": (64.0, "size of a float32 array; other types have as many elements"),
            "rounds": (9, ""),
        },
    ),
    "absorb": (
        "the pass over the model in each step, by one thread and by several, against a copy",
        {
            "mib": (512.0, "size of the model"),
            "chunk-kib": (256, "as HVD_ADPSGD_CHUNK_KIB"),
            "threads": (0, "0: as many as cores"),
            "rounds": (9, ""),
        },
    ),
    "exchange": (
        "one exchange against raw MPI_Sendrecv",
        {
            "mib": (164.6, "size of the model"),
            "rounds": (9, ""),
            "through-mpi": (False, "use messages, as between hosts"),
            "chunk-kib": (256, "as HVD_ADPSGD_CHUNK_KIB"),
        },
    ),
    "wires": (
        "one exchange as messages, over MPI and over TCP, against a plain socket",
        {
            "mib": (32.0, "size of the model"),
            "rounds": (9, ""),
            "chunk-kib": (256, "as HVD_ADPSGD_CHUNK_KIB"),
            "hosts": ("", "two hosts, as node1,node2, with :SLOTS or without; none: here"),
            "nics": ("", "network interface, as HVD_ADPSGD_NICS"),
        },
    ),
    "step": (
        "training steps, averaging on against off",
        {
            "learners": (4, ""),
            "super-learner-size": (1, "learners of a super learner"),
            "blocks": (5, ""),
            "steps": (20, "steps per block"),
            "straggler": (0.0, "one learner sleeps S seconds per step"),
            "device-ms": (
                0.0,
                "learners sleep so long per step, as for a device, and compute one sample",
            ),
            "threads": (1, "of torch in each learner"),
            "averaging": ("random_pairs", "a strategy"),
        },
    ),
    "shards": (
        "an exchange of the whole model by the leaders, against one in shards by all learners",
        {
            "learners": (4, "of two super learners"),
            "mib": (200.0, "size of the model"),
            "rounds": (9, ""),
        },
    ),
    "scaling": (
        "CPU of an exchange, as super learners become more",
        {
            "learners": (16, "2, 4, ... up to this"),
            "mib": (16.0, "size of the model"),
            "rounds": (5, ""),
            "steps": (30, "steps per block"),
            "pause-ms": (5.0, "of a step, times the number of super learners"),
        },
    ),
    "peers": (
        "this library beside others, on the same work",
        {
            "learners": (4, ""),
            "rounds": (3, ""),
            "steps": (200, "steps of each learner, for the loss after as many samples"),
            "seconds": (15.0, "of training, for speed and the loss after as much time"),
            "slow": (0.5, "seconds that the last learner sleeps per step in the third run"),
            "schemes": (
                ["random_pairs", "horovod", "ddp", "post_local_sgd", "torchft", "hivemind"],
                "which",
            ),
            "hosts": ("", "as horovodrun -H: node1:2,node2:2; none: this one"),
        },
    ),
    "watching": (
        "training steps, watched and recorded against not",
        {
            "learners": (2, ""),
            "blocks": (9, ""),
            "steps": (100, "steps per block"),
            "averaging": ("random_pairs", "a strategy"),
        },
    ),
    "gossip": (
        "a ring, with and without A2CiD2, against theory",
        {
            "learners": (8, ""),
            "windows": (200, "windows to measure decay in; 0: none"),
            "simulated": (100, "long runs without engines"),
            "steps": (1500, "steps with updates; 0: none"),
            "columns": (100, "columns per kind of update"),
            "seeds": ([0], ""),
        },
    ),
    "overlap": (
        "does the mean of all overlap the computation?",
        {
            "learners": (2, ""),
            "mib": (32.0, "size of the model"),
            "blocks": (5, ""),
            "steps": (8, "steps per block"),
            "compute": ([0.5, 1.0, 2.0, 3.0], "steps, in means"),
            "busy": (False, "compute instead of sleeping"),
            "picture": ("", "file: draw traced steps instead (matplotlib)"),
        },
    ),
    "allreduce": (
        "the mean of all, by MPI and by the butterfly",
        {
            "learners": (4, "largest number of learners: 2, 4, ... up to this"),
            "mib": (32.0, "size of the model"),
            "rounds": (9, ""),
        },
    ),
    "operations": (
        "operations over all learners, over MPI's messages and over sockets, against MPI's",
        {
            "learners": (8, "largest number of learners: 2, 4, ... up to this"),
            "mib": (64.0, "size of the large tensor; the small one has 1 KiB"),
            "rounds": (9, ""),
            "hosts": ("", "as node1,node2, with :SLOTS or without; none: this one"),
            "nics": ("", "network interface, as HVD_ADPSGD_NICS"),
        },
    ),
    "calibrate": (
        "what averaging costs beside the network, for simulate --calibration",
        {
            "mib": (164.6, "size of the model"),
            "chunk-kib": (256, "as HVD_ADPSGD_CHUNK_KIB"),
            "rounds": (9, ""),
            "out": ("", "file to write"),
        },
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m hvd_adpsgd bench`."""
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name, (told, options) in _KINDS.items():
        kind = kinds.add_parser(name, help=told)
        kind.add_argument("--json", action="store_true", help="print JSON instead of a table")
        for option, (default, means) in options.items():
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


def run(args: argparse.Namespace) -> int:
    """Launch the learners, print what they measured. Returns 0, 1 if they failed, 2 for a wrong argument."""
    try:
        require_at_least(_LEAST | _LEAST_OF.get(args.kind, {}), vars(args))
        return _run(args)
    except ConfigError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    asked = {"learners": 2, "super_learner_size": 1, **vars(args)}
    if asked.get("picture"):
        return _draw_overlap(asked)
    result: dict[str, Any] | None
    if args.kind in _HERE:
        result = _measure_here(args)
    elif args.kind == "watching":
        with tempfile.TemporaryDirectory() as folder:
            result = _measure(asked, HVD_ADPSGD_RECORD=folder)
    else:
        result = _measure(asked)
    if result is None:
        return 1
    print(json.dumps(result) if args.json else _table(result))
    return 0


def require_at_least(least: Mapping[str, float], given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument below its bound, infinite or not a number."""
    for name, bound in least.items():
        if name in given and not bound <= given[name] < math.inf:
            raise ConfigError(
                f"--{name.replace('_', '-')} {given[name]}: allowed is at least {bound}. "
                "Pass such a number."
            )


def _measure_here(args: argparse.Namespace) -> dict[str, Any]:
    """By a module that needs no launcher, or starts its own."""
    return dict(importlib.import_module(f"{__name__}.{args.kind}").measure(args))


def _measure(asked: dict[str, Any], **variables: str) -> dict[str, Any] | None:
    """Launch the learners of one benchmark; their report, or None if they failed (stderr is printed)."""
    kind = asked["kind"]
    path = programs_path()
    size = str(asked["super_learner_size"])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    environment["HVD_ADPSGD_SUPER_LEARNER_SIZE"] = size
    launcher = shutil.which("horovodrun", path=path)
    if launcher is None:
        print(
            f"bench: no horovodrun in {path}. Run python -m hvd_adpsgd build-horovod.",
            file=sys.stderr,
        )
        return None
    program = [sys.executable, "-m", f"{__name__}.{kind}", json.dumps(asked)]
    hosts = asked.get("hosts")
    where = ["-H", with_slots(hosts, asked["learners"])] if hosts else []
    done = subprocess.run(
        [launcher, "-np", str(asked["learners"]), *where, *program],
        env=environment, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    found = [line.split(MARK, 1)[1] for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or not found:
        sys.stderr.write(done.stdout)
        print(f"bench {kind} failed (exit status {done.returncode})", file=sys.stderr)
        return None
    return {**json.loads(found[0]), "machine": machine()}


def with_slots(hosts: str, learners: int) -> str:
    """Hosts as horovodrun -H takes them; those without slots share the learners that are left."""
    names = hosts.split(",")
    without = [name for name in names if ":" not in name]
    left = learners - sum(int(name.split(":")[1]) for name in names if ":" in name)
    each = max(1, -(-left // max(len(without), 1)))
    return ",".join(f"{name}:{each}" if name in without else name for name in names)


def _draw_overlap(asked: dict[str, Any]) -> int:
    """Trace a few steps of each scheme, and draw them."""
    from hvd_adpsgd.tools.bench import picture

    with tempfile.TemporaryDirectory() as folder:
        traces, compute_ms = {}, 0.0
        for scheme in reversed(picture.SCHEMES):  # first what shows how long a mean takes alone
            traces[scheme] = os.path.join(folder, f"{scheme}.json")
            own = os.path.join(folder, str(len(traces)))
            os.mkdir(own)
            one = asked | {"learners": 2, "only": scheme, "compute_ms": compute_ms}
            result = _measure(one, HVD_ADPSGD_TIMELINE=os.path.join(own, "trace.json"))
            if result is None:
                return 1
            merge([own], traces[scheme])
            compute_ms = compute_ms or 1.5 * result["mean_ms"]
        picture.draw(traces, asked["picture"])
    return 0


def programs_path() -> str:
    """PATH, with the folder of this Python's programs first, whether or not its environment is activated."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def machine() -> str:
    """Cores and processor."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{os.cpu_count()} cores, {(*names, platform.machine())[0]}"


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


# ---- in a learner


def settings() -> argparse.Namespace:
    """What this learner was asked to measure."""
    return argparse.Namespace(**json.loads(sys.argv[1]))


def report(rank: int, result: dict[str, Any]) -> None:
    """The first learner's result, on one line that no launcher cuts."""
    if rank == 0:
        os.write(1, (MARK + json.dumps(result) + "\n").encode())


def timed(comm: Any, act: Callable[[], object]) -> float:
    """Seconds from a common start until all of `comm` are done."""
    comm.Barrier()
    began = time.perf_counter()
    act()
    comm.Barrier()
    return time.perf_counter() - began


def spread_of(name: str, ratios: list[float]) -> dict[str, float]:
    """Median, least and most of ratios."""
    return {name: statistics.median(ratios), f"{name}_min": min(ratios), f"{name}_max": max(ratios)}
