"""The schemes in step against their closed forms: contraction, and the spread that noise leaves.

All random numbers, those of rings and pairs too, follow from seeds, and every round has the same
peers in every run: what is asserted passes always or never.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import theorems

from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "in_step.py"
SIZES = (4, *(pytest.param(n, marks=pytest.mark.extended) for n in (8, 16)))
RANDOM_LAWS = {
    "synchronous_gossip+random_ring:seed=8": theorems.randomised_ring_contraction,
    "synchronous_gossip+random_pairs:seed=8": theorems.matching_contraction,
}


def run_in_step(n: int, *args: object) -> dict[str, Any]:
    """What in_step.py prints on n super learners, by strategy."""
    result = run_learners(n, PROGRAM, args=[str(a) for a in args]).checked()
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("n", SIZES)
def test_fixed_ring_in_synchronous_gossip_shrinks_its_slowest_mode_by_lambda_2(n: int) -> None:
    spec = "synchronous_gossip+fixed_ring"
    result = run_in_step(n, "--strategy", spec, "--factors", 8, "--start", "fourier")
    per_round = np.sqrt(result[spec])
    np.testing.assert_allclose(per_round, theorems.ring_eigenvalues(n)[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", SIZES)
def test_random_partners_in_synchronous_gossip_shrink_disagreement_by_their_law(n: int) -> None:
    """Models drawn anew in each round: the mean over 40 rounds is within 2 % of the law."""
    result = run_in_step(n, "--strategy", *RANDOM_LAWS, "--factors", 40, "--seed", 2)
    for spec, law in RANDOM_LAWS.items():
        assert np.mean(result[spec]) == pytest.approx(law(n), rel=0.02), spec


@pytest.mark.parametrize("n", SIZES)
def test_delay_by_one_leaves_no_disagreement_after_one_round(n: int) -> None:
    result = run_in_step(n, "--strategy", "delay_by_one", "--factors", 3)
    assert max(result["delay_by_one"]) < 1e-28


@pytest.mark.parametrize("n", SIZES)
def test_noise_leaves_the_spread_of_the_closed_forms(n: int) -> None:
    """kappa within 5 %, and the mean moves by the noise alone."""
    expected = {
        "synchronous_gossip+fixed_ring": theorems.kappa_fixed(n),
        "synchronous_gossip+random_ring:seed=3": theorems.kappa_random(
            n, theorems.randomised_ring_contraction(n)
        ),
        "synchronous_gossip+random_pairs:seed=3": theorems.kappa_random(
            n, theorems.matching_contraction(n)
        ),
        "delay_by_one": theorems.kappa_random(n, 0.0),
    }
    result = run_in_step(n, "--strategy", *expected, "--kappa", 60)
    for spec, kappa in expected.items():
        assert result[spec]["kappa"] == pytest.approx(kappa, rel=0.05), spec
        assert result[spec]["mean_error"] < 1e-12, spec
