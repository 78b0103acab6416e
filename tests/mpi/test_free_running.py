"""Chunks that are left out, and a learner that is late. Learners that nothing makes wait: test_schemes.py."""

from pathlib import Path

from tests.launcher import run_learners


def test_tensors_that_are_never_averaged_are_named_once() -> None:
    """Values above 65504 do not fit into a float16 wire: their chunks are left out, and their peers' too.

    Nor does half of their difference, which is all that peers of one host exchange.
    """
    program = """
        import torch
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.config import Config
        from tests.mpi.programs.learner import heard, wrap
        for way in ("memory", "mpi"):
            with heard() as told:
                config = Config(wire_dtype="float16", super_learner_size=1, chunk_kib=64, same_host=way)
                hvd.init(config=config)
                rank = hvd.rank()
                model = torch.nn.ParameterDict({
                    "small": torch.nn.Parameter(torch.ones(16384)),  # 64 KiB: a chunk
                    "huge": torch.nn.Parameter(torch.full((16384,), 1e5 + 3e5 * rank)),
                })
                optimizer = wrap(model, lambda ps: torch.optim.SGD(ps, lr=0.0))
                ends = time.monotonic() + 60
                left_out = lambda: [line for line in told if "left out" in line]
                for step in range(10**6):
                    if left_out() and step > 50:
                        break
                    assert time.monotonic() < ends
                    optimizer.zero_grad()
                    sum(p.sum() for p in model.values()).backward()
                    optimizer.step()
                hvd.shutdown()
                say(case=way, rank=rank, told=left_out())
    """
    said = run_learners(2, program).checked().said
    assert len(said) == 4
    for facts in said:
        (line,) = facts["told"]
        assert "with tensors huge: on this super learner or on the peer" in line
        assert "not finite in float16" in line


DEADLINE_S = 1.5
LATE = f"""
    from pathlib import Path
    import torch
    import hvd_adpsgd.torch as hvd
    from tests.mpi.programs.learner import step as make_step, wrap

    hvd.init()
    rank, late, enough = hvd.rank(), Path(sys.argv[1], "late"), Path(sys.argv[1], "enough")
    model = torch.nn.Linear(16, 1)
    optimizer = wrap(model, lambda ps: torch.optim.SGD(ps, lr=0.01))
    torch.manual_seed(rank)
    ends, since, before, waited = time.monotonic() + 90, None, 0, []
    def over():
        '''Of learner 0: the other super learner, late for longer than the deadline, has exchanged on.'''
        global since, before
        exchanges = hvd.metrics()["exchanges"]
        if since is None and late.exists():
            since = time.monotonic()
        if since is None or time.monotonic() < since + {DEADLINE_S} + 1:
            before = exchanges
        return exchanges >= before + 5 or time.monotonic() > ends
    for step in range(60 if rank > 1 else 10**9):
        if rank == 3 and step == 50:
            late.touch()  # the gradient of this learner takes so long
            while not enough.exists() and time.monotonic() < ends + 10:
                time.sleep(0.01)
            waited = [step, enough.exists()]
        if rank < 2:
            stop = torch.tensor(float(rank == 0 and over()))
            if hvd.broadcast(stop, 0, process_set=hvd.super_learner):
                break
        make_step(model, optimizer, torch.randn(8, 16))
        if rank == 2:
            waited.append(late.exists() and not enough.exists())
        time.sleep(5e-3)  # a step
    if rank == 0:
        say(rank=0, more=hvd.metrics()["exchanges"] - before)
        enough.touch()
    else:
        say(rank=rank, waited=waited)
    hvd.shutdown()
"""


def test_a_late_learner_does_not_silence_its_super_learner(tmp_path: Path) -> None:
    """Its super learner waits in the all-reduce of gradients, longer than deadline_s, and goes on exchanging.

    The late learner waits until the others have seen that; a super learner that its all-reduce silences is
    parked after deadline_s, and they never see it.
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2", "HVD_ADPSGD_DEADLINE_S": str(DEADLINE_S)}
    result = run_learners(4, LATE, args=[str(tmp_path)], env=env).checked()
    said = result.by_rank()
    assert said[0]["more"] >= 5, result.report()
    assert said[3]["waited"] == [50, True], "nobody was late"
    assert sum(said[2]["waited"]) <= 1, "the leader has not waited for the late learner"
