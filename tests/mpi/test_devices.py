"""Whole jobs whose tensors are on devices that lag behind the host: the promises, as on CPUs."""

import pytest

from tests.launcher import horovod_inside
from tests.mpi.test_optimizer import STEPS, launch, require_trained

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

CASES = ["SGD", "accumulate", "scaled", "growing", "mixture_fp16", *["adasum"] * horovod_inside()]
SEED = {"TEST_DEVICES": "3"}
SIZE = "HVD_ADPSGD_SUPER_LEARNER_SIZE"


def test_learners_of_a_node_have_the_same_bits_after_every_step() -> None:
    """Only the leader copies its model down; each adds the corrections on its own device."""
    cases = launch(4, "same_inside.py", *CASES, **SEED, **{SIZE: "2"}).by_case()
    assert sorted(cases) == sorted(CASES)
    for said in cases.values():
        require_trained(said, 4)
    assert cases["scaled"][0]["skipped"] == 3 < STEPS


def test_the_mean_moves_by_gradients_only() -> None:
    """With 16-bit parameters too, as exactly as on CPUs: SGD rounds those in every step."""
    bounds = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 5e-2, "between": 1e-12}
    env = {**SEED, SIZE: "1", "ADPSGD_CHUNK_KIB": "64"}
    cases = launch(3, "mean_of_models.py", *bounds, **env).by_case()
    for name, bound in bounds.items():
        said = cases[name]
        assert len(said) == 3
        assert sum(facts["exchanges"] for facts in said) > 0, "the engines did nothing"
        for facts in said:
            assert max(facts["error"], facts["later"]) < bound, facts
            assert facts["alike"], "average_model left learners apart"
