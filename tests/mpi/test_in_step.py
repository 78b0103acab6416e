"""The engine in step against closed forms: mixing matrices, contraction, and the spread that noise leaves.

All random numbers, those of rings and pairs too, follow from seeds, and every round has the same
peers in every run: what is asserted passes always or never. Engines that run freely:
tests/lab/test_free_contraction.py, where time is virtual.
"""

import functools
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


ROUNDS, FACTORS = 7, 40
LOCKSTEP = [
    f"synchronous_gossip:order={order}+{base}"
    for base in ("fixed_ring", "random_ring:seed=3", "random_pairs:seed=3")
    for order in ("atc", "awc")
]
SLOWEST = "synchronous_gossip+fixed_ring"
NOISY = (
    "synchronous_gossip+fixed_ring",
    "synchronous_gossip+random_ring:seed=3",
    "synchronous_gossip+random_pairs:seed=3",
    "delay_by_one",
)
RUNS: dict[str, list[object]] = {
    "lockstep": [*LOCKSTEP, "--lockstep", ROUNDS, "--seed", 11, "--size", 300],
    "slowest": [SLOWEST, "--factors", 8, "--start", "fourier"],
    "random": [*RANDOM_LAWS, "--factors", FACTORS, "--seed", 2],
    "delayed": ["delay_by_one", "--factors", 3],
    "noise": [*NOISY, "--kappa", 60],
}


@functools.cache
def in_step(n: int) -> dict[str, dict[str, Any]]:
    """What in_step.py finds on n super learners, by run and strategy; of few, of the first run alone."""
    names = list(RUNS) if n >= 5 else ["lockstep"]
    args = [str(word) for name in names for word in ("--then", "--strategy", *RUNS[name])]
    return dict(zip(names, run_learners(n, PROGRAM, args=args).checked().said, strict=True))


@pytest.mark.parametrize("n", [2, 3, *SIZES[:2]])
def test_lock_step_is_the_product_of_the_matrices(n: int) -> None:
    for spec in LOCKSTEP:
        before, after = (np.array(in_step(n)["lockstep"][spec][key]) for key in ("before", "after"))
        product = np.eye(n)
        for k in range(ROUNDS):
            product = theorems.mixing_matrix(parse(spec), n, k) @ product
        assert before.std() > 0.5, "the models were all but equal to begin with"
        np.testing.assert_allclose(after, product @ before, rtol=0, atol=1e-12, err_msg=spec)


@pytest.mark.parametrize("n", SIZES)
def test_the_slowest_mode_of_the_fixed_ring_shrinks_by_lambda_2(n: int) -> None:
    """cos(2 pi i / n) is an eigenvector of the ring: lambda_2 = (1 + 2 cos(2 pi / n)) / 3 a round."""
    per_round = np.sqrt(in_step(n)["slowest"][SLOWEST])
    np.testing.assert_allclose(per_round, theorems.ring_eigenvalues(n)[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", SIZES)
def test_random_partners_shrink_disagreement_by_their_law(n: int) -> None:
    """E |T_k X|^2 = c |X|^2 for every X of mean zero, T_k and X drawn anew: the mean over rounds is
    within 5 standard errors of c but for one case in 10^6.
    """
    for spec, law in RANDOM_LAWS.items():
        factors = np.array(in_step(n)["random"][spec])
        error = factors.std(ddof=1) / np.sqrt(FACTORS)
        assert 0 < error < 0.01 * law(n), spec
        assert abs(factors.mean() - law(n)) < 5 * error, (spec, factors.mean(), law(n), error)


@pytest.mark.parametrize("n", SIZES)
def test_delay_by_one_leaves_no_disagreement_after_one_round(n: int) -> None:
    assert max(in_step(n)["delayed"]["delay_by_one"]) < 1e-28


@pytest.mark.parametrize("n", SIZES)
def test_noise_leaves_the_spread_of_the_closed_forms(n: int) -> None:
    """kappa within 5 %, and the mean moves by the noise alone."""
    contractions = theorems.randomised_ring_contraction(n), theorems.matching_contraction(n), 0.0
    kappas = [theorems.kappa_fixed(n), *(theorems.kappa_random(n, c) for c in contractions)]
    for spec, kappa in zip(NOISY, kappas, strict=True):
        noise = in_step(n)["noise"][spec]
        assert noise["kappa"] == pytest.approx(kappa, rel=0.05), spec
        assert noise["mean_error"] < 1e-12, spec
