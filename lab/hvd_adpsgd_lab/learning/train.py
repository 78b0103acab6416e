"""Trains a task in virtual time, with a strategy of the library or a baseline."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.strategies import parse
from hvd_adpsgd_lab.learning.baselines import Baseline, parse_baseline, run_baseline
from hvd_adpsgd_lab.learning.faults import KINDS, LOCK_STEP_KINDS, checked
from hvd_adpsgd_lab.learning.outcome import Outcome
from hvd_adpsgd_lab.learning.run import Budget, EngineRun, Training
from hvd_adpsgd_lab.learning.task import Task, seed_torch
from hvd_adpsgd_lab.simulation.bounds import in_bound
from hvd_adpsgd_lab.simulation.planner import Cluster
from hvd_adpsgd_lab.simulation.scenario import Fault

LARGEST_N = 4096
_PATIENCE = 100  # times the expected duration, after which a run that waits for steps ends


def train(
    task: Task,
    cluster: Cluster,
    *,
    strategy: str | None = None,
    steps: int | None = None,
    faults: Sequence[Fault] = (),
    points: int = 50,
    threads: int = 1,
    replace_s: float | None = None,
    data: str = "dynamic",
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Train a task in virtual time; equal arguments give equal bits.

    Args:
        task: what is trained.
        cluster: the job and its cluster. Its `parameters` give the bytes of the model in messages, and may be
            more than those of the task's model.
        strategy: spec of a strategy, or of a baseline: "synchronous", or
            "diloco:period=50,rate=0.7,momentum=0.9". None: that of the cluster.
        steps: the run ends when the super learners have made `steps` times their number together. None: it
            ends after the minutes of the cluster.
        faults: faults beside the failures of the cluster; see faults.KINDS.
        points: number of points of the curve after the first one.
        threads: threads of torch.
        replace_s: seconds from the failure of a super learner until a replacement asks to join. Replacements
            are admitted one after the other, and fail at the rate of the cluster, too. None: no replacements.
            Synchronous training needs none: there each failure costs a restart, with a replacement.
        data: "dynamic": faster super learners make more steps, as with hvd.DynamicSampler; "equal": each
            makes `steps`, and then waits for the others, as with DistributedSampler.
        progress: called often, with the share of the run that is over.

    Raises:
        ConfigError: for a bad task, strategy, fault or number.
        NonFiniteModelError: if a loss is not finite.
        UnsupportedOptimizerError: if the optimizer needs a closure.
        AdpsgdError: if the strategy does not work with so many super learners.
    """
    n = cluster.super_learners
    in_bound("train: super_learners (--super-learners)", n, (1, LARGEST_N))
    in_bound("train: points (--points)", points, (1, 10**6))
    in_bound("train: threads (--threads)", threads, (1, 1024))
    if steps is not None:
        in_bound("train: steps (--steps)", steps, (1, 10**9))
    if data not in ("dynamic", "equal"):
        raise ConfigError(
            f"train: data={data!r} (--data): allowed are 'dynamic' and 'equal'. Change it."
        )
    if data == "equal" and (not steps or steps < 2 or faults or cluster.failures_per_hour):
        raise ConfigError(
            "train: data='equal' (--data) needs 2 steps or more (--steps), and no faults. Add --steps, and "
            "leave --fail and --fault out; --slow is allowed."
        )
    if replace_s is not None:
        in_bound("train: replace_s (--replace-after)", replace_s, (0.0, 1e9))
    if cluster.has_slow_links and (
        replace_s is not None or any(fault.kind == "join" for fault in faults)
    ):
        raise ConfigError(
            "train: super learners that join (--replace-after, --fault join) with slow links (--slow-links, "
            "--racks): theirs would be fast. Leave one out."
        )
    spec = cluster.config.averaging if strategy is None else strategy
    cluster, baseline, found = prepared(cluster, spec, faults)
    seconds = 60 * cluster.minutes
    if steps is not None:
        slowest = cluster.slow_factor if cluster.slow else 1.0
        waits_s = 3600 * (1 + len(found)) + sum(
            fault.value for fault in found if fault.kind != "slow"
        )
        seconds = _PATIENCE * steps * cluster.step_s * slowest + waits_s
    budget = Budget(None if steps is None else steps * n, seconds, points)
    with _torch_of_its_own(threads):
        seed_torch(cluster.seed, 0, 0)
        model = task.new_model()
        shown = progress or (lambda share: None)
        own_steps = steps if data == "equal" else None
        training = Training(task, model, cluster, found, budget, shown, replace_s, own_steps)
        if baseline is not None:
            return run_baseline(baseline, training)
        run = EngineRun(training)
        try:
            return run.run()
        finally:
            run.close()


def prepared(
    cluster: Cluster, spec: str, faults: Sequence[Fault]
) -> tuple[Cluster, Baseline | None, list[Fault]]:
    """Return the cluster with a strategy, or the baseline, and the faults in order; all are checked.

    Raises:
        ConfigError: for a bad strategy, baseline or fault.
        AdpsgdError: if the strategy does not work with so many super learners.
    """
    if not isinstance(spec, str):
        raise ConfigError(
            f"train: strategy is a {type(spec).__name__}, needed is its spec, as 'random_pairs'. Pass its "
            "spec()."
        )
    n, baseline = cluster.super_learners, parse_baseline(spec)
    if baseline is None:
        cluster = dataclasses.replace(cluster, config=cluster.config.replace(averaging=spec))
        parse(spec).plan(0, n)
    kinds = KINDS if baseline is None else LOCK_STEP_KINDS
    return cluster, baseline, checked(faults, n, kinds, spec)


@contextlib.contextmanager
def _torch_of_its_own(threads: int) -> Iterator[None]:
    """Context manager: torch's threads and random numbers are those of the run, and afterwards as before."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.set_num_threads(threads)
        try:
            with warnings.catch_warnings():
                # delayed_gradients does not step the optimizer in the first step, but the schedule
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                yield
        finally:
            torch.set_num_threads(before)
