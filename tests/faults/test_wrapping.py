"""Optimizers are wrapped after a loss, and while somebody is lost."""

import signal

import pytest

from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

WRAPS = """
    import random, signal, threading, torch
    import hvd_adpsgd.torch as hvd
    hvd.init()
    torch.set_num_threads(1)
    rank, victim, delay_s = hvd.rank(), int(sys.argv[1]), float(sys.argv[2])

    def wrapped():
        model = torch.nn.Linear(300, 300)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters())
        return model, optimizer

    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 300)).square().mean().backward()
            optimizer.step()

    def die_later():
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    first = wrapped()
    train(*first, 5)
    hvd.barrier()
    if rank == victim:
        threading.Thread(target=die_later, daemon=True).start()
    second = wrapped()      # the victim fails before it, in it or after it
    ends = time.monotonic() + 40
    while not hvd.failed_ranks():
        assert time.monotonic() < ends
        train(*second, 1)
    third = wrapped()
    train(*third, 50)
    distance = hvd.consensus_distance(third[0])
    hvd.average_model(third[0])
    say(rank=rank, failed=list(hvd.failed_ranks()), finite=distance >= 0,
        exchanges=third[1]._averaging.engine.metrics()["exchanges"])
    hvd.shutdown()
"""


@pytest.mark.parametrize(
    ("k", "victim", "delay_s"),
    [
        (1, 0, 4e-3),
        pytest.param(1, 1, 0.0, marks=pytest.mark.extended),
        pytest.param(2, 3, 2e-3, marks=pytest.mark.extended),
    ],
)
def test_wrapping_survives_a_loss(k: int, victim: int, delay_s: float) -> None:
    """Whoever is left wraps, trains, wraps again and averages."""
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(k)}
    result = run_learners(4, WRAPS, args=[str(victim), str(delay_s)], env=env)
    lost = [rank for rank in range(4) if rank // k == victim // k]
    living = [facts for facts in result.by_rank() if facts["rank"] not in lost]
    assert [facts["rank"] for facts in living] == [r for r in range(4) if r not in lost], (
        result.report()
    )
    for facts in living:
        assert victim in facts["failed"], result.report()
        assert facts["finite"], result.report()


GOES_ON = """
    import signal, torch
    import hvd_adpsgd.torch as hvd
    from hvd_adpsgd.engine.shard_memory import ShardMemory
    hvd.init()
    torch.set_num_threads(1)
    rank, model = hvd.rank(), torch.nn.Linear(300, 300)
    extend = ShardMemory.extend

    def ends(memory, tensors):
        if rank == 3:
            os.kill(os.getpid(), int(sys.argv[1]))
            time.sleep(60)
        return extend(memory, tensors)

    def told(call):
        try:
            call()
        except Exception as error:
            return [kind.__name__ for kind in type(error).__mro__]

    ShardMemory.extend = ends
    wrap = lambda: hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters())
    wrapped, averaged = told(wrap), told(lambda: hvd.average_model(model))
    say(rank=rank, wrapped=wrapped, averaged=averaged, failed=list(hvd.failed_ranks()))
    hvd.shutdown()
"""


def test_the_mate_of_one_lost_while_wrapping_takes_part_in_nothing_more() -> None:
    """After the error its operations raise, and are not compared with those of the others."""
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
    said = run_learners(4, GOES_ON, args=[str(int(signal.SIGKILL))], env=env).by_rank()
    assert [facts["rank"] for facts in said] == [0, 1, 2], said
    mate = said.pop()
    for seen in (mate["wrapped"], mate["averaged"]):
        assert seen and "LearnerFailedError" in seen, mate
    for facts in said:
        assert facts["wrapped"] is None and facts["averaged"] is None, facts
        assert facts["failed"] == [2, 3], facts


def test_a_super_learner_that_is_preempted_while_wrapping_has_left() -> None:
    """It has no engine yet that could announce their departure to its peers."""
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2", "HVD_ADPSGD_LOG_LEVEL": "info"}
    result = run_learners(4, GOES_ON, args=[str(int(signal.SIGTERM))], env=env)
    # without MPI's launcher the status is that of the first process that ended
    assert result.returncode in (0, 128 + signal.SIGTERM), result.report()
    said = result.by_rank()
    assert [facts["rank"] for facts in said] == [0, 1], result.report()
    for facts in said:
        assert facts["wrapped"] is None and facts["averaged"] is None, result.report()
        assert facts["failed"] == [], result.report()
    for words in ("has failed", "are gone", "Traceback"):
        assert words not in result.stderr, result.report()
    assert "learners [2, 3] have left" in result.stderr, result.report()
