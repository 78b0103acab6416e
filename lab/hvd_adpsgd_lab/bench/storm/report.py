"""What a run has shown: steps of the living, who takes part, replacements, hangs. Arithmetic on its lines."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_adpsgd_lab.bench.storm.driver import driver_file
from hvd_adpsgd_lab.bench.storm.notes import lines

LONG_S = 120.0  # of a life whose growth is judged
HANG_S = 60.0  # without a step, of a slot that is neither dead nor stopped
Span = tuple[float, float]


@dataclass(frozen=True)
class Step:
    """A step that a learner has made.

    Attributes:
        t: when it was complete, in seconds.
        n: its number.
        exchanges: exchanges (torchft: syncs; horovod: steps) of this learner since the step before.
        sent: bytes sent since the step before.
        sync, participants: number of a sync that this step has committed, and of its replicas; else None.
        admit_s: seconds in hvd.admit since the step before.
    """

    t: float
    n: int
    exchanges: int
    sent: int
    sync: int | None = None
    participants: int | None = None
    admit_s: float = 0.0


@dataclass(frozen=True)
class Life:
    """A learner: what one process of a slot has done.

    Attributes:
        slot: its slot.
        started, imported: times of these events; imported is None if it has not come so far.
        steps: its steps.
        held: memory (bytes) and descriptors, as noted by time.
    """

    slot: int
    started: float
    imported: float | None
    steps: list[Step]
    held: list[dict[str, Any]]


class Run:
    """A run, read from the lines of its driver and its learners.

    Args:
        driver: lines of the driver.
        learners: lines of each learner.
        slots: number of slots.

    Attributes:
        window: begin and end of the run, in seconds of the clock of all lines.
        lives: learners by the time of their start.
    """

    def __init__(
        self, driver: Sequence[dict[str, Any]], learners: Iterable[list[dict[str, Any]]], slots: int
    ):
        self.driver, self.slots = driver, slots
        at = {line["event"]: line["t"] for line in driver}
        self.window: Span = (at["began"], at["over"])
        self.lives = sorted((_life(lines) for lines in learners if lines), key=lambda x: x.started)

    @classmethod
    def of(cls, folder: Path, slots: int) -> Run:
        """Return the run of a folder."""
        learners = [list(lines(file)) for file in sorted(folder.glob("learner-*.jsonl"))]
        return cls(list(lines(driver_file(folder))), learners, slots)

    def of_driver(self, event: str) -> list[dict[str, Any]]:
        """Return the driver's lines of an event."""
        return [line for line in self.driver if line["event"] == event]

    def of_slot(self, slot: int) -> list[Life]:
        """Return the learners of a slot, by time."""
        return [life for life in self.lives if life.slot == slot]

    def steps(self, slot: int) -> list[Step]:
        """Return the steps of a slot in the window."""
        first, last = self.window
        return [s for life in self.of_slot(slot) for s in life.steps if first < s.t <= last]

    def back(self, slot: int, t: float) -> Life | None:
        """Return the learner that replaces one killed at time t: the next one that has made a step."""
        later = (life for life in self.of_slot(slot) if life.started > t and life.steps)
        return next(later, None)

    def gone(self, slot: int) -> list[Span]:
        """Return when a slot was dead (until its replacement's first step) or stopped, without overlaps.

        A stop is over when the process is continued, is killed, or another one takes its place.
        """
        spans = []
        for line in self.driver:
            if line.get("slot") != slot:
                continue
            if line["event"] == "kill":
                found = self.back(slot, line["t"])
                spans.append((line["t"], found.steps[0].t if found else math.inf))
            elif line["event"] == "stop":
                ends = [
                    other["t"] for other in self.driver
                    if other["event"] in ("continued", "kill", "spawned") and other["slot"] == slot
                    and other["t"] > line["t"]
                ]  # fmt: skip
                spans.append((line["t"], min(ends, default=math.inf)))
        return united(spans, self.window)

    def living_s(self, slot: int, within: Span | None = None) -> float:
        """Return for how many seconds of the window, or of a part of it, a slot was there and not stopped.

        A second in which its steps take f times as long counts as 1 / f seconds.
        """
        a, b = within or self.window
        lost = _length(united(self.gone(slot), (a, b)))
        for line in self.of_driver("slow"):
            if line["slot"] == slot:
                part = (max(a, line["t"]), min(b, line["t"] + line["seconds"]))
                slow_s = max(0.0, part[1] - part[0]) - _length(united(self.gone(slot), part))
                lost += slow_s * (1 - 1 / line["factor"])
        return b - a - lost

    def living(self, t: float) -> int:
        """Return the number of slots that are there and not stopped at time t."""
        return sum(not any(a <= t < b for a, b in self.gone(slot)) for slot in range(self.slots))


