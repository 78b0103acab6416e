"""The smallest scenario that still breaks a promise: drop faults, steps, super learners, chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from hvd_adpsgd.errors import AdpsgdError
from hvd_adpsgd.simulation.ledger import BrokenPromise
from hvd_adpsgd.simulation.scenario import Fault, Scenario, run

__all__ = ["broken_by", "shrink"]

MOST_RUNS = 400


def broken_by(scenario: Scenario) -> BrokenPromise | None:
    """The promise that a scenario breaks, None if it keeps all."""
    try:
        run(scenario)
    except BrokenPromise as broken:
        return broken
    except AdpsgdError:  # no plan for so few
        return None
    return None


def shrink(
    scenario: Scenario,
    broken: Callable[[Scenario], BrokenPromise | None] = broken_by,
    runs: int = MOST_RUNS,
) -> Scenario:
    """A scenario that breaks the same promise and from which no one thing can be dropped.

    Args:
        scenario: one that breaks a promise.
        broken: which one a scenario breaks.
        runs: at most so many; the smallest found so far is returned then.

    Returns:
        The scenario itself if it breaks none.
    """
    first = broken(scenario)
    if first is None:
        return scenario
    smaller = True
    while smaller and runs > 0:
        smaller = False
        for candidate in _smaller(scenario):
            runs -= 1
            found = broken(candidate)
            if found is not None and found.promise == first.promise:
                scenario, smaller = candidate, True
                break
            if runs <= 0:
                break
    return scenario


def _smaller(s: Scenario) -> Iterator[Scenario]:
    """Scenarios with one thing less, the largest cuts first."""
    for kept in (s.faults[: len(s.faults) // 2], s.faults[len(s.faults) // 2 :]):
        if len(kept) < len(s.faults):
            yield dataclasses.replace(s, faults=kept)
    for i in range(len(s.faults)):
        yield dataclasses.replace(s, faults=s.faults[:i] + s.faults[i + 1 :])
    for i in reversed(range(s.size)):
        if s.size > 2:
            yield _without(s, i)
    for steps in (s.steps // 2, s.steps - 1):
        if 1 <= steps < s.steps:
            yield dataclasses.replace(s, steps=steps)
    for chunks in (1, s.chunks // 2, s.chunks - 1):
        if 1 <= chunks < s.chunks:
            yield dataclasses.replace(s, chunks=chunks)
    yield from _plainer(s)


def _plainer(s: Scenario) -> Iterator[Scenario]:
    """The same with less of everything that is not needed."""
    plain = {
        "later": 0,
        "elements": 1,
        "wire": "",
        "dtype": "float64",
        "hosts": (),
        "jitter": 0.0,
        "late": 0.0,
        "max_staleness": 0,
        "reports_s": 0.0,
        "share": 1.0,
        "shown": False,
    }
    for name, value in plain.items():
        if getattr(s, name) != value:
            yield dataclasses.replace(s, **{name: value})  # type: ignore[arg-type]
    for name, value in (("spread", 0.0), ("node_s", 0.0)):
        if any(getattr(x, name) != value for x in s.learners):
            learners = tuple(dataclasses.replace(x, **{name: value}) for x in s.learners)
            yield dataclasses.replace(s, learners=learners)


def _without(s: Scenario, gone: int) -> Scenario:
    """Without one super learner, and without what happens to it."""

    def now(i: int) -> int:
        return i - (i > gone)

    faults: list[Fault] = []
    for f in s.faults:
        if f.who == gone or (f.kind in ("cut", "sever", "suspect", "break") and gone in f.peers):
            continue
        peers = tuple(now(i) for i in f.peers if i != gone)
        faults.append(dataclasses.replace(f, who=now(f.who), peers=peers))
    return dataclasses.replace(
        s,
        learners=s.learners[:gone] + s.learners[gone + 1 :],
        hosts=s.hosts[:gone] + s.hosts[gone + 1 :],
        faults=tuple(faults),
    )
