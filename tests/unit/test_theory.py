"""Predictions against brute force: companion matrices, simulation with seeds, event by event."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adpsgd import mixing, theory, topology
from hvd_adpsgd.errors import ConfigError, TopologyError

SIZES = st.integers(1, 12)
MATRICES = {
    "ring": mixing.ring_matrix,
    "mean": mixing.uniform_matrix,
    "pairs": lambda n: mixing.matching_matrix(topology.perfect_matching(n, 0, 0)),
    "alone": np.eye,
}


def star(n):
    return [(0, i) for i in range(1, n)]


def path(n):
    return [(i, i + 1) for i in range(n - 1)]


def exponential(n):
    """Neighbours at distances 1, 2, 4, ...: circulant and not complete."""
    pairs = ((i, (i + 2**k) % n) for i in range(n) for k in range(n.bit_length() - 1))
    return sorted({tuple(sorted(pair)) for pair in pairs})


GRAPHS = {
    "ring": topology.ring_edges,
    "complete": topology.complete_edges,
    "star": star,
    "path": path,
    "exponential": exponential,
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
    limit = theory.adapt_while_communicate_limit(matrix)
    assert_limit(limit, lambda step: matrix - step * np.eye(n))


def test_adapt_while_communicate_by_hand():
    limit = theory.adapt_while_communicate_limit
    assert limit(mixing.ring_matrix(8)) == pytest.approx(2 / 3)
    assert limit(mixing.ring_matrix(64)) == pytest.approx(2 / 3)
    assert limit(mixing.uniform_matrix(5)) == pytest.approx(1)
    assert limit([[1.0]]) == pytest.approx(2)
    assert limit(mixing.pair_matrix(2, 0, 1, 1.0)) == pytest.approx(0)


@given(SIZES, st.sampled_from(sorted(MATRICES)))
def test_adapt_then_combine_limit(n, name):
    matrix = MATRICES[name](n)
    limit = theory.adapt_then_combine_limit(matrix)
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
    assert_limit(theory.delayed_limit(delay), lambda step: delayed_system(step, delay))


def test_delayed_limit_by_hand():
    assert theory.delayed_limit(0) == pytest.approx(2)
    assert theory.delayed_limit(1) == pytest.approx(1)
    assert theory.delayed_limit(2) == pytest.approx((5**0.5 - 1) / 2)
    assert theory.delayed_limit(1000) == pytest.approx(np.pi / 2000, rel=1e-3)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_delay_by_one_limits(n):
    """Both forms written out for all learners: own models, and (mean, previous mean)."""
    own = theory.delay_by_one_limit(n)
    assert own == pytest.approx(1 if n > 1 else 2)
    assert_limit(own, lambda step: np.full((n, n), 1 / n) - step * np.eye(n))
    mean = theory.delay_by_one_limit(n, "mean")
    assert mean == pytest.approx(1)
    assert_limit(mean, lambda step: np.array([[1, -step], [1, 0]]))


# ---- how far the models stay apart


@given(SIZES, st.sampled_from(["ring", "mean"]))
def test_kappa_without_curvature_is_that_of_mixing(n, name):
    matrix = MATRICES[name](n)
    expected = mixing.stationary_kappa(matrix)
    assert theory.kappa_on_quadratic(matrix, 0.0) == pytest.approx(expected, abs=1e-12)


@given(SIZES, st.floats(0, 0.99))
def test_delay_by_one_is_an_exact_average_while_descending(n, step):
    expected = theory.kappa_on_quadratic(mixing.uniform_matrix(n), step)
    assert theory.kappa_delay_by_one(n, step) == pytest.approx(expected, abs=1e-9)
    assert theory.kappa_delay_by_one(n) == mixing.kappa_uniform(n)


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
        theory.kappa_on_quadratic(ring, step),
        theory.kappa_on_quadratic(ring, step, "then"),
        theory.kappa_delay_by_one(n, step),
    ]
    np.testing.assert_allclose(list(measured), expected, rtol=0.02)


def test_delay_by_one_spread_is_one_step_of_noise():
    n, width, alpha = 6, 3000, 0.3
    generator = np.random.default_rng(9)
    models = np.zeros((n, width))
    for _ in range(3):
        models = models.mean(axis=0) - alpha * generator.normal(size=models.shape)
    expected = alpha**2 * theory.kappa_delay_by_one(n)
    assert mixing.consensus_distance(models) ** 2 / width == pytest.approx(expected, rel=0.05)


@given(st.integers(1, 6), st.integers(1, 5))
def test_loss_gap_is_exact_on_a_quadratic(n, length):
    generator = np.random.default_rng(n + 10 * length)
    root, models = generator.normal(size=(length, length)), generator.normal(size=(n, length))
    hessian, offset = root @ root.T, generator.normal(size=length)
    losses = [0.5 * x @ hessian @ x + offset @ x for x in [*models, models.mean(axis=0)]]
    expected = np.mean(losses[:-1]) - losses[-1]
    assert theory.loss_gap(hessian, models) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 8), st.integers(1, 5), st.floats(1e-3, 10))
def test_effective_rate_on_a_quadratic_is_the_rate_and_elsewhere_what_the_mean_does(
    n, length, rate
):
    generator = np.random.default_rng(n + 10 * length)
    root, models = generator.normal(size=(length, length)), generator.normal(size=(n, length))
    hessian = root @ root.T + np.eye(length)
    mean = models.mean(axis=0)
    found = theory.effective_rate(rate, models @ hessian, hessian @ mean)
    assert found == pytest.approx(rate, rel=1e-9)
    # of f = sum x^4 / 4: one step of all, seen from the mean model, along the gradient there
    gradients, g = models**3, mean**3
    moved = (mean - (models - rate * gradients).mean(axis=0)) @ g
    assert theory.effective_rate(rate, gradients, g) == pytest.approx(moved / (g @ g), rel=1e-9)


@given(
    st.integers(1, 64), st.integers(1, 512), st.floats(0.1, 10), st.floats(0, 10),
    st.floats(0, 10), st.integers(1, 10**7), st.floats(0, 10),
)  # fmt: skip
def test_the_bound_is_what_the_rate_gives(n, batch, smooth, within, between, updates, start):
    """f0 / (K e) + L v e, the descent lemma's with a step e of the mean, up to its constant 10."""
    noise = theory.Noise(batch, smooth, within, between)
    step = theory.adpsgd_rate(n, noise, updates) * batch / n
    variance = within / batch + 6 * between
    lemma = start / (updates * step) + smooth * variance * step
    bound = theory.adpsgd_bound(noise, updates, start)
    assert lemma <= 10 * bound * (1 + 1e-9)
    slow = (start + smooth) * np.sqrt(variance / updates)
    assert bound == pytest.approx(start * smooth / updates + slow, rel=1e-9)


