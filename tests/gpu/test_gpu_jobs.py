"""Whole jobs on a GPU: learners that share it, or have one each. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.launcher import run_learners

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.mpi,
    pytest.mark.slow,
]

PROGRAM = """
    import torch
    import hvd_adpsgd.torch as hvd

    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    torch.manual_seed(hvd.super_rank())
    model = torch.nn.Linear(300, 100).to("cuda", getattr(torch, sys.argv[1]))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters())
    start = [p.detach().double().cpu().clone() for p in model.parameters()]
    moved = [torch.zeros_like(p) for p in start]
    torch.manual_seed(100 + hvd.rank())
    same = True
    for step in range(300):
        optimizer.zero_grad()
        (model(torch.randn(8, 300, device="cuda", dtype=model.weight.dtype))).square().mean().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            for m, p in zip(moved, model.parameters()):
                m -= 0.01 * p.grad.double().cpu()
            optimizer.step()
        mine = torch.cat([p.detach().flatten() for p in model.parameters()]).double().cpu()
        node = hvd.allgather(mine[None], process_set=hvd.super_learner)
        same = same and bool((node == node[0]).all())
    exchanges = hvd.metrics().get("exchanges", 0)
    with hvd.averaging_paused():
        expected = [hvd.allreduce(s + m) for s, m in zip(start, moved)]
        error = max(float((hvd.allreduce(p.detach().double().cpu()) - e).abs().max())
                    for p, e in zip(model.parameters(), expected))
    say(rank=hvd.rank(), same=same, error=error, exchanges=exchanges or 0)
    hvd.shutdown()
"""


@pytest.mark.parametrize(("learners", "size"), [(2, 1), (4, 2)])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float64", 1e-12)])
def test_the_mean_moves_by_gradients_only(
    learners: int, size: int, dtype: str, bound: float
) -> None:
    """And the learners of a super learner have the same bits after every step, sharing a GPU or not."""
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(size)}
    said = run_learners(learners, PROGRAM, args=[dtype], env=env).checked().by_rank()
    assert len(said) == learners
    assert sum(facts["exchanges"] for facts in said) > 0
    for facts in said:
        assert facts["same"], facts
        assert facts["error"] < bound, facts


BROADCAST = """
    import torch
    import hvd_adpsgd.torch as hvd

    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(30, 10).cuda()
    named = list(model.named_parameters())
    hvd.broadcast_parameters(named, root_rank=1)
    sums = [float(p.detach().double().sum()) for _, p in named]
    hvd.allreduce_(named[0][1], op=hvd.Sum, process_set=hvd.super_learner)
    sums.append(float(named[0][1].detach().double().sum()))
    say(rank=hvd.rank(), sums=sums)
    hvd.shutdown()
"""


def test_operations_of_one_super_learner_write_into_parameters() -> None:
    """Those are Horovod's; without NCCL torch's operations in its background thread write the result."""
    said = (
        run_learners(2, BROADCAST, env={"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}).checked().by_rank()
    )
    first, second = (facts["sums"] for facts in said)
    assert first == second
    assert abs(first[2] - 2 * first[0]) < 1e-4 * abs(first[0]) + 1e-5
