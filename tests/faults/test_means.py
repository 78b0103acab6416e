"""Strategies for which all wait go on with those that live: killed, or ended by an exception."""

from __future__ import annotations

import re

import pytest
from launcher import Result, run_learners

pytestmark = pytest.mark.mpi

N, STEPS = 4, 16
PROGRAM = """
    import signal, threading, torch
    import hvd_adpsgd.torch as hvd
    from hvd_adpsgd import engine
    hvd.init()
    torch.set_num_threads(1)
    rank, spec, how, victims = hvd.rank(), sys.argv[1], sys.argv[2], sys.argv[3]
    model = torch.nn.Linear(1000, 600).double()  # 5 MB: 19 chunks
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(), averaging=spec)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def die():
        say(rank=rank, died=step)
        os.kill(os.getpid(), signal.SIGKILL)

    def watch():
        '''Die in the middle of a mean: some chunks are merged, and not all.'''
        loop = optimizer._averaging.engine._loop
        chunks = optimizer._averaging.engine.layout.generations[0].last_chunk
        while True:
            done = loop.counters()["chunks"] % chunks
            if 3 < done < chunks - 3:
                say(rank=rank, died=step, done=done)
                os.kill(os.getpid(), signal.SIGKILL)

    def train(steps):
        global step
        for step in steps:
            if step == 5 and str(rank) in victims:
                if how == "between":
                    die()
                if how == "middle":
                    threading.Thread(target=watch, daemon=True).start()
                if how == "raise":
                    say(rank=rank, died=step)
                    raise ValueError("on purpose")
            optimizer.zero_grad()
            x = torch.full((2, 1000), (1.0 + rank) / 1000, dtype=torch.double)
            model(x).square().mean().backward()
            optimizer.step()

    train(range(STEPS))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(range(STEPS, STEPS + 4))  # means of what is there, and nothing new
    began = time.monotonic()
    say(rank=rank, steps=step + 1, distance=hvd.consensus_distance(model),
        moved=(model.weight - 0).abs().max().item(), means=hvd.metrics()["means"])
    hvd.shutdown()
    say(rank=rank, quick=time.monotonic() - began < 10)
""".replace("STEPS", str(STEPS))


def run(spec: str, how: str, victims: str) -> Result:
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "HVD_ADPSGD_LEAVE_DEADLINE_S": "2"}
    return run_learners(N, PROGRAM, args=[spec, how, victims], env=env, timeout=120)


@pytest.mark.parametrize(
    ("spec", "how", "victims"),
    [
        ("delay_by_one", "middle", "1"),
        ("delay_by_one", "between", "0,2"),
        ("delay_by_one", "raise", "0"),
        ("delay_by_one:reading=b", "middle", "0"),
        ("periodic_averaging:period=2,block_momentum=0.5", "middle", "0,1,2"),
        ("periodic_averaging:period=1", "between", "3"),
        ("global_average:every=2", "middle", "2"),
        ("global_average:every=2", "raise", "1"),
    ],
)
def test_a_mean_of_all_goes_on_over_the_living(spec: str, how: str, victims: str) -> None:
    """They make all their steps, agree with one another to rounding, and end."""
    result = run(spec, how, victims)
    lost = [int(v) for v in victims.split(",")]
    said = {facts["rank"]: facts for facts in result.by_rank()}
    assert all("died" in said[rank] and "steps" not in said[rank] for rank in lost), result.report()
    living = [said[rank] for rank in range(N) if rank not in lost]
    for facts in living:
        assert facts["steps"] == STEPS + 4, result.report()
        assert facts["distance"] < 1e-12, result.report()
        assert facts["quick"], result.report()
    assert len({facts["means"] for facts in living}) == 1
    if how != "raise":
        told = re.findall(r"learner (\d)\) is lost", result.stderr)
        assert {int(rank) for rank in told} == set(lost), result.report()
