"""Predictions against brute force: companion matrices, simulation with seeds, event by event."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.errors import ConfigError, TopologyError
from hvd_adpsgd.theory import limits, mixing, topology

SIZES = st.integers(1, 12)
MATRICES = {
    "ring": mixing.ring_matrix,
    "mean": mixing.uniform_matrix,
    "pairs": lambda n: mixing.matching_matrix(topology.perfect_matching(n, 0, 0)),
    "alone": np.eye,
}


def radius(matrix):
    return np.abs(np.linalg.eigvals(matrix)).max()


def assert_limit(limit, system_of):
    """Stable just below the limit, unstable just above."""
    assert radius(system_of(0.999 * limit)) < 1
    assert radius(system_of(1.001 * limit)) > 1


# ---- how large a step a quadratic bears


@given(SIZES, st.sampled_from(["ring", "mean", "pairs"]))
def test_adapt_while_communicate_limit(n, name):
    matrix = MATRICES[name](n)
    limit = limits.adapt_while_communicate_limit(matrix)
    assert_limit(limit, lambda step: matrix - step * np.eye(n))


def test_adapt_while_communicate_by_hand():
    limit = limits.adapt_while_communicate_limit
    assert limit(mixing.ring_matrix(8)) == pytest.approx(2 / 3)
    assert limit(mixing.ring_matrix(64)) == pytest.approx(2 / 3)
    assert limit(mixing.uniform_matrix(5)) == pytest.approx(1)
    assert limit([[1.0]]) == pytest.approx(2)
    assert limit(mixing.pair_matrix(2, 0, 1, 1.0)) == pytest.approx(0)


@given(SIZES, st.sampled_from(sorted(MATRICES)))
def test_adapt_then_combine_limit(n, name):
    matrix = MATRICES[name](n)
    limit = limits.adapt_then_combine_limit(matrix)
    assert limit == 2
    assert_limit(limit, lambda step: matrix @ (np.eye(n) - step * np.eye(n)))


def delayed_system(step, delay):
    """Companion matrix of x_{k+1} = x_k - a x_{k-tau} on (x_k, ..., x_{k-tau})."""
    system = np.eye(delay + 1, k=-1)
    system[0, 0] += 1
    system[0, delay] -= step
    return system


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 7, 20])
def test_delayed_limit(delay):
    assert_limit(limits.delayed_limit(delay), lambda step: delayed_system(step, delay))


def test_delayed_limit_by_hand():
    assert limits.delayed_limit(0) == pytest.approx(2)
    assert limits.delayed_limit(1) == pytest.approx(1)
    assert limits.delayed_limit(2) == pytest.approx((5**0.5 - 1) / 2)
    assert limits.delayed_limit(1000) == pytest.approx(np.pi / 2000, rel=1e-3)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_delay_by_one_limits(n):
    """Both forms written out for all learners: own models, and (mean, previous mean)."""
    own = limits.delay_by_one_limit(n)
    assert own == pytest.approx(1 if n > 1 else 2)
    assert_limit(own, lambda step: np.full((n, n), 1 / n) - step * np.eye(n))
    mean = limits.delay_by_one_limit(n, "mean")
    assert mean == pytest.approx(1)
    assert_limit(mean, lambda step: np.array([[1, -step], [1, 0]]))


# ---- how far the models stay apart


@given(SIZES, st.sampled_from(["ring", "mean"]))
def test_kappa_without_curvature_is_that_of_mixing(n, name):
    matrix = MATRICES[name](n)
    expected = mixing.stationary_kappa(matrix)
    assert limits.kappa_on_quadratic(matrix, 0.0) == pytest.approx(expected, abs=1e-12)


@given(SIZES, st.floats(0, 0.99))
def test_delay_by_one_is_an_exact_average_while_descending(n, step):
    expected = limits.kappa_on_quadratic(mixing.uniform_matrix(n), step)
    assert limits.kappa_delay_by_one(n, step) == pytest.approx(expected, abs=1e-9)
    assert limits.kappa_delay_by_one(n) == mixing.kappa_uniform(n)


def simulated_kappas(n, updates, steps=500, width=400, seed=4):
    """Mean squared distance to the mean per entry, alpha = s = 1, for each update of (X, noise)."""
    for update in updates:
        generator = np.random.default_rng(seed)
        models, total = np.zeros((n, width)), 0.0
        for k in range(2 * steps):
            models = update(models, generator.normal(size=models.shape))
            if k >= steps:
                total += mixing.consensus_distance(models) ** 2 / width
        yield total / steps


@pytest.mark.parametrize("n", [5, 8])
def test_kappas_by_simulation(n):
    ring, step = mixing.ring_matrix(n), 0.4
    measured = simulated_kappas(
        n,
        [
            lambda x, noise: ring @ x - step * x - noise,
            lambda x, noise: ring @ (x - step * x - noise),
            lambda x, noise: x.mean(axis=0) - step * x - noise,
        ],
    )
    expected = [
        limits.kappa_on_quadratic(ring, step),
        limits.kappa_on_quadratic(ring, step, "then"),
        limits.kappa_delay_by_one(n, step),
    ]
    np.testing.assert_allclose(list(measured), expected, rtol=0.02)


def test_delay_by_one_spread_is_one_step_of_noise():
    n, width, alpha = 6, 3000, 0.3
    generator = np.random.default_rng(9)
    models = np.zeros((n, width))
    for _ in range(3):
        models = models.mean(axis=0) - alpha * generator.normal(size=models.shape)
    expected = alpha**2 * limits.kappa_delay_by_one(n)
    assert mixing.consensus_distance(models) ** 2 / width == pytest.approx(expected, rel=0.05)


@given(st.integers(1, 6), st.integers(1, 5))
def test_loss_gap_is_exact_on_a_quadratic(n, length):
    generator = np.random.default_rng(n + 10 * length)
    root, models = generator.normal(size=(length, length)), generator.normal(size=(n, length))
    hessian, offset = root @ root.T, generator.normal(size=length)
    losses = [0.5 * x @ hessian @ x + offset @ x for x in [*models, models.mean(axis=0)]]
    expected = np.mean(losses[:-1]) - losses[-1]
    assert limits.loss_gap(hessian, models) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 8), st.integers(1, 5), st.floats(1e-3, 10))
def test_effective_rate_on_a_quadratic_is_the_rate_and_elsewhere_what_the_mean_does(
    n, length, rate
):
    generator = np.random.default_rng(n + 10 * length)
    root, models = generator.normal(size=(length, length)), generator.normal(size=(n, length))
    hessian = root @ root.T + np.eye(length)
    mean = models.mean(axis=0)
    found = limits.effective_rate(rate, models @ hessian, hessian @ mean)
    assert found == pytest.approx(rate, rel=1e-9)
    # of f = sum x^4 / 4: one step of all, seen from the mean model, along the gradient there
    gradients, g = models**3, mean**3
    moved = (mean - (models - rate * gradients).mean(axis=0)) @ g
    assert limits.effective_rate(rate, gradients, g) == pytest.approx(moved / (g @ g), rel=1e-9)


@given(
    st.integers(1, 64), st.integers(1, 512), st.floats(0.1, 10), st.floats(0, 10),
    st.floats(0, 10), st.integers(1, 10**7), st.floats(0, 10),
)  # fmt: skip
def test_the_bound_is_what_the_rate_gives(n, batch, smooth, within, between, updates, start):
    """f0 / (K e) + L v e, the descent lemma's with a step e of the mean, up to its constant 10."""
    noise = limits.Noise(batch, smooth, within, between)
    step = limits.adpsgd_rate(n, noise, updates) * batch / n
    variance = within / batch + 6 * between
    lemma = start / (updates * step) + smooth * variance * step
    bound = limits.adpsgd_bound(noise, updates, start)
    assert lemma <= 10 * bound * (1 + 1e-9)
    slow = (start + smooth) * np.sqrt(variance / updates)
    assert bound == pytest.approx(start * smooth / updates + slow, rel=1e-9)


