"""The engine in lock step against theory: mixing matrices, and contraction laws over many rounds.

Engines that run freely: tests/lab/test_free_contraction.py, where time is virtual.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import theorems

from hvd_adpsgd.strategies import parse
from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "rounds.py"
SIZES = (5, pytest.param(8, marks=pytest.mark.extended))
STRATEGIES = ("fixed_ring", "random_ring:seed=3", "random_pairs:seed=3")


def run_rounds(n: int, *args: object) -> dict[str, Any]:
    """What rounds.py prints on n super learners, by strategy."""
    result = run_learners(n, PROGRAM, args=[str(a) for a in args]).checked()
    return json.loads(result.stdout.splitlines()[-1])


# ---- matrices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, pytest.param(4, marks=pytest.mark.extended), *SIZES])
def test_lock_step_is_the_product_of_the_matrices(n: int) -> None:
    rounds, seed = 7, 11
    result = run_rounds(
        n, "--strategy", *STRATEGIES, "--lockstep", rounds, "--seed", seed, "--size", 300
    )
    for spec in STRATEGIES:
        before, after = (np.array(result[spec][key]) for key in ("before", "after"))
        product = np.eye(n)
        for k in range(rounds):
            product = parse(spec).mixing_matrix(n, k) @ product
        assert before.std() > 0.5, "the models were all but equal to begin with"
        np.testing.assert_allclose(after, product @ before, rtol=0, atol=1e-12, err_msg=spec)


# ---- laws, lock step ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_slowest_mode_of_the_fixed_ring_shrinks_by_lambda_2(n: int) -> None:
    """cos(2 pi i / n) is an eigenvector of the ring: lambda_2 = (1 + 2 cos(2 pi / n)) / 3 a round."""
    result = run_rounds(n, "--strategy", "fixed_ring", "--factors", 10, "--start", "fourier")
    per_round = np.sqrt(result["fixed_ring"])
    np.testing.assert_allclose(per_round, theorems.ring_eigenvalues(n)[1], rtol=0, atol=1e-6)


RANDOM_LAWS = {
    "random_ring:seed=8": theorems.randomised_ring_contraction,
    "random_pairs:seed=8": theorems.matching_contraction,
}


@pytest.mark.parametrize("n", SIZES)
def test_random_schemes_shrink_disagreement_by_their_law(n: int) -> None:
    """E |T_k X|^2 = c |X|^2 for every X of mean zero, T_k and X drawn anew: the mean over rounds is
    within 5 standard errors of c but for one case in 10^6. The rounds follow from the seeds alone,
    so that this passes always or never. X has 2000 columns, which makes the error small.
    """
    rounds = 30
    result = run_rounds(
        n, "--strategy", *RANDOM_LAWS, "--factors", rounds, "--size", 2000, "--seed", 2
    )
    for spec, law in RANDOM_LAWS.items():
        factors = np.array(result[spec])
        error = factors.std(ddof=1) / np.sqrt(rounds)
        assert 0 < error < 0.01 * law(n), spec
        assert abs(factors.mean() - law(n)) < 5 * error, (spec, factors.mean(), law(n), error)
