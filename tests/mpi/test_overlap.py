"""Averaging during the gradient runs beside the computation: by the records of the timeline."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from hvd_adpsgd.watching.trace import learner_path
from tests.launcher import run_learners

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

PROGRAM = Path(__file__).parent / "programs" / "overlap.py"
BESIDE = ("delay_by_one", "delayed_gradients", "synchronous_gossip:order=awc+fixed_ring")
WAITING = ("periodic_averaging:period=1", "synchronous_gossip:order=atc+fixed_ring")
AVERAGING = {"mean of all", "exchange (asked)", "exchange (answered)"}
PATIENCE_S, SOON_S = 60.0, 0.5  # how long a learner lets the other one come to its computation

Interval = tuple[float, float]


@functools.cache
def traced() -> dict[str, list[dict[str, Any]]]:
    """The traces of each scheme: all events of both learners."""
    patience = dict.fromkeys(BESIDE, PATIENCE_S) | dict.fromkeys(WAITING, SOON_S)
    schemes = [f"{spec}={seconds}" for spec, seconds in patience.items()]
    with tempfile.TemporaryDirectory() as folder:
        run_learners(2, PROGRAM, args=[folder, *schemes]).checked()
        found = {}
        for i, spec in enumerate(patience):
            files = [learner_path(Path(folder, f"{i}.json"), rank) for rank in (0, 1)]
            found[spec] = [event for file in files for event in json.loads(file.read_text())]
        return found


def intervals(trace: list[dict[str, Any]], learner: int, names: set[str]) -> list[Interval]:
    """When what is named so ran, in microseconds."""
    mine = [r for r in trace if r.get("ph") == "X" and r["pid"] == learner and r["name"] in names]
    return sorted((r["ts"], r["ts"] + r["dur"]) for r in mine)


def beside(trace: list[dict[str, Any]], learner: int) -> list[float]:
    """Of each round, how much of it lies within computations of this learner."""
    computed = intervals(trace, learner, {"computation"})
    averaged = intervals(trace, learner, AVERAGING)
    assert len(averaged) == len(computed) == 6
    return [sum(max(0.0, min(b, d) - max(a, c)) for c, d in computed) for a, b in averaged]


@pytest.mark.parametrize("spec", BESIDE)
def test_averaging_during_the_gradient_runs_beside_the_computation(spec: str) -> None:
    """Nothing depends on how fast the machine is: each round ends while the learner that leads it
    computes, unless it waited for the round in its step.
    """
    for learner in (0, 1):
        shared = beside(traced()[spec], learner)
        assert min(shared[learner::2]) > 0, (spec, learner, shared)


@pytest.mark.parametrize("spec", WAITING)
def test_averaging_after_the_step_does_not(spec: str) -> None:
    """What the test above would see without overlap."""
    for learner in (0, 1):
        shared = beside(traced()[spec], learner)
        assert max(shared) == 0, (spec, learner, shared)
