"""exchange_share="auto" on processes: the share follows the bound, and the mean stays exact."""

from __future__ import annotations

import pytest

from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

AUTO = """
    import torch
    import hvd_adpsgd.torch as hvd
    hvd.init()
    falls = sys.argv[1] == "falls"
    model = torch.nn.Linear(1000, 600, bias=False)  # 37 chunks of 64 KiB
    torch.manual_seed(hvd.super_rank())
    with torch.no_grad():
        model.weight.copy_(torch.randint(-1000, 1000, model.weight.shape) / 8)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        named_parameters=model.named_parameters(),
        exchange_share="auto",
    )
    flat = model.weight.detach().reshape(-1)
    mean = lambda: hvd.allreduce(flat.double(), op=hvd.Average)
    before, ends, done, shares = mean(), time.monotonic() + 90, [False], set()
    while not all(done):
        for _ in range(16):
            optimizer.zero_grad()
            model(torch.ones(1, 1000)).sum().backward()
            time.sleep(0.01)  # so that an exchange per step is little for the machine
            optimizer.step()
            if hvd.is_leader():
                shares.add(hvd.metrics()["exchange_share"])
        with hvd.averaging_paused():
            drift = (mean() - before).abs().max().item()
            gone = not hvd.is_leader() or (min(shares) < 1 / 64 if falls else max(shares) > 1 / 4)
            done = hvd.allgather_object(gone or time.monotonic() > ends)
    metrics = hvd.metrics()
    say(rank=hvd.rank(), leads=hvd.is_leader(), drift=drift, shares=sorted(shares),
        overhead=metrics["exchange_overhead"], share=metrics["exchange_share"])
"""


@pytest.mark.parametrize(
    ("way", "bound", "size"),
    [
        ("falls", "1e-9", "1"),
        pytest.param("rises", "1", "1", marks=pytest.mark.extended),
        pytest.param("falls", "1e-9", "2", marks=pytest.mark.extended),
    ],
)
def test_the_share_follows_the_bound_and_the_mean_is_kept(way: str, bound: str, size: str) -> None:
    env = {
        "HVD_ADPSGD_SUPER_LEARNER_SIZE": size,
        "HVD_ADPSGD_CHUNK_KIB": "64",
        "HVD_ADPSGD_MAX_OVERHEAD": bound,
        "OMP_NUM_THREADS": "1",
    }
    result = run_learners(4, AUTO, args=[way], env=env).checked()
    for facts in result.by_rank():
        assert facts["drift"] < 1e-4
        if not facts["leads"]:
            continue
        shares = facts["shares"]
        assert 1 / 16 in shares  # the first one
        assert facts["overhead"] >= 0 and facts["share"] in shares
        assert shares[0] < 1 / 64 if way == "falls" else shares[-1] > 1 / 4
