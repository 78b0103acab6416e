"""An exchange that moves a share of the model: the mean stays exact, each chunk has its turn; "auto"."""

import math

import pytest

from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

CHUNKS = 1000 * 600 * 4 / 2**16  # of 64 KiB
# fewest and most bytes of a float32 exchange by wire_dtype: few bits begin with 16, and come back to them
PARTS = {"": (1.0, 1.0), "bfloat16": (0.5, 0.5), "int8": (0.25, 0.51), "int4": (0.125, 0.51)}
WHOLE = math.ceil(CHUNKS)
SHARES = """
    import hvd_adpsgd.torch as hvd
    from tests.sharing import Training
    hvd.init()
    share, wire = sys.argv[1], sys.argv[2] or None
    share = share if share == "auto" else float(share)
    training = Training(600, 1000, exchange_share=share, wire_dtype=wire)  # CHUNKS
    flat = training.model.weight.detach().double()
    by_chunk = lambda: (flat - training.mean()).pow(2).view(-1, 12000).mean(1).sqrt().tolist()
    first, ends, done = by_chunk(), time.monotonic() + 60, [False]
    while not all(done):
        for _ in range(10):
            training.step()
        with hvd.averaging_paused():
            flat, drift = training.model.weight.detach().double(), training.drift()
            last, metrics = by_chunk(), hvd.metrics()  # at rest: of whole exchanges
            done = hvd.allgather_object(max(last) < 1 or time.monotonic() > ends)
    nbytes = metrics["bytes_sent"] + metrics["bytes_shared"]
    say(rank=hvd.rank(), drift=drift, first=first, last=last, exchanges=metrics["exchanges"],
        nbytes=nbytes, total=4 * flat.numel(), share=metrics["exchange_share"])
"""
ALONE = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "ADPSGD_CHUNK_KIB": "64"}


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
    averaging = f"random_pairs:prefer_fast={0.9 if same_host == 'mpi' else 0}"
    env = {**ALONE, "ADPSGD_SAME_HOST": same_host, "HVD_ADPSGD_AVERAGING": averaging}
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
    env = {**ALONE, "ADPSGD_SAME_HOST": "mpi"}
    result = run_learners(3, SHARES, args=["auto", "auto"], env=env).checked()
    for facts in result.by_rank():
        assert facts["drift"] < 1e-4
        assert max(facts["last"]) < 1
        assert 0 < facts["share"] <= 1


AUTO = """
    import hvd_adpsgd.torch as hvd
    from tests.sharing import Training
    hvd.init()
    falls = sys.argv[1] == "falls"
    training = Training(600, 1000, idle_s=0.01, exchange_share="auto")  # 37 chunks of 64 KiB
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
    env = {**ALONE, "HVD_ADPSGD_SUPER_LEARNER_SIZE": size, "HVD_ADPSGD_MAX_OVERHEAD": bound}
    result = run_learners(4, AUTO, args=[way], env=env).checked()
    for facts in result.by_rank():
        assert facts["drift"] < 1e-4
        if not facts["leads"]:
            continue
        shares = facts["shares"]
        assert 1 / 16 in shares  # the first one
        assert facts["overhead"] >= 0 and facts["share"] in shares
        assert shares[0] < 1 / 64 if way == "falls" else shares[-1] > 1 / 4
