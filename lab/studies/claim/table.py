"""The table of all runs, and whether the goals are reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .curves import at_samples, last_until, mean_interval, time_to, told
from .records import Key, Record
from .schemes import TITLES
from .situations import GOALS, SITUATIONS

BASE, OURS = "ddp", "hadpsgd"
HEAD = (
    "| task | situation | scheme | samples/s | held-out loss at T | after as many samples as DDP | "
    "time to DDP's loss / DDP's time |"
)

Place = tuple[str, str, str]  # task, situation, scheme


@dataclass(frozen=True)
class Row:
    """What the runs of a scheme in a situation have shown, a value for each seed that has one.

    Attributes:
        seeds: number of runs.
        speed: samples per second of all learners, until T or the end of the job.
        loss: held-out loss at T or at the end of the job.
        equal: held-out loss after as many samples as DDP has used by then.
        part: time until the loss that DDP has at T, as a part of DDP's time.
        compared: number of runs of which DDP has one with the same seed.
        ended_s: when jobs ended by themselves.
    """

    seeds: int
    speed: list[float]
    loss: list[float]
    equal: list[float]
    part: list[float]
    compared: int
    ended_s: list[float]


def rows(records: Iterable[Record], seconds: float) -> dict[Place, Row]:
    """Return a row for each task, situation and scheme.

    Args:
        records: runs with equal settings.
        seconds: T.
    """
    by_key = {record.key: record for record in records}
    found: dict[Place, Row] = {}
    for key, record in sorted(by_key.items(), key=lambda item: item[0].seed):
        row = found.get(key.place) or Row(0, [], [], [], [], 0, [])
        base = by_key.get(Key(key.task, key.situation, BASE, key.seed))
        found[key.place] = _with(row, record, base, seconds)
    return found


def _with(row: Row, record: Record, base: Record | None, seconds: float) -> Row:
    end = last_until(record.curve, seconds)
    target = last_until(base.curve, seconds) if base else None
    equal = at_samples(record.curve, target.samples) if target else None
    reached = time_to(record.curve, target.loss) if target else None
    ended = record.ended_s
    return Row(
        row.seeds + 1,
        row.speed + ([end.samples / end.seconds] if end else []),
        row.loss + ([end.loss] if end else []),
        row.equal + ([equal] if equal is not None else []),
        row.part + ([reached / target.seconds] if target and reached is not None else []),
        row.compared + (target is not None),
        row.ended_s + ([ended] if ended is not None else []),
    )


def table(
    found: Mapping[Place, Row], absent: Mapping[Place, str], tasks: Sequence[str],
    situations: Sequence[str], schemes: Sequence[str],
) -> str:  # fmt: skip
    """Return the table as Markdown: a line for each task, situation and scheme."""
    lines = [HEAD, "|---|---|---|---|---|---|---|"]
    for task in tasks:
        for situation in situations:
            for scheme in schemes:
                place = task, situation, scheme
                row, why = found.get(place), absent.get(place)
                cells = _cells(row) if row else f"{why or 'no run'} | | |"
                title = SITUATIONS[situation].title
                lines.append(f"| {task} | {title} | {TITLES[scheme]} | {cells} |")
    return "\n".join(lines)


def _cells(row: Row) -> str:
    loss = told(row.loss)
    if row.ended_s:
        loss += f", ends after {told(row.ended_s, 0)} s"
    return f"{told(row.speed, 1)} | {loss} | {told(row.equal) or '–'} | {_part(row)}"


def _part(row: Row) -> str:
    """Return the part of DDP's time, and how many runs have got there if not all have."""
    if not row.compared:
        return "–"
    if len(row.part) == row.compared:
        return told(row.part)
    if not row.part:
        return "not reached"
    return f"{told(row.part)} in {len(row.part)} of {row.compared} runs"


def goal(found: Mapping[Place, Row], task: str, situation: str) -> str | None:
    """Return a line on a goal, reached or missed; None if the situation has none.

    A goal is reached if every run gets to DDP's loss, after a part of DDP's time whose mean over seeds is
    within the bound.
    """
    if situation not in GOALS:
        return None
    bound, row = GOALS[situation], found.get((task, situation, OURS))
    what = f"{task}, {SITUATIONS[situation].title}: goal at most {bound:.2f} of DDP's time"
    if row is None or not row.compared:
        return f"- {what}: not measured"
    whole = len(row.part) == row.compared
    reached = whole and mean_interval(row.part)[0] <= bound
    return f"- {what}: {_part(row)}, **{'reached' if reached else 'missed'}**"