@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (lambda: theory.effective_rate(1, np.ones((2, 3)), np.ones(2)), "shapes do not fit"),
        (lambda: theory.effective_rate(1, np.ones((2, 3)), np.zeros(3)), "no rate can be seen"),
        (lambda: theory.adpsgd_rate(0, theory.Noise(1, 1, 1, 1), 1), "super learners|n ="),
        (lambda: theory.adpsgd_rate(2, theory.Noise(1, 1, 1, 1), 0), "updates = 0"),
        (lambda: theory.adpsgd_bound(theory.Noise(1, 1, 1, 1), 0, 1), "updates = 0"),
        (lambda: theory.Noise(0, 1, 1, 1), "batch = 0"),
        (lambda: theory.Noise(1, 0, 1, 1), "smoothness = 0"),
        (lambda: theory.Noise(1, 1, -1, 1), "within = -1"),
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
    assert theory.rounds_to_shrink(factor, by) in (rounds, rounds + (left * by > 1 - 1e-6))


@pytest.mark.parametrize(("n", "fixed", "randomised"), [(16, 45, 4), (32, 179, 4), (64, 717, 5)])
def test_rounds_table(n, fixed, randomised):
    ring = mixing.second_eigenvalue(mixing.ring_matrix(n))
    assert theory.rounds_to_shrink(ring) == fixed
    assert theory.rounds_to_shrink(mixing.randomised_ring_contraction(n) ** 0.5) == randomised


def test_rounds_by_hand():
    assert theory.rounds_to_shrink(0.5, 8) == 3
    assert theory.rounds_to_shrink(0.5, 8.1) == 4
    assert theory.rounds_to_shrink(0.0) == 1
    assert theory.rounds_to_shrink(0.9, 1) == 0


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
        got = theory.straggler_throughput(learners, slowdown, super_learners=n, waits=waits)
        assert got == pytest.approx(pace)
        time = theory.straggler_epoch_time(learners, slowdown, super_learners=n, waits=waits)
        assert time == pytest.approx(learners / pace)


