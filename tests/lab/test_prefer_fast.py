"""Asking the fastest of three peers: slow links are used less, models approach sooner."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hvd_adpsgd_lab.simulate import units
from hvd_adpsgd_lab.simulation import slow_links
from hvd_adpsgd_lab.simulation.planner import Cluster, allreduce_s, job_of, plan

from hvd_adpsgd.errors import ConfigError
from tests.lab.clusters import changed
from tests.theorems import asking

MEGABIT = 1e6 / 8
# An exchange of the whole model takes four steps on a fast link, forty on a slow one.
UNEQUAL = Cluster(
    super_learners=16,
    parameters=1e6,
    step_s=0.1,
    bytes_per_s=80 * MEGABIT,
    latency_s=1e-4,
    minutes=5.0,
    slow_links=0.25,
    slow_links_factor=10.0,
)


def preferring(cluster: Cluster, prefer: float) -> Cluster:
    return changed(cluster, averaging=f"random_pairs:prefer_fast={prefer}")


def exchanges(cluster: Cluster, seconds: float) -> np.ndarray:
    """How often each pair has exchanged."""
    draw = np.random.default_rng(cluster.seed)
    models = [draw.standard_normal((cluster.chunks, 8)) for _ in range(cluster.super_learners)]
    job = job_of(cluster, models, bytes_scale=cluster.model_nbytes / models[0].nbytes)
    job.run_for(seconds)
    n = cluster.super_learners
    counts = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            counts[i, j] = job.loop_of(i).met(j) if i != j else 0
    return counts


def share_of_slow(cluster: Cluster, seconds: float = 1000.0) -> float:
    """The share of exchanges that are over slow links."""
    met = exchanges(cluster, seconds)
    return float(met[cluster.slowness > 1].sum() / met.sum())


def test_slow_links_are_used_as_rarely_as_in_theory_and_still_used() -> None:
    """Exchanges are so few that no peer is busy: every ask is answered with YES."""
    cluster = changed(UNEQUAL, exchanges_per_step=0.02, bytes_per_s=4e9, latency_s=1e-5)
    fast, slow = 1.0, cluster.slow_links_factor
    seconds = np.where(cluster.slowness > 1, slow, fast)
    for prefer in (0.0, 0.5, 0.9):
        expected = asking(seconds, prefer)
        found = share_of_slow(preferring(cluster, prefer))
        assert found == pytest.approx(expected[cluster.slowness > 1].sum() / 16, abs=0.03)
        assert found > 0


@pytest.mark.parametrize(
    "links",
    [
        {"slow_links": 0.25, "slow_links_factor": 10.0},  # NetMax's setting
        pytest.param({"slow_links": 0.25, "slow_links_factor": 30.0}, marks=pytest.mark.extended),
        {"slow_links": 0.0, "racks": 2, "racks_factor": 10.0},
    ],
)
def test_unequal_links_consensus_per_second(links: dict[str, Any]) -> None:
    """Measured 1.5 to 2.2 times that of uniform pairs."""
    ratios = []
    for seed in range(4):
        cluster = replace(UNEQUAL, minutes=1.5, seed=seed, **links)
        uniform, fast = plan(cluster), plan(preferring(cluster, 0.95))
        assert uniform.decay_per_s is not None
        assert fast.decay_per_s is not None
        assert fast.steps_kept == pytest.approx(uniform.steps_kept, abs=0.01)
        ratios.append(fast.decay_per_s / uniform.decay_per_s)
    assert sum(ratios) / len(ratios) > 1.3, ratios


def test_racks_stay_connected() -> None:
    racks = replace(UNEQUAL, slow_links=0.0, racks=2, racks_factor=10.0, minutes=1.5)
    assert 0.1 < share_of_slow(preferring(racks, 0.95), 200) < share_of_slow(racks, 200)


# ---- slow links of a plan


@pytest.mark.parametrize(("n", "racks"), [(8, 2), (5, 4), (9, 4), (6, 6), (7, 1)])
def test_there_are_as_many_racks_as_asked_for(n: int, racks: int) -> None:
    slowness = slow_links.of_racks(n, racks, 10.0)
    assert len({tuple(row == 1) for row in slowness}) == racks
    assert set(np.unique(slowness)) <= {1.0, 10.0}


def test_a_share_of_the_pairs_is_slow_in_both_directions() -> None:
    slowness = slow_links.of_pairs(9, 0.25, 10.0, seed=3)
    np.testing.assert_array_equal(slowness, slowness.T)
    assert (slowness > 1).sum() == 2 * round(36 / 4)
    assert slow_links.of_ring(slow_links.of_racks(4, 2, 7.0)) == 7.0


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    plain = replace(UNEQUAL, slow_links=0.0)
    slow = replace(plain, racks=2, racks_factor=10.0)
    assert allreduce_s(slow) == pytest.approx(10 * allreduce_s(plain), rel=0.01)


def test_units() -> None:
    assert units.slow_links("0.25x10") == (0.25, 10.0)
    assert units.racks("2x10") == (2, 10.0)
    with pytest.raises(ConfigError, match="--slow-links '10': allowed is SHARE_OF_PAIRSxHOW_MUCH"):
        units.slow_links("10")
    with pytest.raises(ConfigError, match=r"--racks '2\.5x10': allowed is a whole number"):
        units.racks("2.5x10")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"slow_links": 1.5}, r"slow_links \(--slow-links\) is 1\.5"),
        ({"slow_links": 0.001}, "which is no pair of 16 super learners"),
        ({"super_learners": 5000}, "5000 super learners with slow links .*allowed are up to 4096"),
    ],
)
def test_what_would_be_ignored_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(UNEQUAL, **changes)
