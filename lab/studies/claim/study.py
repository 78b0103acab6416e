"""Runs what is missing, in turns, and reports all runs."""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from hvd_adpsgd_lab.bench import machine

from examples.acoustic_model import prepare_data
from examples.acoustic_model.speech import launch
from examples.acoustic_model.speech.problem import Problem
from lab.studies.keeper import Job, perform_jobs

from . import evaluation, learners, picture, schemes, situations, table, tasks
from .curves import Point
from .records import Key, Record, record_of
from .situations import SITUATIONS


def turns(options: argparse.Namespace) -> Iterator[Key]:
    """Yield all runs: those of a task, situation and seed together, in another order for each seed."""
    for seed, task, situation in itertools.product(options.seeds, options.tasks, options.only):
        first = seed % len(options.schemes)
        for scheme in options.schemes[first:] + options.schemes[:first]:
            yield Key(task, situation, scheme, seed)


def perform(options: argparse.Namespace) -> None:
    """Run what is missing, and write table and pictures.

    Raises:
        Problem: after all other runs, if a run has failed.
    """
    data = Path("out/speech/easy") if options.speech is None else options.speech
    if "speech" in options.tasks and not options.table:
        data, _ = prepare_data.named("easy", options.quick, options.speech)
    named = {name: tasks.named(name, options.quick, data) for name in options.tasks}
    absent = reasons(options)
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that learners end with the study
        signal.signal(number, _end)
    its, failures = _train(options, named, data, absent)
    absent |= failures
    text = report(options, its, absent)
    (options.out / "table.md").write_text(text + "\n")
    for across, name in (("seconds", "claim.png"), ("samples", "claim_samples.png")):
        picture.draw(its, absent, options.tasks, options.only, options.out / name, across)
    print(f"\n{text}\n\n{options.out}: runs, table.md, claim.png, claim_samples.png")
    if failures:
        raise Problem(f"{len(failures)} runs failed; start again to repeat them")


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def reasons(options: argparse.Namespace) -> dict[table.Place, str]:
    """Return why runs are not possible on this machine, by task, situation and scheme."""
    found: dict[table.Place, str] = {}
    no_hosts = learners.no_hosts()
    for place in itertools.product(options.tasks, options.only, options.schemes):
        _, situation, scheme = place
        why = schemes.missing(scheme) or (no_hosts if SITUATIONS[situation].rate else None)
        if why:
            found[place] = why
    return found


def settings(task: tasks.Task, scheme: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a run depends on besides its key."""
    common = {"seconds": options.seconds, "learners": situations.LEARNERS}
    return {**task.settings, **common, **schemes.settings(scheme, task.outer)}


def _train(
    options: argparse.Namespace, named: dict[str, tasks.Task], data: Path,
    absent: Mapping[table.Place, str],
) -> tuple[list[Record], dict[table.Place, str]]:  # fmt: skip
    """Run all that is missing, if --table is not given.

    Returns:
        all runs, and why runs have failed, by task, situation and scheme.
    """
    keys = [key for key in turns(options) if key.place not in absent]
    with learners.Hosts() as hosts:
        wanted = [_job(key, named[key.task], options, data, hosts) for key in keys]
        records, lines = perform_jobs(wanted, options.out / "runs", options.table)
    failed = [(key, job) for key, job, kept in zip(keys, wanted, records, strict=True) if not kept]
    failures = {
        key.place: f"failed: {line.removeprefix(f'{job.name}: ').splitlines()[0]}"
        for (key, job), line in zip(failed, lines, strict=not options.table)
    }
    return [
        record_of(key, settings(named[key.task], key.scheme, options), kept)
        for key, kept in zip(keys, records, strict=True)
        if kept
    ], failures


def _job(
    key: Key, task: tasks.Task, options: argparse.Namespace, data: Path, hosts: learners.Hosts
) -> Job:
    what = f"{key.task}, {SITUATIONS[key.situation].title}, {schemes.TITLES[key.scheme]}"

    def act(folder: Path) -> dict[str, Any]:
        points, ended_s = one(key, task, options, data, hosts, folder)
        print(f"   {described(points, ended_s)}", flush=True)
        return {"curve": points, "ended_s": ended_s}

    told = settings(task, key.scheme, options) | {"situation": key.situation, "scheme": key.scheme}
    return Job(f"{what}, seed {key.seed}", told, act)


def described(curve: Sequence[Point], ended_s: float | None) -> str:
    """Return the line on a run that is done."""
    end = curve[-1] if curve else None
    loss = f"held-out loss {end.loss:.3f} after {end.samples:.0f} samples" if end else "no copy"
    return loss + (f", ended after {ended_s:.0f} s" if ended_s is not None else "")


def one(
    key: Key, task: tasks.Task, options: argparse.Namespace, data: Path, hosts: learners.Hosts,
    folder: Path,
) -> tuple[list[Point], float | None]:  # fmt: skip
    """Train once, and evaluate the copies; return the curve, and when the job ended, if it did.

    Raises:
        Problem: if a job fails, other than by a learner that is killed on purpose.
    """
    situation = SITUATIONS[key.situation]
    cluster = hosts.shaped(situation.rate) if situation.rate else None
    words = ["--task", key.task, "--scheme", key.scheme, "--seed", str(key.seed)]
    words += ["--slow", str(situation.slow)] if situation.slow > 1 else []
    kill_s = situations.kill_s(situation, options.seconds)
    words += ["--kill", str(kill_s)] if kill_s else []
    words += ["--quick"] * options.quick
    times = situations.times(options.seconds)
    command = learners.command(folder, data, times, words)
    with learners.Job(key.scheme, command, folder, cluster) as job:
        ended_s = job.run(len(times) - 1, times[-1])
    if ended_s is not None and ended_s < (kill_s or times[-1]):
        log = learners.tail(folder / "log.txt")
        raise Problem(f"the job ended after {ended_s:.0f} s of {times[-1]:.0f} s\n{log}")
    torch.set_num_threads(prepare_data.usable_cores())
    points = evaluation.curve(folder, task, times)
    for file in folder.iterdir():
        file.unlink()  # the copies are large
    if ended_s is not None:
        # a learner may fail later than the first one, and copy its model until then
        points = [point for point in points if point.seconds <= ended_s]
    return points, ended_s


def report(
    options: argparse.Namespace, its: Sequence[Record], absent: Mapping[table.Place, str]
) -> str:
    """Return table, goals, machine and command as Markdown."""
    found = table.rows(its, options.seconds)
    goals = [table.goal(found, t, s) for t, s in itertools.product(options.tasks, options.only)]
    versions = ", ".join(
        f"{name} {version}"
        for name, version in (launch.versions() | {"torchft": schemes.torchft()}).items()
    )
    words = " ".join(["python -m lab.studies.claim", *sys.argv[1:]])
    return "\n".join([
        table.table(found, absent, options.tasks, options.only, options.schemes),
        "",
        f"T = {options.seconds:g} s; {situations.LEARNERS} learners; seeds: {len(options.seeds)}. Mean ± "
        "half of a 95 % interval over seeds (Student's t).",
        "",
        *filter(None, goals),
        "",
        f"{machine()}, Linux; {versions}",
        "",
        f"    {words}",
    ])  # fmt: skip