def united(spans: Iterable[Span], within: Span) -> list[Span]:
    """Return the union of spans, as far as it lies in `within`, as spans that do not overlap."""
    found: list[Span] = []
    for a, b in sorted((max(a, within[0]), min(b, within[1])) for a, b in spans):
        if b <= a:
            continue
        if found and a <= found[-1][1]:
            found[-1] = (found[-1][0], max(b, found[-1][1]))
        else:
            found.append((a, b))
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(b - a for a, b in spans)


def _life(lines: Sequence[dict[str, Any]]) -> Life:
    imported = [line["t"] for line in lines if line["event"] == "imported"]
    return Life(
        slot=lines[0]["slot"],
        started=lines[0]["t"],
        imported=imported[0] if imported else None,
        steps=list(_steps(line for line in lines if line["event"] == "step")),
        held=[line for line in lines if line["event"] == "held"],
    )


def _steps(lines: Iterable[dict[str, Any]]) -> Iterator[Step]:
    """Yield steps; counts begin at 0 again when a super learner joins, with new engines."""
    exchanges = sent = 0
    admit_s = 0.0
    for line in lines:
        told, bytes_, admits_s = line["exchanges"], line.get("sent", 0), line.get("admit_s", 0.0)
        yield Step(
            line["t"], line["n"],
            told - exchanges if told >= exchanges else told,
            bytes_ - sent if bytes_ >= sent else bytes_,
            line.get("sync"), line.get("participants"), admits_s - admit_s,
        )  # fmt: skip
        exchanges, sent, admit_s = told, bytes_, admits_s


# ---- numbers ------------------------------------------------------------------------------------


def summary(run: Run, is_redone: bool) -> dict[str, Any]:
    """Return what one run has shown.

    Args:
        run: the run.
        is_redone: whether steps are made again after a restart from a checkpoint: these count once.
    """
    slots = range(run.slots)
    living_s = sum(run.living_s(slot) for slot in slots)
    made = [step for slot in slots for step in run.steps(slot)]
    kept = len({(i, s.n) for i in slots for s in run.steps(i)}) if is_redone else len(made)
    return {
        "steps_per_living_s": kept / living_s,
        "exchanges_per_living_s": sum(step.exchanges for step in made) / living_s,
        "participation": _participation(run),
        "in_admit": sum(step.admit_s for step in made) / living_s,
        **_replacements(run),
        "redone_steps": len(made) - kept,
        "hangs": sum(hangs(run, slot) for slot in slots),
        "ended_by_themselves": sum(
            line["status"] not in (None, -9) for line in run.of_driver("ended")
        ),
        "killed_at_the_end": sum(line["killed"] for line in run.of_driver("closed")),
        "sent_mb": sum(step.sent for step in made) / 1e6 or None,
        **_held(run),
        "faults": _counts(line["event"] for line in run.driver),
        "left_out": _counts(
            f"{line['kind']} ({line['why']})" for line in run.of_driver("left_out")
        ),
    }


def _participation(run: Run) -> float | None:
    """Return the mean share of the living that take part in a sync; None without syncs."""
    shares = [share for _, share in syncs(run)]
    return statistics.mean(shares) if shares else None


def syncs(run: Run) -> list[Span]:
    """Return (time, participants / living slots) of each committed sync.

    Replicas of different quorums may commit a sync of the same number: its largest quorum counts.
    """
    found: dict[int, Step] = {}
    for slot in range(run.slots):
        for step in run.steps(slot):
            if step.sync is None or step.participants is None:
                continue
            known = found.get(step.sync)
            if known is None or step.participants > (known.participants or 0):
                found[step.sync] = step
    return sorted((s.t, (s.participants or 0) / max(run.living(s.t), 1)) for s in found.values())


def _replacements(run: Run) -> dict[str, Any]:
    times, without, exchanged, missing = [], [], [], 0
    for line in run.of_driver("kill"):
        life = run.back(line["slot"], line["t"])
        if life is None:
            missing += 1
            continue
        times.append(life.steps[0].t - line["t"])
        without.append(times[-1] - (_spawned_to_imported(run, life) or 0.0))
        exchanged += [step.t - line["t"] for step in life.steps if step.exchanges][:1]
    return {
        **_median_and_worst("kill_to_step_s", times),
        **_median_and_worst("kill_to_step_without_imports_s", without),
        **_median_and_worst("kill_to_exchange_s", exchanged),
        "not_replaced": missing,
    }


