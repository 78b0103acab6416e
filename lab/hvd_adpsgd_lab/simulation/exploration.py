"""The small jobs whose interleavings of events are explored exhaustively, and a table of the results.

`lab/ext/hvd_adpsgd_lab/simulation/explore.pyx` explains what is explored, and how.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd_lab.simulation.explore import Explorer

AT_ONCE, WITH_RECEIPT, AT_ANY_TIME = 0, 1, 2


@dataclass(frozen=True)
class Exploration:
    """A simulated job of two to four super learners, of which every interleaving of events is explored.

    Attributes:
        name: name of the job, for `--explore`.
        scripts: actions of each trainer: `o` offers a step, `p` publishes (the all-reduce of its super
            learner begins), `z` pauses, `r` resumes, `l` leaves, `b` leaves as failed.
        chunks: number of chunks of the model.
        crashes, suspicions: most crashes, and most suspicions, in a run; a suspicion takes a living peer for
            failed.
        deadlines, retries: how often deadlines, and pauses before retries, may elapse while other events are
            still possible.
        completion: when sends are complete: AT_ONCE, WITH_RECEIPT or AT_ANY_TIME.
        shared: whether the super learners are on one host and read each other's models in shared memory.
        ends: whether the end of a super learner's process is reported to the others after it has left.
        ring: each super learner asks its successor first; else the lowest other rank, so that asks cross.
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
    ends: bool = False
    ring: bool = False

    def schedules(self) -> list[list[int]]:
        """For each super learner, the peers that it asks for exchanges, in this order."""
        n = len(self.scripts)
        order = [[(i + k) % n for k in range(1, n)] for i in range(n)]
        return order if self.ring else [sorted(peers) for peers in order]

    def run(self, progress: Callable[[int], None] | None = None) -> Explored:
        """Explore every state that the job can reach, and return what was found.

        Args:
            progress: called now and then with the number of states so far.

        Raises:
            BrokenPromise: if an invariant does not hold in a state; names the choices that lead to it.
        """
        explorer = Explorer(
            self.scripts,
            self.schedules(),
            chunks=self.chunks,
            completion=self.completion,
            shared=self.shared,
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
    """Result of the exploration of one simulated job.

    Attributes:
        job: the explored job.
        states, transitions: number of different states, and of transitions between them.
        deepest: number of choices on the longest path.
        seconds: duration of the exploration.
        coverage: how often each message arrived in each state of an exchange, by (state, message).
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
    """Return a Markdown table with one row per exploration."""
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
            "shared" if job.shared else "own",
            f"{found.states:,}",
            f"{found.transitions:,}",
            found.deepest,
            f"{found.seconds / 60:.1f}",
        )
        rows.append("".join(f"| {cell} " for cell in cells) + "|")
    return "\n".join(rows)


TRIO = ("o", "o", "o")

# Jobs whose exploration takes seconds each.
IN_BRIEF = (
    Exploration("two", ("ool", "ool")),
    Exploration("two-crash", ("ol", "ol"), chunks=2, crashes=1),
    Exploration("two-cut", ("ol", "ol"), chunks=2, deadlines=1, completion=WITH_RECEIPT),
    Exploration("two-shared-memory", ("ol", "ol"), chunks=2, crashes=1, shared=True),
    Exploration("two-suspicion", ("ol", "ol"), suspicions=1),
    Exploration("two-pause", ("ozrol", "ol")),
    Exploration("three", TRIO),
)

# Jobs whose exploration takes minutes each.
AT_LENGTH = (
    Exploration("two-cut-and-crash", ("ol", "ol"), chunks=2, crashes=1, deadlines=2),
    Exploration("two-node", ("opol", "opol"), chunks=2, crashes=1),
    Exploration("two-node-and-cut", ("opol", "ol"), chunks=2, crashes=1, deadlines=1),
    Exploration(
        "two-shared-memory-cut", ("ol", "ol"), chunks=2, crashes=1, deadlines=2, shared=True
    ),
    Exploration("two-shared-memory-suspicion", ("ol", "ol"), chunks=2, suspicions=1, shared=True),
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
    """Return the explorations with these names; all of them if no name is given.

    Raises:
        ConfigError: for an unknown name.
    """
    jobs = {job.name: job for job in (*IN_BRIEF, *AT_LENGTH)}
    for name in names:
        if name not in jobs:
            raise ConfigError(
                f"--explore {name}: there is no such job. Pass one of: {', '.join(jobs)}."
            )
    return [jobs[name] for name in names] or list(jobs.values())
