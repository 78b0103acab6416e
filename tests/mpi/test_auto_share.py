"""exchange_share="auto" on processes: the share follows the bound, and the mean stays exact."""

from __future__ import annotations

import pytest

from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

AUTO = """
    import hvd_adpsgd.torch as hvd
    from tests.sharing import Training
    hvd.init()
    falls = sys.argv[1] == "falls"
    training = Training(600, 1000, idle_s=0.01)  # 37 chunks of 64 KiB
    ends, done, shares = time.monotonic() + 90, [False], set()
    while not all(done):
        for _ in range(16):
            training.step()
            if hvd.is_leader():
                shares.add(hvd.metrics()["exchange_share"])
        with hvd.averaging_paused():
            drift = training.drift()
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
        "ADPSGD_CHUNK_KIB": "64",
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
