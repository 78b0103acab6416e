"""Without MPI: learners that die at random moments, also in operations over all learners; no job hangs.

TEST_FAULTS=200 in the environment: that many jobs in place of twelve; TEST_FAULTS_SEED: the first seed.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.launcher import run_learners

pytestmark = [pytest.mark.extended, pytest.mark.slow]

FIRST = int(os.environ.get("TEST_FAULTS_SEED", "0"))
JOBS = int(os.environ.get("TEST_FAULTS", "12"))

PROGRAM = """
    import json, signal, threading
    import torch
    import hvd_adpsgd
    import hvd_adpsgd.torch as hvd
    fault = json.loads(sys.argv[1])
    hvd.init()

    def strike():
        time.sleep(fault["after_s"])
        os.kill(os.getpid(), getattr(signal, fault["how"]))

    if hvd.rank() in fault["victims"]:
        threading.Thread(target=strike, daemon=True).start()
    model = torch.nn.Linear(200, 300)
    done, ended = 0, None
    try:
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3),
            named_parameters=model.named_parameters(), averaging=fault["averaging"],
        )
        for step in range(fault["steps"]):
            optimizer.zero_grad()
            model(torch.ones(2, 200)).sum().backward()
            optimizer.step()
            done += 1
            if step % 10 == 0:
                hvd.allreduce(torch.ones(1), op=hvd.Sum)
            if step % 25 == 0:
                with hvd.averaged(model):
                    pass
        total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item()
        say(rank=hvd.rank(), done=done, total=total, failed=list(hvd.failed_ranks()))
    except (hvd_adpsgd.LearnerFailedError, hvd_adpsgd.PeerFailedError) as error:
        say(rank=hvd.rank(), done=done, lost=type(error).__name__, text=str(error))
"""


def job(seed: int) -> dict[str, Any]:
    """Sizes, strategy, victims and moment of one job."""
    drawn = random.Random(seed)
    size, learners = drawn.choice([(1, 3), (1, 4), (2, 4), (2, 6)])
    count = drawn.choice([1, 1, 1, 2])
    return {
        "size": size,
        "learners": learners,
        "averaging": drawn.choice(["random_pairs", "random_pairs", "delay_by_one", "fixed_ring"]),
        "steps": 150,
        "victims": drawn.sample(range(learners), count),
        "how": drawn.choice(["SIGKILL", "SIGKILL", "SIGSEGV"]),
        "after_s": drawn.uniform(0.0, 1.5),
    }


@pytest.mark.parametrize("seed", range(FIRST, FIRST + JOBS))
def test_the_others_end_and_agree(seed: int) -> None:
    import json

    fault = job(seed)
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(fault["size"]), "HVD_ADPSGD_LEAVE_DEADLINE_S": "2"}
    args = [json.dumps(fault)]
    result = run_learners(fault["learners"], PROGRAM, args=args, env=env, launcher="srun")
    report = f"seed {seed}: {fault}\n{result.report()}"
    size = fault["size"]
    hit = {victim // size for victim in fault["victims"]}
    others = [rank for rank in range(fault["learners"]) if rank // size not in hit]
    facts = {f["rank"]: f for f in result.said}
    assert set(others) <= set(facts), report
    if not result.said or any(facts[rank].get("lost") for rank in others):
        # only where an operation cannot do without the victim: while the optimizer is wrapped
        assert all(facts[rank]["done"] == 0 for rank in others), report
        return
    totals = {facts[rank]["total"] for rank in others}
    assert len(totals) <= 1, report  # one decision
    assert all(facts[rank]["done"] == fault["steps"] for rank in others), report
