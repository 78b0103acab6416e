"""Alerts: finds problems of a run in its reports; a problem is reported once, and again if it returns."""

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hvd_adpsgd.watching.health import hung_after_s, median_speed, slow
from hvd_adpsgd.watching.reports import Report, can_draw, main_scalar

APART_S = 60.0  # alert if a super learner has had no exchange for this time
SILENT_S = 60.0  # alert if a super learner has not answered for this time
OPERATIONS = 0.5  # alert above this share of time in operations over all learners
LASTING_S = 30.0  # how long a super learner must be slow, or in such operations, before the alert
# how long it must be hung: not for the moment in which a stopped one continues
HUNG_LASTING_S = 10.0
# drifting: factor of the distance's rise, with a relative change of the loss below
RISE, FLAT = (3.0, 0.02)
# distance and loss: history kept, shortest history that is judged, interval of samples
HISTORY_S, SHORTEST_S, EVERY_S = 600.0, 120.0, 10.0
OVER_S = 300.0  # a problem that returns is reported again only after this time without it


@dataclass(frozen=True)
class Alert:
    """One problem of a run.

    Attributes:
        kind: silent, hung, apart, slow, operations, left_out or drifting.
        about: super_rank of the super learner that has the problem; None: all.
        text: what is wrong, where, the value against its bound, the cure.
    """

    kind: str
    about: int | None
    text: str


