"""hvd_adpsgd beside other libraries: the same model, data and batch (peers_learner.py), in turns.

Run by `python -m hvd_adpsgd bench peers`. Each round runs every library that is installed three times: for
--steps steps (the loss after as many samples), for --seconds seconds (samples per second, the loss after as
much time), and for --seconds seconds with a learner that sleeps --slow seconds in every step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from typing import Any

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.tools.bench import MARK, machine, programs_path

__all__ = ["measure"]

LEARNER = "hvd_adpsgd.tools.bench.peers_learner"
LAUNCHED_BY = {  # as Scheme.start of each needs it
    "random_pairs": "horovodrun",
    "horovod": "horovodrun",
    "ddp": "torchrun",
    "post_local_sgd": "torchrun",
    "torchft": "torchrun",
    "hivemind": "torchrun",
}
NEEDS = {"torchft": "torchft", "hivemind": "hivemind"}
BATCH, WARM_UP = 32, 12
DEADLINE_S = 240.0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over rounds. A library that is not installed, or fails, is named with the reason.

    Raises:
        ConfigError: for a scheme that there is not.
    """
    if unknown := [name for name in args.schemes if name not in LAUNCHED_BY]:
        raise ConfigError(
            f"--schemes {' '.join(unknown)}: there is no such scheme. Pass some of {', '.join(LAUNCHED_BY)}."
        )
    result: dict[str, Any] = {"learners": args.learners, "rounds": args.rounds}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.schemes}
    absent: dict[str, str] = {}
    for number in range(args.rounds):
        for name in args.schemes:
            if name in absent or (number == 0 and (reason := _missing(name))):
                absent.setdefault(name, reason)
                continue
            try:
                runs[name].append(_round(name, args, number))
            except _Failed as failed:
                absent[name] = str(failed)
            print(f"bench peers: round {number + 1}, {name}", file=sys.stderr)
    for name in args.schemes:
        result[name] = absent.get(name) or _medians(runs[name])
    return result | {"machine": machine()}


class _Failed(Exception):
    """A library does not run here."""


def _missing(name: str) -> str:
    needs = NEEDS.get(name)
    if needs and importlib.util.find_spec(needs) is None:
        return f"not installed: pip install {needs}"
    return ""


def _round(name: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    by_steps = _run(name, args.learners, seed, steps=args.steps)
    by_time = _run(name, args.learners, seed, seconds=args.seconds)
    slow = _run(name, args.learners, seed, seconds=args.seconds, slow_s=args.slow)
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
    """Steps per second of these learners together."""
    return sum(each["steps"] / each["seconds"] for each in learners)


def _run(name: str, learners: int, seed: int, **asked: float) -> dict[str, Any]:
    settings = {"scheme": name, "seed": seed, "warm_up": WARM_UP, "steps": 0, "seconds": 0.0}
    settings |= {"batch": BATCH, "slow_s": 0.0, **asked}
    path = programs_path()
    launcher = LAUNCHED_BY[name]
    found = shutil.which(launcher, path=path)
    if found is None:
        raise _Failed(f"no {launcher} in {path}")
    program = ["-m", LEARNER, json.dumps(settings)]
    if launcher == "torchrun":
        command = [found, "--standalone", f"--nproc-per-node={learners}", *program]
    else:
        command = [found, "-np", str(learners), sys.executable, *program]
    variables = {"PATH": path, "OMP_NUM_THREADS": "1", "HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}
    try:
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, check=False,
            timeout=DEADLINE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise _Failed(f"not over after {DEADLINE_S:g} s") from None
    said = [line.split(MARK, 1)[1] for line in done.stdout.splitlines() if MARK in line]
    if not said:
        last = [line for line in done.stderr.splitlines() if "Error" in line][-1:]
        raise _Failed(
            f"failed with exit status {done.returncode}{': ' if last else ''}{''.join(last)}"
        )
    return dict(json.loads(said[0]))


def _medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    return {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
