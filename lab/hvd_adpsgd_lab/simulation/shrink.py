"""Shrinks a simulated job that breaks a promise: drops faults, steps, super learners and chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from hvd_adpsgd.errors import AdpsgdError, ConfigError
from hvd_adpsgd_lab.simulation.ledger import BrokenPromise
from hvd_adpsgd_lab.simulation.scenario import DEFAULTS, Fault, Scenario, run

MOST_RUNS = 400
_PLAIN: dict[str, Any] = {
    "later": 0,
    "elements": 1,
    "dtype": "float64",
    "hosts": (),
    "jitter": 0.0,
    "late": 0.0,
    "reports_s": 0.0,
    "rare_period": 1,
    "prefer": 0.0,
    "copy_every": 1,
    "aims": False,
}


def broken_by(scenario: Scenario) -> BrokenPromise | None:
    """Run a simulated job; return the promise (invariant) that the job breaks, None if it breaks none."""
    try:
        run(scenario)
    except BrokenPromise as broken:
        return broken
    except AdpsgdError:  # the strategy has no plan for so few super learners
        return None
    return None


def shrink(
    scenario: Scenario,
    broken: Callable[[Scenario], BrokenPromise | None] = broken_by,
    runs: int = MOST_RUNS,
) -> Scenario:
    """Return a minimal scenario that breaks the same promise as `scenario`: no part of it can be dropped.

    Args:
        scenario: a scenario that breaks a promise.
        broken: returns the promise that a scenario breaks, or None.
        runs: most scenarios to run; after them the smallest found so far is returned.

    Returns:
        The minimal scenario; `scenario` itself if it breaks no promise.
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
    """Yield scenarios that lack one part of the scenario `s`, those with the largest cuts first.

    Parts that others need are kept: a super learner that joins and then fails, the bits that a fault chooses.
    """
    for change in _changes(s):
        try:
            smaller = dataclasses.replace(s, **change)
        except ConfigError:
            continue
        yield smaller


def _changes(s: Scenario) -> Iterator[dict[str, Any]]:
    """Yield the fields that differ in a smaller scenario."""
    for kept in (s.faults[: len(s.faults) // 2], s.faults[len(s.faults) // 2 :]):
        if len(kept) < len(s.faults):
            yield {"faults": kept}
    for i in range(len(s.faults)):
        yield {"faults": s.faults[:i] + s.faults[i + 1 :]}
    for i in reversed(range(s.size)):
        if s.size > 2:
            yield _without(s, i)
    for steps in (s.steps // 2, s.steps - 1):
        if 1 <= steps < s.steps:
            yield {"steps": steps}
    for chunks in (1, s.chunks // 2, s.chunks - 1):
        if 1 <= chunks < s.chunks:
            yield {"chunks": chunks}
    yield from _plainer(s)


def _plainer(s: Scenario) -> Iterator[dict[str, Any]]:
    """Yield fields each of which has its simplest value, such as no jitter."""
    for name, value in _PLAIN.items():
        if getattr(s, name) != value:
            yield {name: value}
    for name in s.config.changes(DEFAULTS).keys() - {"averaging"}:
        yield {"config": s.config.replace(**{name: getattr(DEFAULTS, name)})}
    for name, value in (("spread", 0.0), ("node_s", 0.0)):
        if any(getattr(x, name) != value for x in s.learners):
            yield {"learners": tuple(dataclasses.replace(x, **{name: value}) for x in s.learners)}


def _without(s: Scenario, gone: int) -> dict[str, Any]:
    """Return the fields of the scenario without the super learner `gone` and the faults that concern it."""

    def now(i: int) -> int:
        return i - (i > gone)

    faults: list[Fault] = []
    for f in s.faults:
        if f.who == gone or (f.kind in ("cut", "sever", "suspect", "break") and gone in f.peers):
            continue
        peers = tuple(now(i) for i in f.peers if i != gone)
        faults.append(dataclasses.replace(f, who=now(f.who), peers=peers))
    return {
        "learners": s.learners[:gone] + s.learners[gone + 1 :],
        "hosts": s.hosts[:gone] + s.hosts[gone + 1 :],
        "faults": tuple(faults),
    }
