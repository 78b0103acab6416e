"""Models in shards: each learner averages its own with its counterparts; all promises hold."""

import pytest

from tests.launcher import Result, run_learners

pytestmark = pytest.mark.mpi

SHARDS = """
    import torch
    import hvd_adpsgd.torch as hvd
    from hvd_adpsgd.training.presence import live
    from tests.mpi.programs.learner import wrap
    hvd.init()
    dtype = getattr(torch, sys.argv[1])
    model = torch.nn.ModuleDict({
        "a": torch.nn.Linear(1000, 300, bias=False), "b": torch.nn.Linear(300, 700)}).to(dtype)
    torch.manual_seed(hvd.super_rank())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-100, 100, p.shape) / 8)
    optimizer = wrap(model, lambda ps: torch.optim.SGD(ps, lr=0.0))
    flat = lambda: torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()
    mean = lambda: hvd.allreduce(flat(), op=hvd.Average)
    before, ends, done = mean(), time.monotonic() + 60, [False]
    while not all(done):
        for _ in range(10):
            optimizer.zero_grad()
            sum(p.sum() for p in model.parameters()).backward()
            optimizer.step()
        with hvd.averaging_paused():
            now = mean()
            told = hvd.allgather_object((hvd.super_rank(), flat().sum().item(), flat().square().sum().item()))
            same = len(set(told)) == hvd.super_size()
            drift = (now - before).abs().max().item()
            apart = (flat() - now).abs().max().item()
            metrics = hvd.metrics()  # at rest: of whole exchanges
            done = hvd.allgather_object(apart < float(sys.argv[2]) or time.monotonic() > ends)
    with hvd.averaged(model):
        exact = (flat() - now).abs().max().item()
    hvd.average_model(model)
    last = hvd.allgather_object(flat().sum().item())
    averaging, = live()
    say(rank=hvd.rank(), drift=drift, apart=apart, exact=exact, last=last, shards=averaging.tensors.shards,
        same=same, exchanges=metrics["exchanges"], nbytes=metrics["bytes_sent"] + metrics["bytes_shared"],
        total=flat().numel() * dtype.itemsize, mirror=averaging.engine.memory.own.layout.nchunks)
"""


def run(learners: int, of: str, *args: str, program: str = SHARDS, **env: str) -> Result:
    options = {
        "HVD_ADPSGD_SHARD": "auto",
        "HVD_ADPSGD_SUPER_LEARNER_SIZE": of,
        "ADPSGD_CHUNK_KIB": "64",
        "HVD_ADPSGD_LOG_LEVEL": "info",
        **env,
    }
    return run_learners(learners, program, args=args, env=options)


@pytest.mark.parametrize(
    ("dtype", "wire", "same_host"),
    [
        ("float32", "mpi", "memory"),
        ("float32", "tcp", "mpi"),
        pytest.param("bfloat16", "tcp", "memory", marks=pytest.mark.extended),
        pytest.param("float64", "mpi", "mpi", marks=pytest.mark.extended),
    ],
)
def test_every_learner_averages_its_shard_and_the_mean_is_kept(
    dtype: str, wire: str, same_host: str
) -> None:
    env = {"HVD_ADPSGD_WIRE": wire, "ADPSGD_SAME_HOST": same_host}
    near = 2.0 if dtype == "bfloat16" else 0.5
    result = run(4, "2", dtype, str(near), **env).checked()
    told = result.by_rank()
    assert "2 shards (learners per super learner: 2)" in result.stderr, result.report()
    rounding = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.1}[dtype]
    for facts in told:
        assert facts["shards"] == 2
        assert facts["same"], "learners of a super learner have different models"
        assert facts["drift"] < rounding, facts
        assert facts["apart"] < near, facts
        assert facts["exact"] < rounding, facts
        assert len(set(facts["last"])) == 1, "average_model has made them equal"
        assert facts["exchanges"] > 0, "this learner carries a shard"
        assert 0.4 < facts["nbytes"] / facts["exchanges"] / facts["total"] < 0.6, facts
    sizes = [facts["mirror"] for facts in told]
    assert sizes[0] == sizes[2] and sizes[1] == sizes[3] and abs(sizes[0] - sizes[1]) <= 1


KILLED = """
    import signal
    import torch
    import hvd_adpsgd.torch as hvd
    from hvd_adpsgd.engine.peers import PeerState
    from hvd_adpsgd.training.presence import live
    from tests.sharing import Training
    hvd.init()
    training = Training(100, 1000, dtype=torch.float64)
    def steps(n):
        for _ in range(n):
            training.step()
    steps(20)
    if hvd.rank() == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    engine = live()[0].engine
    seen = 0
    while not seen:
        steps(1)
        mine = torch.tensor([float(PeerState.FAILED in map(PeerState, engine.loop.peers()))])
        seen = hvd.allreduce(mine, op=hvd.Min, process_set=hvd.super_learner).item()
    with hvd.averaging_paused():
        training.began = training.mean()
    first, ends, met = sum(hvd.metrics()["peers"]), time.monotonic() + 60, [False]
    while not all(met):  # they go on
        steps(10)
        met = hvd.allgather_object(sum(hvd.metrics()["peers"]) > first)
        assert time.monotonic() < ends, met
    with hvd.averaging_paused():
        drift = training.drift()
    say(rank=hvd.rank(), states=[PeerState(s).name for s in engine.loop.peers()], drift=drift,
        failed=hvd.failed_ranks())
"""


@pytest.mark.parametrize("victim", [pytest.param(2, marks=pytest.mark.extended), 3])
def test_a_killed_learner_takes_its_super_learner_along_in_every_shard(victim: int) -> None:
    result = run(6, "2", str(victim), program=KILLED)
    told = result.by_rank()
    assert [facts["rank"] for facts in told] == [0, 1, 4, 5], result.report()
    for facts in told:
        assert facts["states"][1] == "FAILED" and facts["states"].count("FAILED") == 1, facts
        assert facts["failed"] == [2, 3], facts
        assert facts["drift"] < 1e-9, facts


@pytest.mark.extended
def test_where_there_are_no_shards_the_log_says_why() -> None:
    program = """
        import torch
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.training.presence import live
        hvd.init()
        model = torch.nn.BatchNorm1d(3)
        kept = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averaging=sys.argv[1],
            named_parameters=model.named_parameters(), buffers=model if sys.argv[2:] else None)
        say(rank=hvd.rank(), shards=[a.tensors.shards for a in live()])
    """
    result = run(4, "2", "synchronous_gossip", program=program).checked()
    assert [facts["shards"] for facts in result.said] == [[1]] * 4
    assert "no shards, averaging=synchronous_gossip" in result.stderr, result.report()
    result = run(4, "2", "random_pairs", "buffers", program=program).checked()
    assert [facts["shards"] for facts in result.said] == [[1]] * 4
    assert "no shards, buffers= are those of the leader" in result.stderr, result.report()
    result = run(2, "1", "random_pairs", program=program).checked()
    assert "no shards, one super learner, or one learner in a super learner" in result.stderr
