"""With many super learners each does as much as with few, and departures are soon known."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hvd_adpsgd_lab.simulation.job import Job
from hvd_adpsgd_lab.simulation.network import Network
from hvd_adpsgd_lab.simulation.scenario import schedules

from hvd_adpsgd.engine.engine_options import EngineOptions


def leaving(n: int, steps: list[int]) -> tuple[Job, Network]:
    """Engines that leave after so many steps each."""
    network = Network(n, 1, 50e-6, 1.0, 1e9)
    job = Job(network, 2)
    for count, schedule in zip(steps, schedules("random_pairs", n), strict=True):
        model = np.zeros((1, 1))
        job.add(schedule, EngineOptions(0.5, deadline_s=5.0), model, count, 1e-3, 0.1)
    return job, network


@pytest.mark.parametrize("n", [2, 3, 16, 64])
def test_engines_that_leave_together_do_not_wait_for_each_other(n: int) -> None:
    job, _ = leaving(n, [20] * n)
    job.run(30)
    assert job.summary()["seconds"] < 0.1  # deadline: 5 s


@pytest.mark.parametrize("n", [2, 9, 64])
def test_who_stays_learns_of_all_that_leave_together(n: int) -> None:
    stays = {1, n // 2}
    job, _ = leaving(n, [60 if i in stays else 5 for i in range(n)])
    job.run_for(0.04)
    for i in stays:
        assert {j for j, state in enumerate(job.loop_of(i).peers()) if state == 0} <= stays


SCALE = """
import json, sys, time
from hvd_adpsgd_lab.simulation import planner
from hvd_adpsgd_lab.simulation.scenario import schedules
n, jobs, steps = map(int, sys.argv[1:])
def used():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
schedules("random_pairs", n)
before = used()
clusters = [planner.Cluster(n, 1e6, 0.35, 1.25e9, 50e-6, seed=seed) for seed in range(jobs)]
made = [planner._job(cluster)[0] for cluster in clusters]
def decay(job, c):
    found = []
    for part_s, is_measured in planner._parts(c):
        if not is_measured:
            break
        job.run_for(part_s)
        found.append(planner._distance(job, n))
    return planner._decay(planner._relative(found))
decays = [decay(job, c) for job, c in zip(made, clusters)]
turns = lambda: sum(job.summary()["turns"] for job in made)
first, began = turns(), time.process_time()
for _ in range(300 * steps):
    for job in made:
        job.run_for(0.35 / 300)
took = time.process_time() - began
print(json.dumps({"us": 1e6 * took / (turns() - first), "bytes": (used() - before) / (n * jobs),
                  "decay": sum(decays) / jobs, "theory": planner.theoretical_decay(n)}))
"""


def measured(n: int, jobs: int, steps: int) -> dict[str, float]:
    """Per turn and per engine, in a process of its own."""
    command = [sys.executable, "-c", SCALE, str(n), str(jobs), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.extended
def test_4096_super_learners_cost_each_what_16_do() -> None:
    """Memory per engine at most twice, contraction per exchange as in theory.

    CPU time per turn is printed and has no bound: what else runs decides what the caches hold.
    As many engines in each process, and about one turn of each between two of another, so that all find the
    caches alike.
    """
    found = {n: measured(n, 4096 // n, 3) for n in (16, 256, 4096)}
    for n, numbers in found.items():
        print(n, numbers)
    assert found[4096]["bytes"] <= 2 * found[16]["bytes"]
    for numbers in found.values():
        low, high = numbers["theory"]  # type: ignore[misc]
        assert 0.95 * low <= numbers["decay"] <= 1.05 * high
