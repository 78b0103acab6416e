"""Promise 8 with real processes: operations in a tight loop, engines that exchange, one learner killed."""

import random
from pathlib import Path
from typing import Any

import pytest

from hvd_adpsgd.lifecycle.exit_status import FAILED_STATUS
from tests.launcher import Result, run_learners

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "tight_loop.py"
LEARNERS = 4
AFTER = 24  # operations after the failure


def run(seed: int) -> tuple[Result, int]:
    """One repetition, and its victim: of any rank, at any moment of the first half second."""
    draw = random.Random(seed)
    victim, delay_s = draw.randrange(LEARNERS), draw.uniform(0.0, 0.5)
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "HVD_ADPSGD_LEAVE_DEADLINE_S": "2"}
    arguments = [str(victim), f"{delay_s:.4f}", str(AFTER)]
    result = run_learners(LEARNERS, PROGRAM, args=arguments, env=env, fresh=True)
    return result, victim


def expected(number: int, ranks: list[int]) -> list[float]:
    """What an operation gives if it holds the values of these learners."""
    own = [[1.0 + number, 2.0**rank] for rank in ranks]
    kind = number % 4
    if kind == 0:
        return [sum(column) for column in zip(*own, strict=True)]
    if kind == 1:
        return [value for values in own for value in values]
    if kind == 2:
        return [max(column) for column in zip(*own, strict=True)]
    return [2.0**rank for rank in ranks]


def require_one_decision(result: Result, victim: int, seed: int) -> list[Any]:
    """All survivors report the same value and the same failed learners at each operation."""
    told = result.by_rank()
    where = f"seed {seed}\n{result.report()}"
    assert [facts["rank"] for facts in told] == [r for r in range(LEARNERS) if r != victim], where
    first = told[0]["told"]
    for facts in told:
        assert facts["told"] == first, where
    assert sum(facts["exchanges"] for facts in told) > 0, where
    survivors = [rank for rank in range(LEARNERS) if rank != victim]
    for number, (value, gone) in enumerate(first):
        assert gone in ([], [victim]), where
        # An operation that found the failure holds the victim's value if the victim had given it to all.
        with_victim, without = (expected(number, r) for r in (list(range(LEARNERS)), survivors))
        before = number == 0 or first[number - 1][1] == []
        allowed = [with_victim] if not gone else [with_victim, without] if before else [without]
        assert value in allowed, (number, where)
    assert sum(gone == [victim] for _, gone in first) == AFTER, where
    assert result.returncode == FAILED_STATUS, where
    return first


def test_a_learner_killed_in_a_tight_loop_of_operations_is_one_decision() -> None:
    result, victim = run(0)
    require_one_decision(result, victim, 0)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(1800)  # eleven launches
@pytest.mark.parametrize("first", range(1, 100, 11))
def test_a_hundred_such_kills(first: int) -> None:
    lengths = []
    for seed in range(first, first + 11):
        result, victim = run(seed)
        lengths.append(len(require_one_decision(result, victim, seed)))
    print(f"\noperations until the end, by seed from {first}: {lengths}")
