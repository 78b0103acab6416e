"""An engine with a core of its own."""

from __future__ import annotations

import os

import pytest

from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

CORES = sorted(os.sched_getaffinity(0))
PROGRAM = """
    import threading
    import torch
    before = sorted(os.sched_getaffinity(0))
    import hvd_adpsgd.torch as hvd
    def threads():
        return {int(t): sorted(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")}
    hvd.init()
    model = torch.nn.Linear(300, 300)
    known = set(threads())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
    new = {t: c for t, c in threads().items() if t not in known}
    own, main = sorted(os.sched_getaffinity(0)), threads()[os.getpid()]
    for _ in range(50):
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
    assert optimizer._averaging.engine.loop.wait_finished(1, 60.0)  # on one core its peer may be late
    exchanges = hvd.metrics()["exchanges"]
    hvd.shutdown()
    say(rank=hvd.rank() if hvd.is_initialized() else 0, before=before, own=own, main=main,
        new=list(new.values()), after=sorted(os.sched_getaffinity(0)), exchanges=exchanges)
"""


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_the_engine_runs_where_no_other_thread_does() -> None:
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "HVD_ADPSGD_ENGINE_CPUS": str(CORES[-1])}
    for facts in run_learners(2, PROGRAM, env=env).checked().said:
        assert facts["own"] == facts["main"] == CORES[:-1]
        assert [CORES[-1]] in facts["new"], "the engine's thread is not bound"
        assert all(cores in ([CORES[-1]], CORES[:-1]) for cores in facts["new"]), facts
        assert facts["after"] == facts["before"] == CORES
        assert facts["exchanges"] > 0


@pytest.mark.extended
def test_a_core_that_is_not_there_is_refused_on_all_learners() -> None:
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "HVD_ADPSGD_ENGINE_CPUS": "9999"}
    result = run_learners(2, PROGRAM, env=env)
    assert result.returncode != 0
    assert result.stderr.count("ConfigError: HVD_ADPSGD_ENGINE_CPUS=9999: core 9999:") == 2
