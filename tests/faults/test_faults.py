"""Learners that die in init(), or when all is trained: what the others see, and the status.

In training: test_storm.py.
"""

import textwrap

import pytest

from hvd_adpsgd.lifecycle.exit_status import FAILED_STATUS
from tests.launcher import run_learners

pytestmark = pytest.mark.mpi


def test_a_death_inside_init_is_an_error_of_all() -> None:
    """Nothing has begun: the others get a typed error, and the command its status."""
    program = """
        import signal
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.launch import bootstrap
        rank, answer = int(os.environ["OMPI_COMM_WORLD_RANK"]), bootstrap._answer

        def dies(*args):
            if rank == 1:
                say(rank=rank)
                os.kill(os.getpid(), signal.SIGKILL)
            return answer(*args)

        bootstrap._answer = dies  # MPI is up, the worlds are not yet agreed on
        hvd.init()
    """
    result = run_learners(3, program, env={"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"})
    assert [facts["rank"] for facts in result.said] == [1], result.report()
    assert result.stderr.count("errors.PeerFailedError: init()") == 2, result.report()
    assert result.returncode == 1, result.report()


TRAINED = """
    import signal, torch
    import hvd_adpsgd.torch as hvd
    from hvd_adpsgd.launch import world as worlds
    hvd.init()
    rank = hvd.rank()
    model = torch.nn.Linear(10, 10)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01),
                                         named_parameters=model.named_parameters())
    def train(steps):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 10)).square().mean().backward()
            optimizer.step()
    def die():
        os.kill(os.getpid(), signal.SIGKILL)
    train(20)
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("raise ValueError", 1), pytest.param("sys.exit(3)", 3, marks=pytest.mark.extended)],
)
def test_the_status_when_every_learner_fails_is_not_0(end: str, status: int) -> None:
    """One is killed, the others fail later by themselves."""
    program = f"""
        if rank == 1:
            die()
        ends = time.monotonic() + 60
        while not hvd.failed_ranks() and time.monotonic() < ends:
            train(1)
        say(rank=rank)
        {end}
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "HVD_ADPSGD_LEAVE_DEADLINE_S": "60"}
    result = run_learners(3, textwrap.dedent(TRAINED) + textwrap.dedent(program), env=env)
    assert [facts["rank"] for facts in result.by_rank()] == [0, 2], result.report()
    assert result.returncode == status, result.report()


@pytest.mark.parametrize(
    ("where", "size", "line"),
    [
        ("shutdown", 2, "learners [3] have failed: they did not leave the job in order"),
        ("barrier", 1, "learners [3] have failed: they did not leave the job in order"),
        pytest.param(
            "barrier", 4, "learners [3] have failed: they did not", marks=pytest.mark.extended
        ),
        pytest.param("pause", 2, "barrier: learners [3] are gone", marks=pytest.mark.extended),
    ],
)
def test_a_learner_killed_when_all_is_trained_is_told(where: str, size: int, line: str) -> None:
    """No gradient and no exchange is left that would show it; a follower's leader has no reason to fail."""
    program = f"""
        from hvd_adpsgd.lifecycle.shutdown import Teardown
        meet = Teardown.meet
        if {where!r} == "shutdown":
            worlds.current().teardown.at_shutdown(lambda: rank == 3 and die())
        elif {where!r} == "barrier":
            Teardown.meet = lambda *args: die() if rank == 3 else meet(*args)
        else:
            hvd.barrier()
            rank == 3 and die()
            hvd.barrier()
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": f"{size}", "HVD_ADPSGD_LEAVE_DEADLINE_S": "60"}
    result = run_learners(4, textwrap.dedent(TRAINED) + textwrap.dedent(program), env=env)
    assert line in result.stderr, result.report()
    assert result.returncode == FAILED_STATUS, result.report()