def _spawned_to_imported(run: Run, life: Life) -> float | None:
    spawned = [line["t"] for line in run.of_driver("spawned") if line["slot"] == life.slot]
    at = max((t for t in spawned if t <= life.started), default=life.started)
    return None if life.imported is None else life.imported - at


def _median_and_worst(name: str, values: Sequence[float]) -> dict[str, float | None]:
    median = statistics.median(values) if values else None
    return {name: median, f"{name}_worst": max(values, default=None)}


def hangs(run: Run, slot: int) -> int:
    """Return how often a slot made no step for HANG_S, while it was neither dead nor stopped."""
    times = [run.window[0], *(step.t for step in run.steps(slot)), run.window[1]]
    gaps = itertools.pairwise(times)
    return sum(run.living_s(slot, gap) >= HANG_S for gap in gaps)


def _held(run: Run) -> dict[str, float | None]:
    last = [
        life.held[-1] for slot in range(run.slots) for life in run.of_slot(slot)[-1:] if life.held
    ]
    rss = [line["rss"] / 2**20 for line in last]
    long = [
        life.held for life in run.lives if len(life.held) >= 4 and _seconds(life.held) >= LONG_S
    ]
    return {
        "rss_mib": statistics.median(rss) if rss else None,
        "descriptors": max((line["descriptors"] for line in last), default=None),
        "lives_of_2_min": len(long),
        "rss_growth_mib": max((growth(held, "rss") / 2**20 for held in long), default=None),
        "descriptor_growth": max((growth(held, "descriptors") for held in long), default=None),
    }


def _seconds(held: Sequence[dict[str, Any]]) -> float:
    return float(held[-1]["t"] - held[0]["t"]) if held else 0.0


def growth(held: Sequence[dict[str, Any]], what: str) -> float:
    """Return by how much the median of the last quarter of a life exceeds that of its second quarter."""
    values, quarter = [line[what] for line in held], len(held) // 4
    late, early = values[-quarter:], values[quarter : 2 * quarter]
    return float(statistics.median(late) - statistics.median(early))


def _counts(words: Iterable[str]) -> str:
    counted = Counter(word for word in words if word.split()[0] in ("kill", "stop", "slow", "cut"))
    return ", ".join(f"{count} {word}" for word, count in sorted(counted.items())) or "none"


def jump(losses: Sequence[Span]) -> float | None:
    """Return the largest rise of the loss between two times; 0 if it never rises, None below two times."""
    rises = [b[1] - a[1] for a, b in itertools.pairwise(losses)]
    return max(0.0, *rises) if rises else None


def compared(storm: dict[str, Any], calm: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a run with faults, with its ratios to a run without."""
    ratio = storm["exchanges_per_living_s"] / (calm["exchanges_per_living_s"] or math.nan)
    told = storm["participation"]
    return {
        "steps_kept": storm["steps_per_living_s"] / (calm["steps_per_living_s"] or math.nan),
        **storm,
        "participation": ratio if told is None else told,
        "exchanges_kept": ratio,
        **{f"calm_{name}": calm[name] for name in _BESIDE if name in calm},
    }


_BESIDE = ("steps_per_living_s", "exchanges_per_living_s", "participation", "loss", "jump", "rss_mib",
           "descriptors", "hangs")  # fmt: skip


def participation_over_time(run: Run, calm_per_s: float, bin_s: float) -> list[Span]:
    """Return (seconds since the begin, participation) of parts of the window.

    Args:
        run: the run.
        calm_per_s: exchanges per slot and second of the fault-free run.
        bin_s: length of a part.
    """
    began, over = run.window
    found, known = [], syncs(run)
    for i in range(int((over - began) / bin_s)):
        part = (began + i * bin_s, began + (i + 1) * bin_s)
        if known:
            shares = [share for t, share in known if part[0] < t <= part[1]]
            value = statistics.mean(shares) if shares else None
        else:
            value = _kept_in(run, part, calm_per_s)
        if value is not None:
            found.append((part[1] - began, value))
    return found


def _kept_in(run: Run, part: Span, calm_per_s: float) -> float | None:
    living_s = sum(run.living_s(slot, part) for slot in range(run.slots))
    made = sum(
        step.exchanges for i in range(run.slots) for step in run.steps(i) if part[0] < step.t <= part[1]
    )  # fmt: skip
    return made / living_s / calm_per_s if living_s and calm_per_s else None
