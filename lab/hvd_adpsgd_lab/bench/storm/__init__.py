"""Benchmark of jobs under a schedule of faults: kills with replacement, stops, slow learners.

Run by `python -m hvd_adpsgd bench storm`. A job of n learners trains a small GPT on text. Each learner is a
process in a slot; when one is killed, a supervisor starts another in its slot. The same schedule is played
on each library, after a run without faults. Begin with `schedule` (the text format), `driver` (what plays
it), `training` (a learner's loop) and `report` (what is counted).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hvd_adpsgd.errors import ConfigError, LaunchError
from hvd_adpsgd_lab.bench import machine, programs_path
from hvd_adpsgd_lab.bench.storm import schedule
from hvd_adpsgd_lab.bench.storm.schedule import Fault

__all__ = ["SCHEMES", "measure"]

SCHEMES = ("hadpsgd", "torchft_diloco", "torchft_local_sgd", "horovod")
_LENGTH, _BATCH, _RATE = 64, 8, 2e-3  # bytes of a sequence, sequences of a step, rate of AdamW
_BIN_S, _BINS = 30.0, 10  # of participation over time: length, and the least number of a short run


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return what each scheme has shown; for a scheme that is missing or fails, the reason.

    Args:
        args: options of `bench storm`, with their defaults in tools/bench/__init__.py. Minutes are
            minutes, --step and --every are seconds, --kills, --stops and --slows are per hour.

    Raises:
        ConfigError: for an unknown scheme, a schedule that cannot be read, or an argument out of range.
    """
    _require(args)
    faults = faults_of(args)
    folder = Path(args.out or tempfile.mkdtemp(prefix="hvd_adpsgd_storm.")).resolve()
    for ends in (signal.SIGTERM, signal.SIGHUP):  # raise SystemExit, so that learners are ended
        signal.signal(ends, _end)
    result = _head(args, faults)
    reports: dict[str, dict[str, Any]] = {}
    try:
        for scheme in args.schemes:
            reason = missing(scheme)
            if not reason:
                try:
                    reports[scheme] = _measured(scheme, args, faults, folder / scheme)
                except LaunchError as error:
                    reason = str(error)
            result[scheme] = reason or reports[scheme]
            _say(f"{scheme}: {reason or _line(reports[scheme])}")
    finally:
        if not args.out:
            shutil.rmtree(folder, ignore_errors=True)
    if args.picture and reports:
        from hvd_adpsgd_lab.bench.storm import picture

        played = [fault for fault in faults if fault.kind != "cut"]
        picture.draw(reports, played, args.picture)
    if not args.json:
        result |= {
            name: {k: v for k, v in r.items() if k != "curves"} for name, r in reports.items()
        }
    return result | {"machine": machine()}


def _require(args: argparse.Namespace) -> None:
    if unknown := [name for name in args.schemes if name not in SCHEMES]:
        raise ConfigError(
            f"--schemes {' '.join(unknown)}: unknown. Pass some of {', '.join(SCHEMES)}."
        )
    if args.width % 32:
        raise ConfigError(
            f"--width {args.width}: allowed are multiples of 32, the width of a head. Pass one."
        )


def faults_of(args: argparse.Namespace) -> list[Fault]:
    """Return the faults that the options ask for, at slots that are there."""
    seconds = 60 * args.minutes
    if args.schedule == "drawn":
        rates = {"kill": args.kills, "stop": args.stops, "slow": args.slows}
        return schedule.drawn(args.seed, args.slots, seconds, rates)
    return schedule.played(schedule.named(args.schedule), args.slots, seconds)


def missing(scheme: str) -> str:
    """Return why a scheme cannot run here; "" if it can."""
    if scheme.startswith("torchft") and importlib.util.find_spec("torchft") is None:
        return "not installed: pip install torchft"
    if scheme == "horovod" and shutil.which("horovodrun", path=programs_path()) is None:
        return "no horovodrun: python -m hvd_adpsgd build-horovod"
    return ""


def _head(args: argparse.Namespace, faults: Sequence[Fault]) -> dict[str, Any]:
    told = {
        "slots": args.slots,
        "minutes": args.minutes,
        "schedule": args.schedule,
        "seed": args.seed,
    }
    counts = ", ".join(f"{n} {kind}" for kind, n in schedule.counted(faults).items())
    if args.schedule not in ("drawn", "none"):
        most = max((fault.slot for fault in schedule.named(args.schedule)), default=0)
        if most >= args.slots:
            told["targets"] = f"modulo {args.slots}: the schedule has slots up to {most}"
    return {**told, "faults": counts or "none"}


def _measured(
    scheme: str, args: argparse.Namespace, faults: Sequence[Fault], folder: Path
) -> dict[str, Any]:
    """Run one scheme without faults, and with faults; compare."""
    calm = _run(scheme, args, [], args.calm, folder / "calm")
    storm = _run(scheme, args, faults, args.minutes, folder / "storm")
    return _beside(storm, calm, min(_BIN_S, 60 * args.minutes / _BINS))


def _beside(storm: dict[str, Any], calm: dict[str, Any], bin_s: float) -> dict[str, Any]:
    from hvd_adpsgd_lab.bench.storm import report

    curves = {
        "participation": report.participation_over_time(
            storm.pop("run"), calm["exchanges_per_living_s"], bin_s
        ),
        "loss": storm.pop("losses"),
        "calm_loss": calm["losses"],
    }
    return {**report.compared(storm, calm), "curves": curves}


def _run(
    scheme: str, args: argparse.Namespace, faults: Sequence[Fault], minutes: float, folder: Path
) -> dict[str, Any]:
    from hvd_adpsgd_lab.bench.storm import driver, evaluation, report

    if folder.exists():
        shutil.rmtree(folder)
    settings = _settings(scheme, args, folder)
    _say(f"{scheme}, {folder.name}: {minutes:g} minutes, in {folder}")
    driver.perform(settings, faults, 60 * minutes)
    run = report.Run.of(folder, args.slots)
    losses = evaluation.losses(settings, 60 * minutes)
    found = report.summary(run, is_redone=scheme == "horovod")
    found |= {
        "loss": losses[-1][1] if losses else None,
        "jump": report.jump(losses),
        "losses": losses,
    }
    kept = {"settings": settings, "minutes": minutes, **found}
    (folder / "summary.json").write_text(json.dumps(kept, indent=1) + "\n")
    return found | {"run": run}


def _settings(scheme: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return {
        "scheme": scheme, "slots": args.slots, "folder": str(folder), "step_s": args.step,
        "admit_every": args.admit_every, "checkpoint_every": args.checkpoint_every,
        "width": args.width, "layers": args.layers, "length": _LENGTH, "batch": _BATCH,
        "rate": _RATE, "seed": args.seed, "every_s": args.every,
    }  # fmt: skip


def _line(report: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {report[name]:.3g}"
        for name in ("steps_kept", "participation", "kill_to_step_s")
        if report[name] is not None
    )


def _say(text: str) -> None:
    print(f"bench storm: {text}", file=sys.stderr, flush=True)


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
