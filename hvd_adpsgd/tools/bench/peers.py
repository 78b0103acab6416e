"""Benchmark of hvd_adpsgd beside other training libraries, with the same model, data and batch.

Run by `python -m hvd_adpsgd bench peers`. Each round runs every installed library three times: for --steps
steps (which gives the loss at equal samples), for --seconds seconds (samples per second, loss at equal
time), and for --seconds seconds with a learner that sleeps --slow seconds in every step. With --hosts
the learners run on several hosts, so that the libraries' messages cross the network between these.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import signal
import socket
import statistics
import sys
from types import FrameType
from typing import Any

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.tools.bench import (
    MARK,
    machine,
    programs_path,
    require_at_least,
    spread_of,
    with_slots,
)
from hvd_adpsgd.tools.doctor.probes import bounded, last_line

__all__ = ["measure"]

LEARNER = "hvd_adpsgd.tools.bench.peers_learner"
NEEDS = {"torchft": "torchft", "hivemind": "hivemind"}
SCHEMES = ("random_pairs", "horovod", "ddp", "post_local_sgd", "torchft", "hivemind")
BATCH, WARM_UP = 32, 12
DEADLINE_S = 240.0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return medians over rounds, by library; for a library that is not installed or fails, the reason.

    Raises:
        ConfigError: if a scheme is unknown, an argument is out of range, or there is no horovodrun.
    """
    if unknown := [name for name in args.schemes if name not in SCHEMES]:
        raise ConfigError(
            f"--schemes {' '.join(unknown)}: unknown. Pass some of {', '.join(SCHEMES)}."
        )
    _require_arguments(args)
    # SIGTERM and SIGHUP raise SystemExit, so that bounded() ends the learners' process group.
    for ends in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, _end)
    result: dict[str, Any] = {"learners": args.learners, "rounds": args.rounds}
    result |= {"hosts": args.hosts} if args.hosts else {}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.schemes}
    absent: dict[str, str] = {}
    for number in range(args.rounds):
        for name in args.schemes:
            if name in absent or (number == 0 and (reason := _missing(name))):
                absent.setdefault(name, reason)
                continue
            try:
                runs[name].append(_round(name, args, number))
                told = f"{runs[name][-1]['samples_per_s']:.0f} samples/s"
            except _Failed as failed:
                absent[name] = told = str(failed)
            print(f"bench peers: round {number + 1}, {name}: {told}", file=sys.stderr, flush=True)
    for name in args.schemes:
        result[name] = absent.get(name) or _medians(runs[name])
    return result | {"machine": machine()}


def _require_arguments(args: argparse.Namespace) -> None:
    require_at_least(
        {"learners": 2, "rounds": 1, "steps": 1, "seconds": 0.1, "slow": 0.0}, vars(args)
    )
    if shutil.which("horovodrun", path=programs_path()) is None:
        raise ConfigError("no horovodrun in PATH. Run python -m hvd_adpsgd build-horovod.")


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


class _Failed(Exception):
    """Raised if a library's training fails or times out."""


def _missing(name: str) -> str:
    needs = NEEDS.get(name)
    if needs and importlib.util.find_spec(needs) is None:
        return f"not installed: pip install {needs}"
    return ""


def _round(name: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    by_steps = _run(name, args, seed, steps=args.steps)
    by_time = _run(name, args, seed, seconds=args.seconds)
    slow = _run(name, args, seed, seconds=args.seconds, slow_s=args.slow)
    steps = sum(each["steps"] for each in by_time["learners"])
    others = slow["learners"][:-1]
    return {
        "samples_per_s": BATCH * _rate(by_time["learners"]),
        "cpu_ms_per_step": sum(each["cpu_ms"] * each["steps"] for each in by_time["learners"])
        / steps,
        "loss_after_samples": by_steps["loss"],
        "loss_after_time": by_time["loss"],
        "slow_samples_per_s": BATCH * _rate(slow["learners"]),
        "slow_others_kept": _rate(others) / _rate(by_time["learners"][:-1]),
        "slow_loss_after_time": slow["loss"],
    }


def _rate(learners: list[dict[str, float]]) -> float:
    """Return the steps per second of `learners` together."""
    return sum(each["steps"] / each["seconds"] for each in learners)


def _run(name: str, args: argparse.Namespace, seed: int, **asked: float) -> dict[str, Any]:
    settings = {"scheme": name, "seed": seed, "warm_up": WARM_UP, "steps": 0, "seconds": 0.0}
    settings |= {"batch": BATCH, "slow_s": 0.0, "hosts": args.hosts, **asked}
    settings["port"] = _free_port()
    variables = {"OMP_NUM_THREADS": "1", "HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}
    hosts = ["-H", with_slots(args.hosts, args.learners)] if args.hosts else []
    program = [sys.executable, "-m", LEARNER, json.dumps(settings)]
    done = bounded(
        ["horovodrun", "-np", str(args.learners), *hosts, *program],
        DEADLINE_S + args.seconds,
        {"PATH": programs_path(), **variables},
    )
    if done.error:
        raise _Failed(done.error)
    said = [line.split(MARK, 1)[1] for line in done.out.splitlines() if MARK in line]
    if done.status or not said:
        errors = [line for line in done.err.splitlines() if "Error" in line]
        told = errors[-1] if errors else last_line(done.err)
        raise _Failed(f"failed with exit status {done.status}: {told}")
    return dict(json.loads(said[0]))


def _free_port() -> int:
    """Return a port for learner 0, free on this host, which runs learner 0 if it is the first of --hosts."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    medians = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
    return medians | spread_of("samples_per_s", [found["samples_per_s"] for found in rounds])
