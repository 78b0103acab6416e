"""NaturalGradientSGD inside DistributedOptimizer, on real learners.

Each launch runs several cases (programs/natural.py), and the tests look at what the learners said.
"""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import horovod_inside, run_learners

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("programs") / "natural.py"
IN_PAIRS = ("random_pairs*2", "synchronous")

Facts = dict[str, Any]


@functools.cache
def trained(np: int, size: int, cases: tuple[str, ...]) -> dict[str, list[Facts]]:
    """What the learners said of each case, by rank; SEED=n chooses another seed than 7."""
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(size)}
    return run_learners(np, PROGRAM, args=cases, env=env).checked().by_case()


def require_trained(said: list[Facts], learners: int) -> None:
    """The mean model's loss falls; in a super learner all are equal; gradients are means of natural ones."""
    assert [facts["rank"] for facts in said] == list(range(learners))
    for facts in said:
        assert facts["finite"] and facts["is_instance"] and all(facts["same"]), facts
        assert facts["last"] < 0.95 * facts["first"], facts
    own = [facts["estimates"] for facts in said]
    assert len(set(own)) == learners
    assert all(facts["error"] < 1e-5 and facts["as_alone"] for facts in said), said
    # Horovod's broadcast, in a single super learner, knows torch's state only
    is_horovods = said[0]["case"] == "synchronous" and horovod_inside()
    after = own if is_horovods else [own[1]] * learners
    assert [facts["broadcast"] for facts in said] == after
    assert all(facts["loaded"] for facts in said), said


@pytest.mark.parametrize("case", IN_PAIRS)
def test_two_super_learners_of_two(case: str) -> None:
    require_trained_in_pairs(trained(4, 2, IN_PAIRS)[case])


def require_trained_in_pairs(said: list[Facts]) -> None:
    """As require_trained, and the learners of a super learner have the same model."""
    require_trained(said, 4)
    assert said[0]["model"] == said[1]["model"] and said[2]["model"] == said[3]["model"]
