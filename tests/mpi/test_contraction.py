"""The engine against theory: mixing matrices round by round, contraction laws over many rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import theorems

from hvd_adpsgd.strategies import Strategy, parse
from hvd_adpsgd.theory import mixing, topology
from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "rounds.py"
SIZES = (5, pytest.param(8, marks=pytest.mark.extended))
STRATEGIES = ("fixed_ring", "random_ring:seed=3", "random_pairs:seed=3")


def run_rounds(n: int, *args: object, timeout: float = 120) -> dict[str, Any]:
    """What rounds.py prints on n super learners, by strategy."""
    result = run_learners(n, PROGRAM, args=[str(a) for a in args], timeout=timeout).checked()
    return json.loads(result.stdout.splitlines()[-1])


# ---- matrices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, *SIZES])
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


# ---- laws, running freely ------------------------------------------------------------------------


def slowest(strategy: Strategy, n: int) -> float:
    """Factor on squared disagreement per exchange if exchanges come one by one, at random."""
    if strategy.name == "fixed_ring":
        return theorems.event_contraction(n, topology.ring_edges(n), strategy.pair_weight(n))
    return theorems.complete_event_contraction(n, strategy.pair_weight(n))


def fastest(strategy: Strategy, n: int) -> float:
    """The same if exchanges came in whole rounds, each super learner once: as in lock step.

    For the fixed ring a lower bound: what a round leaves of the mode that it shrinks most slowly
    is at least what it leaves of any, so a start with all modes alike is compared with the mean
    over modes of the first round, |T|_F^2.
    """
    if strategy.name == "random_pairs":
        return float(theorems.matching_contraction(n) ** (1 / (n // 2)))
    if strategy.name == "random_ring":
        return float(theorems.randomised_ring_contraction(n) ** (1 / n))
    return float(theorems.permuted_contraction(mixing.ring_matrix(n)) ** (1 / n))


@pytest.mark.parametrize("n", SIZES)
def test_free_running_engines_follow_the_event_view(n: int) -> None:
    """Between the law of single exchanges and that of whole rounds, per exchange.

    With K_r exchanges and factor f_r in repeat r, the mean of f_r / slowest^K_r is at most 1, for
    engines that exchange one by one at random lose that much on average, and credits, which spread
    exchanges evenly, only help. The mean of f_r / fastest^K_r is at least 1. Each with an allowance of
    5 standard errors over 40 repeats: whoever keeps to the laws fails once in 10^6.
    """
    seed, repeats = 5, 40
    result = run_rounds(
        n, "--strategy", *STRATEGIES, "--events", 2 * n, "--repeats", repeats, "--seed", seed
    )
    for spec in STRATEGIES:
        runs = result[spec]
        assert all(run["exchanges"] >= 2 * n for run in runs)
        factor = np.array([run["factor"] for run in runs])
        count = np.array([run["exchanges"] for run in runs])
        slow = factor / slowest(parse(spec), n) ** count
        fast = factor / fastest(parse(spec), n) ** count
        error_slow, error_fast = (x.std(ddof=1) / np.sqrt(repeats) for x in (slow, fast))
        facts = (spec, n, seed, slow.mean(), error_slow, fast.mean(), error_fast)
        assert slow.mean() < 1 + 5 * error_slow, facts
        assert fast.mean() > 1 - 5 * error_fast, facts
