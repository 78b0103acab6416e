"""The promises, seen from outside, of a script that was played."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import numpy as np

from hvd_adpsgd.lifecycle.exit_status import FAILED_STATUS
from tests.storm.script import drift
from tests.storm.story import Story

FATAL = ("kill", "segfault", "leave", "raise", "exit", "os_exit")
BY_SCRIPT = ("raise", "exit")  # with a status of its own, 1
SIGNALS = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV}
NOT_ENDED = "the status of the job may not tell"  # the library's warning
OVERLAP = 2.0  # see Interval.off_hull
LEAVES_S = 20.0  # promised are 5 s, on a machine that does nothing else; a deadline is 30 s or more
WIRE_EPS = 2.0**-5  # of some ten roundings to bfloat16


def judge(story: Story) -> None:
    """Append what is broken."""
    if story.broken and "every run ends" in story.broken[0]:
        return
    for promise in (
        _survives,
        _ends,
        _leave_soon,
        _same_inside,
        _one_decision,
        _statuses,
        _nothing_lost,
    ):
        story.broken += promise(story)


def _survives(story: Story) -> list[str]:
    """Whoever is not hit trains to the end; whoever is to join has joined."""
    broken, script = [], story.script
    ended = {note["pid"] for note in story.of("down")}
    wrapped = {note["pid"] for note in story.of("wrapped")}
    early = any(fault["place"] == "wrap" for fault in _fatal(story))
    for note in story.of("joined") + [n for n in story.of("initialized") if not n["new"]]:
        late = note["pid"] in wrapped or not early
        if _group(note) not in _hit(story) and note["pid"] not in ended and late:
            broken.append(
                f"survives: learner {note['rank']} of {note['who']} has not trained to its end"
            )
    present, expected = len(story.models.get(max(story.models, default=0), {})), script.n
    if script.joins == "candidate" and not _fatal(story):  # with a fault its listener may be lost
        expected += 1
    if script.joins and story.of("down") and present < expected:
        broken.append(
            f"who is missing is replaced, who asks to join joins: {present} of {expected} in the end"
        )
    return broken


def _ends(story: Story) -> list[str]:
    """Only one learner waits for the others to end: the first survivor."""
    waiting = story.errors.count(NOT_ENDED)
    return [f"every run ends: {waiting} learners wait for each other"] if waiting > 1 else []


def _leave_soon(story: Story) -> list[str]:
    """After SIGTERM, whatever the other learners of the super learner do."""
    asked = {note["who"]: note["at"] for note in story.of("fault") if note["kind"] == "leave"}
    took = [note["at"] - asked.get(note["who"], note["at"]) for note in story.of("left")]
    return [f"SIGTERM to the end: {s:.0f} s, over {LEAVES_S:g}" for s in took if s > LEAVES_S]


def _fatal(story: Story) -> list[dict[str, Any]]:
    """The faults that ended a learner: SIGTERM in shutdown() does not."""
    return [
        note
        for note in story.of("fault")
        if note["kind"] in FATAL and (note["kind"], note["place"]) != ("leave", "shutdown")
    ]


def _group(note: dict[str, Any]) -> tuple[int, bool]:
    """A super learner: one that was there at the start, or those that joined with its number."""
    return note["who"], note["new"]


def _hit(story: Story) -> set[tuple[int, bool]]:
    """Super learners of which a learner has committed a fault that ends it."""
    return {_group(note) for note in _fatal(story)}


def _same_inside(story: Story) -> list[str]:
    """Learners of a super learner hold the same model, to the bit."""
    seen: dict[tuple[int, int], str] = {}
    return [
        f"same in the super learner: {note['who']} at checkpoint {note['checkpoint']}"
        for note in story.of("checkpoint")
        if seen.setdefault((note["checkpoint"], note["who"]), note["bits"]) != note["bits"]
    ]


def _one_decision(story: Story) -> list[str]:
    """All count the same learners at the end, and take for failed those that were hit, and nobody else."""
    totals = {note["total"] for note in story.of("trained")}
    broken = [f"one decision: sums over all learners are {totals}"] if len(totals) > 1 else []
    failed = {who for who, _ in _failed(story)}
    for note in story.of("end"):
        wrong = {rank for rank in note["failed"] if rank // story.script.k not in failed}
        if wrong:
            broken.append(f"one decision: learner {note['rank']} takes {wrong} for failed")
    return broken


def _failed(story: Story) -> set[tuple[int, bool]]:
    """Super learners that were hit by more than SIGTERM."""
    return {_group(note) for note in _fatal(story) if note["kind"] != "leave"}


def _statuses(story: Story) -> list[str]:
    """As docs/failures.md says."""
    allowed = _of_mpirun(story) if story.script.launcher == "mpirun" else _of_each(story)
    told = FAILED_STATUS in story.statuses or not _must_tell(story)
    return ([] if told else [f"status {FAILED_STATUS} of the first survivor: {story.statuses}"]) + [
        f"status {status}, allowed are {sorted(which)}{f', learner {rank}' * (len(allowed) > 1)}"
        for rank, (status, which) in enumerate(zip(story.statuses, allowed, strict=True))
        if which and status not in which
    ]


def _of_mpirun(story: Story) -> list[set[int]]:
    """Of the command; an empty set allows any."""
    script, failed = story.script, _failed(story)
    hit = {who for who, is_new in _hit(story) if not is_new}
    late = {0} if _may_be_silent(story) else set()
    if not failed:
        return [{FAILED_STATUS} | late if len(hit) == script.n else {0}]
    if len(hit) == script.n:
        return [set()]
    allowed = {FAILED_STATUS} | late
    if any(note["kind"] in BY_SCRIPT or note["place"] == "wrap" for note in _fatal(story)):
        allowed.add(1)
    if script.joins:
        allowed.add(0)
    return [allowed]


def _must_tell(story: Story) -> bool:
    """Whether the first survivor must end with a status that tells of the failure, if nobody is replaced."""
    alone = all((who, False) in _hit(story) for who in range(story.script.n))
    fatal, exempt = _fatal(story), (*BY_SCRIPT, "leave")
    return (
        not (alone or story.script.joins or _may_be_silent(story))
        and any(note["kind"] not in exempt for note in fatal)
        and not any(note["place"] == "wrap" for note in fatal)
    )


def _may_be_silent(story: Story) -> bool:
    """Whether the job's status may be 0: nobody could notice, or all took long to end, as a warning says."""
    late = any(_is_late(story, note) for note in _fatal(story))
    return late or NOT_ENDED in story.errors


