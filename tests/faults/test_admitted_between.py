"""hvd.admit(blocking=False): nobody waits for a stopped or slow super learner unless one is joining."""

from pathlib import Path

import pytest

from tests.launcher import Result, run_learners

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "admitted_between.py"
TIMEOUT_S = 240.0  # a new super learner loads torch once more, on a machine that may be busy


def train(folder: Path, np: int, *args: str, of: int = 1, launcher: str = "mpirun") -> Result:
    return run_learners(
        np,
        PROGRAM,
        args=["--folder", str(folder), *args],
        env={"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(of)},
        timeout=TIMEOUT_S,
        launcher=launcher,
        fresh=True,
    )


def require_replaced(result: Result, np: int, of: int) -> None:
    learners = result.by_rank()
    assert "gives up" not in result.stderr, result.report()
    assert [facts["rank"] for facts in learners] == list(range(np)), result.report()
    assert [facts["new"] for facts in learners] == [facts["super"] == 2 for facts in learners]
    assert all(facts["exchanges"] > 0 for facts in learners if facts["rank"] % of == 0)
    # one that has ended its script is not replaced, though others still train
    assert result.stderr.count("starting another one") == 1, result.report()


@pytest.mark.parametrize(
    ("of", "launcher"),
    [
        (1, "mpirun"),
        pytest.param(2, "mpirun", marks=pytest.mark.extended),
        pytest.param(1, "srun", marks=pytest.mark.extended),
        pytest.param(2, "srun", marks=pytest.mark.extended),
    ],
)
def test_nobody_waits_for_a_stopped_super_learner(tmp_path: Path, of: int, launcher: str) -> None:
    """The stop ends when another super learner has made 30 steps, and as many calls, meanwhile."""
    result = train(tmp_path, 3 * of, of=of, launcher=launcher)
    require_replaced(result, 3 * of, of)
    assert all(facts["collections"] == 0 for facts in result.by_rank()), result.report()
    calls = {facts["super"]: facts["calls"] for facts in result.by_rank()}
    assert calls[0] != calls[1]


@pytest.mark.parametrize(
    ("of", "launcher"),
    [
        (1, "mpirun"),
        pytest.param(1, "srun", marks=pytest.mark.extended),
        pytest.param(2, "srun", marks=pytest.mark.extended),
    ],
)
def test_a_meeting_is_called_off_if_one_that_has_answered_stops(
    tmp_path: Path, of: int, launcher: str
) -> None:
    """The stop ends when another super learner has made 30 steps meanwhile; then the new one is let in."""
    result = train(tmp_path, 3 * of, "--called", of=of, launcher=launcher)
    assert (tmp_path / "stopped").exists(), result.report()
    require_replaced(result, 3 * of, of)


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_operations_between_the_calls(tmp_path: Path, launcher: str) -> None:
    """A meeting gives way to an operation that others have begun, and comes later."""
    require_replaced(train(tmp_path, 3, "--evaluates", launcher=launcher), 3, 1)
