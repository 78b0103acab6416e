"""Strategies for which all wait go on with those that live: killed, or ended by an exception."""

import re

import pytest

from tests.launcher import Result, run_learners

pytestmark = pytest.mark.mpi

N, STEPS = 4, 16
PROGRAM = """
    import signal, threading, torch
    import hvd_adpsgd.torch as hvd
    from hvd_adpsgd.engine import engine
    hvd.init()
    torch.set_num_threads(1)
    rank, spec, how, victims = hvd.rank(), sys.argv[1], sys.argv[2], sys.argv[3]
    model = torch.nn.Linear(1000, 600).double()  # 5 MB: 19 chunks
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(), averaging=spec)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def watch():
        '''Die in the middle of a mean: some chunks are merged, and not all.'''
        loop = optimizer._averaging.engine.loop
        chunks = optimizer._averaging.engine.memory.own.layout.parts[0].last_chunk
        while True:
            done = loop.counters()["chunks"] % chunks
            if 3 < done < chunks - 3:
                say(rank=rank, died=step, done=done)
                os.kill(os.getpid(), signal.SIGKILL)

    def all_lost():
        '''All learners find the same.'''
        return all(n >= len(victims.split(",")) for n in hvd.allgather_object(len(hvd.failed_ranks())))

    def train(steps):
        global step
        for step in steps:
            if step >= STEPS and how == "middle" and all_lost():
                return
            if step == 5 and str(rank) in victims:
                if how == "middle":
                    threading.Thread(target=watch, daemon=True).start()
                if how == "raise":
                    say(rank=rank, died=step)
                    raise ValueError("on purpose")
            optimizer.zero_grad()
            x = torch.full((2, 1000), (1.0 + rank) / 1000, dtype=torch.double)
            model(x).square().mean().backward()
            optimizer.step()

    train(range(STEPS if how != "middle" else 10**6))  # a busy machine may miss the middle of a mean
    first = step if how == "middle" else step + 1
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    how = "after"
    train(range(first, first + 4))  # means of what is there, and nothing new
    distance = hvd.consensus_distance(model)
    with hvd.averaging_paused():  # the mean under way is over on all
        say(rank=rank, steps=step + 1, distance=distance,
            moved=(model.weight - 0).abs().max().item(), means=hvd.metrics()["means"])
    hvd.shutdown()
""".replace("STEPS", str(STEPS))


def run(spec: str, how: str, victims: str) -> Result:
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "HVD_ADPSGD_LEAVE_DEADLINE_S": "2"}
    return run_learners(N, PROGRAM, args=[spec, how, victims], env=env)


@pytest.mark.parametrize(
    ("spec", "how", "victims"),
    [
        ("delay_by_one", "middle", "2"),
        ("delay_by_one", "raise", "0"),
        pytest.param("delayed_gradients", "middle", "0", marks=pytest.mark.extended),
        ("periodic_averaging:period=2,block_momentum=0.5", "middle", "0,1,2"),
        pytest.param("gossip_pga:period=2", "middle", "2", marks=pytest.mark.extended),
    ],
)
def test_a_mean_of_all_goes_on_over_the_living(spec: str, how: str, victims: str) -> None:
    """They make all their steps, agree with one another to rounding, and end."""
    result = run(spec, how, victims)
    lost = [int(v) for v in victims.split(",")]
    said = {facts["rank"]: facts for facts in result.by_rank()}
    assert all("died" in said[rank] and "steps" not in said[rank] for rank in lost), result.report()
    assert len(said) == N, result.report()
    living = [said[rank] for rank in range(N) if rank not in lost]
    for facts in living:
        assert facts["steps"] == living[0]["steps"] >= STEPS + 4, result.report()
        assert facts["distance"] < 1e-12, result.report()
    assert len({facts["means"] for facts in living}) == 1
    if how != "raise":
        told = re.findall(r"learner (\d)\) has failed", result.stderr)
        assert {int(rank) for rank in told} == set(lost), result.report()


@pytest.mark.parametrize("spec", ["random_pairs", "delay_by_one"])
def test_a_leader_lost_while_engines_are_started_is_an_error(spec: str) -> None:
    """A typed one, whatever the leaders were making together then."""
    program = f"""
        import signal
        from mpi4py import MPI
        from hvd_adpsgd.config import Config
        from hvd_adpsgd.engine.engine import Engine
        from hvd_adpsgd.errors import PeerFailedError
        from hvd_adpsgd.engine.layout import TensorSpec
        from hvd_adpsgd.strategies import parse
        outer = MPI.COMM_WORLD.Dup()
        outer.Set_errhandler(MPI.ERRORS_RETURN)
        plan = parse({spec!r}).plan(outer.rank, outer.size)
        engine = Engine(inner=None, outer=outer, plan=plan, config=Config())
        engine.memory.extend([TensorSpec("w", (1000,), "float32")])
        if outer.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            engine.start()
        except Exception as error:
            say(rank=outer.rank, kind=type(error).__name__, text=str(error))
        os._exit(0)
    """
    result = run_learners(2, program)
    (facts,) = result.by_rank()
    assert facts["kind"] == "PeerFailedError", result.report()
    assert facts["text"].startswith("averaging: a learner failed meanwhile")