def _is_late(story: Story, note: dict[str, Any]) -> bool:
    """Whether a fault was committed when the learner's training was over: nobody may notice it."""
    return any(done["pid"] == note["pid"] for done in story.of("trained"))


def _of_each(story: Story) -> list[set[int]]:
    """Of each learner that was there at the start, by rank; an empty set allows any."""
    script, failed, hit = story.script, _failed(story), _hit(story)
    ranks = range(script.n * script.k)
    own = {rank: [n for n in _fatal(story) if n["rank"] == rank and not n["new"]] for rank in ranks}
    signals = {
        rank: {-SIGNALS[n["kind"]] for n in own[rank] if n["kind"] in SIGNALS} for rank in ranks
    }
    alone = all((rank // script.k, False) in hit for rank in ranks)
    early = any(note["place"] == "wrap" for note in _fatal(story))
    raised = {1} if any(note["kind"] == "raise" for note in _fatal(story)) else set()
    allowed: list[set[int]] = []
    for rank in ranks:
        group = (rank // script.k, False)
        left = {-signal.SIGTERM} if any(note["kind"] == "leave" for note in own[rank]) else set()
        late = {0} if any(_is_late(story, note) for note in own[rank]) else set()
        if signals[rank]:
            allowed.append(signals[rank] | left)
        elif group in failed or early:
            allowed.append(set())
        elif group in hit:
            allowed.append({-signal.SIGTERM} | late | ({FAILED_STATUS} if alone else set()))
        else:
            allowed.append({0, FAILED_STATUS, *raised} if failed else {0})
    return allowed


def _nothing_lost(story: Story) -> list[str]:
    """Between checkpoints models move by their own steps and by averaging only."""
    broken = []
    for interval in intervals(story):
        off, bound, law = interval.judged()
        if not off <= bound:
            broken.append(f"nothing lost: {law}, {interval}: {off:g} > {bound:g}")
    return broken


def intervals(story: Story) -> list[Interval]:
    """All that can be judged: between checkpoints at which no exchange was running still."""
    if not story.script.conserves:
        return []
    running = {note["checkpoint"] for note in story.of("checkpoint") if not note["rests"]}
    rested = sorted(story.models.keys() - running)
    return [Interval(story, first, then) for first, then in itertools.pairwise(rested)]


class Interval:
    """What lies between two checkpoints."""

    def __init__(self, story: Story, first: int, then: int):
        self.story, self.first, self.then = story, first, then
        self.before = {k: v.astype(np.float64) for k, v in story.models[first].items()}
        self.after = {k: v.astype(np.float64) for k, v in story.models[then].items()}
        at = {note["checkpoint"]: note for note in story.of("checkpoint")}
        self.steps = at[then]["step"] - at[first]["step"]
        self.stay = self.before.keys() & self.after.keys()
        self.lost = self.before.keys() - self.after.keys()
        self.averagings = max(note["averagings"] for note in story.of("checkpoint"))
        self.left = self._left(at[first]["step"])
        self.is_exact = self.lost <= self.left.keys() or self._is_at_rest()

    def __str__(self) -> str:
        return f"checkpoints {self.first} to {self.then}"

    def judged(self) -> tuple[float, float, str]:
        """How far off, how far off rounding explains, and the law."""
        every = [*self.before.values(), *self.after.values()]
        scale = max(1.0, *(float(np.abs(model).max()) for model in every))
        eps = float(np.finfo(self.story.script.dtype).eps)
        rounding = eps * scale * len(every) * (4 + self.steps + 4 * self.averagings)
        if self.is_exact:
            return self.off_sum(), rounding, "the sum moves by local updates only"
        margin = rounding + (WIRE_EPS * scale if self.story.script.rounds_on_wire else 0.0)
        return self.off_hull(), margin, "a model stays among what models were, and local updates"

    def _is_at_rest(self) -> bool:
        """Whether all that are lost were killed at the checkpoint, with no exchange under way."""
        rested = {
            note["who"]
            for note in _fatal(self.story)
            if note["kind"] in SIGNALS
            and (note["place"], note["checkpoint"]) == ("rest", self.first)
            and note["inner"] == 0
        }
        return self.lost <= rested

    def _left(self, step: int) -> dict[int, np.ndarray]:
        """Of those that have left in order, by exchanges alone: what averaging has made of their models."""
        script, held = self.story.script, {n["who"]: n["made"] for n in self.story.of("held")}
        if script.is_in_step or script.joins or not self.lost <= self.story.left.keys():
            return {}
        each = {who: drift(who, self.before[who].shape) for who in self.lost}
        return {who: self.story.left[who] - (held[who] - step) * each[who] for who in self.lost}

    def drift(self, who: int) -> np.ndarray:
        """What a super learner adds to its model in all."""
        return self.steps * drift(who, next(iter(self.before.values())).shape)

    def off_sum(self) -> float:
        """The mean over those that were there and stay, or have left in order; who joins gets the mean."""
        if not self.stay:
            return 0.0
        stays = [self.before[who] + self.drift(who) for who in self.stay]
        expected = np.mean([*stays, *(self.before[who] for who in self.left)], axis=0)
        found = np.mean([*self.after.values(), *self.left.values()], axis=0)
        return float(np.abs(found - expected).max()) * len(self.stay)

    def off_hull(self) -> float:
        """How far survivors are outside of what all models were, with the largest updates of each step.

        Of two exchanges that overlap, the second one is computed from a model without the first one's
        correction and leads beyond the mean: models may leave the range, by less than OVERLAP of its width.
        """
        models, drifts = list(self.before.values()), [self.drift(who) for who in self.before]
        high = np.max(models, axis=0) + np.maximum(np.max(drifts, axis=0), 0)
        low = np.min(models, axis=0) + np.minimum(np.min(drifts, axis=0), 0)
        beyond = 0.0 if self.story.script.is_in_step else OVERLAP * (high - low)
        return max(
            (
                float(max((x - high - beyond).max(), (low - beyond - x).max()))
                for x in self.after.values()
            ),
            default=0.0,
        )
