"""The engine in step against closed forms: mixing matrices, contraction, and the spread that noise leaves.

All random numbers, those of rings and pairs too, follow from seeds, and every round has the same
peers in every run: what is asserted passes always or never. Engines that run freely:
tests/lab/test_free_contraction.py, where time is virtual.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import theorems

from hvd_adpsgd.strategies import parse
from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "in_step.py"
SIZES = (5, *(pytest.param(n, marks=pytest.mark.extended) for n in (8, 16)))
RANDOM_LAWS = {
    "synchronous_gossip+random_ring:seed=8": theorems.randomised_ring_contraction,
    "synchronous_gossip+random_pairs:seed=8": theorems.matching_contraction,
}


def run_in_step(n: int, *args: object) -> dict[str, Any]:
    """What in_step.py finds on n super learners, by strategy."""
    return run_learners(n, PROGRAM, args=[str(a) for a in args]).checked().said[0]


@pytest.mark.parametrize("n", [2, 3, *SIZES[:2]])
def test_lock_step_is_the_product_of_the_matrices(n: int) -> None:
    rounds, bases = 7, ("fixed_ring", "random_ring:seed=3", "random_pairs:seed=3")
    specs = [
        f"synchronous_gossip:order={order}+{base}" for base in bases for order in ("atc", "awc")
    ]
    result = run_in_step(n, "--strategy", *specs, "--lockstep", rounds, "--seed", 11, "--size", 300)
    for spec in specs:
        before, after = (np.array(result[spec][key]) for key in ("before", "after"))
        product = np.eye(n)
        for k in range(rounds):
            product = theorems.mixing_matrix(parse(spec), n, k) @ product
        assert before.std() > 0.5, "the models were all but equal to begin with"
        np.testing.assert_allclose(after, product @ before, rtol=0, atol=1e-12, err_msg=spec)


@pytest.mark.parametrize("n", SIZES)
def test_the_slowest_mode_of_the_fixed_ring_shrinks_by_lambda_2(n: int) -> None:
    """cos(2 pi i / n) is an eigenvector of the ring: lambda_2 = (1 + 2 cos(2 pi / n)) / 3 a round."""
    spec = "synchronous_gossip+fixed_ring"
    result = run_in_step(n, "--strategy", spec, "--factors", 8, "--start", "fourier")
    per_round = np.sqrt(result[spec])
    np.testing.assert_allclose(per_round, theorems.ring_eigenvalues(n)[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", SIZES)
def test_random_partners_shrink_disagreement_by_their_law(n: int) -> None:
    """E |T_k X|^2 = c |X|^2 for every X of mean zero, T_k and X drawn anew: the mean over rounds is
    within 5 standard errors of c but for one case in 10^6.
    """
    rounds = 40
    result = run_in_step(n, "--strategy", *RANDOM_LAWS, "--factors", rounds, "--seed", 2)
    for spec, law in RANDOM_LAWS.items():
        factors = np.array(result[spec])
        error = factors.std(ddof=1) / np.sqrt(rounds)
        assert 0 < error < 0.01 * law(n), spec
        assert abs(factors.mean() - law(n)) < 5 * error, (spec, factors.mean(), law(n), error)


@pytest.mark.parametrize("n", SIZES)
def test_delay_by_one_leaves_no_disagreement_after_one_round(n: int) -> None:
    result = run_in_step(n, "--strategy", "delay_by_one", "--factors", 3)
    assert max(result["delay_by_one"]) < 1e-28


@pytest.mark.parametrize("n", SIZES)
def test_noise_leaves_the_spread_of_the_closed_forms(n: int) -> None:
    """kappa within 5 %, and the mean moves by the noise alone."""
    ring, pairs = theorems.randomised_ring_contraction(n), theorems.matching_contraction(n)
    expected = {
        "synchronous_gossip+fixed_ring": theorems.kappa_fixed(n),
        "synchronous_gossip+random_ring:seed=3": theorems.kappa_random(n, ring),
        "synchronous_gossip+random_pairs:seed=3": theorems.kappa_random(n, pairs),
        "delay_by_one": theorems.kappa_random(n, 0.0),
    }
    result = run_in_step(n, "--strategy", *expected, "--kappa", 60)
    for spec, kappa in expected.items():
        assert result[spec]["kappa"] == pytest.approx(kappa, rel=0.05), spec
        assert result[spec]["mean_error"] < 1e-12, spec