@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (lambda: limits.effective_rate(1, np.ones((2, 3)), np.ones(2)), "shapes do not fit"),
        (lambda: limits.effective_rate(1, np.ones((2, 3)), np.zeros(3)), "no rate can be seen"),
        (lambda: limits.adpsgd_rate(0, limits.Noise(1, 1, 1, 1), 1), "super learners|n ="),
        (lambda: limits.adpsgd_rate(2, limits.Noise(1, 1, 1, 1), 0), "updates = 0"),
        (lambda: limits.adpsgd_bound(limits.Noise(1, 1, 1, 1), 0, 1), "updates = 0"),
        (lambda: limits.Noise(0, 1, 1, 1), "batch = 0"),
        (lambda: limits.Noise(1, 0, 1, 1), "smoothness = 0"),
        (lambda: limits.Noise(1, 1, -1, 1), "within = -1"),
    ],
)
def test_wrong_arguments_of_rates(call, cure):
    with pytest.raises((ConfigError, TopologyError), match=cure):
        call()


@given(st.floats(0, 0.999), st.floats(1, 1e6))
def test_rounds_to_shrink_by_counting(factor, by):
    left, rounds = 1.0, 0
    while left * by > 1 + 1e-6:
        left, rounds = left * factor, rounds + 1
    assert limits.rounds_to_shrink(factor, by) in (rounds, rounds + (left * by > 1 - 1e-6))


