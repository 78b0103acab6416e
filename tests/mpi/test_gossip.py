"""A2CiD2 through the optimizer: its mean, and the super learner's bits. Its law: test_schemes.py."""

from pathlib import Path

import pytest

from tests.launcher import run_learners

PROGRAM = Path(__file__).parent / "programs" / "accelerated.py"


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("learners", "size"), [(4, 1), pytest.param(8, 2, marks=pytest.mark.extended)]
)
def test_a2cid2_keeps_the_mean_and_the_bits_of_a_node(learners: int, size: int) -> None:
    """Through the optimizer, with momentum and gradients that are known beforehand.

    The mean of both models is that of the super learners' plain optimizers, to 1e-12. The models of super
    learners, and the second ones, are not all the same: there was something to keep.
    """
    result = run_learners(
        learners,
        PROGRAM,
        env={"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(size), "HVD_ADPSGD_EXCHANGES_PER_STEP": "2"},
    ).checked()
    said = result.by_rank()
    print("seed", said[0]["seed"], result.stderr)
    assert len(said) == learners
    nodes: dict[int, set[tuple[str, ...]]] = {}
    for facts in said:
        nodes.setdefault(facts["super_rank"], set()).add(tuple(facts["digests"]))
        assert facts["mean_error"] < 1e-12
        assert facts["mean_model_error"] < 1e-12
        assert facts["apart"] > 1e-3
        assert facts["distance"] > 1e-3
    assert [len(bits) for bits in nodes.values()] == [1] * 4
    assert sum(facts["exchanges"] for facts in said) > 0