@pytest.mark.parametrize(
    ("n", "slowdown", "expected"),
    [(8, 2, 1.067), (8, 10, 1.127), (8, 100, 1.141), (16, 2, 1.032), (16, 10, 1.060),
     (16, 100, 1.066)],
)  # fmt: skip
def test_straggler_table(n, slowdown, expected):
    assert theory.straggler_epoch_time(n, slowdown) == pytest.approx(expected, abs=5e-4)
    hierarchical = theory.straggler_epoch_time(4 * n, slowdown, super_learners=n)
    assert hierarchical == pytest.approx(expected, abs=5e-4)


def test_a_stopped_learner():
    assert theory.straggler_throughput(4, float("inf")) == 3
    assert theory.straggler_throughput(8, float("inf"), super_learners=2) == 4
    assert theory.straggler_throughput(4, float("inf"), waits=True) == 0


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize("slowdown", [1, 3, 10])
def test_staleness_by_events(n, slowdown):
    periods = [slowdown + 1e-6, *(1 + 1e-7 * i for i in range(n - 1))]  # no ties
    found = gradients_without_waiting(periods, 2000)
    measured = [np.mean([stale for j, stale in found if j == i]) for i in range(n)]
    expected = theory.expected_staleness([1 / period for period in periods])
    np.testing.assert_allclose(measured, expected, rtol=0.01, atol=0.01)
    assert theory.straggler_staleness(n, slowdown) == pytest.approx(expected[0], rel=1e-4)
    assert np.mean([stale for _, stale in found]) == pytest.approx(n - 1, rel=0.01)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_mean_staleness_does_not_depend_on_the_paces(paces):
    staleness = theory.expected_staleness(paces)
    assert np.average(staleness, weights=paces) == pytest.approx(len(paces) - 1, abs=1e-9)


# ---- averaging now and then


@given(st.integers(1, 64), st.integers(1, 50), st.floats(1e-3, 10), st.floats(0, 10))
def test_averaging_speedup_by_a_clock(n, period, step_s, allreduce_s):
    alone, together = n * period * step_s, 0.0  # seconds for the same data
    for _ in range(period):
        together += step_s
    together += allreduce_s
    speedup = theory.averaging_speedup(n, period, step_s, allreduce_s)
    assert speedup == pytest.approx(alone / together)
    share = theory.allreduce_share(n, min(speedup, n))
    assert share == pytest.approx(allreduce_s / (period * step_s), abs=1e-9)


def test_published_speedups_fit_an_allreduce_of_log_n_stages():
    """Su and Chen, arXiv:1507.01239: 9.3 times with 16 GPUs and 17 times with 32."""
    growth = theory.allreduce_share(32, 17) / theory.allreduce_share(16, 9.3)
    assert growth == pytest.approx(np.log2(32) / np.log2(16), rel=0.03)


# ---- gossip, plain and accelerated


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("name", ["ring", "complete"])
def test_laplacian_of_regular_graphs(n, name):
    edges = GRAPHS[name](n)
    neighbours = np.zeros((n, n))
    for i, j in edges:
        neighbours[i, j] = neighbours[j, i] = 1
    uniform = neighbours / neighbours.sum(axis=1)
    np.testing.assert_allclose(
        theory.laplacian(n, edges, 1.7), 1.7 * (np.eye(n) - uniform), atol=1e-15
    )


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_laplacian_counts_one_exchange_each(name):
    """On average over the learners, at `rate`; and half of it is the drift of the mean model."""
    n, rate, generator = 6, 0.8, np.random.default_rng(1)
    edges = GRAPHS[name](n)
    pull = theory.laplacian(n, edges, rate)
    assert np.trace(pull) / n == pytest.approx(rate)
    neighbours = [[j for e in edges for j in e if i in e and j != i] for i in range(n)]
    drawn, draws = np.zeros((n, n)), 20000
    for i in generator.integers(0, n, size=draws):
        drawn += mixing.pair_matrix(n, i, generator.choice(neighbours[i])) - np.eye(n)
    # n learners, each asking at rate / 2: so many exchanges per unit of time
    np.testing.assert_allclose(-0.5 * pull, drawn / draws * n * rate / 2, atol=0.02)


