"""Every interleaving of a few engines: the small jobs that are explored exhaustively, and the report.

`ext/hvd_adpsgd/simulation/explore.pyx` says what is explored, and how.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.simulation.explore import Explorer

__all__ = ["AT_LENGTH", "IN_BRIEF", "Exploration", "Explored", "chosen", "table"]

AT_ONCE, WITH_RECEIPT, AT_ANY_TIME = 0, 1, 2


@dataclass(frozen=True)
class Exploration:
    """A job of two to four super learners, of which every interleaving is explored.

    Attributes:
        name: of the job.
        scripts: what each trainer does, as of Explorer: `o` offers a step, `p` publishes (the all-reduce
            of its super learner begins), `z` pauses, `r` continues, `l` leaves, `b` leaves as failed.
        chunks: of the model.
        crashes, suspicions: at most so many; a suspicion takes a living peer for failed.
        deadlines, retries: how often deadlines, and pauses before retries, pass while something else can
            happen.
        completion: when sends are complete: AT_ONCE, WITH_RECEIPT or AT_ANY_TIME.
        shared: the super learners are on one host.
        shown: ... and read each other's models where they lie.
        ends: the end of a super learner that has left is reported to the others.
        ring: each asks its successor first; else the one of the lowest rank, so that questions cross.
    """

    name: str
    scripts: tuple[str, ...]
    chunks: int = 1
    crashes: int = 0
    suspicions: int = 0
    deadlines: int = 0
    retries: int = 0
    completion: int = AT_ONCE
    shared: bool = False
    shown: bool = False
    ends: bool = False
    ring: bool = False

    def schedules(self) -> list[list[int]]:
        """Whom each asks."""
        n = len(self.scripts)
        order = [[(i + k) % n for k in range(1, n)] for i in range(n)]
        return order if self.ring else [sorted(peers) for peers in order]

    def run(self, progress: Callable[[int], None] | None = None) -> Explored:
        """Explore every state.

        Args:
            progress: called with the number of states so far.

        Raises:
            BrokenPromise: if a promise or an invariant does not hold somewhere, with the way there.
        """
        explorer = Explorer(
            self.scripts,
            self.schedules(),
            chunks=self.chunks,
            completion=self.completion,
            shared=self.shared,
            shown=self.shown,
            crashes=self.crashes,
            suspicions=self.suspicions,
            retries=self.retries,
            deadlines=self.deadlines,
            ends=self.ends,
        )
        began = time.monotonic()
        explorer.explore(progress and (lambda found: progress(found.states)))
        return Explored(
            self,
            explorer.states,
            explorer.transitions,
            explorer.deepest,
            time.monotonic() - began,
            Counter(explorer.covering()),
        )


@dataclass(frozen=True)
class Explored:
    """What an exploration has met.

    Attributes:
        states, transitions: how many differ, and how many ways lead from one to the next.
        deepest: choices on the longest way.
        coverage: (state of an exchange, message) -> how often.
    """

    job: Exploration
    states: int
    transitions: int
    deepest: int
    seconds: float
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)


COLUMNS = (
    *("trainers", "chunks", "crashes", "suspicions", "deadlines", "sends complete", "memory"),
    *("states", "transitions", "choices", "minutes"),
)


def table(explored: Iterable[Explored]) -> str:
    """One row of Markdown per exploration."""
    rows = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for found in explored:
        job = found.job
        cells = (
            ", ".join(job.scripts),
            job.chunks,
            job.crashes,
            job.suspicions,
            job.deadlines,
            ("at once", "with receipt", "at any time")[job.completion],
            "shown" if job.shown else "shared" if job.shared else "own",
            f"{found.states:,}",
            f"{found.transitions:,}",
            found.deepest,
            f"{found.seconds / 60:.1f}",
        )
        rows.append("".join(f"| {cell} " for cell in cells) + "|")
    return "\n".join(rows)


TRIO = ("o", "o", "o")

# Seconds each.
IN_BRIEF = (
    Exploration("two", ("ool", "ool")),
    Exploration("two-crash", ("ol", "ol"), chunks=2, crashes=1),
    Exploration("two-cut", ("ol", "ol"), chunks=2, deadlines=1, completion=WITH_RECEIPT),
    Exploration("two-shared-memory", ("ol", "ol"), chunks=2, crashes=1, shared=True),
    Exploration("two-shown", ("ol", "ol"), chunks=2, crashes=1, shared=True, shown=True),
    Exploration("two-suspicion", ("ol", "ol"), suspicions=1),
    Exploration("two-pause", ("ozrol", "ol")),
    Exploration("three", TRIO),
)

# Minutes.
AT_LENGTH = (
    Exploration("two-cut-and-crash", ("ol", "ol"), chunks=2, crashes=1, deadlines=2),
    Exploration("two-node", ("opol", "opol"), chunks=2, crashes=1),
    Exploration("two-node-and-cut", ("opol", "ol"), chunks=2, crashes=1, deadlines=1),
    Exploration(
        "two-shared-memory-cut", ("ol", "ol"), chunks=2, crashes=1, deadlines=2, shared=True
    ),
    Exploration(
        "two-shown-cut", ("ol", "ol"), chunks=2, crashes=1, deadlines=2, shared=True, shown=True
    ),
    Exploration(
        "two-shown-suspicion", ("ol", "ol"), chunks=2, suspicions=1, shared=True, shown=True
    ),
    Exploration("two-sends-at-any-time", ("ol", "ol"), chunks=1, completion=AT_ANY_TIME),
    Exploration("two-one-fails", ("ob", "ol"), chunks=2, crashes=1, ends=True),
    Exploration("two-suspicion-and-cut", ("ol", "ol"), chunks=2, suspicions=1, deadlines=1),
    Exploration("three-ring", TRIO, deadlines=1, ring=True),
    Exploration("three-leave", ("l", "l", "l")),
    Exploration("three-one-leaves", ("o", "o", "ol")),
    Exploration("three-silence", TRIO, deadlines=1),
    Exploration("three-crash", TRIO, crashes=1),
    Exploration("three-suspicion", TRIO, suspicions=1),
)


def chosen(names: Iterable[str]) -> list[Exploration]:
    """Those of these names; all for none.

    Raises:
        ConfigError: for a name that there is not.
    """
    jobs = {job.name: job for job in (*IN_BRIEF, *AT_LENGTH)}
    for name in names:
        if name not in jobs:
            raise ConfigError(
                f"--explore {name}: there is no such job. Pass one of: {', '.join(jobs)}."
            )
    return [jobs[name] for name in names] or list(jobs.values())