@pytest.mark.parametrize(("n", "fixed", "randomised"), [(16, 45, 4), (32, 179, 4), (64, 717, 5)])
def test_rounds_table(n, fixed, randomised):
    ring = mixing.second_eigenvalue(mixing.ring_matrix(n))
    assert limits.rounds_to_shrink(ring) == fixed
    assert limits.rounds_to_shrink(mixing.randomised_ring_contraction(n) ** 0.5) == randomised


def test_rounds_by_hand():
    assert limits.rounds_to_shrink(0.5, 8) == 3
    assert limits.rounds_to_shrink(0.5, 8.1) == 4
    assert limits.rounds_to_shrink(0.0) == 1
    assert limits.rounds_to_shrink(0.9, 1) == 0


# ---- one slow learner


def gradients_without_waiting(periods, horizon):
    """(learner, staleness) of every gradient, event by event; each starts the next one at once."""
    ends = [(period, i) for i, period in enumerate(periods)]
    heapq.heapify(ends)
    started, done, found = [0] * len(periods), 0, []
    while ends[0][0] <= horizon:
        time, i = heapq.heappop(ends)
        found.append((i, done - started[i]))
        done += 1
        started[i] = done
        heapq.heappush(ends, (time + periods[i], i))
    return found


@pytest.mark.parametrize(("learners", "size"), [(1, 1), (5, 1), (6, 3), (8, 2)])
@pytest.mark.parametrize("slowdown", [1, 2, 7])
def test_throughput_by_events(learners, size, slowdown):
    n, horizon = learners // size, 700
    periods = [slowdown, *[1] * (n - 1)]
    free = size * len(gradients_without_waiting(periods, horizon)) / horizon
    waiting = learners * (horizon // max(periods)) / horizon
    for waits, pace in ((False, free), (True, waiting)):
        got = limits.straggler_throughput(learners, slowdown, super_learners=n, waits=waits)
        assert got == pytest.approx(pace)
        time = limits.straggler_epoch_time(learners, slowdown, super_learners=n, waits=waits)
        assert time == pytest.approx(learners / pace)


@pytest.mark.parametrize(
    ("n", "slowdown", "expected"),
    [(8, 2, 1.067), (8, 10, 1.127), (8, 100, 1.141), (16, 2, 1.032), (16, 10, 1.060),
     (16, 100, 1.066)],
)  # fmt: skip
def test_straggler_table(n, slowdown, expected):
    assert limits.straggler_epoch_time(n, slowdown) == pytest.approx(expected, abs=5e-4)
    hierarchical = limits.straggler_epoch_time(4 * n, slowdown, super_learners=n)
    assert hierarchical == pytest.approx(expected, abs=5e-4)


def test_a_stopped_learner():
    assert limits.straggler_throughput(4, float("inf")) == 3
    assert limits.straggler_throughput(8, float("inf"), super_learners=2) == 4
    assert limits.straggler_throughput(4, float("inf"), waits=True) == 0


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize("slowdown", [1, 3, 10])
def test_staleness_by_events(n, slowdown):
    periods = [slowdown + 1e-6, *(1 + 1e-7 * i for i in range(n - 1))]  # no ties
    found = gradients_without_waiting(periods, 2000)
    measured = [np.mean([stale for j, stale in found if j == i]) for i in range(n)]
    expected = limits.expected_staleness([1 / period for period in periods])
    np.testing.assert_allclose(measured, expected, rtol=0.01, atol=0.01)
    assert limits.straggler_staleness(n, slowdown) == pytest.approx(expected[0], rel=1e-4)
    assert np.mean([stale for _, stale in found]) == pytest.approx(n - 1, rel=0.01)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_mean_staleness_does_not_depend_on_the_paces(paces):
    staleness = limits.expected_staleness(paces)
    assert np.average(staleness, weights=paces) == pytest.approx(len(paces) - 1, abs=1e-9)


# ---- averaging now and then


@given(st.integers(1, 64), st.integers(1, 50), st.floats(1e-3, 10), st.floats(0, 10))
def test_averaging_speedup_by_a_clock(n, period, step_s, allreduce_s):
    alone, together = n * period * step_s, 0.0  # seconds for the same data
    for _ in range(period):
        together += step_s
    together += allreduce_s
    speedup = limits.averaging_speedup(n, period, step_s, allreduce_s)
    assert speedup == pytest.approx(alone / together)
    share = limits.allreduce_share(n, min(speedup, n))
    assert share == pytest.approx(allreduce_s / (period * step_s), abs=1e-9)


def test_published_speedups_fit_an_allreduce_of_log_n_stages():
    """Su and Chen, arXiv:1507.01239: 9.3 times with 16 GPUs and 17 times with 32."""
    growth = limits.allreduce_share(32, 17) / limits.allreduce_share(16, 9.3)
    assert growth == pytest.approx(np.log2(32) / np.log2(16), rel=0.03)


# ---- refusals


@pytest.mark.parametrize(
    "call",
    [
        lambda: limits.delayed_limit(-1),
        lambda: limits.delay_by_one_limit(4, "both"),
        lambda: limits.kappa_on_quadratic(np.eye(2), 0.0),
        lambda: limits.kappa_on_quadratic(mixing.ring_matrix(8), 0.7),
        lambda: limits.kappa_on_quadratic(mixing.ring_matrix(8), -0.1),
        lambda: limits.kappa_on_quadratic(mixing.ring_matrix(8), float("nan")),
        lambda: limits.kappa_on_quadratic(mixing.ring_matrix(8), 0.1, "before"),
        lambda: limits.kappa_delay_by_one(3, 1.0),
        lambda: limits.rounds_to_shrink(1.0),
        lambda: limits.rounds_to_shrink(0.5, 0.5),
        lambda: limits.rounds_to_shrink(0.5, float("inf")),
        lambda: limits.expected_staleness([]),
        lambda: limits.expected_staleness([1.0, 0.0]),
        lambda: limits.straggler_staleness(4, 0.5),
        lambda: limits.averaging_speedup(4, 0, 1.0, 1.0),
        lambda: limits.averaging_speedup(4, 1, 0.0, 1.0),
        lambda: limits.averaging_speedup(4, 1, 1.0, float("nan")),
        lambda: limits.allreduce_share(4, 4.1),
    ],
)
def test_wrong_arguments(call):
    with pytest.raises(ConfigError, match=r"got .*, allowed is .*\. "):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: limits.adapt_while_communicate_limit(np.ones((2, 2))),
        lambda: limits.adapt_then_combine_limit(np.ones((2, 2))),
        lambda: limits.delay_by_one_limit(0),
        lambda: limits.delay_by_one_limit(0, "mean"),
        lambda: limits.kappa_on_quadratic(np.ones((2, 2)), 0.1),
        lambda: limits.kappa_delay_by_one(0),
        lambda: limits.loss_gap(np.eye(2), np.ones((3, 1))),
        lambda: limits.loss_gap(np.eye(2), np.empty((0, 2))),
        lambda: limits.straggler_throughput(7, 2, super_learners=2),
        lambda: limits.straggler_throughput(0, 2),
        lambda: limits.straggler_epoch_time(0, 2, super_learners=2),
        lambda: limits.straggler_epoch_time(4, 0.5),
        lambda: limits.straggler_epoch_time(4, 0.5, waits=True),
        lambda: limits.straggler_staleness(0, 2),
        lambda: limits.averaging_speedup(0, 1, 1.0, 1.0),
        lambda: limits.allreduce_share(0, 1.0),
    ],
)
def test_wrong_sizes(call):
    with pytest.raises(TopologyError):
        call()