@pytest.mark.parametrize(
    ("n", "eta", "alpha_tilde", "chi1", "gain"),
    [(8, 0.2893, 0.988, 3.41, 2.2), (16, 0.1425, 1.872, 13.1, 5.6), (32, 0.0704, 3.665, 52, 17),
     (64, 0.0350, 7.262, 208, 60)],
)  # fmt: skip
def test_acceleration_table_of_the_ring(n, eta, alpha_tilde, chi1, gain):
    constants = theory.acceleration(n, topology.ring_edges(n))
    assert constants.eta == pytest.approx(eta, abs=5e-5)
    assert constants.alpha_tilde == pytest.approx(alpha_tilde, abs=5e-4)
    assert constants.chi1 == pytest.approx(chi1, rel=5e-3)
    assert constants.chi2 == pytest.approx(1 - 1 / n)  # resistance of n - 1 edges beside one
    assert theory.drift_gain(constants) == pytest.approx(gain, rel=0.03)


@settings(max_examples=30)
@given(st.integers(2, 9), st.sampled_from(sorted(GRAPHS)), st.floats(0.1, 10))
def test_acceleration_by_the_pseudoinverse(n, name, rate):
    edges = GRAPHS[name](n)
    pull = theory.laplacian(n, edges, rate)
    resistances = [edge @ np.linalg.pinv(pull) @ edge
                   for edge in (np.eye(n)[i] - np.eye(n)[j] for i, j in edges)]  # fmt: skip
    chi1, chi2 = 1 / np.sort(np.linalg.eigvalsh(pull))[1], max(resistances) / 2
    got = theory.acceleration(n, edges, rate)
    expected = (chi1, chi2, 1 / (2 * (chi1 * chi2) ** 0.5), 0.5 * (chi1 / chi2) ** 0.5)
    np.testing.assert_allclose((got.chi1, got.chi2, got.eta, got.alpha_tilde), expected, rtol=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_nothing_to_accelerate_on_complete_graphs(n):
    edges = topology.complete_edges(n)
    assert not theory.acceleration(n, edges).pays
    assert theory.acceleration_gain(n, edges) == pytest.approx(1)
    with pytest.raises(ConfigError, match=r"nothing to accelerate: among \d+ .* chi1 > chi2"):
        theory.require_acceleration(n, edges)


@pytest.mark.parametrize("name", ["ring", "star", "path", "exponential"])
def test_something_to_accelerate_elsewhere(name):
    edges = GRAPHS[name](6)
    assert theory.require_acceleration(6, edges) == theory.acceleration(6, edges)
    assert theory.acceleration_gain(6, edges) > 1


def test_drift_gain_by_integration():
    """Expected models under a constant drift, plain and accelerated, until they rest."""
    n, dt = 5, 0.05
    edges = topology.ring_edges(n)
    constants, pull = theory.acceleration(n, edges), theory.laplacian(n, edges)
    drift = np.array([1.0, -2.0, 0.5, 1.5, -1.0])
    plain, fast, shadow = np.zeros(n), np.zeros(n), np.zeros(n)
    for _ in range(4000):
        plain = plain + dt * (drift - 0.5 * pull @ plain)
        moved = constants.eta * (shadow - fast)
        pulled = pull @ fast
        fast, shadow = (
            fast + dt * (moved + drift - 0.5 * pulled),
            shadow + dt * (-moved + drift - constants.alpha_tilde * pulled),
        )
    assert np.sum(plain**2) / np.sum(fast**2) == pytest.approx(theory.drift_gain(constants))


def kronecker_decay(n, edges, rate, eta, weights):
    """Decay from the moments of z = (x, xt) in a basis of disagreement, as one Kronecker matrix."""
    basis = np.linalg.qr(np.hstack([np.ones((n, 1)), np.eye(n)[:, : n - 1]]))[0][:, 1:]
    size, copies = len(weights) * (n - 1), len(weights)
    coupling = eta * (np.ones((copies, copies)) - copies * np.eye(copies))
    drift, one = np.kron(coupling, np.eye(n - 1)), np.eye(size)
    system = np.kron(drift, one) + np.kron(one, drift)
    degrees = np.bincount(np.ravel(edges), minlength=n)
    for i, j in edges:
        edge = basis.T @ (np.eye(n)[i] - np.eye(n)[j])
        from_first = np.outer(weights, np.eye(copies)[0])
        jump = one - np.kron(from_first, np.outer(edge, edge))
        system += (
            rate / 2 * (1 / degrees[i] + 1 / degrees[j]) * (np.kron(jump, jump) - np.eye(size**2))
        )
    return -np.linalg.eigvals(system).real.max()


@pytest.mark.parametrize("n", [2, 3, 5, 6])
@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_decay_by_the_kronecker_product(n, name):
    edges, rate = GRAPHS[name](n), 0.7
    constants = theory.acceleration(n, edges, rate)
    plain = kronecker_decay(n, edges, rate, 0.0, [0.5])
    fast = kronecker_decay(n, edges, rate, constants.eta, [0.5, constants.alpha_tilde])
    assert theory.gossip_decay(n, edges, rate) == pytest.approx(plain, abs=1e-9)
    assert theory.accelerated_decay(n, edges, rate) == pytest.approx(fast, abs=1e-9)


@pytest.mark.parametrize("n", [4, 5, 8, 16])
@pytest.mark.parametrize("accelerated", [False, True])
def test_slowest_disagreement_keeps_its_shape(n, accelerated):
    """Moved by one exchange at random and by the coupling, moments shrink by the decay alone."""
    edges = topology.ring_edges(n)
    constants = theory.acceleration(n, edges) if accelerated else None
    decay = (theory.accelerated_decay if accelerated else theory.gossip_decay)(n, edges)
    weights = [0.5, constants.alpha_tilde] if constants else [0.5]
    moments = theory.slowest_disagreement(n, edges, constants)
    copies = len(weights)
    flat = moments.transpose(0, 2, 1, 3).reshape(copies * n, copies * n)
    assert np.trace(moments[0, 0]) == pytest.approx(n)
    assert np.linalg.eigvalsh(flat).min() > -1e-12
    eta = constants.eta if constants else 0.0
    drift = np.kron(eta * (np.ones((copies, copies)) - copies * np.eye(copies)), np.eye(n))
    changed = drift @ flat + flat @ drift.T
    for i, j in edges:
        edge = np.eye(n)[i] - np.eye(n)[j]
        jump = np.eye(copies * n) - np.kron(
            np.outer(weights, np.eye(copies)[0]), np.outer(edge, edge)
        )
        changed += (jump @ flat @ jump.T - flat) / 2
    np.testing.assert_allclose(changed, -decay * flat, atol=1e-9)


def simulated_square(n, edges, constants, times, seed, runs=40000):
    """E[sum_i |x_i - m|^2] at the given times, over many runs of Poisson exchanges (rate 1)."""
    generator, total = np.random.default_rng(seed), n / 2  # regular graphs: all edges alike
    eta, tilde = (constants.eta, constants.alpha_tilde) if constants else (0.0, 0.5)
    models = np.tile(generator.normal(size=n), (runs, 1))
    models -= models.mean(axis=1, keepdims=True)
    shadow, now, every = models.copy(), 0.0, np.arange(runs)
    i, j = np.array(edges).T
    for time in times:
        left = np.full(runs, time - now)
        while (left > 0).any():
            wait = np.minimum(generator.exponential(1 / total, runs), left)
            mean, half = (models + shadow) / 2, (models - shadow) / 2
            half *= np.exp(-2 * eta * wait)[:, np.newaxis]
            models, shadow = mean + half, mean - half
            left -= wait
            edge = generator.integers(0, len(edges), runs)
            gap = models[every, i[edge]] - models[every, j[edge]]
            gap[left <= 0] = 0  # the next exchange is after `time`
            for each, weight in ((models, 0.5), (shadow, tilde)):
                each[every, i[edge]] -= weight * gap
                each[every, j[edge]] += weight * gap
        now = time
        yield np.mean(np.sum((models - models.mean(axis=1, keepdims=True)) ** 2, axis=1))


@pytest.mark.parametrize("n", [4, 6])
def test_decay_by_simulation(n):
    edges = topology.ring_edges(n)
    constants = theory.acceleration(n, edges)
    for used, expected in (
        (None, theory.gossip_decay(n, edges)),
        (constants, theory.accelerated_decay(n, edges)),
    ):
        early, late = simulated_square(n, edges, used, (6.0, 10.0), seed=7)
        assert np.log(early / late) / 4 == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("n", [2, 4, 7])
def test_decay_on_complete_graphs_by_single_exchanges(n):
    expected = n / 2 * (1 - mixing.complete_event_contraction(n))
    assert theory.gossip_decay(n, topology.complete_edges(n)) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "gain"), [(4, 1.01), (8, 1.34), (16, 2.63), (32, 5.57)])