class Alerts:
    """Finds the problems of a run in the reports of all super learners.

    Args:
        names: host and learner of each super learner, by super_rank.
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._seen: dict[tuple[str, int | None], float] = {}  # time when a problem was last found
        # by kind of problem and super_rank: time since when the problem has lasted
        self._since: dict[str, dict[int, float]] = {}
        self._history: deque[tuple[float, float, float]] = deque()  # (time, distance, loss)

    def check(
        self,
        now_s: float,
        reports: Mapping[int, Report],
        alive: Collection[int],
        suspect: Mapping[int, float] = MappingProxyType({}),
    ) -> list[Alert]:
        """Return the problems that exist now and were not returned before.

        Args:
            now_s: time of a clock that is never set (time.monotonic).
            reports: the newest known report of each super learner, by super_rank.
            alive: super learners that are neither suspect, left nor failed.
            suspect: for each super learner that does not answer, since when, on the clock of `now_s`.
        """
        living = {i: report for i, report in reports.items() if i in alive}
        texts_by_kind = {
            "silent": self._silent(now_s, suspect),
            "hung": self._hung(now_s, living),
            "apart": self._apart(living),
            "slow": self._slow(now_s, living),
            "operations": self._operations(now_s, living),
            "left_out": self._left_out(living),
        }
        new = [
            Alert(kind, i, f"{self._who(i)} {text}")
            for kind, texts in texts_by_kind.items()
            for i, text in texts.items()
        ]
        return [one for one in new + self._drifting(now_s, living) if self._is_new(now_s, one)]

    def _is_new(self, now_s: float, alert: Alert) -> bool:
        key = alert.kind, alert.about
        before = self._seen.get(key, -math.inf)
        self._seen[key] = now_s
        return now_s - before > OVER_S

    def _who(self, i: int) -> str:
        name = f" ({self._names[i]})" if i < len(self._names) else ""
        return f"super learner {i}{name}"

    # Each of these methods returns what is wrong, by super_rank.

    def _silent(self, now_s: float, suspect: Mapping[int, float]) -> dict[int, str]:
        return {
            i: f"has not answered for {now_s - since:.0f} s (bound: {SILENT_S:.0f} s): it is stopped, "
            "its host is overloaded, or its link is cut. The others train on without it. Look at its "
            "processes and at its network."
            for i, since in suspect.items()
            if now_s - since >= SILENT_S
        }

    def _hung(self, now_s: float, living: Mapping[int, Report]) -> dict[int, str]:
        bounds = hung_after_s(living)
        return {
            i: f"has made no step for {living[i].idle_s:.0f} s (bound: {bounds[i]:.0f} s), although its "
            "process answers, and waits in no global collective and no pause of averaging: one of its "
            "learners hangs, or evaluates outside `with hvd.averaged(...)`. The others train on without it. "
            "Look at its data loading, file system and GPUs: `py-spy dump --pid PID` prints the line where a "
            "learner is."
            for i in self._lasting("hung", now_s, bounds, HUNG_LASTING_S)
        }

    def _apart(self, living: Mapping[int, Report]) -> dict[int, str]:
        """Find super learners that train without an exchange for 60 s and twice the usual number of steps."""
        return {
            i: f"has had no exchange for {r.apart_s:.0f} s and {r.apart_steps} steps (bound: {APART_S:.0f} s)"
            f": its model drifts from the others. {_cause(r)}"
            for i, r in living.items()
            if len(living) > 1
            and r.apart_s >= APART_S
            and r.apart_steps > 2 * max(r.due_steps, 1.0)
        }

    def _slow(self, now_s: float, living: Mapping[int, Report]) -> dict[int, str]:
        return {
            i: f"makes {living[i].steps_per_s:.3g} steps/s, less than half of the median "
            f"({median_speed(living):.3g}), for {now_s - since:.0f} s. The others do not wait for it. Look "
            "at that host: other jobs, its clock speed, its data loading."
            for i, since in self._lasting("slow", now_s, slow(living)).items()
        }

    def _operations(self, now_s: float, living: Mapping[int, Report]) -> dict[int, str]:
        busy = {i for i, r in living.items() if r.global_operations > OPERATIONS}
        return {
            i: f"spends {living[i].global_operations:.0%} of its time in operations over all learners (bound"
            f": {OPERATIONS:.0%}), waiting for the slowest. Call them less often, or with "
            "process_set=hvd.super_learner."
            for i in self._lasting("operations", now_s, busy)
        }

    def _left_out(self, living: Mapping[int, Report]) -> dict[int, str]:
        return {
            i: f"has {r.left_out} chunks that are never averaged: a value was not finite in the last 8 "
            "exchanges of each. A warning of that learner names the tensors."
            for i, r in living.items()
            if r.left_out
        }

    def _lasting(
        self, kind: str, now_s: float, whom: Collection[int], seconds: float = LASTING_S
    ) -> dict[int, float]:
        """Return when a problem of `whom` began, by super_rank, if it has lasted for so many seconds."""
        before = self._since.get(kind, {})
        self._since[kind] = since = {i: before.get(i, now_s) for i in whom}
        return {i: begun for i, begun in since.items() if now_s - begun >= seconds}

    def _drifting(self, now_s: float, living: Mapping[int, Report]) -> list[Alert]:
        """Find a consensus distance that has tripled within ten minutes while the loss has not changed."""
        distances = [r.distance for r in living.values() if can_draw(r.distance)]
        losses = [loss[1] for r in living.values() if (loss := main_scalar(r))]
        losses = [loss for loss in losses if can_draw(loss)]
        if not distances or not losses:
            return []
        if not self._history or now_s >= self._history[-1][0] + EVERY_S:
            self._history.append((now_s, statistics.median(distances), statistics.fmean(losses)))
        while self._history[0][0] < now_s - HISTORY_S:
            self._history.popleft()
        return self._risen(now_s)

    def _risen(self, now_s: float) -> list[Alert]:
        if now_s - self._history[0][0] < SHORTEST_S:
            return []
        quarter = max(1, len(self._history) // 4)
        old, new = list(self._history)[:quarter], list(self._history)[-quarter:]
        before, after = (statistics.median(d for _, d, _ in part) for part in (old, new))
        loss, lately = (statistics.fmean(x for _, _, x in part) for part in (old, new))
        if before <= 0 or after < RISE * before or abs(lately - loss) > FLAT * abs(loss):
            return []
        return [
            Alert(
                "drifting",
                None,
                f"the consensus distance has risen from {before:.3g} to {after:.3g} in "
                f"{(now_s - self._history[0][0]) / 60:.0f} min, {after / before:.1f} times (bound: "
                f"{RISE:g}), while the loss stays at {lately:.4g}: the models drift apart. Raise "
                "HVD_ADPSGD_EXCHANGES_PER_STEP, lower the learning rate, or use gossip_pga.",
            )
        ]


def _cause(report: Report) -> str:
    """Return the likely reason why a super learner has no exchanges, from its report, and the cure."""
    if 2 * report.nonfinite_steps >= report.apart_steps:
        return (
            f"Its model was not finite after {report.nonfinite_steps} steps, and such a model is not "
            "averaged: lower its learning rate, clip gradients, or restart it from a checkpoint."
        )
    if report.left_out:
        return (
            f"{report.left_out} chunks of its model are not finite and are left out: lower its learning "
            "rate, or clip gradients."
        )
    return "Look at its network; SIGUSR1 makes it write its state."
