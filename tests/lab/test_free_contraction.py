"""Engines that run freely bring models together as theory says, per exchange.

Under a virtual clock: which pairs exchange when follows from the seeds alone, so each case passes always or
never. On real clocks it depends on the load which engines get to exchange, and no law holds.
"""

import numpy as np
import pytest
import theorems
from hvd_adpsgd_lab.simulation import planner
from hvd_adpsgd_lab.simulation.planner import Cluster

from hvd_adpsgd.strategies import Strategy, parse
from tests.lab.clusters import changed

STRATEGIES = ("fixed_ring", "random_ring:seed=3", "random_pairs:seed=3")
SEEDS, CHUNKS = 40, 8


def slowest(strategy: Strategy, n: int) -> float:
    """Factor on squared disagreement per exchange if exchanges come one by one, at random."""
    if strategy.name == "fixed_ring":
        return theorems.event_contraction(n, theorems.ring_edges(n), strategy.pair_weight(n))
    return theorems.complete_event_contraction(n, strategy.pair_weight(n))


def fastest(strategy: Strategy, n: int) -> float:
    """The same if exchanges come in whole rounds, each super learner once: as in lock step.

    For the fixed ring a lower bound: what a round leaves of the mode that it shrinks most slowly
    is at least what it leaves of any, so a start with all modes alike is compared with the mean
    over modes of the first round, |T|_F^2.
    """
    if strategy.name == "random_pairs":
        return float(theorems.matching_contraction(n) ** (1 / (n // 2)))
    if strategy.name == "random_ring":
        return float(theorems.randomised_ring_contraction(n) ** (1 / n))
    return float(theorems.permuted_contraction(theorems.ring_matrix(n)) ** (1 / n))


def run_freely(spec: str, n: int, seed: int, share: float = 1.0) -> tuple[float, float]:
    """Some 2 n models exchanged: how many, and the factor by which the squared disagreement shrank."""
    # steps of uneven length, models of 64 numbers, messages that take no time beside a step
    how = {"chunks": CHUNKS, "seed": seed, "spread": 0.5}
    cluster = Cluster(n, 1e5, 0.35, 1.25e9, 50e-6, **how)  # type: ignore[arg-type]
    cluster = changed(cluster, averaging=spec, exchange_share=share)
    job, _ = planner._job(cluster)
    job.run_for(0.5 * cluster.step_s)
    met, before = planner._distance(job, n)
    while (now := planner._distance(job, n))[0] < met + 4 / share:
        job.run_for(0.1 * cluster.step_s)
    return share * round((now[0] - met) * n / 2), now[1] / before


@pytest.mark.parametrize("n", [5, 8])
@pytest.mark.parametrize("spec", STRATEGIES)
def test_free_running_engines_follow_the_event_view(spec: str, n: int) -> None:
    """Between the law of single exchanges and that of whole rounds, per exchange.

    With K_r exchanges and factor f_r in repeat r, the mean of f_r / slowest^K_r is at most 1: engines
    that exchange one by one at random lose that much on average, and credits, which spread exchanges
    evenly, only help. The mean of f_r / fastest^K_r is about 1 or more; a little less for pairs of an odd
    number, of which in a round one sits out. If each exchange moved models twice it would be below 0.1.
    """
    count, factor = np.array([run_freely(spec, n, seed) for seed in range(SEEDS)]).T
    slow = factor / slowest(parse(spec), n) ** count
    fast = factor / fastest(parse(spec), n) ** count
    assert slow.mean() < 1, (slow.mean(), fast.mean())
    assert fast.mean() > 0.5, (slow.mean(), fast.mean())


@pytest.mark.parametrize("share", [0.5, 0.25, 0.125])
def test_a_byte_of_a_share_brings_models_together_as_one_of_a_whole_model(share: float) -> None:
    """The same bounds per model's worth of chunks: an exchange moves a share of them, each in its turn."""
    strategy, n = parse("random_pairs:seed=3"), 4
    found = [run_freely("random_pairs:seed=3", n, seed, share) for seed in range(SEEDS)]
    models, factor = np.array(found).T
    slow, fast = factor / slowest(strategy, n) ** models, factor / fastest(strategy, n) ** models
    assert slow.mean() < 1, (slow.mean(), fast.mean())
    assert fast.mean() > 0.5, (slow.mean(), fast.mean())
