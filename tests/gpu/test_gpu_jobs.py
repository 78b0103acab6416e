"""Whole jobs on a GPU: learners that share it, or have one each. Skipped without a GPU.

NCCL takes learners on one GPU for learners of several hosts here (NCCL_HOSTID), as it refuses two on one.
"""

import pytest
import torch

from tests.launcher import Result, run_learners

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.mpi,
    pytest.mark.slow,
]

INNER = ["torch gloo", "torch nccl", "horovod", "horovod nccl"]

START = """
    import os
    if os.environ["TEST_WAY"].endswith("nccl"):
        os.environ["NCCL_HOSTID"] = str(os.getpid())
    import torch
    import hvd_adpsgd.torch as hvd

    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
"""

PROGRAM = (
    START
    + """
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
)


def run(way: str, learners: int, size: int, program: str, *args: str) -> Result:
    """Run a job with `way` inside super learners of `size`."""
    if way.startswith("horovod"):
        horovod = pytest.importorskip("horovod.torch")
        if way == "horovod nccl" and not horovod.nccl_built():
            pytest.skip("Horovod was built without NCCL")
        if way == "horovod" and horovod.nccl_built() and torch.cuda.device_count() < learners:
            pytest.skip("Horovod was built with NCCL, which refuses two learners on one GPU")
    env = {
        "TEST_WAY": way,
        "HVD_ADPSGD_INNER": way.split()[0],
        "HVD_ADPSGD_SUPER_LEARNER_SIZE": str(size),
        "HVD_ADPSGD_LEAVE_DEADLINE_S": "2",
    }
    return run_learners(learners, program, args=args, env=env)


@pytest.mark.parametrize("way", INNER)
@pytest.mark.parametrize(("learners", "size"), [(2, 1), (4, 2)])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float64", 1e-12)])
def test_the_mean_moves_by_gradients_only(
    way: str, learners: int, size: int, dtype: str, bound: float
) -> None:
    """And the learners of a super learner have the same bits after every step, sharing a GPU or not."""
    said = run(way, learners, size, PROGRAM, dtype).checked().by_rank()
    assert len(said) == learners
    assert sum(facts["exchanges"] for facts in said) > 0
    for facts in said:
        assert facts["same"], facts
        assert facts["error"] < bound, facts


LOST = (
    START
    + """
    import signal
    torch.manual_seed(hvd.super_rank())
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4))).cuda()
    parameters = model.parameters()
    if sys.argv[1] == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(
            model, process_group=hvd.super_learner_group())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.01), named_parameters=model.named_parameters())
    after = step = 0

    def die(gradient):  # while others of the same backward pass are being averaged
        if step == 30 and hvd.rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    list(model.parameters())[0].register_hook(die)
    while after < 20:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 200, device="cuda")).square().mean()
        loss.backward()
        if len(sys.argv) > 2:
            loss.item()  # waits for the GPU
        optimizer.step()
        known = torch.tensor([int(hvd.failed_ranks() == (2, 3))])  # both at the same step
        after += bool(hvd.allgather(known, process_set=hvd.super_learner).all())
        step += 1
    mine = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    node = hvd.allgather(mine[None], process_set=hvd.super_learner)
    say(rank=hvd.rank(), same=bool((node == node[0]).all()), finite=bool(mine.isfinite().all()))
    hvd.shutdown()
"""
)

BROADCAST = (
    START
    + """
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
)


@pytest.mark.parametrize("way", INNER)
@pytest.mark.parametrize("script", [["hvd"], ["DDP"], ["hvd", "waits"]])
def test_a_killed_learner_takes_its_super_learner_only(way: str, script: list[str]) -> None:
    """Its mate raises an error, and is not ended by torch's watchdog, a minute later."""
    result = run(way, 4, 2, LOST, *script)
    errors = ("LearnerFailedError", "DistBackendError", "RuntimeError")  # torch's from backward()
    assert any(name in result.stderr for name in errors), result.report()
    assert "Signal: Aborted" not in result.stderr, result.report()
    assert [facts["rank"] for facts in result.by_rank()] == [0, 1], result.report()
    assert all(facts["same"] and facts["finite"] for facts in result.said), result.report()


@pytest.mark.parametrize("way", INNER)
def test_operations_of_one_super_learner_write_into_parameters(way: str) -> None:
    """Those are Horovod's; without NCCL torch's operations in its background thread write the result."""
    first, second = (facts["sums"] for facts in run(way, 2, 2, BROADCAST).checked().by_rank())
    assert first == second
    assert abs(first[2] - 2 * first[0]) < 1e-4 * abs(first[0]) + 1e-5