def test_acceleration_gain_of_the_ring(n, gain):
    assert theory.acceleration_gain(n, topology.ring_edges(n)) == pytest.approx(gain, abs=0.01)


def test_decay_grows_with_the_rate():
    edges = topology.ring_edges(6)
    for decay in (theory.gossip_decay, theory.accelerated_decay):
        assert decay(6, edges, 3.0) == pytest.approx(3 * decay(6, edges))


def test_decay_does_not_depend_on_the_order_of_ranks():
    """Relabelled, the ring is not seen as circulant, and the general way is taken."""
    relabelled = [(0, 3), (3, 1), (1, 5), (5, 2), (2, 4), (4, 0)]
    for decay in (theory.gossip_decay, theory.accelerated_decay):
        assert decay(6, relabelled) == pytest.approx(decay(6, topology.ring_edges(6)))


def test_wrong_constants_make_gossip_slower_or_unstable():
    edges = topology.ring_edges(8)
    good = theory.acceleration(8, edges)
    mild = theory.Acceleration(good.chi1, good.chi2, good.eta, 0.5)
    wild = theory.Acceleration(good.chi1, good.chi2, good.eta, 20 * good.alpha_tilde)
    best = theory.accelerated_decay(8, edges)
    assert theory.accelerated_decay(8, edges, constants=mild) < best
    assert theory.accelerated_decay(8, edges, constants=wild) < 0


