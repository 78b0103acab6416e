"""Reports in simulated jobs: no promise breaks with them, and they spread whole and in time."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hvd_adpsgd_lab.simulation.job import Job
from hvd_adpsgd_lab.simulation.network import Network
from hvd_adpsgd_lab.simulation.scenario import Scenario, run

from hvd_adpsgd.engine.engine_options import EngineOptions
from hvd_adpsgd.watching.reports import REPORT_NBYTES

BLOCK = 50
MORE = pytest.mark.extended


def told_truly(job: Job, n: int) -> int:
    """Check what each engine knows of each: a report that was made, not newer than the newest. How many."""
    known = [job.loop_of(i).reports() for i in range(n)]
    for i in range(n):
        for j, (version, text, age_s) in known[i].items():
            assert 1 <= version <= known[j][j][0], (i, j, known)
            who, step = text.decode().split(" says ")
            newest, last = known[j][j][0], int(known[j][j][1].split()[-1])
            assert int(who) == j and int(step) <= last, (i, j, text, known[j][j])
            assert (version, text) == known[j][j][:2] or version < newest, (i, j, known)
            assert age_s >= 0
    return sum(len(each) for each in known)


@pytest.mark.parametrize("first", [0, *(pytest.param(50 * k, marks=MORE) for k in range(1, 4))])
def test_no_seed_breaks_a_promise_with_reports(first: int) -> None:
    told = 0
    for seed in range(first, first + BLOCK):
        scenario = Scenario.random(seed)
        step_s = min(learner.step_s for learner in scenario.learners)
        job = run(replace(scenario, reports_s=step_s / 2))
        told += told_truly(job, scenario.size)
    assert told > 10 * BLOCK


def options(rate: float, leave_deadline_s: float, report_s: float) -> EngineOptions:
    times = {"deadline_s": 1.0, "leave_deadline_s": leave_deadline_s, "report_s": report_s}
    return EngineOptions(0.5, rate, **times)  # type: ignore[arg-type]


def gossip(n: int, seconds: float) -> Job:
    """So many engines that step ten times per second and report once."""
    network = Network(n, 1, 1e-4, 1.0, 1e9)
    job = Job(network, 2, checks=False)
    model = np.zeros((1, 1))
    for i in range(n):
        peers = [(i + k) % n for k in range(1, n)]
        job.add(peers, options(0.1, 1.0, 1.0), model, 10**6, 0.1, 0.1)
    job.run_for(seconds)
    return job


@pytest.mark.parametrize(("n", "bound_s"), [(2, 10), (8, 10), (16, 15), (64, 60)])
def test_all_know_all_a_little_late(n: int, bound_s: float) -> None:
    """The oldest report that anyone knows, in steps of 0.1 s: after log2 n messages and n / 16 more."""
    job = gossip(n, 120.0)
    newest = [job.loop_of(j).reports()[j][0] for j in range(n)]
    ages = []
    for i in range(n):
        known = job.loop_of(i).reports()
        assert set(known) == set(range(n))
        ages += [(newest[j] - known[j][0]) * 0.1 for j in range(n) if j != i]
    print(f"n={n}: mean age {np.mean(ages):.1f} s, oldest {max(ages):.1f} s")
    assert max(ages) <= bound_s
    assert np.mean(ages) <= 2 * math.log2(2 * n) + n / 16


def test_reports_cost_one_message_per_second() -> None:
    """Of at most 48 + 16 * 216 bytes."""
    seconds = 60
    for nbytes, messages, _ in gossip(16, seconds).traffic():
        assert messages <= seconds * (1 + 4 * 2)  # and an exchange per second, whoever asks
        assert nbytes <= seconds * (48 + 16 * 216 + 400)


def test_reports_under_way_hold_nobody_who_leaves() -> None:
    """Nothing arrives at 1 from 0, which leaves: it waits half of its time, as without reports."""
    network = Network(3, 1, 1e-4, 1.0, 1e9, eager=0.0)
    job = Job(network, 2, checks=False)
    for _ in range(3):
        job.add([], options(0.0, 4.0, 0.1), np.zeros((1, 1)), 10**6, 0.1, 0.1)
    job.strike(0.0, "cut", 0, 1, 100.0)
    job.strike(2.0, "leave", 0)
    job.run_for(2.0)
    assert job.loop_of(0).view()["sending"]
    job.run_for(2.5)
    assert job.loop_of(0).view()["ended"]


def test_a_report_has_a_bound() -> None:
    job = gossip(2, 0.5)
    job.loop_of(0).report(b"x" * REPORT_NBYTES)
    with pytest.raises(ValueError, match="201 bytes; at most 200"):
        job.loop_of(0).report(b"x" * (REPORT_NBYTES + 1))
