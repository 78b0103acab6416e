"""Virtual time of training in lock-step: all wait for the slowest and average; what a failure costs them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_adpsgd_lab.simulation.chance import Chance
from hvd_adpsgd_lab.simulation.planner import Cluster, allreduce_s, failure_times
from hvd_adpsgd_lab.simulation.scenario import Fault

CHECKPOINT_S, RESTART_S = 30.0, 300.0  # as planner.synchronous_goodput


class LockStepClock:
    """The clock of a job in which a failure of one super learner stops all.

    After a failure the job restarts from its last checkpoint with a replacement, and repeats the steps since
    then. They give the same model again, so only time passes.

    Args:
        cluster: the job.
        faults: crash, stop and slow, beside the failures of the cluster.
        planned_s: expected duration, for the interval between checkpoints (Young's).

    Attributes:
        failed: number of failures.
        joined: number of replacements, one with each restart.
        training: the super learners that train.
    """

    def __init__(self, cluster: Cluster, faults: Sequence[Fault], planned_s: float):
        c = self._cluster = cluster
        self.failed = self.joined = 0
        n = c.super_learners
        self.training = set(range(n))
        self._chance, self._failures = Chance(c.seed + 2), Chance(c.seed + 3)
        self._at = [0.0] * n
        self._factor = [c.slow_factor if i < c.slow else 1.0 for i in range(n)]
        self._slow = [fault for fault in faults if fault.kind == "slow"]
        self._stops = [fault for fault in faults if fault.kind == "stop"]
        self._crashes = [fault.at_s for fault in faults if fault.kind == "crash"]
        self._rate = n * c.failures_per_hour / 3600
        self._next_failure_s = min((at_s for _, at_s in failure_times(c)), default=math.inf)
        rate = self._rate + len(self._crashes) / max(planned_s, 1e-9)
        self._interval_s = math.sqrt(2 * CHECKPOINT_S / rate) if rate > 0 else math.inf
        self._saved_s = 0.0  # when the work since the last checkpoint has begun, or begun again

    @property
    def now_s(self) -> float:
        """The time of the super learner that is farthest."""
        return max(self._at)

    def step(self) -> None:
        """Let every super learner compute a step."""
        c = self._cluster
        for i, at in enumerate(self._at):
            while self._slow and self._slow[0].at_s <= at:
                fault = self._slow.pop(0)
                self._factor[fault.who] = fault.value * (
                    c.slow_factor if fault.who < c.slow else 1.0
                )
            spread = 1 + c.spread * self._chance.between(-1, 1)
            self._at[i] = at + c.step_s * self._factor[i] * spread
        for fault in [f for f in self._stops if f.at_s <= self._at[f.who]]:
            self._stops.remove(fault)
            self._at[fault.who] += fault.value

    def meet(self, until_s: float) -> None:
        """Wait for the slowest and average; after failures restart, and now and then write a checkpoint.

        Args:
            until_s: end of the run; later failures are left out.
        """
        now = self.now_s + allreduce_s(self._cluster)
        while (failed_s := self._take_failure(now)) is not None and now <= until_s:
            self.failed += 1
            self.joined += 1
            begins_s = max(failed_s, self._saved_s) + RESTART_S
            now += begins_s - self._saved_s
            self._saved_s = begins_s
        if now - self._saved_s >= self._interval_s:
            now += CHECKPOINT_S
            self._saved_s = now
        self._at = [now] * len(self._at)

    def _take_failure(self, now: float) -> float | None:
        """Return the time of the next failure before `now`, which is over then; None if there is none."""
        if self._crashes and self._crashes[0] <= min(now, self._next_failure_s):
            return self._crashes.pop(0)
        if self._next_failure_s > now:
            return None
        failed_s = self._next_failure_s
        waits_s = self._failures.exponential(1 / self._rate)
        self._next_failure_s = max(failed_s, self._saved_s) + RESTART_S + waits_s
        return failed_s


class QuorumClock:
    """The clock of a job that averages with those that are there, if these are a quorum.

    A super learner that fails is noticed `detect_s` later, for which the others wait when they average. A
    replacement waits for the next mean.

    Args:
        cluster: the job.
        faults: crash, stop and slow, beside the failures of the cluster.
        quorum: share of all super learners without which nobody averages.
        replace_s: seconds from a failure until a replacement waits; None: there are no replacements.

    Attributes:
        failed, joined: number of failures, and of replacements.
        training: the super learners that train.
    """

    def __init__(
        self, cluster: Cluster, faults: Sequence[Fault], quorum: float, replace_s: float | None
    ):
        c = self._cluster = cluster
        n = c.super_learners
        self.failed = self.joined = 0
        self.training = set(range(n))
        self._chance, self._lives = Chance(c.seed + 2), Chance(c.seed + 3)
        self._at = [0.0] * n
        self._factor = [c.slow_factor if i < c.slow else 1.0 for i in range(n)]
        self._others = [fault for fault in faults if fault.kind != "crash"]
        self._crashes = [fault for fault in faults if fault.kind == "crash"]
        self._fails_s = [math.inf] * n
        for i, at_s in failure_times(c):
            self._fails_s[i] = at_s
        self._returns_s = [math.inf] * n
        self._least = max(1, math.ceil(quorum * n - 1e-9))
        self._replace_s = math.inf if replace_s is None else replace_s
        self._last_failed_s = -math.inf  # since the last mean

    @property
    def now_s(self) -> float:
        """The time of the super learner that is farthest."""
        return max(self._at)

    def step(self) -> None:
        """Let every super learner that trains compute a step; some fail in it."""
        c = self._cluster
        for i in sorted(self.training):
            began, spread = self._at[i], 1 + c.spread * self._chance.between(-1, 1)
            self._at[i] = began + c.step_s * self._factor[i] * spread
            for fault in [f for f in self._others if f.who == i and f.at_s <= self._at[i]]:
                self._others.remove(fault)
                if fault.kind == "stop":
                    self._at[i] += fault.value
                else:
                    self._factor[i] = fault.value * (c.slow_factor if i < c.slow else 1.0)
            for fault in [f for f in self._crashes if f.who == i and f.at_s <= self._at[i]]:
                self._crashes.remove(fault)
                self._fails_s[i] = min(self._fails_s[i], fault.at_s)
            if self._fails_s[i] <= self._at[i]:
                self._at[i] = began
                self.training.remove(i)
                self._returns_s[i] = self._fails_s[i] + self._replace_s
                self.failed += 1
                self._last_failed_s = max(self._last_failed_s, self._fails_s[i])

    def meet(self, until_s: float) -> None:
        """Wait for the slowest, and for a quorum, and average; replacements that wait train from then on.

        Args:
            until_s: end of the run.
        """
        now = max((self._at[i] for i in self.training), default=self.now_s)
        now = max(now, self._last_failed_s + self._cluster.detect_s) + allreduce_s(self._cluster)
        self._last_failed_s = -math.inf
        while now <= until_s:
            self._admit(now)
            if len(self.training) >= self._least:
                break
            now = min(self._returns_s)  # infinite: nobody comes any more
        self._at = [min(now, until_s + 1)] * len(self._at)  # without a quorum the run is over

    def _admit(self, now: float) -> None:
        hourly = self._cluster.failures_per_hour
        for i, at_s in enumerate(self._returns_s):
            if at_s <= now:
                self.training.add(i)
                self.joined += 1
                self._returns_s[i] = self._fails_s[i] = math.inf
                self._crashes = [f for f in self._crashes if f.who != i or f.at_s > now]
                if hourly > 0:
                    self._fails_s[i] = now + self._lives.exponential(3600 / hourly)
