"""Simulates a training job: the real engines of all super learners in one process, in virtual time.

python -m hvd_adpsgd simulate --seed N                replay the scenario of a seed, and describe the run
python -m hvd_adpsgd simulate --seeds A B             run seeds A to B - 1; is any promise (invariant) broken?
python -m hvd_adpsgd simulate --super-learners 256 --model 350M --step 0.35s --network 10Gb/s,50us
                                                      predict speed and staleness on a cluster
python -m hvd_adpsgd simulate --train FILE.py --super-learners 16 --steps 300 --step 50ms --network 1Gb/s,50us
                                                      train the model of a file on that cluster
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_adpsgd.errors import AdpsgdError
from hvd_adpsgd_lab.simulate import progress, units
from hvd_adpsgd_lab.simulate.arguments import OPTIONS, parsed
from hvd_adpsgd_lab.simulate.files import check_different, check_image, check_writable
from hvd_adpsgd_lab.simulation import campaign, exploration
from hvd_adpsgd_lab.simulation.calibration import Calibration
from hvd_adpsgd_lab.simulation.chart import chart, write_timeline
from hvd_adpsgd_lab.simulation.ledger import BrokenPromise
from hvd_adpsgd_lab.simulation.planner import PATIENT, Cluster, Outcome, draw, plan
from hvd_adpsgd_lab.simulation.scenario import LONGEST_S, Scenario, job_of
from hvd_adpsgd_lab.simulation.shrink import shrink

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every promise was kept, 1 if one was broken, 2 for a wrong argument."""
    try:
        status = _run(parsed(__doc__, arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output has exited, as `head` does after its lines
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except AdpsgdError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("simulate: stopped", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    check_writable("--timeline", args.timeline)
    check_writable("--json", args.json)
    check_image("--figure", args.figure)
    check_different(("--json", args.json), ("--figure", args.figure))
    if args.train is not None:
        from hvd_adpsgd_lab.simulate import trained  # needs torch, which the other modes do without

        return trained.main(args, _cluster(args, 1.0))
    if args.super_learners is not None:
        return _plan(args)
    if args.seeds is not None:
        return _explore(args)
    if args.explore is not None:
        return _every_interleaving(args.explore)
    return _replay(args)


# ---- one scenario -------------------------------------------------------------------------------


def _replay(args: argparse.Namespace) -> int:
    scenario = (
        Scenario.random(args.seed) if args.scenario is None else Scenario.from_json(args.scenario)
    )
    broken = _told(scenario, args)
    if broken is None:
        return 0
    if not args.no_shrink:
        small = shrink(scenario)
        print(f"\nthe smallest scenario that breaks it too:\n  --scenario '{small.to_json()}'\n")
        _told(small, argparse.Namespace(chart=True, lines=args.lines or 60, timeline=None))
    return 1


def _told(scenario: Scenario, args: argparse.Namespace) -> BrokenPromise | None:
    """Run a simulated job, print it and its result; return the broken promise, None if all were kept."""
    print(scenario)
    job = job_of(scenario, trace=bool(args.chart or args.timeline))
    broken = None
    try:
        job.run(LONGEST_S)
    except BrokenPromise as found:
        broken = found
    if args.chart:
        print(f"\nms, by super learner\n{chart(job, scenario.processes, args.lines)}\n")
    if args.timeline:
        write_timeline(job, scenario.processes, args.timeline)
        print(f"timeline: {Path(args.timeline)}")
    print("".join(f"  {name} {value}" for name, value in job.summary().items()))
    print(f"BROKEN: {broken}" if broken else "every promise kept")
    return broken


# ---- the scenarios of many seeds ----------------------------------------------------------------


def _explore(args: argparse.Namespace) -> int:
    first, last = args.seeds
    kept = Path(args.keep) if args.keep else None
    try:
        report = campaign.explore(
            first, last, workers=args.workers, progress=progress.of_seeds(last - first), kept=kept
        )
    except KeyboardInterrupt:
        if kept is not None and kept.exists():
            done = campaign.Report.from_json(kept.read_text()).runs
            print(
                f"\n{done} of {last - first} seeds are in {kept}; the same command runs the others",
                file=sys.stderr,
            )
        raise
    print(report)
    for failure in report.failures[:1]:
        if not args.no_shrink:
            small = shrink(Scenario.random(failure.seed))
            print(
                f"\nthe smallest scenario found for seed {failure.seed}:\n  --scenario '{small.to_json()}'\n"
            )
            _told(small, argparse.Namespace(chart=True, lines=args.lines or 60, timeline=None))
    return 1 if report.failures else 0


# ---- every interleaving of a small job ----------------------------------------------------------


def _every_interleaving(names: Sequence[str]) -> int:
    explored = []
    for job in exploration.chosen(names):
        try:
            explored.append(job.run(progress.of_states(job.name)))
        except BrokenPromise as broken:
            print(f"{job.name}: BROKEN: {broken}")
            return 1
        print(f"{job.name}: {explored[-1].states:,} states, every promise kept", flush=True)
    print(f"\n{exploration.table(explored)}")
    return 0


# ---- a cluster ----------------------------------------------------------------------------------


def _cluster(args: argparse.Namespace, parameters: float) -> Cluster:
    bytes_per_s, latency_s = units.network(args.network)
    slow, slow_factor = units.slow(args.slow)
    slow_links, slow_links_factor = units.slow_links(args.slow_links)
    racks, racks_factor = units.racks(args.racks)
    return Cluster(
        super_learners=args.super_learners,
        parameters=parameters,
        step_s=units.seconds(args.step),
        bytes_per_s=bytes_per_s,
        latency_s=latency_s,
        config=units.options(
            args.options, averaging=OPTIONS["strategy"].default if args.train else args.strategy
        ),
        minutes=args.minutes,
        slow=slow,
        slow_factor=slow_factor,
        slow_links=slow_links,
        slow_links_factor=slow_links_factor,
        racks=racks,
        racks_factor=racks_factor,
        failures_per_hour=units.failures(args.fail),
        seed=args.random_seed,
        calibration=Calibration.read(args.calibration) if args.calibration else None,
    )


def _plan(args: argparse.Namespace) -> int:
    cluster = _cluster(args, units.model(args.model))
    print(_told_cluster(cluster), flush=True)  # flushed, because plan() may take minutes
    outcome = plan(cluster, progress.of_plan())
    print(_told_plan(cluster, outcome))
    if args.json:
        Path(args.json).write_text(outcome.to_json(cluster))
    if args.figure:
        draw(outcome, args.figure)
    return 0


_FULL = 0.85  # share of a link's bytes per second from which exchanges are reported to wait for the link


def _told_cluster(c: Cluster) -> str:
    slow = f", {c.slow} of them {c.slow_factor:g} times slower" if c.slow else ""
    options = {"averaging": c.config.averaging, **c.config.changes(PATIENT)}
    links = (
        f", {c.slow_links:.0%} of the pairs {c.slow_links_factor:g} times slower"
        if c.slow_links
        else ""
    )
    links += f", {c.racks_factor:g} times slower between {c.racks} racks" if c.racks > 1 else ""
    fails = f", {c.failures_per_hour:g} failures per hour of each" if c.failures_per_hour else ""
    return (
        f"{c.super_learners} super learners{slow}{fails}: {c.parameters / 1e6:g} M parameters, steps of "
        f"{c.step_s:g} s, links of {c.bytes_per_s / 1e6:g} MB/s and {1e6 * c.latency_s:g} us{links}, "
        f"{c.minutes:g} minutes, seed {c.seed}{''.join(f', {n}={v}' for n, v in options.items())}"
    )


def _told_plan(cluster: Cluster, o: Outcome) -> str:
    theory = ", in theory {:.3f} to {:.3f},".format(*o.decay_in_theory) if o.decay_in_theory else ""
    decay = f"{o.decay:.3f}{theory}" if o.decay is not None else "not seen"
    per_s = f", {o.decay_per_s:.3g} per second" if o.decay_per_s is not None else ""
    stale = f"{o.staleness_mean:.1f} steps, 99 % within {o.staleness_99}"
    sent, link = o.bytes_per_s[0] / 1e6, cluster.bytes_per_s / 1e6
    full = (
        ": exchanges wait for the link, models are staler than in theory"
        if sent > _FULL * link
        else ""
    )
    rows = [
        ("steps kept", f"{o.steps_kept:.1%} of the steps without waits, slowness and failures"),
        (
            "synchronous",
            f"{o.synchronous_kept:.1%} (model: ring all-reduce, checkpoints, restarts)",
        ),
        ("exchanges per step", f"{o.exchanges_per_step:.2f} of a super learner, asked and served"),
        ("staleness", stale if o.exchanges_per_step else "not seen"),
        ("consensus decay", f"{decay} per exchange of a super learner{per_s}, squared distance"),
        (
            "sent",
            f"{sent:.0f} MB/s per super learner, most {o.bytes_per_s[1] / 1e6:.0f}, of {link:.0f} of its link"
            f"{full}",
        ),
        ("connections", f"{o.peers[0]:.0f} per super learner, most {o.peers[1]}"),
        ("failed", f"{o.failed} of {cluster.super_learners}"),
        (
            "simulated in",
            f"{o.seconds_of_simulation:.1f} s, {o.us_per_turn:.2f} us per turn of an engine",
        ),
    ]
    return "\n".join(f"{name:>20}  {value}" for name, value in rows)