def test_a_cut_graph_does_not_decay():
    assert theory.gossip_decay(4, [(0, 1), (2, 3)]) == pytest.approx(0, abs=1e-12)


# ---- refusals


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.delayed_limit(-1),
        lambda: theory.delay_by_one_limit(4, "both"),
        lambda: theory.kappa_on_quadratic(np.eye(2), 0.0),
        lambda: theory.kappa_on_quadratic(mixing.ring_matrix(8), 0.7),
        lambda: theory.kappa_on_quadratic(mixing.ring_matrix(8), -0.1),
        lambda: theory.kappa_on_quadratic(mixing.ring_matrix(8), float("nan")),
        lambda: theory.kappa_on_quadratic(mixing.ring_matrix(8), 0.1, "before"),
        lambda: theory.kappa_delay_by_one(3, 1.0),
        lambda: theory.rounds_to_shrink(1.0),
        lambda: theory.rounds_to_shrink(0.5, 0.5),
        lambda: theory.rounds_to_shrink(0.5, float("inf")),
        lambda: theory.expected_staleness([]),
        lambda: theory.expected_staleness([1.0, 0.0]),
        lambda: theory.straggler_staleness(4, 0.5),
        lambda: theory.averaging_speedup(4, 0, 1.0, 1.0),
        lambda: theory.averaging_speedup(4, 1, 0.0, 1.0),
        lambda: theory.averaging_speedup(4, 1, 1.0, float("nan")),
        lambda: theory.allreduce_share(4, 4.1),
        lambda: theory.laplacian(3, [(0, 1)], 0.0),
        lambda: theory.gossip_decay(3, [(0, 1)], float("inf")),
    ],
)
def test_wrong_arguments(call):
    with pytest.raises(ConfigError, match=r"got .*, allowed is .*\. "):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.adapt_while_communicate_limit(np.ones((2, 2))),
        lambda: theory.adapt_then_combine_limit(np.ones((2, 2))),
        lambda: theory.delay_by_one_limit(0),
        lambda: theory.delay_by_one_limit(0, "mean"),
        lambda: theory.kappa_on_quadratic(np.ones((2, 2)), 0.1),
        lambda: theory.kappa_delay_by_one(0),
        lambda: theory.loss_gap(np.eye(2), np.ones((3, 1))),
        lambda: theory.loss_gap(np.eye(2), np.empty((0, 2))),
        lambda: theory.straggler_throughput(7, 2, super_learners=2),
        lambda: theory.straggler_throughput(0, 2),
        lambda: theory.straggler_epoch_time(0, 2, super_learners=2),
        lambda: theory.straggler_epoch_time(4, 0.5),
        lambda: theory.straggler_epoch_time(4, 0.5, waits=True),
        lambda: theory.straggler_staleness(0, 2),
        lambda: theory.averaging_speedup(0, 1, 1.0, 1.0),
        lambda: theory.allreduce_share(0, 1.0),
        lambda: theory.laplacian(1, []),
        lambda: theory.laplacian(3, []),
        lambda: theory.laplacian(3, [(0, 3)]),
        lambda: theory.acceleration(4, [(0, 1), (2, 3)]),
        lambda: theory.accelerated_decay(3, [(0, 1)]),
        lambda: theory.gossip_decay(65, topology.ring_edges(65)),
        lambda: theory.gossip_decay(25, path(25)),
    ],
)
def test_wrong_sizes(call):
    with pytest.raises(TopologyError):
        call()


def test_no_name_is_in_both_rooms():
    assert not set(theory.__all__) & set(mixing.__all__)
