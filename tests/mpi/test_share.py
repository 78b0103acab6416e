"""An exchange that moves a share of the model: the mean stays exact, each chunk has its turn."""

from __future__ import annotations

import math

import pytest

from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

CHUNKS = 1000 * 600 * 4 / 2**16  # of 64 KiB
# fewest and most bytes of a float32 exchange by wire_dtype: few bits begin with 16, and come back to them
PARTS = {"": (1.0, 1.0), "bfloat16": (0.5, 0.5), "int8": (0.25, 0.51), "int4": (0.125, 0.51)}
WHOLE = math.ceil(CHUNKS)
SHARES = """
    import torch
    import hvd_adpsgd.torch as hvd
    hvd.init()
    share, wire = sys.argv[1], sys.argv[2] or None
    model = torch.nn.Linear(1000, 600, bias=False)  # CHUNKS
    torch.manual_seed(hvd.super_rank())
    with torch.no_grad():
        model.weight.copy_(torch.randint(-1000, 1000, model.weight.shape) / 8)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        named_parameters=model.named_parameters(),
        exchange_share=share if share == "auto" else float(share),
        wire_dtype=wire,
    )
    flat = model.weight.detach().reshape(-1)
    mean = lambda: hvd.allreduce(flat.double(), op=hvd.Average)
    by_chunk = lambda mean: (flat.double() - mean).pow(2).view(-1, 12000).mean(1).sqrt().tolist()
    before, ends, done = mean(), time.monotonic() + 60, [False]
    first = by_chunk(before)
    while not all(done):
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
        with hvd.averaging_paused():
            now = mean()
            drift = (now - before).abs().max().item()
            last, metrics = by_chunk(now), hvd.metrics()  # at rest: of whole exchanges
            done = hvd.allgather_object(max(last) < 1 or time.monotonic() > ends)
    nbytes = metrics["bytes_sent"] + metrics["bytes_shared"]
    say(rank=hvd.rank(), drift=drift, first=first, last=last, exchanges=metrics["exchanges"],
        nbytes=nbytes, total=4 * flat.numel(), distance=metrics["consensus_distance"],
        share=metrics["exchange_share"])
"""


@pytest.mark.parametrize(
    ("share", "wire", "same_host"),
    [
        (0.25, "", "memory"),
        (0.25, "int8", "mpi"),
        pytest.param(1.0, "int4", "mpi", marks=pytest.mark.extended),
        pytest.param(0.0625, "", "mpi", marks=pytest.mark.extended),
        pytest.param(0.25, "bfloat16", "memory", marks=pytest.mark.extended),
        pytest.param(0.001, "", "memory", marks=pytest.mark.extended),
    ],
)
def test_each_chunk_has_its_turn_and_the_mean_is_kept(
    share: float, wire: str, same_host: str
) -> None:
    env = {
        "HVD_ADPSGD_SUPER_LEARNER_SIZE": "1",
        "ADPSGD_CHUNK_KIB": "64",
        "ADPSGD_SAME_HOST": same_host,
        "HVD_ADPSGD_AVERAGING": f"random_pairs:prefer_fast={0.9 if same_host == 'mpi' else 0}",
    }
    result = run_learners(3, SHARES, args=[str(share), wire], env=env).checked()
    moved = math.ceil(WHOLE * share)  # chunks; one of them may be the last one, which is shorter
    most, least = moved / CHUNKS, (moved - (WHOLE - CHUNKS)) / CHUNKS
    for facts in result.by_rank():
        assert facts["drift"] < 1e-4
        assert min(facts["first"]) > 1  # all chunks were apart
        assert max(facts["last"]) < 1  # each has been averaged often since
        each = facts["nbytes"] / facts["exchanges"] / facts["total"]
        fewest, largest = PARTS[wire]
        assert 0.999 * least * fewest < each < 1.001 * most * largest


def test_share_and_bits_are_chosen_and_the_mean_is_kept() -> None:
    env = {
        "HVD_ADPSGD_SUPER_LEARNER_SIZE": "1",
        "ADPSGD_CHUNK_KIB": "64",
        "ADPSGD_SAME_HOST": "mpi",
    }
    result = run_learners(3, SHARES, args=["auto", "auto"], env=env).checked()
    for facts in result.by_rank():
        assert facts["drift"] < 1e-4
        assert max(facts["last"]) < 1
        assert 0 < facts["share"] <= 1


WRONG = """
    import torch
    import hvd_adpsgd
    import hvd_adpsgd.torch as hvd
    hvd.init()
    model = torch.nn.Linear(10, 10)
    told = []
    for share, averaging in (
        (0.5, "delay_by_one"), (0.0, "random_pairs"), (1.5, "random_pairs"),
        ("auto", "delay_by_one"), ("auto", "a2cid2"), ("most", "random_pairs"),
        (1.0, "gossip_pga+random_pairs:prefer_fast=0.9"),
    ):
        try:
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.0),
                named_parameters=model.named_parameters(),
                exchange_share=share,
                averaging=averaging,
            )
        except hvd_adpsgd.ConfigError as error:
            told.append(str(error))
    say(rank=hvd.rank(), told=told)
"""


def test_a_share_that_makes_no_sense_is_refused() -> None:
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}
    result = run_learners(4, WRONG, env=env).checked()
    for facts in result.by_rank():
        assert len(facts["told"]) == 7
        assert "exchange_share=0.5 with averaging=delay_by_one" in facts["told"][0]
        assert "exchange_share=auto with averaging=delay_by_one" in facts["told"][3]
        assert "random_pairs" in facts["told"][4]
        assert "auto, or > 0 and <= 1" in facts["told"][5]
        assert all("exchange_share" in told for told in facts["told"][:6])
        assert "only plain gossip prefers fast peers" in facts["told"][6]
